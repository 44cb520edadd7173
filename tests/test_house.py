"""The structure of the package: imports, modules that load torch, public names, and unique class names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

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


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Return the dotted names of the modules that a file imports outside TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
            if node.module == "shardio":
                names |= {f"shardio.{alias.name}" for alias in node.names}
    return names


def folder_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "cli" if path.name == "__main__.py" else first.removesuffix(".py")


def test_the_table_names_every_folder() -> None:
    assert set(table()) == ALL_FOLDERS | ROWS


def test_imports_keep_to_the_table() -> None:
    offenders = list[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = folder_of(path)
        if folder in {*FREE, "__init__"}:
            continue  # `shardio/__init__.py` loads lazily, and another test checks the free modules.
        allowed, torch = table()[folder]
        others = {name.split(".")[1] for name in imported(path) if name.startswith("shardio.")} - {folder}
        wrong = others - allowed - FREE
        if not torch and "torch" in path.read_text():
            wrong |= {name for name in imported(path, top_level_only=True) if name.split(".")[0] == "torch"}
        if wrong:
            offenders.append(f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(wrong))}")
    assert not offenders, "\n".join(offenders)


def test_free_modules_import_nothing_else_of_the_package() -> None:
    free = {f"shardio.{name}" for name in FREE}
    for name in FREE:
        assert {n for n in imported(PACKAGE / f"{name}.py") if n.startswith("shardio")} <= free


def test_order_uses_numpy_alone() -> None:
    for path in (PACKAGE / "order").glob("*.py"):
        foreign = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)
        assert foreign <= {"lazy_loader", "numpy", "shardio"}, path


def modules_after(statement: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after a statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_import_shardio_loads_neither_torch_nor_numpy() -> None:
    assert not modules_after("import shardio") & {"torch", "numpy", "cv2", "PIL", "typer"}


def test_folders_without_torch_load_without_it() -> None:
    names = [name for name, (_, torch) in table().items() if not torch]
    assert len(names) == 17
    statement = "; ".join(f"import shardio.{name}" for name in (*names, "loader"))
    assert "torch" not in modules_after(statement)


def test_worker_processes_start_without_what_takes_long_to_import() -> None:
    slow = {"torch", "cv2", "PIL", "pydantic", "secrets", "tarfile", "zipfile", "safetensors"}
    imports = "import shardio.loader.chunk_worker, shardio.reading.reader, shardio.decoding"
    added = modules_after(imports) - modules_after("import numpy")
    assert not slow & added


def test_the_command_line_starts_without_torch() -> None:
    assert "torch" not in modules_after("import shardio.cli.main")


OPENING = {"open", "fdopen", "pread", "preadv", "mmap", "memmap", "fromfile", "FileIO", "ZipFile"} | {
    f"{verb}_{what}" for verb in ("read", "write") for what in ("bytes", "text")
}
"""Functions and methods that open, read or write a file. ``location.open()`` has no arguments and opens an object."""

FOLDERS_OF_DATASETS = ("shards", "reading", "datasets", "packing")

OTHER_FILES = {
    "reading/seen.py": "maps anonymous memory",
    "packing/folders.py": "appends to a local file, which no dataset contains",
    "shards/tar_scan.py": "tarfile reads from an object of a store",
}
"""Files in ``FOLDERS_OF_DATASETS`` that may call a function in ``OPENING``, with the reason."""

RENAMING = {"files.py": "the only atomic write", "check/ranks.py": "gives a former run's file another name"}
"""Files that may rename other files, with the reason."""


def calls_in(path: Path) -> list[tuple[str, ast.Call]]:
    """Return each call in a file, with the last part of the called function's name."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    functions = [call.func for call in calls]
    names = [getattr(function, "attr", getattr(function, "id", "")) for function in functions]
    return list(zip(names, calls, strict=True))


def test_only_storage_opens_the_files_of_datasets() -> None:
    paths = [path for folder in FOLDERS_OF_DATASETS for path in PACKAGE.glob(f"{folder}/*.py")]
    found = {
        str(path.relative_to(PACKAGE))
        for path in paths
        for name, call in calls_in(path)
        if name in OPENING and (name != "open" or call.args or {each.arg for each in call.keywords} - {"whole"})
    }
    assert found == set(OTHER_FILES)


