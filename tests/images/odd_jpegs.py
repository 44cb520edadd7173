"""JPEGs that libjpeg warns of: some have the right pixels all the same, and some are damaged."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection
from functools import partial

import numpy as np

from tests.images.jpeg_files import by_pillow, patch, scan_start, segments_of
from tests.images.jpeg_writer import segment
from tests.images.pictures import make_picture

HEIGHT, WIDTH = 64, 96
PICTURE = make_picture(HEIGHT, WIDTH)

KINDS = {
    "plain": by_pillow(PICTURE, quality=90),
    "restarts": by_pillow(PICTURE, quality=90, restart_marker_blocks=4),
    "progressive": by_pillow(PICTURE, quality=90, progressive=True),
    "gray": by_pillow(PICTURE[..., 0].copy(), quality=90, restart_marker_blocks=7),
}
"""Files without a fault."""

PARTS = {"part 2 of 3": [(2, 3)], "part 1 twice": [(1, 2)] * 2, "counts differ": [(1, 2), (2, 3)], "0 of 0": [(0, 0)]}


def insert_before_restarts(content: bytes, data: bytes, numbers: Collection[int] | None = None) -> bytes:
    """Insert data before the restart markers with these positions in the file, or before all."""
    start = scan_start(content)
    count = itertools.count()

    def pad(marker: re.Match[bytes]) -> bytes:
        return (data if numbers is None or next(count) in numbers else b"") + marker[0]

    return content[:start] + re.sub(rb"\xff[\xd0-\xd7]", pad, content[start:])


def _with_profile(content: bytes, parts: list[tuple[int, int]], data: bytes = b"x" * 50) -> bytes:
    segments = b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes(part) + data) for part in parts)
    return content[:2] + segments + content[2:]


def _with_spectrum(content: bytes) -> bytes:
    """Return a file whose scan header names other coefficients than a sequential scan has."""
    start, stop = next((start, stop) for marker, start, stop in segments_of(content) if marker == 0xDA)
    return patch(content, 0xDA, stop - start - 4 - 3, 1)


def _with_adobe(content: bytes) -> bytes:
    start, stop = next((start, stop) for marker, start, stop in segments_of(content) if marker == 0xE0)
    return content[:start] + segment(0xEE, b"Adobe\0\x64\0\0\0\0\x07") + content[stop:]


def _pad_end(data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:-2] + data + content[-2:]


HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    **{f"profile, {name}": partial(_with_profile, parts=parts) for name, parts in PARTS.items()},
    "empty profile": lambda content: _with_profile(content, [(1, 1)], b""),
    "JFIF 2": lambda content: patch(content, 0xE0, 5, 2),
    "unknown transform": _with_adobe,
    "profile and padding": lambda content: _pad_end(bytes(40))(_with_profile(content, [(1, 2)])),
    "zeros at the end": _pad_end(bytes(40)),
    "ones at the end": _pad_end(b"\xff\0" * 20),
    "two bytes at the end": _pad_end(b"\x12\x34"),
    "fill bytes at the end": _pad_end(b"\xff" * 9),
}

HARMLESS_BY_KIND: dict[str, Callable[[bytes], bytes]] = {
    "plain, spectrum": _with_spectrum,
    "restarts, two bytes before each": lambda content: insert_before_restarts(content, b"\x12\x34"),
    "restarts, two bytes before one": lambda content: insert_before_restarts(content, b"\x12\x34", [2]),
    "restarts, zeros before some": lambda content: insert_before_restarts(content, bytes(30), [0, 3]),
    "gray, a byte before each": lambda content: insert_before_restarts(content, b"\x12"),
    "gray, three bytes before each": lambda content: insert_before_restarts(content, b"\x12\x34\x56"),
    "gray, zeros before each": lambda content: insert_before_restarts(content, bytes(30)),
}
"""Changes that suit one kind of file. Their names begin with it."""

NOISE = bytes(range(40, 90))
_CMYK = by_pillow(np.dstack([PICTURE, PICTURE[..., :1]]), quality=90)

DAMAGED: dict[str, bytes] = {
    **{f"{kind}, other bytes at the end": _pad_end(NOISE)(content) for kind, content in KINDS.items()},
    "plain, profile and other bytes": _with_profile(_pad_end(NOISE)(KINDS["plain"]), [(2, 3)]),
    "restarts, other bytes before one": insert_before_restarts(KINDS["restarts"], NOISE, [1]),
    "restarts, padding and other bytes": _pad_end(NOISE)(insert_before_restarts(KINDS["restarts"], bytes(30), [1])),
    "restarts, padding and a missing marker": insert_before_restarts(KINDS["restarts"], bytes(30), [1]).replace(
        b"\xff\xd4", b"\0"
    ),
    "plain, half the data": KINDS["plain"][: len(KINDS["plain"]) // 2].rstrip(b"\xff") + b"\xff\xd9",
    "plain, no end": KINDS["plain"][:-2],
    "plain, zeros amid the data": KINDS["plain"][:1500] + bytes(40) + KINDS["plain"][1540:],
    "CMYK, zeros amid the data": _CMYK[:2500] + bytes(60) + _CMYK[2560:],
}


def harmless_files() -> dict[str, bytes]:
    files = {f"{kind}, {name}": change(content) for kind, content in KINDS.items() for name, change in HARMLESS.items()}
    return files | {name: change(KINDS[name.partition(",")[0]]) for name, change in HARMLESS_BY_KIND.items()}
