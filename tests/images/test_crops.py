"""A part of a picture is that part of its full decode, bit for bit, whatever is decoded for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg

from shardio.images import JpegPicture, decode_image, open_image
from shardio.images.jpeg import Box, has_tiles
from shardio.images.tiling import NotTileable, tile_jpeg
from tests.images.crop_laws import (
    SCALES,
    assert_parts,
    edge_boxes,
    full_decode,
    part,
    random_boxes,
    scaled_size,
    some_boxes,
    tile_by_hand,
)
from tests.images.jpeg_corpus import ODD_FACTORS, small_corpus
from tests.images.jpeg_files import (
    SAMPLINGS,
    Factors,
    JpegFile,
    by_cv2,
    by_pillow,
    by_simplejpeg,
    make_jpeg,
    noise,
    readers_of,
)
from tests.images.pictures import TURNS, Array, exif_of, make_picture, read_by_pillow, save

FACTORS = {
    **SAMPLINGS,
    **{name: factors for name, factors in ODD_FACTORS.items() if "simplejpeg" in readers_of(factors)},
}
KINDS = ("untouched", "tiled", "tiled by ones")


@cache
def _write_noise(factors: Factors, size: tuple[int, int], **options: Any) -> bytes:
    """All pixels and chroma samples of noise tell."""
    return make_jpeg("", noise(*size), factors=factors, quality=95, **options).content


def _write(factors: Factors, size: tuple[int, int], kind: str) -> tuple[bytes, bytes]:
    """Return a JPEG of noise, and the same as a kind."""
    rgb: dict[str, Any] = {"rgb": True, "header": "adobe"} if kind.startswith("rgb") else {}
    content = _write_noise(factors, size, **rgb)
    if kind == "tiled by ones":
        return content, tile_by_hand(_write_noise(factors, size, restart_interval=1))
    return content, tile_jpeg(content) if "tiled" in kind else content


def _boxes_of(size: tuple[int, int], kind: str, *, at_end: bool) -> dict[str, list[Box]]:
    """Return crops of a small picture, other ones for each kind. ``tools/crop_campaign.py`` checks all."""
    width, edges = size[1], edge_boxes(*size, 8)
    anywhere = some_boxes(*size, 8) + random_boxes(*size, 3, np.random.default_rng(len(kind)))
    if at_end:
        anywhere += [Box(0, left, size[0], width - left) for left in range(max(width - 9, 0), width)]
    return {"anywhere": anywhere, "at the edges of MCUs": edges[len(kind) % 3 :: 1 + len(edges) // 12]}


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
def test_crops_of_small_pictures(factors: Factors) -> None:
    """Rows of 11 and 6 MCUs, with intervals of 1 and 3, end in an MCU of 1 or 4 pixels. No interval divides these."""
    mcu_width = 8 * max(across for across, _ in factors) if len(factors) > 1 else 8
    rows = [(9, (num_mcus - 1) * mcu_width + last) for num_mcus in (11, 6) for last in (1, 4)]
    sizes = [(1, 1), (1, 4), (3, 2), (5, 5), (1, 33), (33, 1), (18, 4), (2, 34), (34, 2), (9, 11), (35, 69)]
    can_be_rgb = factors in (FACTORS["4:4:4"], FACTORS["4:2:0"])
    for kind in [*KINDS, *(("rgb", "rgb, tiled") if can_be_rgb else ())]:
        for size in [*sizes, *(rows if kind == "tiled" else [])]:
            original, content = _write(factors, size, kind)
            assert has_tiles(content) == ("tiled" in kind)
            assert isinstance(open_image(content), JpegPicture)
            for scale in SCALES:
                expected = full_decode(original, size, scale)
                for where, boxes in _boxes_of(scaled_size(size, scale), kind, at_end=size in rows).items():
                    assert_parts(content, expected, boxes, scale=scale, name=f"{kind} {size}, {where}")


def _photographs() -> dict[str, bytes]:
    picture, odd = make_picture(375, 500), make_picture(301, 211)
    sampling = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440)
    return {
        "4:2:0 by Pillow": by_pillow(picture, quality=92),
        "4:4:4 with restarts by Pillow": by_pillow(odd, quality=95, subsampling=0, restart_marker_rows=1),
        "4:2:2 by simplejpeg": by_simplejpeg(odd, "4:2:2"),
        "4:4:0 by OpenCV": by_cv2(odd, *sampling),
        "gray by Pillow": by_pillow(picture[..., 0].copy()),
    }


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("original", [pytest.param(content, id=name) for name, content in _photographs().items()])
def test_random_crops_of_photographs(original: bytes, scale: int) -> None:
    height, width, *_ = simplejpeg.decode_jpeg_header(original)
    expected = full_decode(original, (height, width), scale)
    height, width = expected.shape[:2]
    boxes = random_boxes(height, width, 15, np.random.default_rng(scale))
    for content in (original, tile_jpeg(original)):
        assert_parts(content, expected, boxes, scale=scale)


def _full_decode_of(content: bytes, picture_size: tuple[int, int], *, by_pillow: bool, scale: int) -> Array | None:
    try:
        return read_by_pillow(content) if by_pillow else full_decode(content, picture_size, scale)
    except (ValueError, OSError):
        return None


def test_crops_of_all_files_of_the_corpus_that_can_be_decoded() -> None:
    random = np.random.default_rng(0)
    num_checked = 0
    for file in small_corpus():
        for content in (file.content, _tile(file)):
            try:
                picture = open_image(content)
            except ValueError:
                continue
            for scale in (1, 8) if picture.can_scale else (1,):
                is_jpeg = isinstance(picture, JpegPicture)
                expected = _full_decode_of(file.content, picture.size, by_pillow=not is_jpeg, scale=scale)
                if expected is not None:
                    boxes = random_boxes(*scaled_size(picture.size, scale), 5, random)
                    assert_parts(content, expected, boxes, scale=scale, name=file.name)
                    num_checked += 1
            if file.tileable and file.readers:
                np.testing.assert_array_equal(decode_image(content), read_by_pillow(file.content), err_msg=file.name)
    assert num_checked > 700


def _tile(file: JpegFile) -> bytes:
    try:
        return tile_jpeg(file.content)
    except NotTileable:
        return file.content


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["untouched", "tiled", "4:2:0, tiled", "png"])
def test_crops_of_upright_pictures_are_crops_of_the_turned_full_decode(orientation: int, kind: str) -> None:
    size = (37, 53)
    if kind == "png":
        content = original = save(make_picture(*size), "PNG", exif=exif_of(orientation))
    else:
        subsampling = 2 if "4:2:0" in kind else 0
        content = original = by_pillow(make_picture(*size), exif=exif_of(orientation), subsampling=subsampling)
        content = tile_jpeg(original) if "tiled" in kind else content
    for scale in (1,) if kind == "png" else SCALES:
        stored = read_by_pillow(original) if kind == "png" else full_decode(original, size, scale)
        upright = TURNS[orientation](stored)
        (height, width), (stored_height, stored_width) = upright.shape[:2], stored.shape[:2]
        boxes = random_boxes(height, width, 12, np.random.default_rng(orientation))
        boxes.append(Box(0, 0, height, width))
        assert_parts(content, upright, boxes, scale=scale, orientation="apply")
        boxes = random_boxes(stored_height, stored_width, 5, np.random.default_rng(1))
        assert_parts(content, stored, boxes, scale=scale)


def test_a_part_that_was_read_stays_as_it_is_until_the_next_is() -> None:
    content = tile_jpeg(by_pillow(make_picture(40, 60)))
    picture = open_image(content)
    whole = full_decode(content, (40, 60))
    for box in random_boxes(40, 60, 50, np.random.default_rng(0)):
        pixels = picture.read(box)
        assert pixels.dtype == np.uint8
        assert pixels.shape == (box.height, box.width, 3)
        np.testing.assert_array_equal(pixels, part(whole, box))
