"""The structure of the package: imports, modules that load torch, public names, and unique class names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardio

PACKAGE = Path(shardio.__file__).parent
ALL_FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
ROWS = {"bad_samples", "libraries", "pages", "shared", "streams", "world"}
"""Modules that have rows in the table, as folders do."""
FREE = {"epochs", "errors", "files", "process", "progress", "sample", "values"}
"""Modules that every folder may import, and that may import only each other."""


@cache
def table() -> dict[str, tuple[set[str], bool]]:
    """Read from shardio/README.md what each folder may import, and whether it may import torch."""
    rows = re.findall(r"^\| `(\w+)` +\| ([^|]+?) +\| ([^|]+?) +\|", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    found = {name: (set(re.findall(r"`(\w+)`", allowed)), torch.startswith("yes")) for name, allowed, torch in rows}
    found |= dict.fromkeys(("cli", "testing"), (ALL_FOLDERS | ROWS, True))
    return found


@cache
def trees() -> dict[str, ast.Module]:
    """Return the parsed files of the package, by their paths in it."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def nodes() -> Iterator[tuple[str, Any]]:
    """Yield all nodes of the package, each with the path of its file."""
    return ((path, node) for path, tree in trees().items() for node in ast.walk(tree))


def imported(path: str, *, top_level_only: bool = False) -> set[str]:
    """Return the dotted names of the modules that a file imports outside TYPE_CHECKING blocks."""
    tree = trees()[path]
    for_checkers = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import) and node not in for_checkers:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in for_checkers:
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
            if node.module == "shardio":
                names |= {f"shardio.{alias.name}" for alias in node.names}
    return names


def test_imports_keep_to_the_table() -> None:
    assert set(table()) == ALL_FOLDERS | ROWS
    offenders = list[str]()
    for path in trees():
        folder = "cli" if path == "__main__.py" else path.partition("/")[0].removesuffix(".py")
        if folder == "__init__":
            continue  # It loads lazily.
        allowed, torch = table().get(folder, (set(), True))
        wrong = {name.split(".")[1] for name in imported(path) if name.startswith("shardio.")} - {
            folder,
            *allowed,
            *FREE,
        }
        if folder in FREE:
            wrong |= {"shardio"} & imported(path)
        if not torch:
            wrong |= {name for name in imported(path, top_level_only=True) if name.split(".")[0] == "torch"}
        if folder == "order":
            foreign = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)
            wrong |= foreign - {"lazy_loader", "numpy", "shardio"}
        if wrong:
            offenders.append(f"{path} imports {', '.join(sorted(wrong))}")
    assert not offenders, "\n".join(offenders)


