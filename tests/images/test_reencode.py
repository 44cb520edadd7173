"""Re-encoded JPEGs are smaller, upright and tiled, and keep no metadata except the color profile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardio.images import decode_image
from shardio.images.jpeg import has_tiles
from shardio.images.tiling import reencode_jpeg, tile_jpeg
from tests.images.icc_profiles import cmyk_profile, gray_profile, wide_rgb_profile
from tests.images.jpeg_corpus import truncations
from tests.images.jpeg_files import by_pillow, exif_with_thumbnail, segments_of
from tests.images.pictures import (
    TURNS,
    Array,
    convert,
    exif_of,
    make_picture,
    open_by_pillow,
    psnr_db,
    read_by_pillow,
    save,
)
from tests.images.tiling_laws import take_apart

MAX_PIXELS = 10**6


def _smooth(height: int, width: int, seed: int = 0) -> Array:
    coarse = Image.fromarray(make_picture(5, 6, seed))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.uint8)


def _reencode(content: bytes, max_side: int | None = None, quality: int = 90) -> bytes:
    return reencode_jpeg(content, max_side=max_side, quality=quality, max_pixels=MAX_PIXELS)


def _resized(image: Image.Image, max_side: int) -> Array:
    upright = ImageOps.exif_transpose(image).convert("RGB")
    ratio = max_side / max(upright.size)
    width, height = (max(round(side * ratio), 1) for side in upright.size)
    return np.asarray(upright.resize((width, height), Image.Resampling.BOX))


def test_the_longer_side_has_the_permitted_length_and_the_image_is_tiled() -> None:
    sizes = {
        (300, 400, 200): (150, 200),
        (400, 300, 200): (200, 150),
        (300, 300, 7): (7, 7),
        (333, 500, 256): (170, 256),
        (1, 1000, 100): (1, 100),
        (900, 2, 10): (10, 1),
        **dict.fromkeys(((300, 400, 400), (300, 400, 401), (300, 400, None)), (300, 400)),
    }
    for (height, width, max_side), expected in sizes.items():
        content = _reencode(by_pillow(_smooth(height, width)), max_side)
        assert decode_image(content).shape == (*expected, 3)
        assert has_tiles(content)
        assert tile_jpeg(content) == content


@pytest.mark.parametrize("max_side", [61, 128, 256, 333, 512])
def test_the_pixels_are_close_to_pillows(max_side: int) -> None:
    options: list[dict[str, Any]] = [{}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}]
    for each in options:
        content = by_pillow(_smooth(375, 512), quality=95, **each)
        image = open_by_pillow(content)
        assert psnr_db(read_by_pillow(_reencode(content, max_side, 95)), _resized(image, max_side)) > 38


@pytest.mark.parametrize("orientation", TURNS)
def test_the_image_is_turned_upright_and_has_no_orientation(orientation: int) -> None:
    picture = _smooth(96, 128)
    for max_side in (None, 60):
        content = _reencode(save(picture, "JPEG", exif=exif_of(orientation), quality=95), max_side, 95)
        image = open_by_pillow(content)
        assert image.getexif().get(274) is None
        expected = _resized(Image.fromarray(TURNS[orientation](picture)), max_side or 128)
        assert psnr_db(image, expected) > 35
        np.testing.assert_array_equal(decode_image(content, orientation="apply"), decode_image(content))


@pytest.mark.parametrize("max_side", [None, 50])
def test_gray_stays_gray_and_cmyk_becomes_rgb_and_loses_its_profile(max_side: int | None) -> None:
    gray, four = _smooth(80, 120)[..., 0].copy(), np.dstack([_smooth(80, 120), _smooth(80, 120, seed=1)[..., :1] // 4])
    image = open_by_pillow(_reencode(by_pillow(gray, quality=95), max_side, 95))
    assert image.mode == "L"
    assert psnr_db(image.convert("RGB"), _resized(Image.fromarray(gray), max_side or 120)) > 40
    content = by_pillow(four, quality=95, icc_profile=bytes(500))
    written = open_by_pillow(_reencode(content, max_side, 95))
    assert (open_by_pillow(content).mode, written.mode) == ("CMYK", "RGB")
    assert psnr_db(written, _resized(open_by_pillow(content), max_side or 120)) > 35
    assert "icc_profile" not in written.info


def test_the_quality_is_that_of_libjpeg_and_chroma_is_halved() -> None:
    for quality in (1, 50, 90, 100):
        image = open_by_pillow(_reencode(by_pillow(_smooth(40, 60)), 30, quality))
        other = open_by_pillow(by_pillow(_smooth(8, 8), quality=quality))
        assert image.quantization == other.quantization  # type: ignore[attr-defined]  # only of JPEG images
    frame = take_apart(_reencode(by_pillow(_smooth(40, 60), subsampling=0))).all_of(0xC0)[0]
    assert frame[9:] == bytes([3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1])


@pytest.mark.parametrize("num_bytes", [0, 1, 500, 150_000])
@pytest.mark.parametrize("is_gray", [False, True])
def test_the_color_profile_is_kept_and_all_other_metadata_is_dropped(is_gray: bool, num_bytes: int) -> None:
    picture = _smooth(80, 120)[..., 0] if is_gray else _smooth(80, 120)
    exif, profile = exif_with_thumbnail(by_pillow(_smooth(40, 60))), np.random.default_rng(num_bytes).bytes(num_bytes)
    metadata: dict[str, Any] = {"exif": exif, "comment": b"a comment", "xmp": b"<x/>", "dpi": (300, 300)}
    written = _reencode(by_pillow(picture, icc_profile=profile, **metadata), 30)
    assert open_by_pillow(written).info.get("icc_profile", b"") == profile
    kinds = [marker for marker, _, _ in segments_of(written)]
    assert set(kinds) == {0xE0, 0xDB, 0xC0, 0xC4, 0xDD, 0xE9, 0xDA} | ({0xE2} if profile else set())
    assert kinds[0] == 0xE0, "JFIF 1.02 requires its header to come first"


@pytest.mark.parametrize("max_side", [None, 60])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_to_srgb_converts_the_colors_and_drops_the_profile(mode: str, max_side: int | None) -> None:
    profile = {"RGB": wide_rgb_profile(), "L": gray_profile(1.4), "CMYK": cmyk_profile()}[mode]
    four = np.dstack([_smooth(80, 120), _smooth(80, 120, seed=1)[..., :1] // 4])
    picture = {"RGB": four[..., :3].copy(), "L": four[..., 0].copy(), "CMYK": four}[mode]
    content = by_pillow(picture, quality=95, icc_profile=profile, exif=exif_of(6))
    written = reencode_jpeg(content, max_side=max_side, quality=95, max_pixels=MAX_PIXELS, to_srgb=True)
    found, converted = open_by_pillow(written), open_by_pillow(convert(content, "png", to_srgb=True))
    assert found.mode == ("L" if mode == "L" else "RGB")
    assert psnr_db(found.convert("RGB"), _resized(converted, max_side or 120)) > 33
    assert psnr_db(found.convert("RGB"), _resized(open_by_pillow(content), max_side or 120)) < 25
    assert "icc_profile" not in found.info


def test_to_srgb_changes_nothing_without_a_profile_and_refuses_a_damaged_one() -> None:
    options: dict[str, Any] = {"max_side": 60, "quality": 90, "max_pixels": MAX_PIXELS}
    content = by_pillow(_smooth(80, 120))
    assert reencode_jpeg(content, to_srgb=True, **options) == reencode_jpeg(content, **options)
    with pytest.raises(ValueError, match="ICC profile is damaged"):
        reencode_jpeg(by_pillow(_smooth(80, 120), icc_profile=bytes(500)), to_srgb=True, **options)


def test_reencoding_is_a_function_of_the_bytes_of_at_most_so_many_pixels() -> None:
    content = by_pillow(_smooth(80, 120))
    assert _reencode(content, 50) == _reencode(content, 50) == _reencode(tile_jpeg(content), 50)
    assert reencode_jpeg(content, max_side=10, quality=90, max_pixels=9600)
    with pytest.raises(ValueError, match="120×80 pixels, more than max_pixels=9599"):
        reencode_jpeg(content, max_side=10, quality=90, max_pixels=9599)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("max_side", [None, 8])
def test_a_file_truncated_anywhere_is_an_error(progressive: bool, max_side: int | None) -> None:
    content = by_pillow(_smooth(24, 32), progressive=progressive)
    for cut in truncations(content):
        with pytest.raises(ValueError, match=r".+"):
            _reencode(cut, max_side)
