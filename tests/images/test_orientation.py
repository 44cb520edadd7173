"""EXIF orientation turns images as Pillow and Exif define it."""

from __future__ import annotations

import io
import itertools
import struct
from typing import get_args

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from shardio.images import CropPlan, Resampling, decode_image, decode_pil, open_image
from shardio.images.jpeg.regions import Box
from shardio.images.tiling import tile_jpeg
from tests.images import naive
from tests.images.by_kernel import render_chunk_by_kernel
from tests.images.crop_laws import random_boxes
from tests.images.jpeg_files import SAMPLINGS, Factors, make_jpeg
from tests.images.jpeg_writer import segment
from tests.images.pictures import TURNS, exif_of, make_picture, read_by_pillow, save

FORMATS = ["JPEG", "PNG", "WEBP"]


@pytest.mark.parametrize("file_format", [*FORMATS, "TIFF"])
@pytest.mark.parametrize("orientation", TURNS)
def test_apply_turns_the_image_as_pillow_does(file_format: str, orientation: int) -> None:
    content = save(make_picture(33, 47), file_format, exif=exif_of(orientation))
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(decode_image(content, orientation="apply"), expected)
    np.testing.assert_array_equal(np.asarray(decode_pil(content, orientation="apply")), expected)


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("orientation", TURNS)
def test_apply_turns_the_pixels_as_exif_defines_it(file_format: str, orientation: int) -> None:
    content = save(make_picture(33, 47), file_format, exif=exif_of(orientation))
    np.testing.assert_array_equal(decode_image(content, orientation="apply"), TURNS[orientation](decode_image(content)))


@pytest.mark.parametrize("factors", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("orientation", TURNS)
def test_the_kernel_renders_the_crops_of_the_turned_image(orientation: int, factors: Factors) -> None:
    stored = make_jpeg("", make_picture(83, 121), factors=factors, quality=90).content
    content = stored[:2] + segment(0xE1, exif_of(orientation).tobytes()) + stored[2:]
    whole = TURNS[orientation](np.asarray(simplejpeg.decode_jpeg(content)))
    height, width = whole.shape[:2]
    random = np.random.default_rng(orientation)
    for kind, resampling in itertools.product((content, tile_jpeg(content)), get_args(Resampling)):
        pictures = [open_image(kind, orientation="apply")] * 4
        boxes = random_boxes(height, width, 4, random)
        size, window = (40, 53), Box(-3, 5, 39, 50)
        plan = CropPlan(
            box=np.array(boxes),
            size=np.array([size] * 4),
            window=np.array([window] * 4),
            flip=random.integers(0, 2, 4).astype(np.bool_),
            resampling=resampling,
        )
        rows = np.zeros((4, 39, 50, 3), np.uint8)
        is_rendered = render_chunk_by_kernel(pictures, plan, rows)
        assert is_rendered.any()
        for i in np.flatnonzero(is_rendered):
            resized = naive.resize(naive.crop(whole, boxes[i]), *size, resampling=resampling)
            expected = naive.crop(resized, window)[:, :: -1 if plan.flip[i] else 1]
            np.testing.assert_array_equal(rows[i], expected, err_msg=str(boxes[i]))


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("orientation", TURNS)
def test_ignore_leaves_the_pixels_as_they_are_stored(file_format: str, orientation: int) -> None:
    picture = make_picture(33, 47)
    content = save(picture, file_format, exif=exif_of(orientation))
    stored = read_by_pillow(save(picture, file_format))
    np.testing.assert_array_equal(decode_image(content), stored)
    np.testing.assert_array_equal(decode_image(content, orientation="ignore"), stored)


@pytest.mark.parametrize("orientation", TURNS)
def test_a_tiff_is_turned_once_whatever_the_choice(orientation: int) -> None:
    """Pillow turns TIFFs when it loads them, so "ignore" gives Pillow's pixels."""
    content = save(make_picture(33, 47), "TIFF", exif=exif_of(orientation))
    turned = TURNS[orientation](make_picture(33, 47))
    np.testing.assert_array_equal(decode_image(content, orientation="ignore"), turned)
    np.testing.assert_array_equal(decode_image(content, orientation="apply"), turned)


@pytest.mark.parametrize("file_format", [*FORMATS, "TIFF"])
def test_apply_without_exif_changes_nothing(file_format: str) -> None:
    content = save(make_picture(33, 47), file_format)
    np.testing.assert_array_equal(decode_image(content, orientation="apply"), decode_image(content))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_exif_does_not_define_is_ignored(orientation: int) -> None:
    content = save(make_picture(33, 47), "JPEG", exif=exif_of(orientation))
    np.testing.assert_array_equal(decode_image(content, orientation="apply"), decode_image(content))


@pytest.mark.parametrize(
    ("tag", "field_type"), [(296, 2), (270, 11), (282, 2)], ids=["text as unit", "float as text", "text as resolution"]
)
def test_another_tag_of_a_wrong_type_does_not_hide_the_orientation(tag: int, field_type: int) -> None:
    """Cameras and editors write such tags; only the orientation matters."""
    entries = [(274, 3, 1, struct.pack("<HH", 6, 0)), (tag, field_type, 1, struct.pack("<f", 1))]
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries))
    exif += b"".join(struct.pack("<HHI4s", *entry) for entry in entries) + struct.pack("<I", 0)
    content = save(make_picture(33, 47), "JPEG", exif=exif)
    np.testing.assert_array_equal(decode_image(content, orientation="apply"), np.rot90(decode_image(content), -1))
