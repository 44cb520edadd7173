"""Converted images have the pixels that Pillow decodes, upright; what a format cannot store is an error."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from shardio.images import ConvertedFormat, TooManyPixels
from tests.images.converted import (
    CASES,
    FORMATS,
    HEIGHT,
    IMAGES,
    KEPT_BY_PNG,
    OPAQUE,
    PIXELS,
    SMOOTH,
    WIDE,
    WIDTH,
    convert,
    make_palette,
    open_image,
    replace_chunk,
    same,
    values_of,
)
from tests.images.pictures import TURNS, exif_of, make_picture, save


def _psnr_db(image: Image.Image, other: Image.Image) -> float:
    error = np.mean((values_of(image).astype(float) - values_of(other)) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else np.inf


@pytest.mark.parametrize(("name", "source"), CASES)
def test_png_has_the_values_that_pillow_decodes(name: str, source: str) -> None:
    content = save(IMAGES[name][0], source)
    stored, found = open_image(content), open_image(convert(content, "png"))
    assert found.format == "PNG"
    if stored.mode in KEPT_BY_PNG:
        assert found.mode == stored.mode
        assert same(values_of(found), values_of(stored))
        assert same(found.convert("RGBA"), stored.convert("RGBA"))
    elif stored.mode.startswith("I"):
        assert found.mode == "I;16"
        assert same(values_of(found), values_of(stored))
    else:
        assert found.mode == "RGB"
        assert same(found, stored.convert("RGB"))


@pytest.mark.parametrize(("name", "source"), CASES)
@pytest.mark.parametrize("to", ["jpeg", "webp"])
def test_jpeg_and_webp_are_encoded_from_what_pillow_decodes(name: str, source: str, to: ConvertedFormat) -> None:
    content = save(IMAGES[name][0], source)
    stored = open_image(content)
    if stored.mode.startswith("I"):
        with pytest.raises(ValueError, match=r"has 16 bits per pixel, which JPEG and WebP cannot store: .* png"):
            convert(content, to)
        return
    if to == "jpeg" and stored.has_transparency_data:
        with pytest.raises(ValueError, match=r"has transparent pixels, which a JPEG cannot store: .* png or webp"):
            convert(content, to)
        return
    found = open_image(convert(content, to))
    is_gray = to == "jpeg" and stored.mode in ("1", "L")
    mode = "RGBA" if stored.has_transparency_data else "L" if is_gray else "RGB"
    assert (found.format, found.mode) == (to.upper(), mode)
    # An encoder of the same library, given what Pillow decodes, is the oracle.
    options: dict[str, Any] = {"subsampling": "4:2:0"} if to == "jpeg" else {}
    expected = open_image(save(stored.convert(mode), to.upper(), quality=95, **options))
    assert same(found, expected)


def test_jpegs_are_decoded_as_strictly_as_elsewhere() -> None:
    content = bytearray(save(PIXELS, "JPEG"))
    content[-40:-30] = bytes(10)
    Image.open(io.BytesIO(bytes(content))).load()  # Pillow takes this.
    for to in FORMATS:
        with pytest.raises(ValueError, match=r"[Cc]orrupt|extraneous"):
            convert(bytes(content), to)


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("name", ["palette", "RGB", "16 bits"])
def test_the_image_is_upright_and_has_no_orientation(name: str, source: str, orientation: int) -> None:
    image, sources = IMAGES[name]
    if source not in sources:
        return
    content = save(image, source, exif=exif_of(orientation))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    found = open_image(convert(content, "png"))
    assert found.mode == expected.mode
    assert same(values_of(found), values_of(expected))
    assert found.getexif().get(274) is None
    if source == "PNG":
        upright = TURNS[orientation](np.asarray(image).reshape(HEIGHT, WIDTH, -1))
        assert same(values_of(found), upright.squeeze())


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["gray", "RGB"])
def test_opaque_alpha_is_dropped_where_the_format_can_do_without(name: str, to: ConvertedFormat) -> None:
    plain = np.asarray(IMAGES[name][0])
    content = save(Image.fromarray(np.dstack([plain, OPAQUE]), "LA" if name == "gray" else "RGBA"), "TIFF")
    without = convert(save(plain, "TIFF"), to)
    if to == "png":
        assert same(open_image(convert(content, to)), open_image(content))
    else:
        assert convert(content, to) == without


def test_a_single_transparent_pixel_is_not_dropped() -> None:
    alpha = OPAQUE.copy()
    alpha[7, 9] = 254
    content = save(np.dstack([PIXELS, alpha]), "PNG")
    with pytest.raises(ValueError, match="has transparent pixels"):
        convert(content, "jpeg")
    assert same(open_image(convert(content, "webp")).getchannel("A"), alpha[..., 0])


@pytest.mark.parametrize(("source", "transparency"), [("gray", 130), ("RGB", (1, 2, 3))])
def test_a_transparent_colour_is_kept(source: str, transparency: Any) -> None:
    pixels = np.asarray(IMAGES[source][0]).copy()
    pixels[4:9] = transparency
    content = save(pixels, "PNG", transparency=transparency)
    found = open_image(convert(content, "png"))
    assert found.mode == Image.fromarray(pixels).mode
    assert same(found.convert("RGBA"), open_image(content).convert("RGBA"))
    assert not np.asarray(found.convert("RGBA"))[4:9, :, 3].any()
    with pytest.raises(ValueError, match="has transparent pixels"):
        convert(content, "jpeg")


def test_indices_beyond_the_palette_keep_their_colours() -> None:
    content = save(make_palette(), "PNG")  # Seven colours, in four bits per pixel.
    two_colours = replace_chunk(content, b"PLTE", make_picture(1, 2, seed=3).tobytes())
    assert np.asarray(open_image(two_colours)).max() == 6
    found = open_image(convert(two_colours, "png"))
    assert same(found.convert("RGB"), open_image(two_colours).convert("RGB"))


@pytest.mark.parametrize("values", [np.array([[-1, 5]]), np.array([[0, 65536]])], ids=["negative", "large"])
def test_integers_that_do_not_fit_are_an_error(values: NDArray[np.int64]) -> None:
    content = save(Image.fromarray(values.astype(np.int32)), "TIFF")
    for to in FORMATS:
        with pytest.raises(ValueError, match=rf"stores integers from {values.min()} to {values.max()}"):
            convert(content, to)


def test_floating_point_numbers_are_an_error() -> None:
    content = save(Image.fromarray(WIDE.astype(np.float32)), "TIFF")
    for to in FORMATS:
        with pytest.raises(ValueError, match="stores numbers of Pillow's mode F"):
            convert(content, to)


@pytest.mark.parametrize("source", ["GIF", "WEBP", "TIFF", "PNG"])
@pytest.mark.parametrize("to", FORMATS)
def test_several_frames_are_an_error(source: str, to: ConvertedFormat) -> None:
    others = [Image.fromarray(make_picture(HEIGHT, WIDTH, seed)) for seed in (1, 2)]
    content = save(PIXELS, source, save_all=True, append_images=others)
    with pytest.raises(ValueError, match="has 3 frames: split it"):
        convert(content, to)
    assert convert(save(PIXELS, source, save_all=True), to)


def test_the_first_image_of_a_multi_picture_jpeg_is_converted() -> None:
    content = save(PIXELS, "MPO", save_all=True, append_images=[Image.fromarray(SMOOTH)])
    assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 2
    assert same(open_image(convert(content, "png")), open_image(content))


@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF"])
@pytest.mark.parametrize("to", FORMATS)
def test_truncated_files_are_errors(source: str, to: ConvertedFormat) -> None:
    content = save(PIXELS, source)
    for stop in np.linspace(0, 0.95 * len(content), 12, dtype=int).tolist():
        with pytest.raises(ValueError, match=r".+"):
            convert(content[:stop], to)


@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF"])
def test_the_limit_of_pixels_is_checked_on_the_header(source: str) -> None:
    content = save(PIXELS, source)
    assert convert(content, "png", max_pixels=HEIGHT * WIDTH)
    is_readable_in_part = source not in ("TIFF", "WEBP")
    for cut in (content, content[: len(content) * 2 // 3] if is_readable_in_part else content):
        with pytest.raises(TooManyPixels, match=f"{WIDTH}×{HEIGHT} pixels, more than max_pixels={HEIGHT * WIDTH - 1}"):
            convert(cut, "png", max_pixels=HEIGHT * WIDTH - 1)


@pytest.mark.parametrize(("to", "limit"), [("jpeg", 65_536), ("webp", 16_384)])
def test_an_image_that_is_too_long_for_the_format_is_an_error(to: ConvertedFormat, limit: int) -> None:
    content = save(Image.new("L", (limit, 1)), "PNG")
    with pytest.raises(ValueError, match=r".+"):
        convert(content, to)


def test_what_is_not_an_image_is_an_error() -> None:
    for content in (b"", b"no image", bytes(1000)):
        with pytest.raises(ValueError, match="not an image in a known format"):
            convert(content, "png")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_metadata_is_dropped(source: str, to: ConvertedFormat) -> None:
    exif = exif_of(1)
    exif[0x010E] = "a description"
    options: dict[str, Any] = {"exif": exif, "dpi": (300, 300)}
    if source == "JPEG":
        options |= {"comment": b"a comment", "xmp": b"<x/>"}
    found = open_image(convert(save(PIXELS, source, **options), to))
    assert not dict(found.getexif())
    assert not {"exif", "comment", "xmp", "dpi", "icc_profile"} & found.info.keys()


@pytest.mark.parametrize("to", FORMATS)
def test_conversion_is_a_function_of_the_pixels(to: ConvertedFormat) -> None:
    contents = {convert(save(SMOOTH, source), to) for source in ("PNG", "TIFF", "BMP", "PPM", "TGA") for _ in range(2)}
    assert len(contents) == 1


@pytest.mark.parametrize("to", ["jpeg", "webp"])
def test_the_quality_counts(to: ConvertedFormat) -> None:
    content = save(SMOOTH, "PNG")
    files = [convert(content, to, quality=quality) for quality in (1, 50, 90, 100)]
    assert sorted(map(len, files)) == [len(file) for file in files]
    errors = [_psnr_db(open_image(file), Image.fromarray(SMOOTH)) for file in files]
    assert sorted(errors) == errors
