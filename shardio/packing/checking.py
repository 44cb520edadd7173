"""Check that images can be decoded before they are packed."""

from __future__ import annotations

from collections.abc import Mapping

from shardio.images import DEFAULT_MAX_PIXELS, IMAGE_FORMATS, TooManyPixels, find_format, holds_images


def find_mislabelled(field: str, content: bytes) -> str | None:
    """Return the format of an image whose field has the name of another format; otherwise None."""
    found = find_format(content)
    return found if found is not None and found != IMAGE_FORMATS[field.rpartition(".")[2]] else None


def why_rejected(fields: Mapping[str, bytes], max_pixels: int | None) -> tuple[str, str] | None:
    """Return the field of the first image that cannot be decoded, and the reason; None if all can be decoded.

    Args:
        fields: The contents of a sample by field.
        max_pixels: Larger images are rejected; None for Pillow's limit.
    """
    from shardio.images import decode_image, decode_unconverted  # Packing without a check does not need decoders.

    for field, content in fields.items():
        if not holds_images(field):
            continue
        if find_format(content) is None:
            return field, "is not an image"
        # A mask's values are read as they are stored: conversion to RGB may be impossible.
        decode = decode_image if field in IMAGE_FORMATS else decode_unconverted
        try:
            decode(content, max_pixels=max_pixels or DEFAULT_MAX_PIXELS)
        except TooManyPixels as error:
            return field, f"is too large: {error}"
        except ValueError as error:
            return field, f"cannot be decoded: {error}"
    return None
