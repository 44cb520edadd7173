"""``shardio view``, ``dups`` and ``augment``."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import shardio
from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.cli.view import CAPTION_HEIGHT, CELL, GAP, GROUP_GAP, MARGIN, ROW_GAP, TITLE_HEIGHT
from shardio.transforms import recipes
from tests.cli.commands import error_of, run, run_main, usage_error
from tests.images.stored_values import write_tiff
from tests.packing.packs import write_files
from tests.pages import Page
from tests.sources import encode, write_images
from tests.tars import write_tar


@pytest.fixture
def doubled(tmp_path: Path) -> Path:
    """Class folders in which two classes contain the same image."""
    root = tmp_path / "doubled"
    write_images(root, per_class=2)
    shutil.copy(root / "class-0" / "name-000.jpg", root / "class-1" / "copy.jpg")
    return root


def test_view_writes_a_page_or_a_contact_sheet(packed: Path, images: Path, doubled: Path, tmp_path: Path) -> None:
    page, sheet = tmp_path / "sheet.html", tmp_path / "sheet.png"
    done = run("view", packed, "-o", page, "--limit", 4)
    assert ("4 images of 21, 21 samples" in done.stdout, done.stderr) == (True, "")
    assert len(Page(page.read_bytes()).find("img")) == 4
    values = json.loads(run("view", images, "-o", page, "--json", "--seed", 1).stdout)
    assert values["classes"] == {"class-0": 7, "class-1": 7, "class-2": 7}
    assert values["headers"]["sizes"] == {"48×32": 21}
    assert (values["samples"], values["thumbnails"], values["undecodable"]) == (21, 21, {})
    (doubled / "class-2" / "name-001.jpg").write_bytes(b"")
    assert "7 images of 7 (1 cannot be decoded)" in run("view", doubled, "-o", sheet).stdout
    with Image.open(sheet) as image:
        assert image.format == "PNG"
    (tmp_path / "in").mkdir()
    content = sheet.rename(tmp_path / "in" / "a.png").read_bytes()
    assert "would be overwritten" in usage_error("view", tmp_path / "in", "-o", tmp_path / "in" / "a.png")
    assert (tmp_path / "in" / "a.png").read_bytes() == content
    for command in ("view", "dups"):
        assert "must end in .html" in usage_error(command, images, "-o", tmp_path / "sheet.jpg")


def test_a_tiff_that_cannot_be_decoded_is_a_cell_of_the_page(doubled: Path, tmp_path: Path) -> None:
    (doubled / "class-2" / "name-001.jpg").unlink()
    (doubled / "class-2" / "float64.tif").write_bytes(write_tiff(np.eye(4)))
    assert shardio.pack(doubled, tmp_path / "packed", check=False).num_samples == 7
    for source, key in ((doubled, "class-2/float64.tif"), (tmp_path / "packed", "class-2/float64")):
        output = run("view", source, "-o", tmp_path / "sheet.html", "--json").stdout
        values = json.loads(output)
        assert list(values["headers"]["unreadable"]) == list(values["undecodable"]) == [key]
        assert not re.search(r"\b0x[0-9a-f]+", output), "no memory address"
        assert len(Page((tmp_path / "sheet.html").read_bytes()).find("img")) == 6


def test_dups_lists_groups_and_exits_with_1(doubled: Path, images: Path) -> None:
    (doubled / "class-2" / "name-000.jpg").write_bytes(b"nothing")
    done = run("dups", doubled, code=1)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[1] == ["1", "", str(doubled), "class-0/name-000.jpg", "class-0", "", ""]
    assert lines[2] == ["1", "same bytes", str(doubled), "class-1/copy.jpg", "class-1", "", ""]
    assert lines[3] == ["1", "same image, different classes: class-0, class-1"]
    assert "1 group, 1 extra copy among 7 images" in done.stdout
    assert f"cannot be decoded: class-2/name-000.jpg in {doubled}" in done.stderr
    assert "0 groups" in run("dups", images, "--exact").stdout


def test_dups_between_sources(doubled: Path, images: Path, tmp_path: Path) -> None:
    packed, other = tmp_path / "packed", tmp_path / "other"
    shardio.pack(doubled, packed)
    write_files(other, {"class-9/<b>.jpg": (doubled / "class-2" / "name-001.jpg").read_bytes()})
    values = json.loads(run("dups", packed, other, "--between", "--json", "-o", tmp_path / "page.html", code=1).stdout)
    assert values["within"] == {}
    assert values["between"] == [{"sources": [str(packed), str(other)], "groups": 1, "samples": [1, 1]}]
    (group,) = values["groups"]
    assert [sample["key"] for sample in group["samples"]] == ["class-2/name-001", "class-9/<b>.jpg"]
    assert group["samples"][0]["shard"] == "shard-000000.tar"
    assert (group["same_bytes"], group["classes"]) == (True, ["class-2", "class-9"])
    page = Page((tmp_path / "page.html").read_bytes())
    assert (len(page.find("img")), page.addresses()) == (2, {"data"})
    assert "class-9/<b>.jpg" in page.text
    assert "named twice" in usage_error("dups", images, images)


def test_images_beside_tars_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in", "val"):
        write_images(tmp_path / name, classes=2, per_class=1)
    write_tar(tmp_path / "in" / "backup.tar", [("a.jpg", encode(0)), ("a.cls", b"0")])
    augment = "augment in --recipe trivial_augment -o sheet.png"
    commands = ("view in -o sheet.html", "dups in", augment, "bench in", "train in --val val --out run", "pack in out")
    for command in commands:
        message = str(run(*command.split(), code=1).exception)
        assert "backup.tar" in message, (command, message)
        assert "class-0/name-000.jpg" in message, (command, message)
    for number in range(2):
        folder = tmp_path / "in" / f"class-{number}"
        (folder / "name-000.jpg").rename(folder / "notes.txt")
    assert "1 image of 1" in run("view", "in", "-o", "sheet.html").stdout


Pixels = NDArray[np.uint8]


def make_sheet(source: Path, out: Path, *arguments: object) -> Pixels:
    run("augment", source, "-o", out, *arguments)
    with Image.open(out) as sheet:
        assert (sheet.format, sheet.mode) == ("PNG", "RGB")
        return np.asarray(sheet)


def cell(sheet: Pixels, row: int, column: int, *, gaps: int | None = None) -> Pixels:
    """Return a cell of a sheet whose images all fill their cells. ``gaps`` is the sum of the gaps before the cell."""
    left = MARGIN + column * CELL + (column * GROUP_GAP if gaps is None else gaps)
    top = MARGIN + TITLE_HEIGHT + CAPTION_HEIGHT + row * (CELL + CAPTION_HEIGHT + ROW_GAP)
    return sheet[top : top + CELL, left : left + CELL]


def enlarge(image: Any, factor: int) -> Pixels:
    """Return an image, [3, height, width], as [height, width, 3], with each pixel repeated."""
    pixels = np.asarray(image).transpose(1, 2, 0)
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    path.write_bytes(encode(0, width=40, height=40, suffix="png"))
    return path


@pytest.mark.parametrize("size", [CELL, CELL // 4])
def test_a_row_shows_what_the_loader_of_a_run_yields(images: Path, tmp_path: Path, size: int) -> None:
    options = ("--recipe", "trivial_augment", "--size", size, "--images", 3, "--draws", 2, "--seed", 5)
    sheet = make_sheet(images, tmp_path / "sheet.png", *options)
    dataset = ImageFolder(images, recipes.trivial_augment(size))
    loader = DataLoader(dataset, sampler=EpochSampler(dataset, shuffle=False, seed=5), batch_size=21)
    for epoch in range(2):
        loader.set_epoch(epoch)
        ((batch, _),) = loader
        for row in range(3):
            assert np.array_equal(cell(sheet, row, 1 + epoch), enlarge(batch[7 * row], CELL // size))


def test_the_order_of_a_run_does_not_matter(packed: Path, tmp_path: Path) -> None:
    keys = ShardMapDataset(packed, fields="key")
    options = ("--recipe", "randaugment", "--size", CELL, "--images", 2, "--draws", 2)
    sheet = make_sheet(packed, tmp_path / "sheet.png", *options)
    dataset = ShardDataset(packed, fields=("key", "image"), shuffle=True, transform=recipes.randaugment(CELL))
    loader = DataLoader(dataset, batch_size=4)
    for epoch in range(2):
        loader.set_epoch(epoch)
        found = {key: image for batch in loader for key, image in zip(*batch, strict=True)}
        assert np.array_equal(cell(sheet, 0, 1 + epoch), enlarge(found[keys[0]], 1))
        assert np.array_equal(cell(sheet, 1, 1 + epoch), enlarge(found[keys[10]], 1))


def test_several_crops_of_an_epoch_stand_together(images: Path, tmp_path: Path) -> None:
    options = ("--recipe", "simclr", "--size", CELL, "--images", 1)
    sheet = make_sheet(images, tmp_path / "sheet.png", *options)
    dataset = ImageFolder(images, recipes.simclr(CELL))
    for epoch in range(4):  # With 4 epochs of 2 views, the sheet has as many columns as with 8 epochs of 1 view.
        dataset.set_epoch(epoch)
        for view, image in enumerate(dataset[0][0]):
            gaps = (1 + epoch) * GROUP_GAP + (epoch + view) * GAP
            assert np.array_equal(cell(sheet, 0, 1 + 2 * epoch + view, gaps=gaps), enlarge(image, 1))
    assert sheet.shape[1] == 2 * MARGIN + 9 * CELL + 4 * (GROUP_GAP + GAP)


OWN = """
import numpy as np

