"""Converted images are upright and have the same pixels as in Pillow. Values that a format cannot store cause errors.

Converted images keep their ICC profile, or their colors are converted from it to sRGB.
"""

from __future__ import annotations

import io
import zlib
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageCms, ImageOps

from shardio.images import ConvertedFormat, TooManyPixels
from tests.images.icc_profiles import cmyk_profile, gray_profile, gray_to_srgb, wide_rgb_profile, wide_rgb_to_srgb
from tests.images.pictures import TURNS, Array, convert, exif_of, make_picture, open_by_pillow, psnr_db, save
from tests.raising import assert_raises

HEIGHT, WIDTH = 30, 44
PIXELS = make_picture(HEIGHT, WIDTH)
GRAY = PIXELS[..., 0].copy()
SMOOTH = np.asarray(Image.fromarray(make_picture(5, 6)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.uint8)
ALPHA = make_picture(HEIGHT, WIDTH, seed=1)[..., :1]
WIDE = GRAY.astype(np.uint16) * 257
FORMATS: tuple[ConvertedFormat, ...] = get_args(ConvertedFormat)
EIGHT_BITS: list[ConvertedFormat] = ["jpeg", "webp", "ppm"]

OPAQUE = ("jpeg", "ppm")
SOURCES = ["JPEG", "PNG", "WEBP", "TIFF"]
KEPT_BY_PNG = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}

each_source = pytest.mark.parametrize("source", SOURCES)
each_format = pytest.mark.parametrize("to", FORMATS)


def make_palette(transparency: int | None = None) -> Image.Image:
    """Return an image of seven colors, one of which may be transparent."""
    image = Image.fromarray(GRAY % 7, "P")
    image.putpalette(make_picture(1, 7, seed=3).tobytes())
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


IMAGES: dict[str, tuple[Image.Image, str]] = {
    "one bit": (Image.fromarray(GRAY > 128), "TIFF PNG BMP TGA PPM"),
    "gray": (Image.fromarray(GRAY), "TIFF PNG BMP TGA PPM JPEG GIF JPEG2000"),
    "gray, alpha": (Image.fromarray(np.dstack([GRAY, ALPHA]), "LA"), "TIFF PNG TGA"),
    "palette": (make_palette(), "TIFF PNG BMP GIF TGA PCX"),
    "palette, transparent": (make_palette(transparency=3), "PNG GIF"),
    "RGB": (Image.fromarray(PIXELS), "TIFF PNG BMP TGA PPM WEBP JPEG JPEG2000"),
    "RGBA": (Image.fromarray(np.dstack([PIXELS, ALPHA])), "TIFF PNG WEBP TGA DDS"),
    "CMYK": (Image.fromarray(np.dstack([PIXELS, ALPHA]), "CMYK"), "TIFF JPEG"),
    "YCbCr": (Image.fromarray(PIXELS, "YCbCr"), "TIFF"),
    "LAB": (Image.fromarray(PIXELS, "LAB"), "TIFF"),
    "16 bits": (Image.fromarray(WIDE), "TIFF PNG PPM"),
    "16 bits, big-endian": (Image.frombytes("I;16B", (WIDTH, HEIGHT), WIDE.astype(">u2").tobytes()), "TIFF"),
    "32 bits": (Image.fromarray(WIDE.astype(np.int32)), "TIFF"),
}
CASES = [(name, source) for name, (_, sources) in IMAGES.items() for source in sources.split()]


def values_of(image: Image.Image) -> NDArray[Any]:
    values = np.asarray(image)
    return values.astype(values.dtype.newbyteorder("="))


def replace_chunk(content: bytes, name: bytes, data: bytes) -> bytes:
    start = content.index(name) - 4
    stop = start + 12 + int.from_bytes(content[start : start + 4], "big")
    chunk = len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")
    return content[:start] + chunk + content[stop:]


def same(one: Image.Image | ArrayLike, other: Image.Image | ArrayLike) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def to_png(content: bytes, **options: Any) -> Image.Image:
    return open_by_pillow(convert(content, "png", **options))


