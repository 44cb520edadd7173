"""The code blocks of README.md and docs/ work when pasted."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

import shardio
from shardio.cli.main import MODULES, load_command
from shardio.libraries import import_library
from shardio.storage import Location, RemoteAccess
from shardio.storage.local import LocalStore
from shardio.storage.locations import OPENERS
from tests.processes import run_python
from tests.sources import encode, write_images

ROOT = Path(shardio.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path, language: str) -> list[tuple[int, str]]:
    """Return the line number and the text of each code block in a language."""
    text = page.read_text()
    found = [block for block in BLOCK.finditer(text) if block[1] == language]
    return [(text.count("\n", 0, block.start(2)) + 1, block[2]) for block in found]


def open_url(url: str, access: RemoteAccess) -> Location:
    """Return a local file or folder instead of a remote one."""
    path = Path("images" if "/images" in url else "packed").absolute()
    return Location(store=LocalStore(), key=str(path / "shard-000000.tar" if url.endswith(".tar") else path))


def prepare() -> None:
    warnings.simplefilter("error")
    # Machines may have few cores, and accelerate and torchdata call deprecated functions of torch.
    warnings.filterwarnings("ignore", "This DataLoader will create|'set_vital' is deprecated", UserWarning)
    if "transformers" in Path("pasted.py").read_text():
        import_library("torchvision")  # Transformers imports torchvision, which may not match torch.
    OPENERS.update(dict.fromkeys(("s3", "az", "hf", "https"), "tests.test_docs:open_url"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images/, and datasets of images, annotations and tokens: packed/, folders in it, and scenes.tar."""
    root = tmp_path_factory.mktemp("pages")
    write_images(root / "images", classes=3, per_class=12)
    for name in ("packed", "packed/web", "packed/code", "packed/math", "packed/train", "packed/val"):
        with shardio.ShardWriter(root / name, classes=["cat", "dog", "owl"]) as writer:
            for number in range(36):
                images = {"jpg": encode(number), "mask.png": encode(number, suffix="png", mode="L")}
                boxes = {"boxes": [[4, 4, 20, 16]], "labels": [1], "points": [[8, 8]]}
                tokens, label = np.arange(number, number + 500, dtype=np.uint16), ["cat", "dog", "owl"][number % 3]
                writer.write({"__key__": f"{name}/{number:04d}", **images, "json": boxes, "cls": label, "npy": tokens})
    (root / "scenes.tar").symlink_to(root / "packed" / "shard-000000.tar")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run_one_after_another(page: Path, folder: Path, tmp_path: Path) -> None:
    """The blocks of a page form one program, whose line numbers are those of the page."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    program = ""
    for line, block in blocks_of(page, "python"):
        if '"cuda"' not in block or torch.cuda.is_available():
            program += "\n" * (line - 1 - program.count("\n")) + block
    (tmp_path / "pasted.py").write_text(program)
    found = run_python("pasted.py", cwd=tmp_path, prepare=prepare)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "sh")], ids=lambda page: page.name)
def test_commands_in_sh_blocks_exist(page: Path) -> None:
    for line, block in blocks_of(page, "sh"):
        for command in block.replace("\\\n", " ").splitlines():
            words = shlex.split(command, comments=True)
            if "shardio" in words[:1] or "-m shardio" in " ".join(words):
                name, *arguments = words[words.index("shardio") + 1 :]
                assert check_usage(name, arguments) == "", f"{page.name}:{line}: {command}"


def check_usage(name: str, arguments: list[str]) -> str:
    """Return what is wrong with a command, or "" if nothing is."""
    if name not in MODULES:
        return f"no command {name}"
    command = load_command(name)
    # The command caches its help option with these names, and other tests use the command too.
    context = typer.Context(command, info_name=name, help_option_names=["-h", "--help"])
    try:
        _, others, _ = command.make_parser(context).parse_args(arguments)
    except typer.TyperException as error:
        return error.format_message()
    return f"too many arguments: {others}" if others else ""
