"""ICC profiles, written byte by byte (ICC.1:2001-04, version 2), and the colors that they define."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from tests.images.pictures import Array

Floats = NDArray[np.float64]

_D50 = (0.9642, 1.0, 0.8249)

WIDE_PRIMARIES = np.array([(0.60974, 0.20528, 0.14919), (0.31111, 0.62567, 0.06322), (0.01947, 0.06087, 0.74457)])
"""The XYZ values of Adobe RGB (1998)'s primaries, in columns, adapted to D50."""

SRGB_PRIMARIES = np.array([(0.43607, 0.38515, 0.14307), (0.22249, 0.71687, 0.06061), (0.01392, 0.09708, 0.71410)])
"""The XYZ values of sRGB's primaries, in columns, adapted to D50."""

GAMMA = 563 / 256


def wide_rgb_profile() -> bytes:
    """Return a profile with the primaries and the gamma of Adobe RGB (1998)."""
    columns = {f"{name}XYZ": _xyz(*column) for name, column in zip("rgb", WIDE_PRIMARIES.T, strict=True)}
    return _profile("RGB ", "XYZ ", {**columns, **{f"{name}TRC": _gamma(GAMMA) for name in "rgb"}})


def gray_profile(gamma: float) -> bytes:
    return _profile("GRAY", "XYZ ", {"kTRC": _gamma(gamma)})


def cmyk_profile() -> bytes:
    """Return a profile in which the paper is white and each full ink is black."""
    # The cube of four inks has 16 corners, the last ink varying fastest, with L* 255 (white) or 0, and a* = b* = 0.
    corners = bytes(byte for corner in range(16) for byte in (255 if corner == 0 else 0, 128, 128))
    identity = struct.pack(">9i", *(65536 * (i % 4 == 0) for i in range(9)))
    table = bytes(range(256))
    return _profile("CMYK", "Lab ", {"A2B0": b"mft1\0\0\0\0\4\3\2\0" + identity + 4 * table + corners + 3 * table})


def wide_rgb_to_srgb(pixels: Array) -> Array:
    """Convert pixels of :func:`wide_rgb_profile` to sRGB, according to the definition of sRGB (IEC 61966-2-1)."""
    linear = (pixels / 255) ** GAMMA @ WIDE_PRIMARIES.T @ np.linalg.inv(SRGB_PRIMARIES).T
    return _encode_srgb(linear)


def gray_to_srgb(pixels: Array, gamma: float) -> Array:
    return _encode_srgb((pixels / 255) ** gamma)


def _encode_srgb(linear: Floats) -> Array:
    linear = np.clip(linear, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.asarray(np.rint(255 * encoded), np.uint8)


def _profile(colors: str, connection: str, tags: dict[str, bytes]) -> bytes:
    tags = {"wtpt": _xyz(*_D50), **tags}
    offset, entries, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, content in tags.items():
        entries += struct.pack(">4sII", name.encode(), offset + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    header = struct.pack(
        ">I4sI4s4s4s12s4s4sI4sI8sI12s48x",
        *(offset + len(body), b"", 0x02400000, b"mntr" if colors != "CMYK" else b"prtr"),
        *(colors.encode(), connection.encode(), struct.pack(">6H", 2024, 1, 1, 0, 0, 0)),
        *(b"acsp", b"", 0, b"", 0, b"", 0, _xyz(*_D50)[8:]),
    )
    return header + struct.pack(">I", len(tags)) + entries + body


def _xyz(*values: float) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(65536 * value) for value in values))


def _gamma(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(256 * gamma))
