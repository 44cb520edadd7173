from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner, Result

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.cli.contact_sheet import CAPTION_HEIGHT, CELL, GAP, GROUP_GAP, MARGIN, ROW_GAP, TITLE_HEIGHT
from shardio.cli.main import app, main
from shardio.libraries import import_library
from shardio.transforms import recipes
from tests.sources import encode

Pixels = NDArray[np.uint8]


def augment(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["augment", *map(str, arguments)])


def make_sheet(source: Path, out: Path, *arguments: object) -> Pixels:
    done = augment(source, "-o", out, *arguments)
    assert done.exit_code == 0, done.output
    with Image.open(out) as sheet:
        assert (sheet.format, sheet.mode) == ("PNG", "RGB")
        return np.asarray(sheet)


def usage_error(*arguments: object) -> str:
    """Return the text of a usage error, without the frame, which breaks lines anywhere."""
    done = augment(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    return " ".join(done.stderr.replace("│", " ").split())


def cell(sheet: Pixels, row: int, column: int, *, gaps: int | None = None) -> Pixels:
    """Return a cell of a sheet whose images are all as large as a cell. ``gaps`` is the space before it."""
    left = MARGIN + column * CELL + (column * GROUP_GAP if gaps is None else gaps)
    top = MARGIN + TITLE_HEIGHT + CAPTION_HEIGHT + row * (CELL + CAPTION_HEIGHT + ROW_GAP)
    return sheet[top : top + CELL, left : left + CELL]


def enlarge(image: Any, factor: int) -> Pixels:
    """Return an image, [3, height, width], as [height, width, 3], with each pixel repeated."""
    pixels = np.asarray(image).transpose(1, 2, 0)
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """An image file of 40×40 pixels."""
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
    for epoch in range(4):  # 4 epochs of 2 views: as many columns as without crops.
        dataset.set_epoch(epoch)
        for view, image in enumerate(dataset[0][0]):
            gaps = (1 + epoch) * GROUP_GAP + (epoch + view) * GAP
            assert np.array_equal(cell(sheet, 0, 1 + 2 * epoch + view, gaps=gaps), enlarge(image, 1))
    assert sheet.shape[1] == 2 * MARGIN + 9 * CELL + 4 * (GROUP_GAP + GAP)


def test_the_original_is_shown_whole(photo: Path, tmp_path: Path) -> None:
    photo.write_bytes(encode(0, width=80, height=40, suffix="png"))
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--recipe", "imagenet_eval", "--size", CELL, "--draws", 1)
    with Image.open(photo) as image:
        pixels = np.asarray(image)
    assert np.array_equal(cell(sheet, 0, 0)[40:120], pixels.repeat(2, axis=0).repeat(2, axis=1))
    assert (cell(sheet, 0, 0)[:40] == 255).all()


OWN = """
import numpy as np

def invert(image):
    return 255 - image

class Inversion:
    def __call__(self, image):
        return invert(image)

instance = Inversion()

def make(flipped=False):
    return (lambda image: image) if flipped else invert

def enlarged(size):
    return lambda image: np.full((size, size, 3), 7, np.uint8)

def normalised(image):
    return (image / 255 - 0.5).astype(np.float32).transpose(2, 0, 1)

def incomplete(image):
    return np.where(image == image.max(), np.nan, image)

def boxes(image):
    return {"boxes": []}

def wrong():
    return 3

class Rotation:
    def __init__(self, degrees):
        pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with transforms."""
    path = tmp_path / "own_transforms.py"
    path.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)  # It is undone, with what the command adds.
    return path


@pytest.mark.parametrize("name", ["invert", "Inversion", "instance", "make"])
def test_transforms_are_named_themselves_or_by_what_makes_them(
    photo: Path, own: Path, tmp_path: Path, name: str
) -> None:
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--transform", f"{own}:{name}", "--draws", 1)
    assert np.array_equal(cell(sheet, 0, 1), 255 - cell(sheet, 0, 0))