@pytest.mark.parametrize(("name", "source"), CASES)
def test_values_are_those_that_pillow_decodes(name: str, source: str) -> None:
    content = save(IMAGES[name][0], source)
    stored, found = open_by_pillow(content), to_png(content)
    assert found.format == "PNG"
    if stored.mode.startswith("I"):
        assert found.mode == "I;16"
        assert same(values_of(found), values_of(stored))
        for to in EIGHT_BITS:
            assert_raises(ValueError, r"has 16 bits per pixel, which only PNG can store: .* png", convert, content, to)
        return
    if stored.mode in KEPT_BY_PNG:
        assert found.mode == stored.mode
        assert same(values_of(found), values_of(stored))
        assert same(found.convert("RGBA"), stored.convert("RGBA"))
    else:
        assert found.mode == "RGB"
        assert same(found, stored.convert("RGB"))
    for to in EIGHT_BITS:
        if to in OPAQUE and stored.has_transparency_data:
            with pytest.raises(ValueError, match=r"has transparent pixels, which JPEG and PPM cannot store: .* webp"):
                convert(content, to)
            continue
        found = open_by_pillow(convert(content, to))
        is_gray = to in OPAQUE and stored.mode in ("1", "L")
        mode = "RGBA" if stored.has_transparency_data else "L" if is_gray else "RGB"
        assert (found.format, found.mode) == (to.upper(), mode)
        options: dict[str, Any] = {"subsampling": "4:2:0"} if to == "jpeg" else {}
        assert same(found, open_by_pillow(save(stored.convert(mode), to.upper(), quality=95, **options)))


@pytest.mark.parametrize("orientation", TURNS)
def test_the_image_is_upright_and_has_no_orientation(orientation: int) -> None:
    for name, source in [(name, source) for name, source in CASES if name in ("palette", "RGB", "16 bits")]:
        if source not in SOURCES:
            continue
        content = save(IMAGES[name][0], source, exif=exif_of(orientation))
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        found = to_png(content)
        assert found.mode == expected.mode
        assert same(values_of(found), values_of(expected))
        assert found.getexif().get(274) is None
        if source == "PNG":
            upright = TURNS[orientation](np.asarray(IMAGES[name][0]).reshape(HEIGHT, WIDTH, -1))
            assert same(values_of(found), upright.squeeze())


@each_format
def test_alpha_is_dropped_if_it_is_opaque_and_the_format_can_do_without(to: ConvertedFormat) -> None:
    opaque = np.full_like(ALPHA, 255)
    for plain, mode in ((GRAY, "LA"), (PIXELS, "RGBA")):
        content = save(Image.fromarray(np.dstack([plain, opaque]), mode), "TIFF")
        if to == "png":
            assert same(to_png(content), open_by_pillow(content))
        else:
            assert convert(content, to) == convert(save(plain, "TIFF"), to)
    opaque[7, 9] = 254
    content = save(np.dstack([PIXELS, opaque]), "PNG")
    if to in OPAQUE:
        assert_raises(ValueError, "has transparent pixels", convert, content, to)
    else:
        assert same(open_by_pillow(convert(content, to)).getchannel("A"), opaque[..., 0])


def test_transparent_colors_indices_beyond_the_palette_and_the_first_picture_are_kept() -> None:
    for source, transparency in (("gray", 130), ("RGB", (1, 2, 3))):
        pixels = np.asarray(IMAGES[source][0]).copy()
        pixels[4:9] = transparency
        content = save(pixels, "PNG", transparency=transparency)
        found = to_png(content)
        assert found.mode == Image.fromarray(pixels).mode
        assert same(found.convert("RGBA"), open_by_pillow(content).convert("RGBA"))
        assert not np.asarray(found.convert("RGBA"))[4:9, :, 3].any()
        assert_raises(ValueError, "has transparent pixels", convert, content, "jpeg")
    content = save(make_palette(), "PNG")  # The image has seven colors, in four bits per pixel.
    two_colors = replace_chunk(content, b"PLTE", make_picture(1, 2, seed=3).tobytes())
    assert np.asarray(open_by_pillow(two_colors)).max() == 6
    assert same(to_png(two_colors).convert("RGB"), open_by_pillow(two_colors).convert("RGB"))
    content = save(PIXELS, "MPO", save_all=True, append_images=[Image.fromarray(SMOOTH)])
    assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 2
    assert same(to_png(content), open_by_pillow(content))


def cut_jpeg() -> bytes:
    content = save(PIXELS, "JPEG")
    damaged = content[:-40] + bytes(10) + content[-30:]
    open_by_pillow(damaged)  # Pillow accepts this.
    return damaged