class Inversion:
    def __call__(self, image):
        return 255 - image

class Rotation:
    def __init__(self, degrees):
        pass

instance = Inversion()
make = lambda flipped=False: (lambda image: image) if flipped else invert
enlarged = lambda size: lambda image: np.full((size, size, 3), 7, np.uint8)
normalized = lambda image: (image / 255 - 0.5).astype(np.float32).transpose(2, 0, 1)
incomplete = lambda image: np.where(image == image.max(), np.nan, image)
boxes = lambda image: {"boxes": []}
wrong = lambda: 3
turn = lambda image: image.rotate(180)

def invert(image):
    return 255 - image
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own_transforms.py"
    path.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)  # monkeypatch also undoes the command's own change to sys.path.
    return path


@pytest.mark.parametrize("name", ["invert", "Inversion", "instance", "make"])
def test_transforms_or_what_makes_them_are_named(photo: Path, own: Path, tmp_path: Path, name: str) -> None:
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--transform", f"{own}:{name}", "--draws", 1)
    assert np.array_equal(cell(sheet, 0, 1), 255 - cell(sheet, 0, 0))


def test_functions_may_take_a_size_and_pillow_images(photo: Path, own: Path, tmp_path: Path) -> None:
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--transform", f"{own}:enlarged", "--size", CELL)
    assert (cell(sheet, 0, 8) == 7).all()
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--transform", f"{own}:turn", "--decode", "pil")
    assert np.array_equal(cell(sheet, 0, 3), cell(sheet, 0, 0)[::-1, ::-1])


