"""A JPEG is damaged or not by one rule, whatever the decoder, the crop, and the way it is packed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

import shardio
from shardio import DataLoader, ImageFolder, ShardDataset
from shardio.images import decode_image, open_image
from shardio.images.jpeg import Box
from shardio.images.tiling import NotTileable, reencode_jpeg, tile_jpeg
from shardio.packing import REJECTED_NAME
from shardio.transforms import CenterCrop, Compose
from tests.images.by_kernel import render_parts
from tests.images.crop_laws import part
from tests.images.odd_jpegs import DAMAGED, HEIGHT, WIDTH, harmless_files
from tests.images.pictures import Array, convert, read_by_pillow
from tests.tars import write_tar

HARMLESS = harmless_files()
CROP = 24
BOXES = [Box(0, 0, HEIGHT, WIDTH), Box(0, 0, 9, 9), Box(20, 36, CROP, CROP), Box(HEIGHT - 8, 0, 8, WIDTH)]


def reencode(content: bytes) -> bytes:
    return reencode_jpeg(content, max_side=None, quality=90, max_pixels=10**6)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_fault_has_the_pixels_of_pillow_and_opencv_in_every_way(name: str) -> None:
    content = HARMLESS[name]
    expected = read_by_pillow(content)
    by_opencv: Any = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(by_opencv[..., ::-1], expected)
    np.testing.assert_array_equal(decode_image(content), expected)
    picture = open_image(content)
    for box in BOXES:
        np.testing.assert_array_equal(picture.read(box), part(expected, box))
    np.testing.assert_array_equal(picture.read(Box(0, 0, HEIGHT // 2, WIDTH // 2), 2), read_half(content))
    parts, is_rendered = render_parts(content, BOXES)
    for box, pixels, is_done in zip(BOXES, parts, is_rendered.tolist(), strict=True):
        assert not is_done or np.array_equal(pixels, part(expected, box))
    if (why := why_not_tiled(content)) is None:
        np.testing.assert_array_equal(decode_image(tile_jpeg(content)), expected)
    else:
        assert why in ("padding before a marker", "progressive", "several scans")
    np.testing.assert_array_equal(read_by_pillow(convert(content, "png")), expected)
    reencoded = reencode(content)
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(reencoded), decode_image(reencoded))


def read_half(content: bytes) -> Array:
    with Image.open(io.BytesIO(content)) as image:
        image.draft(None, (WIDTH // 2, HEIGHT // 2))
        return np.asarray(image.convert("RGB"))


def why_not_tiled(content: bytes) -> str | None:
    try:
        tile_jpeg(content)
    except NotTileable as error:
        return error.reason
    return None


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pixels_are_refused_in_every_way_that_reads_them(name: str) -> None:
    content = DAMAGED[name]
    by_pillow = read_leniently(content)
    with pytest.raises(ValueError, match=r".+"):
        decode_image(content)
    with pytest.raises(ValueError, match=r".+"):
        reencode(content)
    with pytest.raises(NotTileable, match=r"damaged|progressive|4 components"):
        tile_jpeg(content)
    for read in (lambda box: open_image(content).read(box), lambda box: render_strictly(content, box)):
        assert isinstance(_pixels_or_error(read, BOXES[0]), ValueError)
        for box in BOXES[1:]:  # A crop that needs nothing of the damage may be right.
            found = _pixels_or_error(read, box)
            assert isinstance(found, ValueError) or np.array_equal(found, part(by_pillow, box))


def read_leniently(content: bytes) -> Array:
    image: Any = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    return read_by_pillow(content + b"\xff\xd9") if image is None else np.asarray(image[..., ::-1], np.uint8)


def render_strictly(content: bytes, box: Box) -> Array:
    (pixels,), (is_rendered,) = render_parts(content, [box])
    if not is_rendered:
        raise ValueError("the kernel leaves it to the libraries")
    return pixels


def _pixels_or_error(read: Any, box: Box) -> Any:
    try:
        return np.array(read(box))
    except ValueError as error:
        return error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd")
    for label, files in enumerate((HARMLESS, DAMAGED)):
        (root / f"in/{label}").mkdir(parents=True)
        for number, content in enumerate(files.values()):
            (root / f"in/{label}/{number:03d}.jpg").write_bytes(content)
    (root / "good").mkdir()
    (root / "good/0").symlink_to(root / "in/0")
    return root


@pytest.mark.parametrize("jpeg", ["copy", "tile", "reencode"])
def test_pack_takes_the_harmless_and_leaves_out_the_damaged(
    folder: Path, tmp_path: Path, jpeg: Literal["copy", "tile", "reencode"]
) -> None:
    manifest = shardio.pack(folder / "in", tmp_path / "out", jpeg=jpeg, shuffle_seed=None)
    rejected = [json.loads(line)["key"] for line in (tmp_path / "out" / REJECTED_NAME).read_text().splitlines()]
    if jpeg != "reencode":
        assert rejected == [f"1/{number:03d}" for number in range(len(DAMAGED))]
    assert manifest.num_samples == len(HARMLESS) + len(DAMAGED) - len(rejected)
    assert shardio.verify(tmp_path / "out", deep=True) == []
    if jpeg != "reencode":
        check_images(ShardDataset(tmp_path / "out"), ShardDataset(tmp_path / "out", transform=crop()))


def test_a_folder_is_read_whole_and_cropped(folder: Path) -> None:
    check_images(ImageFolder(folder / "good"), ImageFolder(folder / "good", transform=crop()))


def test_a_deep_verification_names_the_damaged_files(tmp_path: Path) -> None:
    for name, files, num_problems in (("a.tar", HARMLESS, 0), ("b.tar", DAMAGED, len(DAMAGED))):
        write_tar(tmp_path / name, [(f"{number:03d}.jpg", content) for number, content in enumerate(files.values())])
        ShardDataset(tmp_path / name, fields="image")  # It makes an index.
        assert len(shardio.verify(tmp_path / name, deep=True)) == num_problems


def crop() -> Compose:
    return Compose([CenterCrop(CROP)])


def check_images(whole: Any, cropped: Any) -> None:
    expected = [read_by_pillow(content) for content in HARMLESS.values()]
    box = Box((HEIGHT - CROP) // 2, (WIDTH - CROP) // 2, CROP, CROP)
    for dataset, place in ((whole, Box(0, 0, HEIGHT, WIDTH)), (cropped, box)):
        images = [image for images, _ in DataLoader(dataset, batch_size=8, num_workers=0) for image in images]
        assert len(images) == len(expected)
        for name, image, pixels in zip(HARMLESS, images, expected, strict=True):
            np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), part(pixels, place), err_msg=name)