FRAMES = {"save_all": True, "append_images": [Image.fromarray(make_picture(HEIGHT, WIDTH, seed)) for seed in (1, 2)]}
BAD: list[tuple[bytes, str]] = [
    *((save(PIXELS, source, **FRAMES), "has 3 frames: split it") for source in ("GIF", "WEBP", "TIFF", "PNG")),
    *((content, "not an image in a known format") for content in (b"", b"no image", bytes(1000))),
    (save(Image.fromarray(np.array([[-1, 5]], np.int32)), "TIFF"), "stores integers from -1 to 5"),
    (save(Image.fromarray(np.array([[0, 65536]], np.int32)), "TIFF"), "stores integers from 0 to 65536"),
    (save(Image.fromarray(WIDE.astype(np.float32)), "TIFF"), "stores values of Pillow's mode F"),
    (cut_jpeg(), r"[Cc]orrupt|extraneous"),
]


@each_format
def test_what_cannot_be_converted_is_an_error(to: ConvertedFormat) -> None:
    for content, message in BAD:
        assert_raises(ValueError, message, convert, content, to)
    for source in ("GIF", "WEBP", "TIFF", "PNG"):
        assert convert(save(PIXELS, source, save_all=True), to)
    if (limit := {"jpeg": 65_536, "webp": 16_384}.get(to)) is not None:
        assert_raises(ValueError, ".+", convert, save(Image.new("L", (limit, 1)), "PNG"), to)


