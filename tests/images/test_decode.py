"""Whole images have the pixels of other decoders; damaged ones are errors."""

from __future__ import annotations

from typing import Any, get_args

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image, features

from shardio.images import (
    DECODER_DESCRIPTIONS,
    CropPlan,
    DecoderName,
    Orientation,
    decode_image,
    decode_pil,
    open_image,
    render_chunk,
    why_not_by_kernel,
)
from tests.images.arithmetic import PROGRESSIVE, SEQUENTIAL
from tests.images.pictures import SIZES, Array, make_picture, read_by_pillow, save

JPEGS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "optimised": {"optimize": True},
    "restarts": {"restart_marker_blocks": 3},
    "low quality": {"quality": 10},
}


def _read_by_cv2(content: bytes) -> Array:
    image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert image is not None
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), dtype=np.uint8)


def _palette_with_transparency(picture: Array) -> bytes:
    return save(Image.fromarray(picture).quantize(16), "PNG", transparency=3)


def _deep_gray(picture: Array) -> bytes:
    return save(Image.fromarray(picture[..., 0].astype(np.uint16) * 257), "PNG")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", JPEGS)
def test_jpegs_decode_to_the_pixels_of_pillow_and_of_opencv(kind: str, size: tuple[int, int]) -> None:
    content = save(make_picture(*size), "JPEG", **JPEGS[kind])
    decoded = decode_image(content)
    np.testing.assert_array_equal(decoded, read_by_pillow(content))
    np.testing.assert_array_equal(decoded, _read_by_cv2(content))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sampling", [cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411])
def test_jpegs_of_rare_subsamplings_decode_to_the_pixels_of_pillow(sampling: int, size: tuple[int, int]) -> None:
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    content = cv2.imencode(".jpg", make_picture(*size), options)[1].tobytes()
    np.testing.assert_array_equal(decode_image(content), read_by_pillow(content))


