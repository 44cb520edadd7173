"""Measure the power of the tests: change single expressions of the package, and count the changes that tests detect.

``python tools/mutation_campaign.py choose 60 --seed 1 > changes.json`` chooses changes, the same number in each folder.
``python tools/mutation_campaign.py run changes.json`` applies one change at a time to this checkout, which must have no
uncommitted changes. For each change, the script runs the tests of the changed folder, then all others, until a test
fails. All tests must pass before any change is made. For comparison, ``--checkout`` uses a different checkout, where
each change is found by its function and its statement, in any file.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parents[1]
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
TIMEOUT_S = 1200.0
"""The time limit of the tests in seconds. If the tests exceed the limit, they are killed, and the change counts as
noticed.
"""

Change = dict[str, str]
"""The folder, the function, the statement, and the statement after the change, as :func:`ast.unparse` writes them."""


def find_changes(package: Path) -> Iterator[Change]:
    """Yield all changes that can be made to the statements of functions."""
    for path in sorted(package.rglob("*.py")):
        folder = path.relative_to(package).parts[0].removesuffix(".py")
        for name, statement in find_statements(ast.parse(path.read_text())):
            before = ast.unparse(statement)
            for after in change(statement):
                yield {"folder": folder, "function": name, "before": before, "after": after}


def find_statements(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield the simple statements of all functions, each with its function's qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from find_statements(node, f"{name}.{node.name}".strip("."))
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.Expr | ast.Assert) and name:
            yield name, node
        else:
            yield from find_statements(node, name)


def change(statement: ast.stmt) -> Iterator[str]:
    """Yield the source of a statement with one operator swapped, one flag negated, or one integer increased."""
    for number, _ in enumerate(ast.walk(statement)):
        changed = copy.deepcopy(statement)
        target = list(ast.walk(changed))[number]
        match target:
            case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
                target.ops = [SWAPPED[type(operator)]()]  # type: ignore[list-item]
            case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED:
                target.op = SWAPPED[type(operator)]()  # type: ignore[assignment]
            case ast.Constant(value=bool(value)):
                target.value = not value
            case ast.Constant(value=int(value)):
                target.value = value + 1
            case _:
                continue
        yield ast.unparse(changed)


def choose(num_changes: int, seed: int) -> list[Change]:
    """Choose changes from each folder in turn."""
    by_folder = defaultdict[str, list[Change]](list)
    for found in find_changes(HERE / "shardio"):
        by_folder[found["folder"]].append(found)
    generator = random.Random(seed)
    for changes in by_folder.values():
        generator.shuffle(changes)
    folders = sorted(by_folder)
    turns = [(folder, turn) for turn in range(num_changes) for folder in folders if turn < len(by_folder[folder])]
    return [by_folder[folder][turn] for folder, turn in turns[:num_changes]]


def apply(checkout: Path, wanted: Change) -> Path | None:
    """Make a change in a checkout, and return the changed file, or None if the checkout has no such statement."""
    for path in sorted((checkout / "shardio").rglob("*.py")):
        text = path.read_text()
        for name, statement in find_statements(ast.parse(text)):
            if name == wanted["function"] and ast.unparse(statement) == wanted["before"]:
                lines = text.splitlines(keepends=True)
                end = statement.end_lineno or statement.lineno
                indented = " " * statement.col_offset + wanted["after"] + "\n"
                path.write_text("".join([*lines[: statement.lineno - 1], indented, *lines[end:]]))
                return path
    return None


def is_noticed(checkout: Path, changed: Path) -> bool:
    """Run the tests that are most likely to fail, then all others. Return whether any test fails."""
    tests, module = checkout / "tests", changed.relative_to(checkout).with_suffix("")
    all_files = sorted(tests.rglob("test_*.py"))
    near = [path for path in all_files if ".".join(module.parts) in path.read_text()]
    near += [path for path in all_files if path not in near and path.parent.name == module.parts[1]]
    others = [path for path in all_files if path not in near]
    return any(run_tests(checkout, paths) for paths in (near, others) if paths)


def run_tests(checkout: Path, paths: Sequence[Path]) -> bool:
    """Return whether a test fails, or takes too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider", "--numprocesses", "2"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *map(str, paths)],
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(TIMEOUT_S) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def run(checkout: Path, changes: Sequence[Change]) -> None:
    """Apply changes one at a time, and print whether a test noticed each one."""
    if run_tests(checkout, [checkout / "tests"]):
        raise SystemExit("error: tests fail without a change: fix them first")
    found = defaultdict[str, int](int)
    for number, wanted in enumerate(changes):
        path = apply(checkout, wanted)
        if path is None:
            outcome = "not there"
        else:
            try:
                outcome = "noticed" if is_noticed(checkout, path) else "survived"
            finally:
                subprocess.run(["git", "checkout", "--", str(path)], cwd=checkout, check=True)
        found[outcome] += 1
        print(json.dumps({"number": number, "outcome": outcome, **wanted}), flush=True)
    print(dict(found))


def main() -> None:
    """Choose changes or run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    choosing = commands.add_parser("choose")
    choosing.add_argument("number", type=int)
    choosing.add_argument("--seed", type=int, default=1)
    running = commands.add_parser("run")
    running.add_argument("changes", type=Path)
    running.add_argument("--checkout", type=Path, default=HERE)
    arguments = parser.parse_args()
    if arguments.command == "choose":
        print(json.dumps(choose(arguments.number, arguments.seed), indent=1))
    else:
        run(arguments.checkout, json.loads(arguments.changes.read_text()))


if __name__ == "__main__":
    main()
