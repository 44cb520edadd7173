"""Check that images can be decoded before they are packed."""

from __future__ import annotations

from shardio.images import DEFAULT_MAX_PIXELS, IMAGE_FORMATS, TooManyPixels, find_format


def find_mislabelled(field: str, content: bytes) -> str | None:
    """Return the format of an image whose field has the name of another format; otherwise None."""
    found = find_format(content)
    return found if found is not None and found != IMAGE_FORMATS[field.rpartition(".")[2]] else None


def why_rejected(field: str, content: bytes, max_pixels: int | None) -> str | None:
    """Return why an image cannot be decoded; None if it can.

    Args:
        field: The field, which holds images.
        content: The content of the image file.
        max_pixels: Larger images are rejected; None for Pillow's limit.
    """
    from shardio.images import decode_image, decode_unconverted  # Packing without a check does not need decoders.

    if find_format(content) is None:
        return "is not an image"
    # A mask's values are read as they are stored: conversion to RGB may be impossible.
    decode = decode_image if field in IMAGE_FORMATS else decode_unconverted
    try:
        decode(content, max_pixels=max_pixels or DEFAULT_MAX_PIXELS)
    except TooManyPixels as error:
        return f"is too large: {error}"
    except ValueError as error:
        return f"cannot be decoded: {error}"
    return None
