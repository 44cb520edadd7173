"""The laws of tiling, checked by decoders and by a parser that shares no code with shardio.

``test_tiling.py`` checks them on the small corpus, ``tools/tile_campaign.py`` on the full corpus and on photographs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import cv2
import numpy as np
import simplejpeg

from shardio.images import decode_image, tiling
from shardio.images.jpeg import has_tiles
from shardio.images.tiling import NotTileable, tile_jpeg, untile_jpeg
from tests.images.jpeg_files import JpegFile
from tests.images.pictures import Array, read_by_pillow

TILED = "tiled"
"""The outcome for a file that can be tiled. For other files, the outcome is the reason why they cannot be tiled."""

LONGEST_REASON = 60
"""The maximum number of characters in a reason, because reasons are shown in tables."""

_RST = re.compile(rb"\xff[\xd0-\xd7]")
_SIZES = struct.Struct(">HHHBI")


def read_by_simplejpeg(content: bytes) -> Array:
    return np.asarray(simplejpeg.decode_jpeg(content, strict=True))


def read_by_cv2(content: bytes) -> Array:
    """Decode a file with OpenCV to uint8 [height, width, 3], ignoring its orientation."""
    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise ValueError("OpenCV cannot read the file")
    return np.asarray(pixels, np.uint8)


READERS: dict[str, Callable[[bytes], Array]] = {
    "simplejpeg": read_by_simplejpeg,
    "OpenCV": read_by_cv2,
    "Pillow": read_by_pillow,
    "shardio": decode_image,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The DHT and DRI segments, those of tile tables, all others up to the scan's header, and the scan's data."""

    tables: list[bytes]
    others: list[bytes]
    scan: bytes

    def all_of(self, *markers: int) -> list[bytes]:
        return [segment for segment in self.tables + self.others if segment[1] in markers]

    @property
    def tile_table(self) -> list[bytes]:
        return [segment for segment in self.tables if segment[1] == 0xE9]

    @property
    def intervals(self) -> list[bytes]:
        return _RST.split(self.scan)

    @property
    def restarts(self) -> list[bytes]:
        return _RST.findall(self.scan)


def take_apart(content: bytes) -> Parts:
    """Return the parts of a file that ends with its only scan, without fill bytes before markers."""
    tables, others = list[bytes](), list[bytes]()
    start = 2
    while not others or others[-1][1] != 0xDA:
        while content[start + 1] == 0xFF:
            start += 1
        assert content[start] == 0xFF, f"there is no marker at byte {start}"
        end = start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")
        segment = content[start:end]
        is_table = segment[1] in (0xC4, 0xDD) or (segment[1] == 0xE9 and segment[4:12] == b"shardio\0")
        (tables if is_table else others).append(segment)
        start = end
    return Parts(tables=tables, others=others, scan=content[start : content.rindex(b"\xff\xd9")])


def tile_by(content: bytes, interval: int) -> bytes:
    """Tile a JPEG with intervals of a given number of MCUs, which must divide the number of MCUs in a row."""
    with patch.object(tiling, "choose_interval", lambda *_: interval):
        return tile_jpeg(content)


def check_corpus_file(file: JpegFile) -> str:
    """Check the laws for a file of the corpus, and check that tiling it succeeds if and only if it is tileable."""
    _hold(not has_tiles(file.content), file.name, "an untiled file has no tiles")
    outcome = check_file(file.name, file.content)
    # No decoder supports fractional factors, so these files are not tiled.
    is_tileable = file.tileable and file.readers != ()
    _hold((outcome == TILED) == is_tileable, file.name, f"tiled if and only if tileable, but the outcome is: {outcome}")
    return outcome


def check_file(name: str, content: bytes) -> str:
    """Check the laws for any file. Return the outcome."""
    try:
        tiled = tile_jpeg(content)
    except NotTileable as error:
        _check_refusal(name, content, error)
        return error.reason
    plain = untile_jpeg(content)
    _check_segments(name, content, tiled, plain)
    _check_tiles(name, tiled)
    _check_ways_back(name, content, tiled, plain)
    for reader in READERS:
        _check_pixels(name, reader, content, {"tiled": tiled, "untiled": plain})
    return TILED


def _hold(is_so: bool, name: str, law: str) -> None:
    if not is_so:
        raise AssertionError(f"{name}: this law is broken: {law}")


def _check_refusal(name: str, content: bytes, error: NotTileable) -> None:
    short = 0 < len(error.reason) <= LONGEST_REASON and "(" not in error.reason
    _hold(short, name, f"a reason is short, but got {error.reason!r}")
    _hold(str(error).startswith(error.reason), name, f"a message begins with its reason, but got {error}")
    try:
        untile_jpeg(content)
    except NotTileable as other:
        _hold(other.reason == error.reason, name, "tiling and untiling refuse a file for the same reason")
    else:
        _hold(False, name, "untiling refuses what tiling refuses")