@pytest.mark.parametrize("source", [*SOURCES, "BMP", "GIF"])
def test_truncated_files_are_errors_and_the_limit_of_pixels_is_checked_on_the_header(source: str) -> None:
    content = save(PIXELS, source)
    for number, stop in enumerate(np.linspace(0, 0.95 * len(content), 12, dtype=int).tolist()):
        assert_raises(ValueError, ".+", convert, content[:stop], FORMATS[number % 3])
    assert convert(content, "png", max_pixels=HEIGHT * WIDTH)
    is_readable_in_part = source not in ("TIFF", "WEBP")
    for cut in (content, content[: len(content) * 2 // 3] if is_readable_in_part else content):
        with pytest.raises(TooManyPixels, match=f"{WIDTH}×{HEIGHT} pixels, more than max_pixels={HEIGHT * WIDTH - 1}"):
            convert(cut, "png", max_pixels=HEIGHT * WIDTH - 1)


@each_format
def test_conversion_is_a_function_of_the_pixels_and_the_quality_and_drops_metadata(to: ConvertedFormat) -> None:
    contents = {convert(save(SMOOTH, source), to) for source in ("PNG", "TIFF", "BMP", "PPM", "TGA") for _ in range(2)}
    assert len(contents) == 1
    for source in SOURCES:
        exif = exif_of(1)
        exif[0x010E] = "a description"
        options: dict[str, Any] = {"exif": exif, "dpi": (300, 300)}
        if source == "JPEG":
            options |= {"comment": b"a comment", "xmp": b"<x/>"}
        found = open_by_pillow(convert(save(PIXELS, source, **options), to))
        assert not dict(found.getexif())
        assert not {"exif", "comment", "xmp", "dpi", "icc_profile"} & found.info.keys()
    if to in ("jpeg", "webp"):
        files = [convert(save(SMOOTH, "PNG"), to, quality=quality) for quality in (1, 50, 90, 100)]
        assert sorted(map(len, files)) == [len(file) for file in files]
        similarity = [psnr_db(open_by_pillow(file), SMOOTH) for file in files]
        assert sorted(similarity) == similarity


# Color profiles.


@each_format
@each_source
def test_without_to_srgb_the_profile_is_kept_and_the_pixels_too(source: str, to: ConvertedFormat) -> None:
    profile = wide_rgb_profile()
    found = open_by_pillow(convert(save(PIXELS, source, icc_profile=profile), to))
    assert found.info.get("icc_profile") == (None if to == "ppm" else profile)
    assert same(found, open_by_pillow(convert(save(PIXELS, source), to)))


def test_a_profile_that_no_longer_fits_is_dropped() -> None:
    gray = save(GRAY, "PNG", icc_profile=gray_profile(1.8))
    assert open_by_pillow(convert(gray, "jpeg")).info["icc_profile"] == gray_profile(1.8)
    assert "icc_profile" not in open_by_pillow(convert(gray, "webp")).info
    cmyk = save(IMAGES["CMYK"][0], "TIFF", icc_profile=cmyk_profile())
    for to in FORMATS:
        assert "icc_profile" not in open_by_pillow(convert(cmyk, to)).info


def by_lcms(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an image to RGB in sRGB with PIL.ImageCms and its defaults."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert converted is not None
    return converted


def assert_near(found: Image.Image, expected: Array) -> None:
    assert np.abs(values_of(found).astype(int) - expected).max() <= 1


@each_source
def test_to_srgb_has_the_colors_of_the_profile(source: str) -> None:
    profile = wide_rgb_profile()
    content = save(PIXELS, source, icc_profile=profile)
    found, stored = to_png(content, to_srgb=True), open_by_pillow(content)
    assert "icc_profile" not in found.info
    assert same(found, by_lcms(stored, profile))
    assert_near(found, wide_rgb_to_srgb(values_of(stored)))
    assert np.abs(values_of(stored).astype(int) - values_of(found)).max() > 50
    for to in EIGHT_BITS:
        assert convert(content, to, to_srgb=True) == convert(save(found, "PNG"), to)


def test_to_srgb_keeps_gray_and_alpha() -> None:
    profile = gray_profile(1.8)
    found = to_png(save(GRAY, "PNG", icc_profile=profile), to_srgb=True)
    assert found.mode == "L"
    assert_near(found, gray_to_srgb(GRAY, 1.8))
    with_alpha = Image.fromarray(np.dstack([GRAY, ALPHA]), "LA")
    two = to_png(save(with_alpha, "PNG", icc_profile=profile), to_srgb=True)
    assert same(two, np.dstack([np.asarray(found), ALPHA]))
    four = to_png(save(np.dstack([PIXELS, ALPHA]), "PNG", icc_profile=wide_rgb_profile()), to_srgb=True)
    assert same(four, np.dstack([np.asarray(by_lcms(Image.fromarray(PIXELS), wide_rgb_profile())), ALPHA]))
    for_rgb = to_png(save(GRAY, "PNG", icc_profile=wide_rgb_profile()), to_srgb=True)
    assert for_rgb.mode == "L"
    assert_near(for_rgb, wide_rgb_to_srgb(np.repeat(PIXELS[..., :1], 3, axis=2))[..., 0])


def test_to_srgb_converts_palettes_and_cmyk() -> None:
    profile = wide_rgb_profile()
    bits = to_png(save(IMAGES["one bit"][0], "PNG", icc_profile=gray_profile(1.8)), to_srgb=True)
    assert bits.mode == "L"
    assert same(bits, IMAGES["one bit"][0].convert("L"))
    for name, mode in (("palette", "RGB"), ("palette, transparent", "RGBA")):
        image = IMAGES[name][0]
        found = to_png(save(image, "PNG", icc_profile=profile), to_srgb=True)
        assert found.mode == mode
        assert same(found.convert("RGB"), by_lcms(image.convert("RGB"), profile))
        assert same(found.convert("RGBA").getchannel("A"), image.convert("RGBA").getchannel("A"))
    for source in ("TIFF", "JPEG"):
        content = save(IMAGES["CMYK"][0], source, icc_profile=cmyk_profile())
        found, stored = to_png(content, to_srgb=True), open_by_pillow(content)
        assert same(found, by_lcms(stored, cmyk_profile()))
        assert not same(found, stored.convert("RGB"))


@pytest.mark.parametrize("name", [name for name in IMAGES if "bits" not in name])
def test_to_srgb_without_a_profile_changes_nothing(name: str) -> None:
    for source in IMAGES[name][1].split()[:2]:
        content = save(IMAGES[name][0], source)
        assert convert(content, "png", to_srgb=True) == convert(content, "png")


def test_to_srgb_refuses_damaged_profiles() -> None:
    whole = wide_rgb_profile()
    others = [
        *(np.random.default_rng(0).bytes(400), whole[:200], gray_profile(2.2), cmyk_profile()),
        whole[:16] + b"XYZ " + whole[20:],
    ]
    damaged = [(save(PIXELS, source, icc_profile=each), each) for source in SOURCES for each in others]
    for content, profile in damaged:
        assert to_png(content).info["icc_profile"] == profile
        with pytest.raises(ValueError, match="ICC profile is damaged or does not fit the image"):
            convert(content, "png", to_srgb=True)
    unreadable = replace_chunk(save(PIXELS, "PNG", icc_profile=whole), b"iCCP", b"a name\0\0no compressed data")
    assert "icc_profile" not in to_png(unreadable).info
    assert_raises(ValueError, "ICC profile is incomplete or damaged", convert, unreadable, "png", to_srgb=True)
    deep = save(Image.fromarray(WIDE), "PNG", icc_profile=gray_profile(1.8))
    assert to_png(deep).info["icc_profile"] == gray_profile(1.8)
    assert_raises(ValueError, "more than 8 bits", convert, deep, "png", to_srgb=True)
