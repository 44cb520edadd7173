"""EXIF orientation turns images as Pillow and Exif define it."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardio.images import decode_image, decode_pil
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