def _check_segments(name: str, content: bytes, tiled: bytes, plain: bytes) -> None:
    before, after, back = take_apart(content), take_apart(tiled), take_apart(plain)
    kept = _make_sequential(before) if before.all_of(0xC2) else before.others
    _hold(after.others == kept, name, "all segments except DHT, DRI and tile tables are kept, in order")
    _hold(back.others == kept, name, "untiling keeps all segments except DHT, DRI and tile tables, in order")
    is_plain = not (back.tile_table or back.all_of(0xDD) or back.restarts)
    _hold(is_plain, name, "an untiled file has no restart markers")
    for parts, file in ((after, tiled), (back, plain)):
        rest = b"".join([b"\xff\xd8", *sorted(parts.tables + parts.others), parts.scan, b"\xff\xd9"])
        _hold(len(rest) == len(file), name, "there are no bytes between segments or after EOI")


def _make_sequential(parts: Parts) -> list[bytes]:
    """Return the segments of a progressive file, with the headers of a sequential frame and of its only scan."""
    (frame,) = parts.all_of(0xC2)
    is_wide = any(segment[4] >> 4 for segment in parts.all_of(0xDB))
    sequential = b"\xff" + (b"\xc1" if is_wide else b"\xc0") + frame[2:]
    tables = zip(frame[10::3], b"\x00\x11\x11", strict=False)
    scan_header = b"".join([frame[9:10], *map(bytes, tables), b"\x00\x3f\x00"])
    kept = [sequential if segment == frame else segment for segment in parts.others[:-1]]
    return [*kept, b"\xff\xda" + struct.pack(">H", 2 + len(scan_header)) + scan_header]


def _check_tiles(name: str, tiled: bytes) -> None:
    parts = take_apart(tiled)
    frame, scan_header = parts.all_of(0xC0, 0xC1)[0], parts.others[-1]
    height, width, num_components = struct.unpack_from(">HHB", frame, 5)
    factors = [frame[11 + 3 * i] for i in range(num_components)] if num_components > 1 else [0x11]
    rows = -(-height // (8 * max(factor & 15 for factor in factors)))
    mcu_width = 8 * max(factor >> 4 for factor in factors)
    row_mcus = -(-width // mcu_width)
    _hold(scan_header[4] == num_components, name, "one scan holds all components")

    headers = [segment[12:15] for segment in parts.tile_table]
    _hold(headers == [bytes([1, i, len(headers)]) for i in range(len(headers))], name, "a table's parts are numbered")
    table = b"".join(segment[15:] for segment in parts.tile_table)
    table_height, table_width, interval, num_bytes, scan_length = _SIZES.unpack_from(table)
    lengths = np.frombuffer(table, f">u{num_bytes}", offset=_SIZES.size).tolist()

    _hold((table_height, table_width) == (height, width), name, "a table has the size of the picture")
    _hold(parts.all_of(0xDD) == [struct.pack(">HHH", 0xFFDD, 4, interval)], name, "a table has the interval of DRI")
    choices = [i for i in range(1, 17) if row_mcus % i == 0 and 32 <= i * mcu_width <= 128] or [1, row_mcus]
    _hold(interval in choices, name, f"the interval, {interval}, is one of {choices}")
    _hold(len(parts.intervals) * interval == rows * row_mcus, name, "a marker follows each interval")
    _hold(len(lengths) == len(parts.restarts) + 1, name, "a table has as many lengths as there are intervals")
    _hold(lengths == [len(data) for data in parts.intervals], name, "a table's lengths are those of the intervals")
    _hold(scan_length == len(parts.scan), name, "a table has the length of the scan")
    codes = [bytes([0xFF, 0xD0 + i % 8]) for i in range(len(parts.restarts))]
    _hold(parts.restarts == codes, name, "restart markers have the right numbers")
    others = re.search(rb"\xff([^\x00]|$)", _RST.sub(b"", parts.scan))
    _hold(others is None, name, "a scan holds restart markers and no other markers")


def _check_ways_back(name: str, content: bytes, tiled: bytes, plain: bytes) -> None:
    _hold(has_tiles(tiled), name, "a tiled file has tiles")
    _hold(not has_tiles(plain), name, "an untiled file has no tiles")
    _hold(tile_jpeg(tiled) == tiled, name, "tiling twice is tiling once")
    _hold(tile_jpeg(plain) == tiled, name, "tiling undoes untiling")
    _hold(untile_jpeg(tiled) == plain, name, "untiling undoes tiling")
    _hold(untile_jpeg(plain) == plain, name, "untiling twice is untiling once")


def _check_pixels(name: str, reader: str, content: bytes, rewritten: dict[str, bytes]) -> None:
    try:
        expected = READERS[reader](content)
    except (ValueError, OSError):
        return
    for kind, file in rewritten.items():
        try:
            found = READERS[reader](file)
        except (ValueError, OSError) as error:
            raise AssertionError(f"{name}: {reader} reads the file, but not the {kind} one: {error}") from error
        _hold(np.array_equal(found, expected), name, f"{reader} finds the same pixels in the {kind} file")
