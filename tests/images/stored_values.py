"""PNG, TIFF and Netpbm files that hold known values of any type, and are written byte by byte."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PNG_COLORS = {1: 0, 2: 4, 3: 2, 4: 6}
_TIFF_KINDS = {"u": 1, "i": 2, "f": 3, "c": 6}
_SHORT, _LONG = 3, 4


def make_values(dtype: str, *shape: int, seed: int = 0) -> NDArray[Any]:
    random, of = np.random.default_rng(seed), np.dtype(dtype)
    if of.kind in "ui":
        native = of.newbyteorder("=")
        return random.integers(np.iinfo(of).min, np.iinfo(of).max, shape, native, endpoint=True).astype(of)
    return (random.normal(size=shape) * 1000).astype(of)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def write_png(values: NDArray[Any], *extra: bytes) -> bytes:
    """Return a 16-bit PNG without filters, with extra chunks before the data."""
    height, width = values.shape[:2]
    num_channels = values.shape[2] if values.ndim == 3 else 1
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, _PNG_COLORS[num_channels], 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(extra) + data + chunk(b"IEND", b"")


def write_tiff(
    values: NDArray[Any],
    *,
    order: str = "<",
    orientation: int = 1,
    extra: tuple[int, ...] = (),
    planes: int = 1,
    photometric: int | None = None,
    deflates: bool = False,
) -> bytes:
    """Return a TIFF with one strip, or with one strip for each plane."""
    height, width = values.shape[:2]
    samples = values.shape[2] if values.ndim == 3 else 1
    data = values.astype(values.dtype.newbyteorder("<" if order == "<" else ">"))
    strips = [data[..., i].tobytes() for i in range(samples)] if planes == 2 else [data.tobytes()]
    strips = [zlib.compress(strip) for strip in strips] if deflates else strips
    offsets = [8 + sum(map(len, strips[:i])) for i in range(len(strips))]
    tags: dict[int, tuple[int, tuple[int, ...]]] = {
        256: (_LONG, (width,)),
        257: (_LONG, (height,)),
        258: (_SHORT, (values.dtype.itemsize * 8,) * samples),
        259: (_SHORT, (8 if deflates else 1,)),
        262: (_SHORT, ((2 if samples >= 3 else 1) if photometric is None else photometric,)),
        273: (_LONG, tuple(offsets)),
        274: (_SHORT, (orientation,)),
        277: (_SHORT, (samples,)),
        278: (_LONG, (height,)),
        279: (_LONG, tuple(map(len, strips))),
        284: (_SHORT, (planes,)),
        **({338: (_SHORT, extra)} if extra else {}),
        339: (_SHORT, (_TIFF_KINDS[values.dtype.kind],) * samples),
    }
    body = b"".join(strips) + bytes(sum(map(len, strips)) % 2)
    start = 8 + len(body)
    directory, more = struct.pack(order + "H", len(tags)), b""
    beyond = start + 2 + 12 * len(tags) + 4
    for tag, (kind, numbers) in tags.items():
        packed = struct.pack(order + {_SHORT: "H", _LONG: "I"}[kind] * len(numbers), *numbers)
        if len(packed) > 4:
            place, more = struct.pack(order + "I", beyond + len(more)), more + packed
        else:
            place = packed.ljust(4, b"\0")
        directory += struct.pack(order + "HHI", tag, kind, len(numbers)) + place
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", start)
    return head + body + directory + bytes(4) + more


def write_pnm(values: NDArray[Any], white: int, *, is_plain: bool = False) -> bytes:
    kind = (2 if is_plain else 5) + (values.ndim == 3)
    head = b"P%d\n# a comment\n%d %d\n%d\n" % (kind, values.shape[1], values.shape[0], white)
    raster = values.astype(">u2" if white > 255 else np.uint8).tobytes()
    return head + (" ".join(map(str, values.ravel())).encode() + b"\n" if is_plain else raster)
