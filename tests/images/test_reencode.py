"""Reencoded JPEGs are smaller, upright and tiled, and keep no metadata but the colour profile."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from shardio.images import decode_image
from shardio.images.jpeg import has_tiles
from shardio.images.tiling import reencode_jpeg, tile_jpeg
from tests.images.icc_profiles import cmyk_profile, gray_profile, wide_rgb_profile
from tests.images.jpeg_files import by_pillow, exif_with_thumbnail, segments_of
from tests.images.jpeg_writer import JpegOptions, write_jpeg
from tests.images.pictures import TURNS, Array, exif_of, make_picture, read_by_pillow, save
from tests.images.tiling_laws import take_apart
from tests.images.untileable_jpegs import not_jpegs, truncations, untileable_jpegs

MAX_PIXELS = 10**6


def _smooth(height: int, width: int, seed: int = 0) -> Array:
    """Return an image that scaling and subsampling hardly change."""
    coarse = Image.fromarray(make_picture(5, 6, seed))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.uint8)


def _reencode(content: bytes, max_side: int | None = None, quality: int = 90) -> bytes:
    return reencode_jpeg(content, max_side=max_side, quality=quality, max_pixels=MAX_PIXELS)


def _resized(image: Image.Image, max_side: int) -> Array:
    """Return an image turned upright and shrunk by Pillow, by averaging over areas, uint8 [height, width, 3]."""
    upright = ImageOps.exif_transpose(image).convert("RGB")
    ratio = max_side / max(upright.size)
    width, height = (max(round(side * ratio), 1) for side in upright.size)
    return np.asarray(upright.resize((width, height), Image.Resampling.BOX))


def _psnr_db(image: Array, other: Array) -> float:
    assert image.shape == other.shape
    error = np.mean((image.astype(float) - other) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else np.inf


def _profile_of(content: bytes) -> bytes | None:
    with Image.open(io.BytesIO(content)) as image:
        profile: bytes | None = image.info.get("icc_profile")
        return profile


@pytest.mark.parametrize(
    ("height", "width", "max_side", "expected"),
    [
        (300, 400, 200, (150, 200)),
        (400, 300, 200, (200, 150)),
        (300, 300, 7, (7, 7)),
        (333, 500, 256, (170, 256)),
        (1, 1000, 100, (1, 100)),
        (900, 2, 10, (10, 1)),
        (300, 400, 400, (300, 400)),
        (300, 400, 401, (300, 400)),
        (300, 400, None, (300, 400)),
    ],
)
def test_the_longer_side_has_the_permitted_length_and_the_image_is_tiled(
    height: int, width: int, max_side: int | None, expected: tuple[int, int]
) -> None:
    content = _reencode(by_pillow(_smooth(height, width)), max_side)
    assert decode_image(content).shape == (*expected, 3)
    assert has_tiles(content)
    assert tile_jpeg(content) == content


@pytest.mark.parametrize("max_side", [61, 128, 256, 333, 512])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}], ids=str)
def test_the_pixels_are_close_to_pillows(options: dict[str, Any], max_side: int) -> None:
    content = by_pillow(_smooth(375, 512), quality=95, **options)
    with Image.open(io.BytesIO(content)) as image:
        assert _psnr_db(read_by_pillow(_reencode(content, max_side, 95)), _resized(image, max_side)) > 38


def test_an_image_that_is_small_enough_differs_only_by_its_quality() -> None:
    content = by_pillow(_smooth(200, 300), quality=95)
    similarity = [
        _psnr_db(read_by_pillow(_reencode(content, 300, quality)), read_by_pillow(content)) for quality in (5, 50, 95)
    ]
    assert similarity == sorted(similarity)
    assert similarity[-1] > 40


@pytest.mark.parametrize("max_side", [None, 60])
@pytest.mark.parametrize("orientation", TURNS)
def test_the_image_is_turned_upright_and_has_no_orientation(orientation: int, max_side: int | None) -> None:
    picture = _smooth(96, 128)
    content = _reencode(save(picture, "JPEG", exif=exif_of(orientation), quality=95), max_side, 95)
    with Image.open(io.BytesIO(content)) as image:
        assert image.getexif().get(274) is None
        expected = _resized(Image.fromarray(TURNS[orientation](picture)), max_side or 128)
        assert _psnr_db(np.asarray(image), expected) > 35
    np.testing.assert_array_equal(decode_image(content, orientation="apply"), decode_image(content))


@pytest.mark.parametrize("quality", [1, 50, 90, 100])
def test_the_quality_is_that_of_libjpeg(quality: int) -> None:
    content = _reencode(by_pillow(_smooth(40, 60)), 30, quality)
    with (
        Image.open(io.BytesIO(content)) as image,
        Image.open(io.BytesIO(by_pillow(_smooth(8, 8), quality=quality))) as other,
    ):
        assert image.quantization == other.quantization  # type: ignore[attr-defined]  # of JPEG images only


def test_colour_is_stored_with_halved_chroma() -> None:
    frame = take_apart(_reencode(by_pillow(_smooth(40, 60), subsampling=0))).all_of(0xC0)[0]
    assert frame[9:] == bytes([3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1])


@pytest.mark.parametrize("max_side", [None, 50])
def test_gray_stays_gray(max_side: int | None) -> None:
    gray = _smooth(80, 120)[..., 0].copy()
    with Image.open(io.BytesIO(_reencode(by_pillow(gray, quality=95), max_side, 95))) as image:
        assert image.mode == "L"
        expected = _resized(Image.fromarray(gray), max_side or 120)
        assert _psnr_db(np.asarray(image.convert("RGB")), expected) > 40


@pytest.mark.parametrize("max_side", [None, 50])
def test_cmyk_becomes_rgb_and_loses_its_profile(max_side: int | None) -> None:
    four = np.dstack([_smooth(80, 120), _smooth(80, 120, seed=1)[..., :1] // 4])
    content = by_pillow(four, quality=95, icc_profile=bytes(500))
    written = _reencode(content, max_side, 95)
    with Image.open(io.BytesIO(content)) as image, Image.open(io.BytesIO(written)) as other:
        assert (image.mode, other.mode) == ("CMYK", "RGB")
        assert _psnr_db(np.asarray(other), _resized(image, max_side or 120)) > 35
    assert _profile_of(written) is None


@pytest.mark.parametrize("num_bytes", [1, 500, 150_000])
@pytest.mark.parametrize("is_gray", [False, True], ids=["colour", "gray"])
def test_the_colour_profile_is_kept(num_bytes: int, is_gray: bool) -> None:
    profile = np.random.default_rng(num_bytes).bytes(num_bytes)
    picture = _smooth(40, 60)
    content = by_pillow(picture[..., 0].copy() if is_gray else picture, icc_profile=profile)
    assert _profile_of(content) == profile
    assert _profile_of(_reencode(content, 30)) == profile


@pytest.mark.parametrize("with_profile", [False, True], ids=["without profile", "with profile"])
def test_all_other_metadata_is_dropped(with_profile: bool) -> None:
    options = {"icc_profile": bytes(700)} if with_profile else {}
    exif = exif_with_thumbnail(by_pillow(_smooth(40, 60)))
    content = by_pillow(_smooth(80, 120), exif=exif, comment=b"a comment", xmp=b"<x/>", dpi=(300, 300), **options)
    written = _reencode(content)
    profile = {0xE2} if with_profile else set()
    assert {marker for marker, _, _ in segments_of(content)} >= {0xE1, 0xFE, *profile}
    kinds = {marker for marker, _, _ in segments_of(written)}
    assert kinds == {0xE0, 0xDB, 0xC0, 0xC4, 0xDD, 0xE9, 0xDA, *profile}
    # JFIF 1.02 requires its header to come first.
    assert next(segments_of(written))[0] == 0xE0


@pytest.mark.parametrize("max_side", [None, 60])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_to_srgb_converts_the_colours_and_drops_the_profile(mode: str, max_side: int | None) -> None:
    profile = {"RGB": wide_rgb_profile(), "L": gray_profile(1.4), "CMYK": cmyk_profile()}[mode]
    four = np.dstack([_smooth(80, 120), _smooth(80, 120, seed=1)[..., :1] // 4])
    picture = {"RGB": four[..., :3].copy(), "L": four[..., 0].copy(), "CMYK": four}[mode]
    content = by_pillow(picture, quality=95, icc_profile=profile, exif=exif_of(6))
    written = reencode_jpeg(content, max_side=max_side, quality=95, max_pixels=MAX_PIXELS, to_srgb=True)
    with Image.open(io.BytesIO(content)) as image, Image.open(io.BytesIO(written)) as other:
        assert other.mode == ("L" if mode == "L" else "RGB")
        source, target = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        upright = ImageOps.exif_transpose(image)
        expected = ImageCms.profileToProfile(upright, source, target, outputMode="RGB")
        assert expected is not None
        found = np.asarray(other.convert("RGB"))
        assert _psnr_db(found, _resized(expected, max_side or 120)) > 33
        assert _psnr_db(found, _resized(image, max_side or 120)) < 25
    assert _profile_of(written) is None
    assert {marker for marker, _, _ in segments_of(written)} == {0xE0, 0xDB, 0xC0, 0xC4, 0xDD, 0xE9, 0xDA}


def test_to_srgb_changes_nothing_without_a_profile() -> None:
    content = by_pillow(_smooth(80, 120))
    options: dict[str, Any] = {"max_side": 60, "quality": 90, "max_pixels": MAX_PIXELS}
    assert reencode_jpeg(content, to_srgb=True, **options) == reencode_jpeg(content, **options)


def test_to_srgb_refuses_a_damaged_profile() -> None:
    content = by_pillow(_smooth(80, 120), icc_profile=bytes(500))
    with pytest.raises(ValueError, match="ICC profile is damaged"):
        reencode_jpeg(content, max_side=None, quality=90, max_pixels=MAX_PIXELS, to_srgb=True)


def test_reencoding_is_a_function_of_the_bytes() -> None:
    content = by_pillow(_smooth(80, 120))
    assert _reencode(content, 50) == _reencode(content, 50)
    assert _reencode(tile_jpeg(content), 50) == _reencode(content, 50)


def test_an_image_with_too_many_pixels_is_an_error() -> None:
    content = by_pillow(_smooth(80, 120))
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


def test_a_file_that_no_decoder_reads_is_an_error() -> None:
    broken = [
        *not_jpegs(),
        *(
            file
            for file in untileable_jpegs([(20, 30)])
            if any(word in file.name for word in ("no data", "half the data"))
        ),
    ]
    for file in broken:
        with pytest.raises(ValueError, match=r".+"):
            _reencode(file.content)


@pytest.mark.parametrize(
    "factors", [((1, 4), (1, 1), (1, 1)), ((3, 1), (1, 1), (1, 1)), ((2, 2), (2, 1), (1, 2))], ids=str
)
def test_rare_samplings_are_read(factors: tuple[tuple[int, int], ...]) -> None:
    content = write_jpeg(_smooth(48, 64), JpegOptions(factors=factors, quality=95))
    assert _psnr_db(read_by_pillow(_reencode(content, None, 95)), read_by_pillow(content)) > 30
