from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import shardio
from shardio.cli.main import app
from tests.looking.pages import Page
from tests.sources import encode, write_images
from tests.tars import write_tar


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def usage_error(*arguments: object) -> str:
    """Return the text of a usage error, without the frame, which breaks lines anywhere."""
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.fixture
def doubled(tmp_path: Path) -> Path:
    """Class folders with one image in two classes."""
    root = tmp_path / "doubled"
    write_images(root, per_class=2)
    shutil.copy(root / "class-0" / "name-000.jpg", root / "class-1" / "copy.jpg")
    return root


def test_view_writes_a_page(packed: Path, tmp_path: Path) -> None:
    done = run("view", packed, "-o", tmp_path / "sheet.html", "--limit", 4)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "4 images of 21, 21 samples" in done.stdout
    page = Page((tmp_path / "sheet.html").read_bytes())
    assert len(page.find("img")) == 4


def test_view_prints_numbers_as_json(images: Path, tmp_path: Path) -> None:
    done = run("view", images, "-o", tmp_path / "sheet.html", "--json", "--seed", 1)
    values = json.loads(done.stdout)
    assert values["classes"] == {"class-0": 7, "class-1": 7, "class-2": 7}
    assert values["headers"]["sizes"] == {"48×32": 21}
    assert (values["samples"], values["thumbnails"], values["undecodable"]) == (21, 21, {})


def test_view_writes_a_contact_sheet(doubled: Path, tmp_path: Path) -> None:
    (doubled / "class-2" / "name-001.jpg").write_bytes(b"")
    done = run("view", doubled, "-o", tmp_path / "sheet.png")
    assert done.exit_code == 0, done.output
    assert "7 images of 7 (1 cannot be decoded)" in done.stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG"


def test_a_tiff_that_cannot_be_decoded_is_a_cell_of_the_page(doubled: Path, tmp_path: Path) -> None:
    """The header of a TIFF is read in another way than those of other formats."""
    (doubled / "class-2" / "name-001.jpg").unlink()
    (doubled / "class-2" / "float64.tif").write_bytes(gray_tiff_of_float64())
    assert shardio.pack(doubled, tmp_path / "packed", check=False).num_samples == 7
    for source, key in ((doubled, "class-2/float64.tif"), (tmp_path / "packed", "class-2/float64")):
        done = run("view", source, "-o", tmp_path / "sheet.html", "--json")
        assert done.exit_code == 0, done.output
        values = json.loads(done.stdout)
        assert list(values["headers"]["unreadable"]) == list(values["undecodable"]) == [key]
        assert not re.search(r"\b0x[0-9a-f]+", done.stdout), "no memory address"
        assert len(Page((tmp_path / "sheet.html").read_bytes()).find("img")) == 6


def gray_tiff_of_float64() -> bytes:
    """Return a TIFF of 4×4 pixels (TIFF 6.0, section 19: SampleFormat 3), which Pillow does not open."""
    tags = {256: 4, 257: 4, 258: 64, 259: 1, 262: 1, 273: 8, 277: 1, 278: 4, 279: 128, 339: 3}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    pixels = struct.pack("<16d", *range(16))
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_view_does_not_overwrite_an_image(tmp_path: Path) -> None:
    content = encode(1, suffix="png")
    (tmp_path / "a.png").write_bytes(content)
    assert "would be overwritten" in usage_error("view", tmp_path, "-o", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == content


@pytest.mark.parametrize("command", ["view", "dups"])
def test_other_outputs_are_refused(command: str, images: Path, tmp_path: Path) -> None:
    assert "must end in .html" in usage_error(command, images, "-o", tmp_path / "sheet.jpg")


def test_dups_lists_groups_and_exits_with_1(doubled: Path) -> None:
    done = run("dups", doubled)
    assert done.exit_code == 1
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[1] == ["1", "", str(doubled), "class-0/name-000.jpg", "class-0", "", ""]
    assert lines[2] == ["1", "same bytes", str(doubled), "class-1/copy.jpg", "class-1", "", ""]
    assert lines[3] == ["1", "same image, different classes: class-0, class-1"]
    assert "1 group, 1 extra copy among 7 images" in done.stdout


def test_dups_exits_with_0_without_duplicates(images: Path) -> None:
    done = run("dups", images, "--exact")
    assert done.exit_code == 0, done.output
    assert "0 groups" in done.stdout


def test_dups_between_sources(doubled: Path, images: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    shardio.pack(doubled, packed)
    other = tmp_path / "other" / "class-9"
    other.mkdir(parents=True)
    shutil.copy(doubled / "class-2" / "name-001.jpg", other / "<b>.jpg")
    options = ("--between", "--json", "-o", tmp_path / "page.html")
    done = run("dups", packed, other.parent, *options)
    assert done.exit_code == 1
    values = json.loads(done.stdout)
    assert values["within"] == {}
    assert values["between"] == [{"sources": [str(packed), str(other.parent)], "groups": 1, "samples": [1, 1]}]
    (group,) = values["groups"]
    assert [sample["key"] for sample in group["samples"]] == ["class-2/name-001", "class-9/<b>.jpg"]
    assert group["samples"][0]["shard"] == "shard-000000.tar"
    assert (group["same_bytes"], group["classes"]) == (True, ["class-2", "class-9"])
    page = Page((tmp_path / "page.html").read_bytes())
    assert len(page.find("img")) == 2
    assert page.addresses() == {"data"}
    assert "class-9/<b>.jpg" in page.text


def test_dups_names_unreadable_images(doubled: Path) -> None:
    (doubled / "class-2" / "name-001.jpg").write_bytes(b"nothing")
    done = run("dups", doubled)
    assert f"cannot be decoded: class-2/name-001.jpg in {doubled}" in done.stderr


def test_dups_needs_different_sources(images: Path) -> None:
    assert "named twice" in usage_error("dups", images, images)
    assert "several sources" in usage_error("dups", images, "--between")


COMMANDS: dict[str, list[str]] = {
    "view": ["-o", "sheet.html"],
    "dups": [],
    "augment": ["--recipe", "trivial_augment", "-o", "sheet.png"],
    "bench": ["--batches", "1"],
    "train": ["--val", "val", "--out", "run"],
    "pack": ["out"],
}


def test_images_beside_tars_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that takes class folders or tars says that a folder holds both."""
    monkeypatch.chdir(tmp_path)
    for name in ("in", "val"):
        write_images(tmp_path / name, classes=2, per_class=1)
    write_tar(tmp_path / "in" / "backup.tar", [("a.jpg", encode(0)), ("a.cls", b"0")])
    for command, options in COMMANDS.items():
        done = run(command, "in", *options)
        message = str(done.exception)
        assert done.exit_code != 0, command
        assert "backup.tar" in message, (command, message, done.output)
        assert "class-0/name-000.jpg" in message, (command, message)
    (tmp_path / "in" / "class-0" / "name-000.jpg").rename(tmp_path / "in" / "class-0" / "notes.txt")
    (tmp_path / "in" / "class-1" / "name-000.jpg").rename(tmp_path / "in" / "class-1" / "notes.txt")
    assert "1 image of 1" in run("view", "in", "-o", "sheet.html").stdout