def modules_after(statement: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after executing a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_modules_load_without_what_takes_long_to_import() -> None:
    assert not modules_after("import shardio") & {"torch", "numpy", "cv2", "PIL", "typer"}
    assert "torch" not in modules_after("import shardio.cli.main")
    names = [name for name, (_, torch) in table().items() if not torch]
    assert len(names) == 17
    statement = "; ".join(f"import shardio.{name}" for name in (*names, "loader"))
    assert "torch" not in modules_after(statement)
    worker = modules_after("import shardio.loader.chunk_worker, shardio.reading.reader, shardio.decoding")
    slow = {"torch", "cv2", "PIL", "pydantic", "secrets", "tarfile", "zipfile", "safetensors"}
    assert not slow & (worker - modules_after("import numpy"))


OPENING = {"open", "fdopen", "pread", "preadv", "mmap", "memmap", "fromfile", "FileIO", "ZipFile"}
OPENING |= {f"{verb}_{what}" for verb in ("read", "write") for what in ("bytes", "text")}
"""Functions and methods that open, read or write a file. ``location.open()`` takes no arguments and opens an object."""

FOLDERS_OF_DATASETS = ("shards", "reading", "datasets", "packing")

OTHER_FILES = {
    "shards/shard_reading.py": "maps anonymous memory",
    "packing/folders.py": "appends to a local file, which no dataset contains",
    "shards/tar_scan.py": "tarfile reads from an object of a store",
}
"""Files in ``FOLDERS_OF_DATASETS`` that may call a function in ``OPENING``, with the reason for each."""

RENAMING = {"files.py": "the only atomic write", "check/ranks.py": "gives a former run's file another name"}
"""Files that may rename other files, with the reason for each."""


def test_files_are_opened_and_written_by_their_owners() -> None:
    opening, renaming = set[str](), set[str]()
    for path, call in nodes():
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        options = {each.arg for each in call.keywords}
        is_in_dataset = path.startswith(FOLDERS_OF_DATASETS) and path.count("/") == 1
        if is_in_dataset and name in OPENING and (name != "open" or call.args or options - {"whole"}):
            opening.add(path)
        # str.replace and dataclasses.replace need more arguments than Path.replace.
        renames = (len(call.args) == 1 and not options) or ast.unparse(call.func) == "os.replace"
        if name == "rename" or (name == "replace" and renames):
            renaming.add(path)
        assert name not in {"to_bytes", "from_bytes"} or len(call.args) + len(options) > 1, (
            f"{path} does not name the byte order, as Python 3.10 requires"
        )
    assert (opening, renaming) == (set(OTHER_FILES), set(RENAMING))


def test_frozen_dataclasses_with_slots_have_no_state_of_their_own_which_python_3_10_would_replace() -> None:
    for path, node in nodes():
        if isinstance(node, ast.ClassDef):
            calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
            options = {ast.unparse(option) for call in calls for option in call.keywords}
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            has_state = bool(methods & {"__getstate__", "__setstate__"})
            assert not (has_state and {"frozen=True", "slots=True"} <= options), (path, node.name)


def test_workers_and_the_bound_of_epochs_have_one_owner() -> None:
    """Messages in other modules may mention get_worker_info and 2**62, which they write without spaces."""
    naming = {
        path
        for path, node in nodes()
        if "get_worker_info" in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
    }
    assert naming == {"world.py"}
    assert {path for path, tree in trees().items() if "2 ** 62" in ast.unparse(tree)} == {"epochs.py"}


PUBLIC = """
BatchRandomErasing BusyError CoverageError CutMix DataLoader DevicePrefetcher Diagnosis EpochSampler FormatError
IdentityError ImageFolder KeyedShards LocationError Manifest MixUp MixedDataset NonFiniteLossError OneOf PackError
PackedTokens Problem SampleError ShardDataset ShardMapDataset ShardWriter ShardioError SharedList StaleIndexError
StateError StoreError StreamDataset WorkerError WorkerInfo append check doctor finalize get_worker_info merge open
pack reshard split train transforms verify
"""


def test_public_names_are_these_and_can_all_be_loaded() -> None:
    assert shardio.__all__ == PUBLIC.split() == dir(shardio)
    assert all(getattr(shardio, name) is not None for name in shardio.__all__)
    functions = {name for name in shardio.__all__ if callable(getattr(shardio, name))}
    assert not functions & ALL_FOLDERS, "no folder has the name of a public function"
    with pytest.raises(AttributeError, match="No shardio attribute nothing"):
        shardio.nothing  # type: ignore[attr-defined]  # noqa: B018  # looking it up is the test


def test_no_two_public_classes_share_a_name_and_no_file_is_too_long_or_named_after_nothing() -> None:
    found = [item.name for tree in trees().values() for item in tree.body if isinstance(item, ast.ClassDef)]
    public = [name for name in found if not name.startswith("_")]
    assert sorted(public) == sorted(set(public))
    for path in PACKAGE.rglob("*.py"):
        assert path.stem not in {"utils", "common", "helpers", "base", "misc"}
        assert len(path.read_text().splitlines()) <= 600, path
