"""Converted images keep their ICC profile, or have the colours that it defines, in sRGB."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageCms

from shardio.images import ConvertedFormat
from tests.images.converted import (
    ALPHA,
    FORMATS,
    IMAGES,
    PIXELS,
    WIDE,
    convert,
    open_image,
    replace_chunk,
    same,
    values_of,
)
from tests.images.icc_profiles import (
    cmyk_profile,
    gray_profile,
    gray_to_srgb,
    wide_rgb_profile,
    wide_rgb_to_srgb,
)
from tests.images.pictures import save


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_without_to_srgb_the_profile_is_kept_and_the_pixels_too(source: str, to: ConvertedFormat) -> None:
    profile = wide_rgb_profile()
    found = open_image(convert(save(PIXELS, source, icc_profile=profile), to))
    assert found.info["icc_profile"] == profile
    assert same(found, open_image(convert(save(PIXELS, source), to)))


def test_a_profile_that_no_longer_fits_is_dropped() -> None:
    gray = save(PIXELS[..., 0].copy(), "PNG", icc_profile=gray_profile(1.8))
    assert open_image(convert(gray, "jpeg")).info["icc_profile"] == gray_profile(1.8)
    assert "icc_profile" not in open_image(convert(gray, "webp")).info
    for to in FORMATS:
        cmyk = save(IMAGES["CMYK"][0], "TIFF", icc_profile=cmyk_profile())
        assert "icc_profile" not in open_image(convert(cmyk, to)).info


def _by_lcms(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an image to RGB in sRGB by PIL.ImageCms, with its defaults."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert converted is not None
    return converted


@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_to_srgb_has_the_colours_of_the_profile(source: str) -> None:
    profile = wide_rgb_profile()
    content = save(PIXELS, source, icc_profile=profile)
    found, stored = open_image(convert(content, "png", to_srgb=True)), open_image(content)
    assert "icc_profile" not in found.info
    assert same(found, _by_lcms(stored, profile))
    by_definition = wide_rgb_to_srgb(values_of(stored))
    assert np.abs(values_of(found).astype(int) - by_definition).max() <= 1
    assert np.abs(values_of(stored).astype(int) - by_definition).max() > 50
    for to in ("jpeg", "webp"):
        assert convert(content, to, to_srgb=True) == convert(save(found, "PNG"), to)


def test_to_srgb_keeps_gray_and_alpha() -> None:
    gray, profile = PIXELS[..., 0].copy(), gray_profile(1.8)
    expected = gray_to_srgb(gray, 1.8)
    found = open_image(convert(save(gray, "PNG", icc_profile=profile), "png", to_srgb=True))
    assert found.mode == "L"
    assert np.abs(values_of(found).astype(int) - expected).max() <= 1
    with_alpha = Image.fromarray(np.dstack([gray, ALPHA]), "LA")
    two = open_image(convert(save(with_alpha, "PNG", icc_profile=profile), "png", to_srgb=True))
    assert same(two, np.dstack([np.asarray(found), ALPHA]))
    content = save(np.dstack([PIXELS, ALPHA]), "PNG", icc_profile=wide_rgb_profile())
    four = open_image(convert(content, "png", to_srgb=True))
    assert same(four, np.dstack([np.asarray(_by_lcms(Image.fromarray(PIXELS), wide_rgb_profile())), ALPHA]))


def test_to_srgb_reads_gray_with_a_profile_for_rgb() -> None:
    content = save(PIXELS[..., 0].copy(), "PNG", icc_profile=wide_rgb_profile())
    found = open_image(convert(content, "png", to_srgb=True))
    assert found.mode == "L"
    expected = wide_rgb_to_srgb(np.repeat(PIXELS[..., :1], 3, axis=2))[..., 0]
    assert np.abs(values_of(found).astype(int) - expected).max() <= 1


@pytest.mark.parametrize(("name", "mode"), [("palette", "RGB"), ("palette, transparent", "RGBA"), ("one bit", "L")])
def test_to_srgb_converts_palettes(name: str, mode: str) -> None:
    profile = wide_rgb_profile() if mode != "L" else gray_profile(1.8)
    image = IMAGES[name][0]
    found = open_image(convert(save(image, "PNG", icc_profile=profile), "png", to_srgb=True))
    assert found.mode == mode
    if mode == "L":
        assert same(found, image.convert("L"))
        return
    assert same(found.convert("RGB"), _by_lcms(image.convert("RGB"), profile))
    if mode == "RGBA":
        assert same(found.getchannel("A"), image.convert("RGBA").getchannel("A"))


@pytest.mark.parametrize("source", ["TIFF", "JPEG"])
def test_to_srgb_uses_the_profile_of_cmyk(source: str) -> None:
    content = save(IMAGES["CMYK"][0], source, icc_profile=cmyk_profile())
    found, stored = open_image(convert(content, "png", to_srgb=True)), open_image(content)
    assert same(found, _by_lcms(stored, cmyk_profile()))
    assert not same(found, stored.convert("RGB"))
    without = save(IMAGES["CMYK"][0], source)
    assert convert(without, "png", to_srgb=True) == convert(without, "png")


@pytest.mark.parametrize("name", [name for name in IMAGES if "bits" not in name])
def test_to_srgb_without_a_profile_changes_nothing(name: str) -> None:
    content = save(IMAGES[name][0], IMAGES[name][1][0])
    assert convert(content, "png", to_srgb=True) == convert(content, "png")


@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_to_srgb_refuses_damaged_profiles(source: str) -> None:
    whole = wide_rgb_profile()
    profiles = {
        "random": np.random.default_rng(0).bytes(400),
        "truncated": whole[:200],
        "for gray": gray_profile(2.2),
        "for CMYK": cmyk_profile(),
        "for XYZ": whole[:16] + b"XYZ " + whole[20:],
    }
    for profile in profiles.values():
        content = save(PIXELS, source, icc_profile=profile)
        assert open_image(convert(content, "png")).info["icc_profile"] == profile
        with pytest.raises(ValueError, match="ICC profile is damaged or does not fit the image"):
            convert(content, "png", to_srgb=True)


def test_to_srgb_refuses_profiles_that_cannot_be_read() -> None:
    content = save(PIXELS, "PNG", icc_profile=wide_rgb_profile())
    damaged = replace_chunk(content, b"iCCP", b"a name\0\0no compressed data")
    assert "icc_profile" not in open_image(convert(damaged, "png")).info
    with pytest.raises(ValueError, match="ICC profile is incomplete or damaged"):
        convert(damaged, "png", to_srgb=True)


def test_to_srgb_refuses_16_bits_with_a_profile() -> None:
    content = save(Image.fromarray(WIDE), "PNG", icc_profile=gray_profile(1.8))
    assert open_image(convert(content, "png")).info["icc_profile"] == gray_profile(1.8)
    with pytest.raises(ValueError, match="more than 8 bits"):
        convert(content, "png", to_srgb=True)
