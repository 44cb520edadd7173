"""Convert images of any format that Pillow reads to JPEG, PNG, WebP or PPM, and convert their colors to sRGB.

The rendering intent is perceptual, as in browsers and in Pillow by default. Profiles that define only relative
colorimetry, such as most camera and screen profiles, give the same colors with either intent.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageCms

from shardio.images.crop_plan import CropPlan
from shardio.images.formats import (
    ConvertedFormat,
    ValueFormat,
    encode_png,
    errors_of_pillow,
    opened_by_pillow,
    read_value_format,
)
from shardio.images.opening import decode_unconverted, open_image
from shardio.images.pictures import (
    DEFAULT_MAX_PIXELS,
    Picture,
    Pixels,
    check_size,
    fit_size,
    read_turn,
    sizes_of,
    turn_pillow,
)
from shardio.images.rendering import DecodeError, render_chunk

_MODELS = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Pillow's mode for the colors that a profile describes, by the color space in the profile's header (ICC.1:2022,
7.2.6)."""

_ALPHA = {"LA": "L", "RGBA": "RGB"}

_SIMPLER_MODES = {
    **{mode: mode for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")},
    **dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB"),
    **dict.fromkeys(("PA", "RGBa"), "RGBA"),
    "La": "LA",
}
"""The PNG-compatible Pillow mode for the pixels of each Pillow mode."""

_INTEGERS = frozenset(("I", "I;16B", "I;16L", "I;16N"))
"""Modes of gray images whose values may fit into 16 bits."""

_GRAY = frozenset(("1", "L", "LA", "La", "I;16"))

_OPAQUE = 255
"""The alpha of an opaque pixel."""


def convert_image(
    content: bytes,
    to: ConvertedFormat,
    *,
    quality: int,
    max_side: int | None = None,
    min_side: int | None = None,
    to_srgb: bool = False,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> bytes:
    """Decode an image of any format, turn it upright, and encode it in another format.

    ========  =======================================================================================================
    ``jpeg``  8 bits, gray or RGB with chroma stored as 4:2:0. Transparent pixels cause errors
    ``png``   lossless. Gray, palettes, alpha channels and 16-bit values are kept. Other values cause errors
    ``webp``  lossy, 8 bits, RGB or RGBA
    ``ppm``   8 bits, gray (PGM) or RGB, without compression. Transparent pixels cause errors
    ========  =======================================================================================================

    CMYK, YCbCr, LAB and HSV become RGB. 16-bit color is reduced to 8 bits, except in ``png``. All metadata except the
    ICC profile is dropped; a PPM does not keep the profile either. The same bytes always give the same result. An image
    that already has the requested format is encoded again.

    Args:
        content: The bytes of an image file.
        to: The format to convert to.
        quality: The quality of JPEGs (on libjpeg's scale) and WebPs, 1 to 100. Other formats ignore the quality.
        max_side: The maximum length of the longer side in pixels, or None for no limit. Larger images are shrunk by
            area averaging.
        min_side: The maximum length of the shorter side in pixels, or None for no limit.
        to_srgb: Whether to convert the colors from the image's ICC profile to sRGB. If so, the profile is dropped, and
            a palette becomes RGB or RGBA. Otherwise, the profile stays embedded, unless the color model changes, for
            example from CMYK to RGB.
        max_pixels: The largest permitted number of pixels.

    Raises:
        ValueError: If the image is damaged, too large (TooManyPixels) or of an unknown format; if it has several
            frames; if the requested format cannot store it; or if ``to_srgb`` is set and the profile is damaged.
    """
    stored = read_value_format(content)
    if stored is not None and not _is_like_pillows(stored):
        if to == "png":
            is_shrunk = fit_size(stored.shape[0], stored.shape[1], max_side, min_side) is not None
            return _convert_wide(content, stored, is_shrunk=is_shrunk, to_srgb=to_srgb, max_pixels=max_pixels)
        if stored.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"stores {stored.describe()}, which only PNG may support: leave it out")
    limits = (None, None) if to_srgb else (max_side, min_side)  # Colors are converted before shrinking.
    image, profile = _read_upright(content, max_pixels, *limits, needs_profile=to_srgb)
    if profile is not None and to_srgb:
        image, profile = _convert_colors(image, profile), None
    prepare, options = _CONVERSIONS[to]
    converted = prepare(_shrink(_simplify(image), fit_size(image.height, image.width, max_side, min_side)))
    if _find_model(converted) != _find_model(image):
        profile = None
    return _encode(converted, icc_profile=profile, quality=quality, **options)


def _read_upright(
    content: bytes, max_pixels: int, max_side: int | None, min_side: int | None, *, needs_profile: bool
) -> tuple[PIL.Image.Image, bytes | None]:
    """Return an image and its ICC profile. The image is upright, and has no metadata except its transparent color.

    JPEGs are shrunk to the maximum side lengths here, because decoding and shrinking them together is fast.
    """
    with opened_by_pillow(content) as stored:
        check_size(stored.height, stored.width, max_pixels)
        _check_frames(stored)
        profile = read_profile(stored) if needs_profile else stored.info.get("icc_profile")
        if stored.format in ("JPEG", "MPO") and stored.mode in ("L", "RGB"):
            # Unlike Pillow, open_image rejects damaged data.
            picture = open_image(content, orientation="apply", max_pixels=max_pixels)
            pixels = _render_whole(picture, fit_size(*picture.size, max_side, min_side))
            image = PIL.Image.fromarray(pixels if stored.mode == "RGB" else pixels[..., 0].copy())
        else:
            stored.load()  # The orientation of a TIFF is known only after loading.
            image = turn_pillow(stored, read_turn(stored))
        image.info = {name: value for name, value in image.info.items() if name == "transparency"}
    return image, profile


def _render_whole(picture: Picture, size: tuple[int, int] | None) -> Pixels:
    plan = CropPlan.whole(sizes_of([picture]))
    if size is not None:
        plan = plan.resize(np.array([size]), "antialiased box")
    try:
        return np.asarray(render_chunk([picture], plan).images[0])
    except DecodeError as error:
        raise ValueError(str(error)) from error


def _is_like_pillows(stored: ValueFormat) -> bool:
    """Return whether Pillow's image holds the values of a file, apart from a scale factor."""
    return stored.is_in_pillow or (stored.white is not None and (stored.dtype == np.uint8 or stored.num_channels == 1))


def _convert_wide(content: bytes, stored: ValueFormat, *, is_shrunk: bool, to_srgb: bool, max_pixels: int) -> bytes:
    is_storable = stored.dtype == np.uint16 and stored.num_channels <= 4 and stored.has_alpha
    if not is_storable or stored.decode is None:
        raise ValueError(f"stores {stored.describe()}, which PNG cannot store or shardio cannot decode: leave it out")
    with opened_by_pillow(content) as image:
        check_size(image.height, image.width, max_pixels)
        _check_frames(image)
        profile, transparency = image.info.get("icc_profile"), image.info.get("transparency")
    if to_srgb and profile is not None:
        raise ValueError("color with more than 8 bits cannot be converted to sRGB: leave out to_srgb")
    if is_shrunk:
        raise ValueError("color with more than 8 bits cannot be shrunk: leave out max_side and min_side")
    values = decode_unconverted(content, orientation="apply", max_pixels=max_pixels)
    return encode_png(stored.scale(values), icc_profile=profile, transparency=transparency)


def _check_frames(image: PIL.Image.Image) -> None:
    """Raise ValueError if an image has several frames or pages.

    The additional images in an MPO, which many phones write as .jpg, are mostly previews. The additional images in a
    PSD are layers.
    """
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1 and image.format not in ("MPO", "PSD"):
        raise ValueError(f"has {num_frames} frames: split it into one file for each frame, or leave it out")


def _convert_colors(image: PIL.Image.Image, profile: bytes) -> PIL.Image.Image:
    if image.mode == "LAB":  # LAB needs no profile, because Pillow converts it to sRGB.
        return _simplify(image)
    if image.mode == "I;16" or image.mode in _INTEGERS or image.mode == "F":
        raise ValueError(f"gray with more than 8 bits (mode {image.mode}) cannot be converted to sRGB: omit to_srgb")
    if image.mode != "CMYK":
        image = _simplify(image)
    if image.has_transparency_data and image.mode not in ("LA", "RGBA"):
        image = image.convert("LA" if image.mode in _GRAY else "RGBA")
    elif image.mode in ("1", "P"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    return convert_to_srgb(image, profile)


def _simplify(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an image with the same pixels in a mode that PNG supports."""
    if image.mode in _INTEGERS:
        integers = image.convert("I")  # Direct conversions between 16-bit modes lose the upper 8 bits.
        low, high = integers.getextrema()
        if low < 0 or high > 0xFFFF:  # type: ignore[operator]  # One channel gives two numbers.
            raise ValueError(f"stores integers from {low} to {high}, which no 16-bit image can hold")
        return integers.convert("I;16")
    if image.mode not in _SIMPLER_MODES:
        raise ValueError(f"stores values of Pillow's mode {image.mode}, which shardio cannot convert")
    return image.convert(_SIMPLER_MODES[image.mode]) if image.mode != _SIMPLER_MODES[image.mode] else image


def _shrink(image: PIL.Image.Image, size: tuple[int, int] | None) -> PIL.Image.Image:
    if size is None:
        return image
    if image.mode in ("1", "P"):  # Bits and palette indices cannot be averaged.
        with_alpha = image.has_transparency_data
        image = image.convert("L" if image.mode == "1" else "RGBA" if with_alpha else "RGB")
    return image.resize(size[::-1], PIL.Image.Resampling.BOX)


def _find_model(image: PIL.Image.Image) -> str:
    if image.mode in _GRAY or image.mode in _INTEGERS:
        return "gray"
    return image.mode if image.mode in ("CMYK", "LAB") else "RGB"


def _prepare_png(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode == "P":
        num_colors = len(image.getpalette() or ()) // 3
        # Pillow would clip indices beyond the palette.
        if image.getextrema()[1] >= num_colors:  # type: ignore[operator]
            return image.convert("RGBA" if image.has_transparency_data else "RGB")
    return image


def _prepare_opaque(image: PIL.Image.Image) -> PIL.Image.Image:
    image = _drop_opaque_alpha(_require_8_bits(image))
    if image.mode in ("LA", "RGBA"):
        raise ValueError("has transparent pixels, which JPEG and PPM cannot store: convert it to png or webp")
    return image.convert("L" if image.mode in _GRAY else "RGB")


def _prepare_webp(image: PIL.Image.Image) -> PIL.Image.Image:
    image = _drop_opaque_alpha(_require_8_bits(image))
    return image.convert("RGBA" if image.mode in ("LA", "RGBA") else "RGB")


def _require_8_bits(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode == "I;16":
        raise ValueError("has 16 bits per pixel, which only PNG can store: convert it to png")
    return image


def _drop_opaque_alpha(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an image with its transparency in an alpha channel, or without transparency if all pixels are opaque."""
    if not image.has_transparency_data:
        return image
    is_gray = image.mode in _GRAY
    image = image.convert("LA" if is_gray else "RGBA")
    is_opaque = image.getchannel("A").getextrema() == (_OPAQUE, _OPAQUE)
    return image.convert("L" if is_gray else "RGB") if is_opaque else image


def _encode(image: PIL.Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    with errors_of_pillow():
        image.save(file, **options)
    return file.getvalue()


def read_profile(image: PIL.Image.Image) -> bytes | None:
    """Return an image's embedded ICC profile, or None if it has none.

    Raises:
        ValueError: If the profile in the file is incomplete, or cannot be decompressed.
    """
    profile: bytes | None = image.info.get("icc_profile")
    if profile is None and "icc_profile" in image.info:
        raise ValueError("the ICC profile is incomplete or damaged: convert without to_srgb, or remove the profile")
    return profile or None


def convert_to_srgb(image: PIL.Image.Image, profile: bytes) -> PIL.Image.Image:
    """Convert the colors of an image from its profile to sRGB.

    Args:
        image: An image of mode L, LA, RGB, RGBA or CMYK.
        profile: The image's ICC profile. A gray image may have an RGB profile.

    Returns:
        An image of mode RGB, or of mode L if the image is gray. An alpha channel is kept.

    Raises:
        ValueError: If the profile is damaged, or is for a different color model.
    """
    colors = image.convert(_ALPHA.get(image.mode, image.mode))
    converted = _apply_profile(colors, profile)
    if image.mode == "L" or image.mode == "LA":
        converted = converted.convert("L")
    if image.mode in _ALPHA:
        converted.putalpha(image.getchannel("A"))
    return converted


def _apply_profile(image: PIL.Image.Image, profile: bytes) -> PIL.Image.Image:
    try:
        with errors_of_pillow():
            model, transform = _make_srgb_transform(profile)
            if model != image.mode:
                if (image.mode, model) != ("L", "RGB"):
                    raise ValueError(f"it is for {model} images, but this one is {image.mode}")
                image = image.convert("RGB")
            return transform.apply(image)
    except (PIL.ImageCms.PyCMSError, ValueError) as error:
        raise ValueError(
            f"the ICC profile is damaged or does not fit the image ({error}): convert without to_srgb, or remove the "
            "profile"
        ) from error


@lru_cache(maxsize=16)
def _make_srgb_transform(profile: bytes) -> tuple[str, PIL.ImageCms.ImageCmsTransform]:
    """Return the mode of the images to which a profile applies, and the conversion of such images to sRGB.

    Conversions are cached: creating one takes as long as converting 200,000 pixels, and many images have the same
    profile. Threads may share a conversion.
    """
    source = PIL.ImageCms.ImageCmsProfile(io.BytesIO(profile))
    model = _MODELS.get(source.profile.xcolor_space)
    if model is None:
        raise ValueError(f"its color space is {source.profile.xcolor_space!r}, not RGB, gray or CMYK")
    target = PIL.ImageCms.createProfile("sRGB")
    return model, PIL.ImageCms.buildTransform(source, target, model, "RGB", PIL.ImageCms.Intent.PERCEPTUAL)


_CONVERSIONS: dict[ConvertedFormat, tuple[Callable[[PIL.Image.Image], PIL.Image.Image], dict[str, Any]]] = {
    "jpeg": (_prepare_opaque, {"format": "JPEG", "subsampling": "4:2:0"}),
    "png": (_prepare_png, {"format": "PNG"}),
    "webp": (_prepare_webp, {"format": "WEBP"}),
    "ppm": (_prepare_opaque, {"format": "PPM"}),
}
"""The conversion to each format: a function that converts an image to a mode of the format, and Pillow's options."""
