"""One rule decides whether a JPEG is damaged, for every decoder, crop and way of packing."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg

import shardio
from shardio import DataLoader, ImageFolder, ShardDataset
from shardio.images import decode_image, open_image
from shardio.images.jpeg import Box
from shardio.images.tiling import NotTileable, reencode_jpeg, tile_jpeg
from shardio.packing import REJECTED_NAME
from shardio.transforms import CenterCrop, Compose
from tests.images.crop_laws import part, render_parts
from tests.images.jpeg_files import by_pillow, patch, scan_start, segments_of
from tests.images.jpeg_writer import segment
from tests.images.pictures import Array, convert, make_picture, read_by_pillow
from tests.raising import assert_raises
from tests.tars import write_tar

HEIGHT, WIDTH = 64, 96
PICTURE = make_picture(HEIGHT, WIDTH)

KINDS = {
    "plain": by_pillow(PICTURE, quality=90),
    "restarts": by_pillow(PICTURE, quality=90, restart_marker_blocks=4),
    "progressive": by_pillow(PICTURE, quality=90, progressive=True),
    "gray": by_pillow(PICTURE[..., 0].copy(), quality=90, restart_marker_blocks=7),
}
"""Files without a fault."""

PARTS = {"part 2 of 3": [(2, 3)], "part 1 twice": [(1, 2)] * 2, "counts differ": [(1, 2), (2, 3)], "0 of 0": [(0, 0)]}


def insert_before_restarts(content: bytes, data: bytes, numbers: Collection[int] | None = None) -> bytes:
    """Insert data before the restart markers with these numbers, or before every restart marker."""
    start = scan_start(content)
    count = itertools.count()

    def pad(marker: re.Match[bytes]) -> bytes:
        return (data if numbers is None or next(count) in numbers else b"") + marker[0]

    return content[:start] + re.sub(rb"\xff[\xd0-\xd7]", pad, content[start:])


def _with_profile(content: bytes, parts: list[tuple[int, int]], data: bytes = b"x" * 50) -> bytes:
    segments = b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes(part) + data) for part in parts)
    return content[:2] + segments + content[2:]


def _with_spectrum(content: bytes) -> bytes:
    """Return a file whose scan header declares a range of coefficients that no sequential scan has."""
    start, stop = next((start, stop) for marker, start, stop in segments_of(content) if marker == 0xDA)
    return patch(content, 0xDA, stop - start - 4 - 3, 1)


def _with_adobe(content: bytes) -> bytes:
    start, stop = next((start, stop) for marker, start, stop in segments_of(content) if marker == 0xE0)
    return content[:start] + segment(0xEE, b"Adobe\0\x64\0\0\0\0\x07") + content[stop:]


def _pad_end(data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:-2] + data + content[-2:]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    **{f"profile, {name}": partial(_with_profile, parts=parts) for name, parts in PARTS.items()},
    "empty profile": lambda content: _with_profile(content, [(1, 1)], b""),
    "JFIF 2": lambda content: patch(content, 0xE0, 5, 2),
    "unknown transform": _with_adobe,
    "profile and padding": lambda content: _pad_end(bytes(40))(_with_profile(content, [(1, 2)])),
    "zeros at the end": _pad_end(bytes(40)),
    "ones at the end": _pad_end(b"\xff\0" * 20),
    "two bytes at the end": _pad_end(b"\x12\x34"),
    "fill bytes at the end": _pad_end(b"\xff" * 9),
}

HARMLESS_BY_KIND: dict[str, Callable[[bytes], bytes]] = {
    "plain, spectrum": _with_spectrum,
    "restarts, two bytes before each": lambda content: insert_before_restarts(content, b"\x12\x34"),
    "restarts, two bytes before one": lambda content: insert_before_restarts(content, b"\x12\x34", [2]),
    "restarts, zeros before some": lambda content: insert_before_restarts(content, bytes(30), [0, 3]),
    "gray, a byte before each": lambda content: insert_before_restarts(content, b"\x12"),
    "gray, three bytes before each": lambda content: insert_before_restarts(content, b"\x12\x34\x56"),
    "gray, zeros before each": lambda content: insert_before_restarts(content, bytes(30)),
}
"""Changes to one kind of file. The first word of each name is the kind."""

NOISE = bytes(range(40, 90))
_CMYK = by_pillow(np.dstack([PICTURE, PICTURE[..., :1]]), quality=90)

DAMAGED: dict[str, bytes] = {
    **{f"{kind}, other bytes at the end": _pad_end(NOISE)(content) for kind, content in KINDS.items()},
    "plain, profile and other bytes": _with_profile(_pad_end(NOISE)(KINDS["plain"]), [(2, 3)]),
    "restarts, other bytes before one": insert_before_restarts(KINDS["restarts"], NOISE, [1]),
    "restarts, padding and other bytes": _pad_end(NOISE)(insert_before_restarts(KINDS["restarts"], bytes(30), [1])),
    "restarts, padding and a missing marker": insert_before_restarts(KINDS["restarts"], bytes(30), [1]).replace(
        b"\xff\xd4", b"\0"
    ),
    "plain, half the data": KINDS["plain"][: len(KINDS["plain"]) // 2].rstrip(b"\xff") + b"\xff\xd9",
    "plain, no end": KINDS["plain"][:-2],
    "plain, zeros amid the data": KINDS["plain"][:1500] + bytes(40) + KINDS["plain"][1540:],
    "CMYK, zeros amid the data": _CMYK[:2500] + bytes(60) + _CMYK[2560:],
}


HARMLESS = {f"{kind}, {name}": change(content) for kind, content in KINDS.items() for name, change in CHANGES.items()}
HARMLESS |= {name: change(KINDS[name.partition(",")[0]]) for name, change in HARMLESS_BY_KIND.items()}


CROP = 24
BOXES = [Box(0, 0, HEIGHT, WIDTH), Box(0, 0, 9, 9), Box(20, 36, CROP, CROP), Box(HEIGHT - 8, 0, 8, WIDTH)]


reencode = partial(reencode_jpeg, max_side=None, quality=90, max_pixels=10**6)


def render_strictly(content: bytes, box: Box) -> Array:
    (pixels,), (is_rendered,) = render_parts(content, [box])
    if not is_rendered:
        raise ValueError("the kernel does not render this crop")
    return pixels


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_fault_has_the_pixels_of_pillow_and_opencv_in_every_way(name: str) -> None:
    content = HARMLESS[name]
    expected = read_by_pillow(content)
    by_opencv: Any = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(by_opencv[..., ::-1], expected)
    np.testing.assert_array_equal(decode_image(content), expected)
    picture = open_image(content)
    parts, is_rendered = render_parts(content, BOXES)
    for box, pixels, is_done in zip(BOXES, parts, is_rendered.tolist(), strict=True):
        np.testing.assert_array_equal(picture.read(box), part(expected, box))
        assert not is_done or np.array_equal(pixels, part(expected, box))
    tiled, why = content, ""
    try:
        tiled = tile_jpeg(content)
    except NotTileable as error:
        why = error.reason
    unsupported = "progressive, of a kind that the kernel does not decode"
    assert why in ("", "padding before a marker", "several scans", unsupported)
    np.testing.assert_array_equal(decode_image(tiled), expected)
    np.testing.assert_array_equal(read_by_pillow(convert(content, "png")), expected)
    reencoded = reencode(content)
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(reencoded), decode_image(reencoded))


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pixels_are_refused_in_every_way_that_reads_them(name: str) -> None:
    content = DAMAGED[name]
    by_pillow = read_leniently(content)
    for read in (decode_image, reencode):
        assert_raises(ValueError, ".+", read, content)
    assert_raises(NotTileable, r"damaged|progressive|4 components", tile_jpeg, content)
    for read_part in (lambda box: open_image(content).read(box), lambda box: render_strictly(content, box)):
        assert isinstance(_pixels_or_error(read_part, BOXES[0]), ValueError)
        for box in BOXES[1:]:  # A crop outside the damaged part may be correct.
            found = _pixels_or_error(read_part, box)
            assert isinstance(found, ValueError) or np.array_equal(found, part(by_pillow, box))


def read_leniently(content: bytes) -> Array:
    image: Any = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    return read_by_pillow(content + b"\xff\xd9") if image is None else np.asarray(image[..., ::-1], np.uint8)


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
def test_pack_leaves_out_what_is_damaged(folder: Path, tmp_path: Path, jpeg: Any) -> None:
    manifest = shardio.pack(folder / "in", tmp_path / "out", jpeg=jpeg, shuffle_seed=None)
    rejected = [json.loads(line)["key"] for line in (tmp_path / "out" / REJECTED_NAME).read_text().splitlines()]
    assert manifest.num_samples == len(HARMLESS) + len(DAMAGED) - len(rejected)
    assert shardio.verify(tmp_path / "out", deep=True) == []
    if jpeg != "reencode":
        assert rejected == [f"1/{number:03d}" for number in range(len(DAMAGED))]
        check_images(lambda **options: ShardDataset(tmp_path / "out", **options))


def test_a_folder_is_read_whole_and_cropped(folder: Path) -> None:
    check_images(lambda **options: ImageFolder(folder / "good", **options))


def test_a_deep_verification_names_the_damaged_files(tmp_path: Path) -> None:
    for name, files, num_problems in (("a.tar", HARMLESS, 0), ("b.tar", DAMAGED, len(DAMAGED))):
        write_tar(tmp_path / name, [(f"{number:03d}.jpg", content) for number, content in enumerate(files.values())])
        ShardDataset(tmp_path / name, fields="image")  # This creates an index.
        assert len(shardio.verify(tmp_path / name, deep=True)) == num_problems


def check_images(make: Callable[..., Any]) -> None:
    expected = [read_by_pillow(content) for content in HARMLESS.values()]
    box = Box((HEIGHT - CROP) // 2, (WIDTH - CROP) // 2, CROP, CROP)
    whole, cropped = make(), make(transform=Compose([CenterCrop(CROP)]))
    for dataset, place in ((whole, Box(0, 0, HEIGHT, WIDTH)), (cropped, box)):
        images = [image for images, _ in DataLoader(dataset, batch_size=8, num_workers=0) for image in images]
        for name, image, pixels in zip(HARMLESS, images, expected, strict=True):
            np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), part(pixels, place), err_msg=name)
