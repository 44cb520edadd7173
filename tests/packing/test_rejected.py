"""Images that cannot be decoded are left out and listed, on any number of workers; without the check, nothing is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.errors import PackError
from shardio.packing import REJECTED_NAME, TILED, PackResult, PackSettings, RunOptions, SourceOptions, pack_source
from tests.files import read_files
from tests.images.pictures import make_picture, save
from tests.sources import encode
from tests.tars import read_with_webdataset

SOUND = save(make_picture(40, 30), "JPEG")
BROKEN = {
    "c/cut.jpg": (SOUND[: len(SOUND) // 2], "cannot be decoded: "),
    "c/empty.jpg": (b"", "is not an image"),
    "d/cut.png": (save(make_picture(40, 30), "PNG")[:-40], "cannot be decoded: "),
    "d/html.webp": (b"<html>404</html>", "is not an image"),
    "d/large.jpg": (save(make_picture(41, 30), "JPEG"), "is too large: "),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    for folder in "c", "d":
        (root / folder).mkdir(parents=True)
        for i in range(4):
            (root / folder / f"{i}.jpg").write_bytes(SOUND)
    for name, (content, _) in BROKEN.items():
        (root / name).write_bytes(content)
    (root / "c" / "cut.json").write_bytes(b"{}")
    return root


def pack(source: Path, out: Path, *, num_workers: int = 1, strict: bool = False, **settings: Any) -> PackResult:
    values = {"max_shard_size": 1 << 30, "max_shard_samples": 4, "max_pixels": 40 * 30, **settings}
    return pack_source(source, out, PackSettings(**values), run=RunOptions(num_workers=num_workers, strict=strict))


def read_all(out: Path) -> dict[str, dict[str, bytes]]:
    return {key: fields for path in sorted(out.glob("*.tar")) for key, fields in read_with_webdataset(path)}


@pytest.mark.parametrize("num_workers", [1, 3])
def test_undecodable_images_are_left_out_and_listed(source: Path, tmp_path: Path, num_workers: int) -> None:
    result = pack(source, tmp_path / "out", num_workers=num_workers)
    assert sorted(read_all(tmp_path / "out")) == sorted(f"{folder}/{i}" for folder in "cd" for i in range(4))
    assert result.manifest.num_samples == 8
    lines = (tmp_path / "out" / REJECTED_NAME).read_text().splitlines()
    rejected = [json.loads(line) for line in lines]
    assert [each["file"] for each in rejected] == sorted(BROKEN)
    for each in rejected:
        assert each["key"] == each["file"].partition(".")[0]
        assert each["reason"].startswith(BROKEN[each["file"]][1])
    assert [sample._asdict() for sample in result.rejected] == rejected


def test_the_output_does_not_depend_on_workers_or_on_where_the_source_is(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "a", num_workers=1)
    moved = source.rename(tmp_path / "elsewhere")
    pack(moved, tmp_path / "b", num_workers=2)
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


def test_without_the_check_every_file_is_packed_as_it_is(source: Path, tmp_path: Path) -> None:
    result = pack(source, tmp_path / "out", check=False, max_pixels=None)
    assert result.rejected == []
    assert not (tmp_path / "out" / REJECTED_NAME).exists()
    stored = read_all(tmp_path / "out")
    for name, (content, _) in BROKEN.items():
        key, _, field = name.partition(".")
        assert stored[key][field] == content


def test_strict_refuses_the_first_undecodable_image_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"in/[cd]/\w+\.\w+ (is|cannot) .*: rename, repair or remove the file"):
        pack(source, tmp_path / "out", strict=True, max_shard_samples=None)
    assert not (tmp_path / "out").exists()


def test_a_source_without_a_sound_image_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "a.jpg", "b.jpg":
        (tmp_path / "in" / name).write_bytes(b"no image")
    with pytest.raises(PackError, match=r"no images that can be packed: .*in/\w\.jpg is not an image \(there are 2"):
        shardio.pack(tmp_path / "in", tmp_path / "out", max_shard_samples=1)
    assert not (tmp_path / "out").exists()


def test_masks_that_have_no_rgb_values_are_sound(tmp_path: Path) -> None:
    (tmp_path / "in" / "images").mkdir(parents=True)
    (tmp_path / "in" / "masks").mkdir()
    for i, mode in enumerate(("I;16", "P", "1", "L")):
        picture = make_picture(8, 8)[..., 0]
        (tmp_path / "in" / "images" / f"{i}.jpg").write_bytes(encode(i))
        (tmp_path / "in" / "masks" / f"{i}.png").write_bytes(save(picture, "PNG", mode=mode))
    (tmp_path / "in" / "images" / "9.jpg").write_bytes(encode(9))
    (tmp_path / "in" / "masks" / "9.png").write_bytes(b"no image")
    settings = PackSettings(max_shard_size=1 << 30)
    result = pack_source(tmp_path / "in", tmp_path / "out", settings, SourceOptions(layout="pairs"))
    assert result.rejected == [("9", "masks/9.png", "is not an image")]
    assert result.manifest.num_samples == 4


def test_tiling_leaves_out_the_same_images_as_copying(tmp_path: Path) -> None:
    """A JPEG that can be tiled is not decoded as well: no damage may escape by that."""
    random = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    for number in range(150):
        content = bytearray(encode(number % 7, width=64, height=48, quality=int(random.integers(30, 95))))
        if number % 5:
            offset = int(random.integers(2, len(content)))
            content[offset] ^= 1 << int(random.integers(8))
        if number % 11 == 3:
            del content[int(random.integers(2, len(content))) :]
        (tmp_path / "in" / f"{number:03d}.jpg").write_bytes(content)
    copied = pack(tmp_path / "in", tmp_path / "copied", max_pixels=None)
    tiled = pack(tmp_path / "in", tmp_path / "tiled", max_pixels=None, jpeg="tile")
    assert tiled.rejected == copied.rejected
    assert 30 < len(copied.rejected) < 130
    assert tiled.jpegs.outcomes[TILED] > 20