@pytest.mark.parametrize("content", [SEQUENTIAL, PROGRESSIVE], ids=["sequential", "progressive"])
def test_arithmetic_coding_needs_no_pillow(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow may be built without it, and the kernel does not support it."""
    expected = simplejpeg.decode_jpeg(content)
    monkeypatch.setattr(Image, "open", None)
    picture = open_image(content)
    assert picture.decoder_name == "libjpeg"
    np.testing.assert_array_equal(decode_image(content), expected)
    plan = CropPlan.whole(np.array([picture.size])).crop(np.array([[3, 5, 16, 8]]))
    np.testing.assert_array_equal(render_chunk([picture], plan).images[0], expected[3:19, 5:13])
    assert str(why_not_by_kernel(content)).startswith("coded by process SOF")


def test_every_decoder_has_a_description() -> None:
    assert set(DECODER_DESCRIPTIONS) == set(get_args(DecoderName))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("progressive", [False, True])
def test_gray_jpegs_have_three_equal_channels(size: tuple[int, int], progressive: bool) -> None:
    content = save(Image.fromarray(make_picture(*size)).convert("L"), "JPEG", progressive=progressive)
    decoded = decode_image(content)
    np.testing.assert_array_equal(decoded, read_by_pillow(content))
    np.testing.assert_array_equal(decoded, np.repeat(decoded[..., :1], 3, axis=2))


@pytest.mark.parametrize("size", SIZES)
def test_jpegs_that_store_rgb_are_not_converted(size: tuple[int, int]) -> None:
    content = save(make_picture(*size), "JPEG", keep_rgb=True, quality=95)
    np.testing.assert_array_equal(decode_image(content), read_by_pillow(content))


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("size", SIZES)
def test_lossless_formats_return_the_saved_pixels(file_format: str, size: tuple[int, int]) -> None:
    picture = make_picture(*size)
    np.testing.assert_array_equal(decode_image(save(picture, file_format)), picture)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_pngs_of_every_mode_decode_as_pillow_converts_them_to_rgb(mode: str) -> None:
    picture = make_picture(33, 47)
    content = _deep_gray(picture) if mode == "I;16" else save(Image.fromarray(picture).convert(mode), "PNG")
    np.testing.assert_array_equal(decode_image(content), read_by_pillow(content))


@pytest.mark.parametrize(
    "content",
    [
        save(make_picture(33, 47), "WEBP", quality=80),
        save(make_picture(33, 47), "WEBP", lossless=True),
        save(make_picture(33, 47), "GIF"),
        save(make_picture(33, 47), "TIFF", compression="tiff_lzw"),
        save(Image.fromarray(make_picture(33, 47)).convert("CMYK"), "JPEG"),
        save(Image.fromarray(make_picture(33, 47)).convert("CMYK"), "TIFF"),
        _palette_with_transparency(make_picture(33, 47)),
    ],
    ids=["webp", "lossless webp", "gif", "lzw tiff", "cmyk jpeg", "cmyk tiff", "transparent palette"],
)
def test_other_formats_decode_as_pillow_converts_them_to_rgb(content: bytes) -> None:
    np.testing.assert_array_equal(decode_image(content), read_by_pillow(content))


@pytest.mark.parametrize("orientation", ["ignore", "apply"])
@pytest.mark.parametrize(("mode", "file_format"), [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG")])
def test_pixels_are_a_writable_contiguous_array_of_bytes(mode: str, file_format: str, orientation: Orientation) -> None:
    """``torch.from_numpy`` warns about arrays that are not writable."""
    content = save(Image.fromarray(make_picture(33, 47)).convert(mode), file_format)
    decoded = decode_image(content, orientation=orientation)
    assert decoded.shape == (33, 47, 3)
    assert decoded.dtype == np.uint8
    assert decoded.flags.c_contiguous
    assert decoded.flags.writeable


@pytest.mark.parametrize("orientation", ["ignore", "apply"])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_truncated_jpeg_never_gives_pixels(mode: str, progressive: bool, orientation: Orientation) -> None:
    content = save(Image.fromarray(make_picture(150, 200)).convert(mode), "JPEG", progressive=progressive)
    assert len(content) > 20 * 97
    for stop in [*range(0, len(content) - 2, 97), len(content) - 2, len(content) - 1]:
        with pytest.raises(ValueError, match=r".+"):
            decode_image(content[:stop], orientation=orientation)


@pytest.mark.parametrize("orientation", ["ignore", "apply"])
def test_a_jpeg_with_a_hole_in_its_data_never_gives_pixels(orientation: Orientation) -> None:
    content = save(make_picture(150, 200), "JPEG")
    middle = len(content) // 2
    with pytest.raises(ValueError, match=r".+"):
        decode_image(content[:middle] + content[middle + 50 :], orientation=orientation)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "BMP", "GIF"])
def test_half_a_file_of_another_format_never_gives_pixels(file_format: str) -> None:
    content = save(make_picture(60, 80), file_format)
    with pytest.raises(ValueError, match=r".+"):
        decode_image(content[: len(content) // 2])


@pytest.mark.skipif("avif" not in features.get_supported(), reason="this Pillow was built without AVIF")
def test_a_damaged_avif_is_a_value_error() -> None:
    content = save(make_picture(60, 80), "AVIF")
    start = content.index(b"mdat") + 4
    with pytest.raises(ValueError, match=r".+"):
        decode_image(content[:start] + bytes(len(content) - start))


@pytest.mark.parametrize("orientation", ["ignore", "apply"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0" + bytes(100), b"\x89PNG\r\n\x1a\n", b"no image" * 50],
)
def test_content_that_is_not_an_image_is_a_value_error(content: bytes, orientation: Orientation) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_image(content, orientation=orientation)
    with pytest.raises(ValueError, match=r".+"):
        decode_pil(content, orientation=orientation)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_after_a_jpeg_start_are_a_value_error(seed: int) -> None:
    noise = np.random.default_rng(seed).bytes(500)
    with pytest.raises(ValueError, match=r".+"):
        decode_image(b"\xff\xd8\xff" + noise)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_pillow_images_have_the_same_pixels(file_format: str) -> None:
    content = save(make_picture(33, 47), file_format)
    image = decode_pil(content)
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), decode_image(content))
