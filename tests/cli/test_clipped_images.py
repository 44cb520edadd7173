"""Gray images of other numbers than uint8 become white or black, as in torchvision: commands and loaders say so."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shardio
from shardio import DataLoader, ImageFolder, ShardDataset
from shardio.cli.main import app
from shardio.images import find_clipped_type, open_image
from shardio.images.jpeg.regions import Box
from tests.images.stored_values import make_values, write_png, write_tiff
from tests.images.test_value_formats import EXACT

GRAY = np.linspace(2000, 60000, 32 * 24).reshape(32, 24).astype(np.uint16)
FILES = {
    "a.png": (write_png(GRAY), "uint16"),
    "b.tif": (write_tiff(GRAY), "uint16"),
    "c.tif": (write_tiff((GRAY / 65535).astype(np.float32)), "float32"),
    "d.tif": (write_tiff(make_values("int8", 32, 24)), "int8"),
}
PLAIN = {
    "e.png": write_png(make_values("uint16", 32, 24, 3)),
    "f.tif": write_tiff(make_values("uint8", 32, 24)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    (root / "class").mkdir()
    for name, content in [*((name, content) for name, (content, _) in FILES.items()), *PLAIN.items()]:
        (root / "class" / name).write_bytes(content)
    return root


def run(*arguments: object) -> Any:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr
    return done


def test_pack_and_info_say_how_many_and_what_to_do(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = "4 gray images store other numbers than uint8 (2 × uint16, 1 × float32, 1 × int8): as images they become RGB"
    packed = run("pack", folder, tmp_path / "out")
    assert packed.stderr.count(said) == 1
    assert "fields=('png', 'label')" in packed.stderr
    again = json.loads(run("pack", folder, tmp_path / "again", "--no-check", "--json").stdout)
    assert again["clipped"] == {"float32": 1, "int8": 1, "uint16": 2}
    assert f"clipped  {said}" in run("info", tmp_path / "out").stdout
    assert json.loads(run("info", tmp_path / "out", "--json").stdout)["decoded"]["clipped"] == again["clipped"]
    with caplog.at_level(logging.WARNING, "shardio"):
        shardio.pack(folder, tmp_path / "called")
    assert "4 gray images store other numbers than uint8" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_the_loader_says_it_once_an_epoch(folder: Path, tmp_path: Path, kind: str, num_workers: int) -> None:
    dataset: Any = ImageFolder(folder)
    if kind == "shards":
        shardio.pack(folder, tmp_path / "out")
        dataset = ShardDataset(tmp_path / "out")
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers)
    with pytest.warns(UserWarning, match=r"other numbers than uint8: as images they become RGB of 8 bits") as caught:
        list(loader)
    assert len(caught) == 1
    assert loader.stats().num_images_by_decoder == {"kernel": 0, "libjpeg": 0, "pillow": 6}


def test_other_images_and_fields_of_their_own_cause_no_warning(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in/class").mkdir(parents=True)
    for name, content in PLAIN.items():
        (tmp_path / "in/class" / name).write_bytes(content)
    shardio.pack(folder, tmp_path / "out", fields=["png", "cls"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = list(DataLoader(ImageFolder(tmp_path / "in"), batch_size=2, num_workers=0))
        fields = list(DataLoader(ShardDataset(tmp_path / "out", fields=("png",)), batch_size=1, num_workers=0))
    assert plain
    assert fields
    assert not caught


@pytest.mark.parametrize("name", EXACT)
def test_the_head_tells_what_pillow_clips(name: str) -> None:
    content, values = EXACT[name]
    picture, refused = None, ""
    try:
        picture = open_image(content)
    except ValueError as error:
        refused = str(error)
    if picture is None:  # Pillow does not read it, so it clips nothing.
        assert "cannot become RGB" in refused
        return
    is_clipped = find_clipped_type(content) is not None
    assert is_clipped == (picture.decoder_name == "pillow, clipped")
    if values.ndim == 2:
        gray = picture.read(Box(0, 0, *picture.size))[..., 0].astype(np.float64)
        is_proportional = gray.std() > 0 and np.corrcoef(gray.ravel(), values.ravel().astype(float))[0, 1] > 0.99
        assert is_clipped != is_proportional
    else:
        assert not is_clipped