def test_files_are_written_whole_by_one_function() -> None:
    def renames(name: str, call: ast.Call) -> bool:
        has_one_argument = (
            len(call.args) == 1 and not call.keywords
        )  # str.replace and dataclasses.replace need more arguments.
        return name == "rename" or (name == "replace" and (has_one_argument or ast.unparse(call.func) == "os.replace"))

    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\b(rename|replace)\(", path.read_text())  # Parsing all takes seconds.
        for name, call in calls_in(path)
        if renames(name, call)
    }
    assert found == set(RENAMING)


def test_conversions_of_integers_name_the_byte_order_as_python_3_10_requires() -> None:
    for path in PACKAGE.rglob("*.py"):
        for name, call in calls_in(path):
            assert name not in {"to_bytes", "from_bytes"} or len(call.args) + len(call.keywords) > 1, path


def test_frozen_dataclasses_with_slots_have_no_state_of_their_own_which_python_3_10_would_replace() -> None:
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path in (path for path, text in texts.items() if "state__(self" in text):  # Parsing all takes seconds.
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.ClassDef) and {"frozen=True", "slots=True"} <= _decorator_options(node):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                assert not methods & {"__getstate__", "__setstate__"}, (path, node.name)


def _decorator_options(node: ast.ClassDef) -> set[str]:
    calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
    return {ast.unparse(option) for call in calls for option in call.keywords}


def test_one_module_finds_the_worker() -> None:
    """Other modules may mention get_worker_info in messages."""

    def names_it(node: ast.AST) -> bool:
        names = [getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "")]
        return "get_worker_info" in names

    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    likely = [path for path, text in texts.items() if "get_worker_info" in text]  # Parsing all takes seconds.
    paths = [path for path in likely if any(map(names_it, ast.walk(ast.parse(texts[path]))))]
    assert sorted(path.name for path in paths) == ["world.py"]


def test_the_bound_of_epochs_has_one_owner() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "62" in (text := path.read_text())
        and "2 ** 62" in ast.unparse(ast.parse(text))  # Messages contain 2**62 without spaces.
    }
    assert found == {"epochs.py"}


def test_public_names_are_these_and_can_all_be_loaded() -> None:
    assert shardio.__all__ == [
        "BatchRandomErasing",
        "BusyError",
        "CoverageError",
        "CutMix",
        "DataLoader",
        "DevicePrefetcher",
        "Diagnosis",
        "EpochSampler",
        "FormatError",
        "IdentityError",
        "ImageFolder",
        "KeyedShards",
        "LocationError",
        "Manifest",
        "MixUp",
        "MixedDataset",
        "NonFiniteLossError",
        "OneOf",
        "PackError",
        "PackedTokens",
        "Problem",
        "SampleError",
        "ShardDataset",
        "ShardMapDataset",
        "ShardWriter",
        "ShardioError",
        "SharedList",
        "StaleIndexError",
        "StateError",
        "StoreError",
        "StreamDataset",
        "WorkerError",
        "WorkerInfo",
        "append",
        "check",
        "doctor",
        "finalize",
        "get_worker_info",
        "merge",
        "open",
        "pack",
        "reshard",
        "split",
        "train",
        "transforms",
        "verify",
    ]
    assert all(getattr(shardio, name) is not None for name in shardio.__all__)
    assert dir(shardio) == shardio.__all__
    with pytest.raises(AttributeError, match="No shardio attribute nothing"):
        shardio.nothing  # type: ignore[attr-defined]  # noqa: B018  # looking it up is the test


def test_no_two_public_classes_share_a_name() -> None:
    found: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(path)
    assert not {name for name, paths in found.items() if len(paths) > 1}


def test_no_folder_has_the_name_of_a_public_function() -> None:
    functions = {name for name in shardio.__all__ if callable(getattr(shardio, name))}
    assert not functions & ALL_FOLDERS


def test_no_file_is_too_long_or_named_after_nothing() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert path.stem not in {"utils", "common", "helpers", "base", "misc"}
        assert len(path.read_text().splitlines()) <= 600, path