def test_functions_that_take_a_size_get_it(photo: Path, own: Path, tmp_path: Path) -> None:
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--transform", f"{own}:enlarged", "--size", CELL)
    assert (cell(sheet, 0, 8) == 7).all()
    assert "needs values for size" in usage_error(photo, "-o", tmp_path / "x.png", "--transform", f"{own}:enlarged")


def test_other_values_than_bytes_are_stretched(photo: Path, own: Path, tmp_path: Path) -> None:
    with Image.open(photo) as image:
        image.point(lambda level: level // 2 + 40).save(photo)
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--transform", f"{own}:normalised", "--draws", 1)
    original = cell(sheet, 0, 0).astype(int)
    low, high = original.min(), original.max()
    assert 0 < low < high < 255
    difference = cell(sheet, 0, 1) - (original - low) * 255 / (high - low)
    assert np.abs(difference).max() <= 0.51


def test_torchvisions_transforms_show_what_the_loader_yields(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_library("torchvision")
    crop = import_module("torchvision.transforms.v2").RandomCrop(16)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "v2_transform.py").write_text("from torchvision.transforms import v2\ncrop = v2.RandomCrop(16)")
    sheet = make_sheet(images, tmp_path / "sheet.png", "--transform", "v2_transform:crop", "--images", 2)
    dataset = ImageFolder(images, crop)
    loader = DataLoader(dataset, sampler=EpochSampler(dataset, shuffle=False), batch_size=21)
    ((batch, _),) = loader
    assert np.array_equal(cell(sheet, 1, 1), enlarge(batch[10], 10))


def test_functions_may_take_pillow_images(photo: Path, own: Path, tmp_path: Path) -> None:
    own.write_text("def turn(image):\n    return image.rotate(180)")
    sheet = make_sheet(photo, tmp_path / "sheet.png", "--transform", f"{own}:turn", "--decode", "pil")
    assert np.array_equal(cell(sheet, 0, 3), cell(sheet, 0, 0)[::-1, ::-1])
    error = usage_error(photo, "-o", tmp_path / "x.png", "--recipe", "cifar", "--decode", "pil")
    assert "use decode='array'" in error


def write_grey(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (level, level, level)).save(path)


@pytest.mark.parametrize("folders", [[""], ["a", "b"], ["", "b"]], ids=["flat", "classes", "mixed"])
def test_images_are_found_in_any_folders_and_evenly_spaced(tmp_path: Path, folders: list[str]) -> None:
    source = tmp_path / "images"
    for number in range(8):  # Images in the directory itself are found before those in its folders.
        write_grey(source / folders[number * len(folders) // 8] / f"{number}.png", 10 * number)
    if "" in folders:
        (source / "without images").mkdir()
    sheet = make_sheet(source, tmp_path / "sheet.png", "--recipe", "cifar", "--size", 8, "--images", 4, "--draws", 1)
    assert [cell(sheet, row, 0)[80, 80, 0] for row in range(4)] == [0, 20, 40, 60]


@pytest.mark.parametrize("source", [".", "../images", "images/0.png"])
def test_the_source_may_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    write_grey(tmp_path / "images" / "0.png", 30)
    monkeypatch.chdir(tmp_path if "/0" in source else tmp_path / "images")
    sheet = make_sheet(Path(source), tmp_path / "sheet.png", "--recipe", "cifar", "--size", 8)
    assert (cell(sheet, 0, 0) == 30).all()


def test_names_may_contain_any_bytes(tmp_path: Path) -> None:
    source = tmp_path / "images"
    write_grey(source / os.fsdecode(b"line\nbreak \x1b[2J \xff" + b"long" * 20 + b".png"), 9)
    sheet = make_sheet(source, tmp_path / "sheet.png", "--recipe", "cifar", "--size", 8, "--draws", 1)
    name = sheet[-MARGIN - CAPTION_HEIGHT : -MARGIN]
    assert name[:, :MARGIN].min() == name[:, MARGIN + CELL :].min() == 255 > name.min()


def test_json_says_what_was_written(photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    done = augment(photo, "-o", out, "--recipe", "dino", "--images", 50, "--json")
    with Image.open(out) as sheet:
        assert json.loads(done.stdout) == {"path": str(out), "images": 1, "draws": 2, "size": list(sheet.size)}
        size = f"{sheet.width}×{sheet.height} pixels"
    assert augment(photo, "-o", out, "--recipe", "dino").stdout == f"{out}: 1 image, 2 draws, {size}\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "pass either --recipe or --transform. The recipes are imagenet_train, "),
        (["--recipe", "cifar", "--transform", "numpy:flip"], "pass either --recipe or --transform."),
        (["--recipe", "simlcr"], "there is no recipe 'simlcr': did you mean simclr? The recipes are imagenet_train, "),
        (["--recipe", "zzz"], "there is no recipe 'zzz': The recipes are imagenet_train, "),
        (["--transform", "zzz:flip"], "there is no transform 'zzz:flip': there is no module 'zzz'"),
    ],
)
def test_unknown_names_are_usage_errors(photo: Path, tmp_path: Path, arguments: list[str], error: str) -> None:
    assert error in usage_error(photo, "-o", tmp_path / "sheet.png", *arguments)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nothing", "own_transforms.py has no function 'nothing'"),
        ("wrong", "must return a transform, which is callable, but it returned int"),
        ("Rotation", "needs values for degrees: name a function"),
        ("boxes", "must return an image with 1, 3 or 4 channels, or a tuple of images, but returned dict"),
        ("incomplete", "the transform returned NaN or infinite values for photo.png"),
    ],
)
def test_wrong_transforms_are_usage_errors(photo: Path, own: Path, tmp_path: Path, name: str, error: str) -> None:
    text = usage_error(photo, "-o", tmp_path / "sheet.png", "--transform", f"{own}:{name}")
    assert error.replace(" ", "") in text.replace(" ", "")  # A long path is broken anywhere.
    assert not (tmp_path / "sheet.png").exists()