def test_the_original_is_shown_whole_and_other_values_than_bytes_are_stretched(
    photo: Path, own: Path, tmp_path: Path
) -> None:
    with Image.open(photo) as image:
        darker = image.point(lambda level: level // 2 + 40)
    darker.save(photo)
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--transform", f"{own}:normalized", "--draws", 1)
    original = cell(sheet, 0, 0).astype(int)
    low, high = original.min(), original.max()
    assert 0 < low < high < 255
    assert np.abs(cell(sheet, 0, 1) - (original - low) * 255 / (high - low)).max() <= 0.51
    wide = darker.crop((0, 0, 40, 20))
    wide.save(photo)
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--recipe", "imagenet_eval", "--size", CELL, "--draws", 1)
    assert np.array_equal(cell(sheet, 0, 0)[40:120], enlarge(np.asarray(wide).transpose(2, 0, 1), 4))
    assert (cell(sheet, 0, 0)[:40] == 255).all()


def gray(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (level, level, level)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("folders", [[""], ["a", "b"], ["", "b"]], ids=["flat", "classes", "mixed"])
def test_images_are_found_in_any_folders_and_evenly_spaced(tmp_path: Path, folders: list[str]) -> None:
    # Images in the directory itself are found before those in its folders.
    names = [f"{folders[number * len(folders) // 8]}/{number}.png".lstrip("/") for number in range(8)]
    source = write_files(tmp_path / "images", {name: gray(10 * number) for number, name in enumerate(names)})
    if "" in folders:
        (source / "without images").mkdir()
    sheet = make_sheet(source, tmp_path / "sheet.png", "--recipe", "cifar", "--size", 8, "--images", 4, "--draws", 1)
    assert [cell(sheet, row, 0)[80, 80, 0] for row in range(4)] == [0, 20, 40, 60]


@pytest.mark.parametrize("source", [".", "../images", "images/0.png"])
def test_the_source_may_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    write_files(tmp_path, {"images/0.png": gray(30)})
    monkeypatch.chdir(tmp_path if "/0" in source else tmp_path / "images")
    sheet = make_sheet(Path(source), tmp_path / "sheet.png", "--recipe", "cifar", "--size", 8)
    assert (cell(sheet, 0, 0) == 30).all()


def test_names_may_contain_any_bytes_and_the_summary_says_what_was_written(tmp_path: Path) -> None:
    name, out = os.fsdecode(b"line\nbreak \x1b[2J \xff" + b"long" * 20 + b".png"), tmp_path / "sheet.png"
    source = write_files(tmp_path / "images", {name: gray(9)})
    sheet = make_sheet(source, out, "--recipe", "cifar", "--size", 8, "--draws", 1)
    shown = sheet[-MARGIN - CAPTION_HEIGHT : -MARGIN]
    assert shown[:, :MARGIN].min() == shown[:, MARGIN + CELL :].min() == 255 > shown.min()
    values = json.loads(run("augment", source, "-o", out, "--recipe", "dino", "--images", 50, "--json").stdout)
    with Image.open(out) as image:
        assert values == {"path": str(out), "images": 1, "draws": 2, "size": list(image.size)}
        size = f"{image.width}×{image.height} pixels"
    assert run("augment", source, "-o", out, "--recipe", "dino").stdout == f"{out}: 1 image, 2 draws, {size}\n"


MISTAKES: list[tuple[str, str]] = [
    ("", "pass either --recipe or --transform. The recipes are imagenet_train, "),
    ("--recipe cifar --transform numpy:flip", "pass either --recipe or --transform."),
    ("--recipe simlcr", "there is no recipe 'simlcr': did you mean simclr? The recipes are imagenet_train, "),
    ("--recipe zzz", "there is no recipe 'zzz': The recipes are imagenet_train, "),
    ("--recipe cifar --decode pil", "use decode='array'"),
    ("--transform zzz:flip", "there is no transform 'zzz:flip': there is no module 'zzz'"),
    ("--transform OWN:nothing", "own_transforms.py has no function 'nothing'"),
    ("--transform OWN:wrong", "must return a transform (a callable), but it returned int"),
    ("--transform OWN:Rotation", "needs values for degrees: name a function"),
    ("--transform OWN:enlarged", "needs values for size"),
    ("--transform OWN:boxes", "return an image with 1, 3 or 4 channels, or a tuple of images, but returned dict"),
    ("--transform OWN:incomplete", "the transform returned NaN or infinite values for photo.png"),
    ("--recipe cifar -o DIR/sheet.jpg", "must end in .png"),
    ("--recipe cifar -o DIR/missing/sheet.png", "does not exist: create it first"),
    ("--recipe cifar -o DIR/photo.png", "is one of the images"),
]


@pytest.mark.parametrize(("arguments", "error"), MISTAKES)
def test_wrong_transforms_and_outputs_are_refused(
    photo: Path, own: Path, tmp_path: Path, arguments: str, error: str
) -> None:
    before = photo.read_bytes()
    named = arguments.replace("OWN", str(own)).replace("DIR", str(tmp_path)).split()
    out = [] if "-o" in named else ["-o", tmp_path / "sheet.png"]
    source = tmp_path if str(photo) in named else photo
    text = usage_error("augment", source, *out, *named)
    assert error.replace(" ", "") in text.replace(" ", "")  # The comparison ignores spaces.
    assert {path.name for path in tmp_path.glob("*.*g")} == {"photo.png"}
    assert photo.read_bytes() == before


def test_images_that_cannot_be_read_do_not_prevent_a_sheet_of_the_others(photo: Path, tmp_path: Path) -> None:
    bad, command = tmp_path / "bad.png", ("-o", tmp_path / "sheet.png", "--recipe", "cifar")
    bad.write_bytes(photo.read_bytes()[:60])
    done = run("augment", tmp_path, *command, "--json")
    assert json.loads(done.stdout)["images"] == 1
    assert done.stderr.startswith("not shown: the image of sample ")
    assert "bad.png" in done.stderr
    photo.unlink()
    (tmp_path / "sheet.png").unlink()
    for source in (tmp_path, bad):
        done_badly = run_main("augment", source, *command)
        assert (done_badly.code, str(bad) in done_badly.stderr) == (1, True)
    bad.unlink()
    assert "holds neither images (jpg, " in error_of("augment", tmp_path, *command)
    assert not (tmp_path / "sheet.png").exists()
