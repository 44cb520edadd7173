"""Count what a newcomer has to read: files, lines, imports, words and tests in a checkout.

``python tools/count_house.py [CHECKOUT …] [--junit FILE …]`` prints one column for each checkout. The script's
environment must have the dependencies of each checkout.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

PATH_OF_A_SAMPLE = """
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import shardio

with tempfile.TemporaryDirectory() as folder:
    images = Path(folder, "images", "cats")
    images.mkdir(parents=True)
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(images / "0.jpg")
    shardio.pack(images.parent, Path(folder, "out"))
    dataset = shardio.ShardDataset(Path(folder, "out"), transform=shardio.transforms.RandomResizedCrop(32))
    for batch in shardio.DataLoader(dataset, batch_size=1):
        pass
print(sum(name.split(".")[0] == "shardio" for name in sys.modules))
"""
"""A program that packs an image, loads it in a batch, and prints how many of shardio's modules are then imported."""


def count(checkout: Path, junit: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each statistic of a checkout."""
    package = checkout / "shardio"
    kernel = package / "kernel"
    paths = sorted(package.rglob("*.py"))
    yield "files in shardio/", f"{len(paths)}, {sum(kernel in path.parents for path in paths)} of them in the kernel"
    lines = {path: len(path.read_text().splitlines()) for path in paths}
    yield "lines", f"{sum(lines.values()):,}, {sum(n for path, n in lines.items() if kernel in path.parents):,}"
    code = sum(map(count_code, paths))
    imports = sum(map(count_import_lines, paths))
    yield "lines of code", f"{code:,}"
    yield "share of imports", f"{100 * imports / code:.1f} %"
    yield "files with one importer", str(sum(n == 1 for n in count_importers(package, paths).values()))
    yield "modules from pack to batch", run_python(checkout, PATH_OF_A_SAMPLE)
    yield "docstrings of private functions", str(sum(map(count_private_docstrings, paths)))
    words = (package / "README.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    yield "rows of the glossary", str(len(re.findall(r"^\| ", words, re.MULTILINE)) - 1)
    for name in ("README.md", "shardio/README.md", "benchmarks/README.md"):
        yield f"words in {name}", f"{len((checkout / name).read_text().split()):,}"
    pages = [path for path in (checkout / "docs" / "decisions").glob("*.md") if path.name != "README.md"]
    yield "decision pages", f"{len(pages)}, {sum(len(path.read_text().split()) for path in pages):,} words"
    tests = sorted((checkout / "tests").rglob("*.py"))
    yield "files in tests/", str(len(tests))
    yield "lines in tests/", f"{sum(len(path.read_text().splitlines()) for path in tests):,}"
    if junit is not None:
        cases = list(ET.parse(junit).iter("testcase"))
        seconds = sum(float(case.get("time", "0")) for case in cases)
        yield "tests, worker-seconds", f"{len(cases):,}, {seconds:,.0f} s"


def count_code(path: Path) -> int:
    """Return the number of lines that hold code, not counting blank lines, comments and docstrings."""
    text = path.read_text()
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def count_import_lines(path: Path) -> int:
    """Return the number of lines of import statements."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def count_importers(package: Path, paths: list[Path]) -> dict[str, int]:
    """Return the number of modules that import each module, not counting ``__init__`` files."""
    found = {path.relative_to(package.parent).with_suffix("").as_posix().replace("/", "."): 0 for path in paths}
    for path in paths:
        if path.name != "__init__.py":
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
            for module in {node.module or "" for node in nodes} & set(found):
                found[module] += 1
    return found


def count_private_docstrings(path: Path) -> int:
    """Return the number of private functions and methods that have a docstring."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    is_private = [node.name.startswith("_") and not node.name.startswith("__") for node in functions]
    return sum(private and bool(ast.get_docstring(node)) for node, private in zip(functions, is_private, strict=True))


def run_python(checkout: Path, program: str) -> str:
    """Run a program with a checkout's shardio, and return its output."""
    prepared = f"import sys; sys.path.insert(0, {str(checkout.absolute())!r})\n{program}"
    return subprocess.check_output([sys.executable, "-c", prepared], text=True, cwd=checkout).strip()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--junit", nargs="*", type=Path, default=[], help="pytest's --junitxml file for each checkout")
    arguments = parser.parse_args()
    junits = [*arguments.junit, *[None] * len(arguments.checkouts)]
    columns = [dict(count(checkout, junit)) for checkout, junit in zip(arguments.checkouts, junits, strict=False)]
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column.get(name, "") for column in columns) + " |")


if __name__ == "__main__":
    main()
