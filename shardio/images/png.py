"""PNG files: the chunks that hold the pixels, and an encoder for 16 bits (PNG specification, third edition)."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

IHDR = struct.Struct(">IIBBBBB")
"""The data of the first chunk: width, height, bit depth, colour type, compression, filter, interlace (11.2.1)."""

COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""The colour type of gray, gray and alpha, RGB, RGBA, by the number of channels."""

_CHUNK = struct.Struct(">I4s")
_CRITICAL = frozenset((b"IHDR", b"PLTE", b"IDAT", b"IEND"))
_PAETH = 4


def strip_png(content: bytes) -> bytes | None:
    """Return a PNG without the chunks that describe its pixels, such as profiles; None if any chunk is damaged.

    libpng prints warnings of such chunks, and OpenCV adds an alpha channel for a transparent colour. libpng also prints
    errors of damaged chunks, so their checksums are compared here.
    """
    view, offset = memoryview(content), len(PNG_SIGNATURE)
    kept: list[bytes | memoryview] = [PNG_SIGNATURE]
    while offset + 12 <= len(content):
        length, name = _CHUNK.unpack_from(content, offset)
        stop = offset + 12 + length
        if stop > len(content) or zlib.crc32(view[offset + 4 : stop - 4]) != int.from_bytes(view[stop - 4 : stop]):
            return None
        if name in _CRITICAL:
            kept.append(view[offset:stop])
        if name == b"IEND":
            return b"".join(kept)
        offset = stop
    return None


def encode_png(
    values: NDArray[Any], *, icc_profile: bytes | None = None, transparency: tuple[int, ...] | None = None
) -> bytes:
    """Encode values without loss as a PNG of 16 bits.

    Pillow cannot: its images have at most 8 bits of colour.

    Args:
        values: uint16 [height, width] or [height, width, channels], 1 to 4 channels.
        icc_profile: The colour profile.
        transparency: The transparent colour, one value for each channel.
    """
    height, width = values.shape[:2]
    num_channels = values.shape[2] if values.ndim == 3 else 1
    big_endian = np.ascontiguousarray(values.reshape(height, width * num_channels), ">u2")
    head = IHDR.pack(width, height, 16, COLOUR_TYPES[num_channels], 0, 0, 0)
    chunks = [_write_chunk(b"IHDR", head)]
    if icc_profile is not None:
        chunks.append(_write_chunk(b"iCCP", b"ICC Profile\0\0" + zlib.compress(icc_profile)))
    if transparency is not None:
        chunks.append(_write_chunk(b"tRNS", struct.pack(f">{num_channels}H", *transparency)))
    rows = _filter(big_endian.view(np.uint8), 2 * num_channels)
    chunks += [_write_chunk(b"IDAT", zlib.compress(rows)), _write_chunk(b"IEND", b"")]
    return PNG_SIGNATURE + b"".join(chunks)


def _write_chunk(name: bytes, data: bytes) -> bytes:
    return _CHUNK.pack(len(data), name) + data + zlib.crc32(name + data).to_bytes(4)


def _filter(rows: NDArray[np.uint8], stride: int) -> bytes:
    """Filter rows of bytes by Paeth's predictor, with the bytes of a pixel ``stride`` apart (clause 9.4)."""
    padded = np.zeros((rows.shape[0] + 1, rows.shape[1] + stride), np.int16)
    padded[1:, stride:] = rows
    left, above, corner = padded[1:, :-stride], padded[:-1, stride:], padded[:-1, :-stride]
    by_left, by_above, by_corner = np.abs(above - corner), np.abs(left - corner), np.abs(left + above - 2 * corner)
    predicted = np.where(by_above <= by_corner, above, corner)
    predicted = np.where((by_left <= by_above) & (by_left <= by_corner), left, predicted)
    filtered = np.full((len(rows), rows.shape[1] + 1), _PAETH, np.uint8)
    filtered[:, 1:] = rows - predicted.astype(np.uint8)
    return filtered.tobytes()