def test_the_file_must_be_a_png_in_an_existing_directory_and_none_of_the_images(photo: Path, tmp_path: Path) -> None:
    before = photo.read_bytes()
    assert "must end in .png" in usage_error(photo, "-o", tmp_path / "sheet.jpg", "--recipe", "cifar")
    missing = tmp_path / "missing" / "sheet.png"
    assert "does not exist: create it first" in usage_error(photo, "-o", missing, "--recipe", "cifar")
    assert "is one of the images" in usage_error(tmp_path, "-o", photo, "--recipe", "cifar")
    assert photo.read_bytes() == before


def test_an_image_that_cannot_be_decoded_is_an_error_that_names_the_file(
    photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo.write_bytes(photo.read_bytes()[:60])
    arguments = ["augment", str(photo), "-o", str(tmp_path / "sheet.png"), "--recipe", "cifar"]
    monkeypatch.setattr(sys, "argv", ["shardio", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert str(photo) in capsys.readouterr().err


def test_images_that_cannot_be_read_do_not_prevent_a_sheet_of_the_others(photo: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    done = augment(tmp_path, "-o", tmp_path / "sheet.png", "--recipe", "cifar", "--json")
    assert (done.exit_code, json.loads(done.stdout)["images"]) == (0, 1)
    assert done.stderr.startswith("not shown: the image of sample ")
    assert "bad.png" in done.stderr
    photo.unlink()
    (tmp_path / "sheet.png").unlink()
    assert augment(tmp_path, "-o", tmp_path / "sheet.png", "--recipe", "cifar").exit_code == 1
    assert not (tmp_path / "sheet.png").exists()


def test_a_directory_without_images_is_an_error(tmp_path: Path) -> None:
    done = augment(tmp_path, "-o", tmp_path / "sheet.png", "--recipe", "cifar")
    assert isinstance(done.exception, FileNotFoundError)
    assert "holds neither images (jpg, " in str(done.exception)
