"""Convert images with an ICC profile to sRGB, by LittleCMS (through Pillow).

The rendering intent is perceptual, as in browsers and in Pillow's default. A profile that defines only relative
colorimetry, as those of cameras and screens usually do, gives the same colours for both.
"""

from __future__ import annotations

import io
from functools import lru_cache

import PIL.Image
import PIL.ImageCms

from shardio.images.errors_of_pillow import errors_of_pillow

_MODELS = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Pillow's mode for the values that a profile describes, by the colour space in its header (ICC.1:2022, 7.2.6)."""

_ALPHA = {"LA": "L", "RGBA": "RGB"}


def read_profile(image: PIL.Image.Image) -> bytes | None:
    """Return the ICC profile that an image has embedded, or None if it has none.

    Raises:
        ValueError: If the file contains only a part of the profile, or a profile that cannot be decompressed.
    """
    profile: bytes | None = image.info.get("icc_profile")
    if profile is None and "icc_profile" in image.info:
        raise ValueError("the ICC profile is incomplete or damaged: convert without to_srgb, or remove the profile")
    return profile or None


def convert_to_srgb(image: PIL.Image.Image, profile: bytes) -> PIL.Image.Image:
    """Convert an image from the colours of its profile to sRGB.

    Args:
        image: An image of mode L, LA, RGB, RGBA or CMYK.
        profile: Its ICC profile. That of a gray image may be one for RGB.

    Returns:
        An image of mode RGB; L if the image is gray. An alpha channel is kept.

    Raises:
        ValueError: If the profile is damaged, or made for other images.
    """
    colours = image.convert(_ALPHA.get(image.mode, image.mode))
    converted = _transform(colours, profile)
    if image.mode == "L" or image.mode == "LA":
        converted = converted.convert("L")
    if image.mode in _ALPHA:
        converted.putalpha(image.getchannel("A"))
    return converted


def _transform(image: PIL.Image.Image, profile: bytes) -> PIL.Image.Image:
    try:
        with errors_of_pillow():
            model, transform = _make_transform(profile)
            if model != image.mode:
                if (image.mode, model) != ("L", "RGB"):
                    raise ValueError(f"it is for {model} images, but this one is {image.mode}")
                image = image.convert("RGB")
            return transform.apply(image)
    except (PIL.ImageCms.PyCMSError, ValueError) as error:
        raise ValueError(
            f"the ICC profile is damaged or does not fit the image ({error}): convert without to_srgb, or remove it"
        ) from error


@lru_cache(maxsize=16)
def _make_transform(profile: bytes) -> tuple[str, PIL.ImageCms.ImageCmsTransform]:
    """Return the mode of the images that a profile is for, and how to convert them to sRGB.

    Making it takes as long as converting 200,000 pixels, and many images have the same profile. Threads may share it.
    """
    source = PIL.ImageCms.ImageCmsProfile(io.BytesIO(profile))
    model = _MODELS.get(source.profile.xcolor_space)
    if model is None:
        raise ValueError(f"its colour space is {source.profile.xcolor_space!r}, expected RGB, gray or CMYK")
    target = PIL.ImageCms.createProfile("sRGB")
    return model, PIL.ImageCms.buildTransform(source, target, model, "RGB", PIL.ImageCms.Intent.PERCEPTUAL)
