"""Reencode JPEGs at a smaller size, with loss."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg

from shardio.images.decode import decode_image
from shardio.images.errors_of_pillow import errors_of_pillow
from shardio.images.jpeg.head import JpegHead, read_head
from shardio.images.jpeg.standard import APP0, APP2, ICC_SIGNATURE
from shardio.images.pixels import Pixels
from shardio.images.tiling.certainty import has_whole_profile
from shardio.images.tiling.transcode import tile_jpeg
from shardio.images.unconverted import decode_unconverted_pil

_SOI_LENGTH = 2


def reencode_jpeg(
    content: bytes, *, max_side: int | None, quality: int, max_pixels: int, to_srgb: bool = False
) -> bytes:
    """Decode a JPEG, turn it upright, shrink it, and encode it as a tiled JPEG.

    Colour is stored as 4:2:0, and gray stays gray. The colour profile is kept, except that of CMYK, which becomes RGB.
    All other metadata is dropped.

    Args:
        content: A JPEG file.
        max_side: The largest permitted side in pixels, or None for no limit. Larger images are shrunk by averaging over
            areas.
        quality: 1 to 100, on libjpeg's scale.
        max_pixels: The largest permitted number of pixels.
        to_srgb: Whether to convert the colours from the profile to sRGB, before shrinking, and to drop the profile.

    Raises:
        ValueError: If the image is damaged or too large, or if its profile is needed, but damaged.
    """
    pixels = decode_image(content, orientation="apply", max_pixels=max_pixels)
    head = read_head(content)
    if to_srgb:
        pixels = _convert_to_srgb(content, pixels, max_pixels)
    pixels = _shrink(pixels, max_side)
    if len(head.factors) == 1:
        encoded = simplejpeg.encode_jpeg(pixels[..., :1].copy(), quality, "GRAY", "Gray")
    else:
        encoded = simplejpeg.encode_jpeg(pixels, quality, "RGB", "420")
    is_kept = not to_srgb and len(head.factors) < 4  # CMYK becomes RGB, which its profile does not fit.
    profile = _read_profile(content, head) if is_kept else b""
    return tile_jpeg(_insert(encoded, profile))


def _convert_to_srgb(content: bytes, pixels: Pixels, max_pixels: int) -> Pixels:
    """Return a JPEG's upright pixels in sRGB.

    Args:
        content: The file.
        pixels: What it was decoded to, uint8 [height, width, 3].
        max_pixels: The largest permitted number of pixels.
    """
    import PIL.Image  # Not before an image needs it: see resizing.py.

    from shardio.images.srgb import convert_to_srgb, read_profile

    with errors_of_pillow(), PIL.Image.open(io.BytesIO(content)) as stored:
        profile, mode = read_profile(stored), stored.mode
    if profile is None:
        return pixels
    if mode == "CMYK":
        image = decode_unconverted_pil(content, orientation="apply", max_pixels=max_pixels)
    else:
        image = PIL.Image.fromarray(pixels if mode == "RGB" else pixels[..., 0].copy())
    return np.array(convert_to_srgb(image, profile).convert("RGB"))


def _shrink(pixels: Pixels, max_side: int | None) -> Pixels:
    height, width = pixels.shape[:2]
    if max_side is None or max(height, width) <= max_side:
        return pixels
    ratio = max_side / max(height, width)
    size = max(round(width * ratio), 1), max(round(height * ratio), 1)
    import cv2  # It takes 0.1 s, and packing without re-encoding does not need it.

    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)  # type: ignore[return-value]  # uint8 stays uint8


def _read_profile(content: bytes, head: JpegHead) -> bytes:
    """Return the segments of the colour profile, unless some are missing."""
    if not has_whole_profile(content, head):
        return b""
    return b"".join(
        content[segment.start : segment.stop]
        for segment in head.segments
        if segment.marker == APP2 and content.startswith(ICC_SIGNATURE, segment.payload_start)
    )


def _insert(content: bytes, segments: bytes) -> bytes:
    """Insert segments after the JFIF header, or after SOI without one."""
    first = read_head(content).segments[0]
    stop = first.stop if first.marker == APP0 else _SOI_LENGTH
    return content[:stop] + segments + content[stop:]
