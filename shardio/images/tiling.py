"""Rewrite JPEGs so that parts of them can be decoded separately, without changing the coefficients.

A tiled JPEG has restart intervals of a few MCUs, and a table that locates them (:mod:`shardio.images.jpeg`).
So a crop can be decoded without the rest of the image. To tile a JPEG, shardio decodes its data into tokens, whose
counts determine the optimal Huffman tables, and writes the tokens. A progressive JPEG is decoded into coefficients,
which become the tokens of a baseline JPEG.

:func:`tile_jpeg` reads every code of the scan, and rejects all scans about which libjpeg would warn. It does not check
the other data that libjpeg needs: quantization tables, and the segments that determine how to convert colors. If such
data is faulty, libjpeg rejects the file or warns about it (:mod:`shardio.images.jpeg`). :func:`decodes_if_tileable`
tests conditions under which libjpeg does neither. Other files may or may not be decodable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from shardio.images.formats import opened_by_pillow
from shardio.images.jpeg import (
    ADOBE,
    ADOBE_TRANSFORM,
    JFIF,
    JFIF_MAJOR,
    MAX_SIDE,
    dump_tile_table,
    is_tile_table,
    write_harmless,
)
from shardio.images.jpeg.head import (
    APP0,
    APP2,
    APP14,
    DHT,
    DQT,
    DRI,
    EOI,
    FIRST_AC_TABLE,
    ICC_SIGNATURE,
    MAX_CODE_LENGTH,
    MAX_DC_SYMBOL,
    MAX_TABLE_ID,
    NUM_HUFFMAN_TABLES,
    SOF0,
    SOF1,
    SOF2,
    SOI,
    SOS,
    USUAL_FACTORS,
    JpegHead,
    Segment,
    marker_bytes,
    read_head,
    why_irregular,
)
from shardio.images.opening import decode_image, decode_unconverted_pil
from shardio.images.pictures import Pixels, fit_size
from shardio.kernel import require_functions
from shardio.kernel.functions import scratch
from shardio.kernel.records import (
    COMPONENT,
    DAMAGED,
    EXCESS_DATA,
    MISSING_SCANS,
    NO_END,
    OUT_OF_RANGE,
    READ_PADDING,
    RECODED,
    SCAN_READING,
    SCAN_WRITING,
    STORED_TABLE,
    UNSUPPORTED,
    WRONG_MARKER,
)

Counts = NDArray[np.int64]
"""int64 [256]: the number of occurrences of each symbol."""

TILE_WIDTH = 64
"""The preferred width of a restart interval, in pixels."""


MIN_WIDTH, MAX_WIDTH = TILE_WIDTH // 2, TILE_WIDTH * 2
"""The permitted widths of an interval, in pixels, if the row of MCUs can be divided into such intervals."""

MIN_LONE_MCU_WIDTH = 16
"""The minimum width, in pixels, of an MCU that becomes an interval by itself if the row cannot be divided this way."""

_SCAN_ERRORS = {
    DAMAGED: "damaged: the data ends early or contains an unknown code",
    EXCESS_DATA: "damaged: there is more data than the image needs",
    WRONG_MARKER: "damaged: a restart marker is missing or wrong",
    OUT_OF_RANGE: "coefficients out of range",
    NO_END: "more data after a scan",
    MISSING_SCANS: "progressive, and the last scans are missing",
    UNSUPPORTED: "progressive, of a kind that the kernel does not decode",
}

_NO_END = "damaged: the end-of-image marker is missing"

_SLACK = 64
"""The number of spare bytes in arrays copied in steps of 32 bytes, and of spare tokens for an incomplete block."""


class NotTileable(ValueError):  # noqa: N818  # An image that cannot be tiled may be intact.
    """The error for an image that cannot be tiled.

    Attributes:
        reason: The reason in a few words, identical for all images of a kind.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason.split(" (")[0]


def tile_jpeg(content: bytes) -> bytes:
    """Rewrite a JPEG without loss, with restart intervals, a tile table and optimized Huffman tables.

    All coefficients, quantization tables and metadata segments stay as they are. Tiling a tiled file changes nothing. A
    progressive file becomes a baseline file, and :func:`untile_jpeg` does not make it progressive again.

    Raises:
        NotTileable: If the image is damaged, or of a kind that cannot be tiled.
    """
    head = _read_head(content)
    return _transcode(content, head, choose_interval(head.num_mcus[1], head.mcu_size[1]))


def untile_jpeg(content: bytes) -> bytes:
    """Rewrite a JPEG without loss, with optimized Huffman tables and no restart intervals or tile table.

    The result is a baseline JPEG, even if the file was progressive, or was tiled from a progressive one.

    Raises:
        NotTileable: If the image is damaged, or of a kind that cannot be tiled.
    """
    return _transcode(content, _read_head(content), 0)


def choose_interval(row_mcus: int, mcu_width: int) -> int:
    """Return the number of MCUs in an interval, a divisor of the number of MCUs in a row.

    Args:
        row_mcus: The number of MCUs in a row.
        mcu_width: The width of an MCU in pixels.
    """
    divisors = [i for i in range(1, row_mcus + 1) if row_mcus % i == 0 and MIN_WIDTH <= i * mcu_width <= MAX_WIDTH]
    if divisors:
        return min(divisors, key=lambda i: abs(math.log(i * mcu_width / TILE_WIDTH)))
    return 1 if mcu_width >= MIN_LONE_MCU_WIDTH else row_mcus


def _read_head(content: bytes) -> JpegHead:
    try:
        head = read_head(content)
    except ValueError as error:
        raise NotTileable(f"damaged header ({error})") from error
    baseline = head._replace(process=SOF0, is_single_scan=True)
    reason = why_irregular(baseline if head.process == SOF2 else head)
    if reason is not None:
        raise NotTileable(reason)
    return head


def _transcode(content: bytes, head: JpegHead, interval: int) -> bytes:
    header = _make_scan_header(content, head)
    try:
        scan = _read_scan(content, head, header)
        tokens = read_tokens(scan, interval)
    except NotTileable:
        raise
    except ScanError as error:
        raise NotTileable(_explain(error, content, head)) from error
    except ValueError as error:
        raise NotTileable(f"damaged header ({error})") from error
    _check_end(content, len(content) - len(scan.data) + tokens.stop)
    indices = np.flatnonzero(tokens.counts.any(axis=1)).tolist()
    tables = {index: make_best_table(tokens.counts[index]) for index in indices}
    data, lengths = write_tokens(tokens, pack_tables(tables))
    segments = dump_tables(tables) + _dump_intervals(head, interval, lengths) + header
    return _join_file(content, head, segments, data)


def _make_scan_header(content: bytes, head: JpegHead) -> bytes:
    """Return the header of the recoded scan. Luma and chroma of a progressive image get separate tables."""
    _, start, stop = head.segments[-1]
    if head.process != SOF2:
        return content[start:stop]
    ids, _ = _read_components(content, head)
    body = bytes([len(ids)]) + b"".join(bytes([each, 0x11 if i else 0]) for i, each in enumerate(ids)) + b"\0\x3f\0"
    return marker_bytes(SOS) + (2 + len(body)).to_bytes(2, "big") + body


def _explain(error: ScanError, content: bytes, head: JpegHead) -> str:
    if error.outcome == EXCESS_DATA and write_harmless(content, head) is not None:
        return "padding before a marker"
    if error.outcome == NO_END and not content.endswith(marker_bytes(EOI)):
        return _NO_END
    return str(error)


def _read_scan(content: bytes, head: JpegHead, header: bytes) -> Scan:
    """Return a scan of all components, or all progressive scans. The MCU of a single component is one block (A.2.2)."""
    is_progressive, num_mcus, num_components = head.process == SOF2, math.prod(head.num_mcus), len(head.factors)
    if num_mcus > 8 * len(content):  # Each MCU takes at least one bit. This check saves memory for small files.
        raise NotTileable(f"{_SCAN_ERRORS[DAMAGED]} (there are more MCUs than bits)")
    tables = {} if is_progressive else read_tables(content, head)
    num_blocks = [1] if num_components == 1 else [across * down for across, down in head.factors]
    table_ids = header[6 : 6 + 2 * num_components : 2]
    dc_ids, ac_ids = [ids >> 4 for ids in table_ids], [ids & 15 for ids in table_ids]
    if max(*dc_ids, *ac_ids) > MAX_TABLE_ID:
        raise NotTileable(f"damaged header (the scan names a Huffman table above {MAX_TABLE_ID})")
    used = {*dc_ids, *(FIRST_AC_TABLE + table_id for table_id in ac_ids)}
    if not (used <= tables.keys() or is_progressive):
        raise NotTileable("a missing Huffman table")
    components = np.zeros(num_components, COMPONENT)
    components["dc_table"], components["ac_table"] = dc_ids, FIRST_AC_TABLE + np.array(ac_ids)
    return Scan(
        data=np.frombuffer(content, np.uint8, offset=0 if is_progressive else head.scan_start),
        tables=pack_tables({index: table for index, table in tables.items() if index in used}),
        components=components,
        blocks=np.repeat(np.arange(num_components), num_blocks),
        num_mcus=num_mcus,
        interval=head.restart_interval,
        is_progressive=is_progressive,
    )


def _check_end(content: bytes, stop: int) -> None:
    while content[stop : stop + 2] == b"\xff\xff":  # Fill bytes (B.1.1.2).
        stop += 1
    if content[stop : stop + 2] != marker_bytes(EOI):
        is_truncated = stop + 2 > len(content)
        raise NotTileable(_NO_END if is_truncated else "more data after the scan")
    if stop + 2 != len(content):
        raise NotTileable("bytes after the end of the image")


def _dump_intervals(head: JpegHead, interval: int, lengths: NDArray[np.int64]) -> bytes:
    if not interval:
        return b""
    try:
        table = dump_tile_table(head.height, head.width, interval, lengths)
    except ValueError as error:
        raise NotTileable(f"too many intervals for a tile table ({error})") from error
    return marker_bytes(DRI) + b"\0\4" + interval.to_bytes(2, "big") + table


def _join_file(content: bytes, head: JpegHead, new_segments: bytes, data: bytes) -> bytes:
    # 16-bit quantization tables are not baseline (B.2.4.1). libjpeg writes such files as extended sequential JPEGs.
    sequential = SOF1 if any(_read_quantizers(content, head).values()) else SOF0
    kept = [
        marker_bytes(sequential if segment.marker == SOF2 else segment.marker)
        + content[segment.start + 2 : segment.stop]
        for segment in head.segments[:-1]
        if segment.marker not in {DHT, DRI} and not is_tile_table(content, segment)
    ]
    return b"".join([marker_bytes(SOI), *kept, new_segments, data, marker_bytes(EOI)])


class HuffmanTable(NamedTuple):
    """A Huffman table as stored in a DHT segment (B.2.4.2).

    Attributes:
        lengths: 16 bytes: the number of codes of each length, 1 to 16 bits.
        symbols: The symbols in the order of their codes.
    """

    lengths: bytes
    symbols: bytes


def read_tables(content: bytes, head: JpegHead) -> dict[int, HuffmanTable]:
    """Return the tables in effect when the scan begins, by index: DC 0 to 3, then AC 0 to 3.

    Raises:
        ValueError: If a DHT segment is damaged.
    """
    tables = {}
    for segment in head.segments:
        if segment.marker != DHT:
            continue
        offset = segment.payload_start
        while offset < segment.stop:
            is_ac, table_id = content[offset] >> 4, content[offset] & 15
            lengths = content[offset + 1 : offset + 1 + MAX_CODE_LENGTH]
            stop = offset + 1 + MAX_CODE_LENGTH + sum(lengths)
            symbols = content[offset + 1 + MAX_CODE_LENGTH : stop]
            is_named = is_ac <= 1 and table_id <= MAX_TABLE_ID
            is_too_long = stop > segment.stop or len(symbols) > 256
            if not is_named or is_too_long or (not is_ac and max(symbols, default=0) > MAX_DC_SYMBOL):
                raise ValueError(f"the Huffman table at byte {offset} is damaged")
            tables[FIRST_AC_TABLE * is_ac + table_id] = HuffmanTable(lengths, symbols)
            offset = stop
    return tables


def dump_tables(tables: dict[int, HuffmanTable]) -> bytes:
    """Return a DHT segment with the tables, which are given by index."""
    body = b"".join(
        bytes([(index // FIRST_AC_TABLE) << 4 | index % FIRST_AC_TABLE]) + table.lengths + table.symbols
        for index, table in sorted(tables.items())
    )
    return marker_bytes(DHT) + (2 + len(body)).to_bytes(2, "big") + body


def pack_tables(tables: dict[int, HuffmanTable]) -> NDArray[np.void]:
    """Convert Huffman tables, given by index, to the form that the kernel uses, STORED_TABLE [8].

    Raises:
        ValueError: If a table has more codes than its lengths allow.
    """
    packed = np.zeros(NUM_HUFFMAN_TABLES, STORED_TABLE)
    for index, (lengths, symbols) in tables.items():
        code = 0
        for length, num_codes in enumerate(lengths, 1):
            # The code that consists only of ones stays unused (C.2).
            if code + num_codes > (1 << length) - (num_codes > 0):
                raise ValueError("a Huffman table has more codes than its lengths allow")
            code = (code + num_codes) << 1
        packed[index] = np.frombuffer(lengths, np.uint8), np.frombuffer(symbols.ljust(256, b"\0"), np.uint8)
    return packed


def make_best_table(counts: Counts) -> HuffmanTable:
    """Return the Huffman table for symbols with these counts, built as in K.2 and libjpeg.

    The table needs the fewest bits, except that one code stays unused, and codes longer than 16 bits are shortened.
    """
    return HuffmanTable(*require_functions().make_best_table(counts))


class Scan(NamedTuple):
    """A scan to recode, or all scans of a progressive image.

    Attributes:
        data: uint8, the file from the first byte of the scan; the whole file if it is progressive.
        tables: STORED_TABLE [8], the scan's Huffman tables.
        components: COMPONENT [components].
        blocks: int64 [blocks per MCU], the index of each block's component.
        num_mcus: The number of MCUs in the scan.
        interval: The number of MCUs between restart markers; 0 if there are none.
        is_progressive: Whether the image is progressive; if it is, ``tables`` and ``interval`` are not used.
    """

    data: NDArray[np.uint8]
    tables: NDArray[np.void]
    components: NDArray[np.void]
    blocks: NDArray[np.int64]
    num_mcus: int
    interval: int
    is_progressive: bool


class Tokens(NamedTuple):
    """A scan, decoded into symbols and the bits that follow their codes.

    Attributes:
        tokens: uint32 [tokens], valid until this thread reads the next scan.
        stops: int64 [intervals], the index after the last token of each restart interval.
        counts: int64 [8, 256], the number of occurrences of each symbol in each Huffman table.
        stop: The offset of the end of the scan in the data.
    """

    tokens: NDArray[np.uint32]
    stops: NDArray[np.int64]
    counts: NDArray[np.int64]
    stop: int


class ScanError(ValueError):
    """The error for a scan whose data violates the standard or the limits of a baseline image.

    Attributes:
        outcome: The problem, such as DAMAGED.
    """

    def __init__(self, outcome: int, where: str) -> None:
        super().__init__(f"{_SCAN_ERRORS[outcome]} ({where})")
        self.outcome = outcome


def read_tokens(scan: Scan, interval: int) -> Tokens:
    """Read a scan so that it can be written with a different restart interval.

    Args:
        scan: The scan.
        interval: The number of MCUs between restart markers in the data to write; 0 for none.

    Raises:
        ScanError: If the scan cannot be recoded.
    """
    num_intervals = -(-scan.num_mcus // interval) if interval else 1
    num_blocks = scan.num_mcus * len(scan.blocks)
    # A token has at least one bit, and a block has at most 64 tokens. In a progressive file, an AC coefficient has at
    # least two bits, and a block has at most five other tokens: DC, three runs and the end. Each interval may have one
    # more token.
    max_tokens = 5 * num_blocks + 4 * len(scan.data) if scan.is_progressive else 8 * len(scan.data)
    max_tokens = min(max_tokens, 64 * num_blocks) + num_intervals + _SLACK
    coefficients = scratch("coefficients", 128 * num_blocks if scan.is_progressive else 0)
    tokens = scratch("tokens", 4 * max_tokens).view(np.uint32)
    unstuffed = scratch("scan", len(scan.data) + READ_PADDING)
    stops = np.empty(num_intervals, np.int64)
    counts = np.empty((NUM_HUFFMAN_TABLES, 256), np.int64)
    call = np.zeros(1, SCAN_READING)
    call[0] = (
        *(scan.data.ctypes.data, len(scan.data), scan.tables.ctypes.data),
        *(scan.components.ctypes.data, len(scan.components), scan.blocks.ctypes.data, len(scan.blocks)),
        *(scan.num_mcus, scan.interval, interval, unstuffed.ctypes.data, coefficients.ctypes.data),
        *(counts.ctypes.data, tokens.ctypes.data, stops.ctypes.data, 0, 0, 0, 0),
    )
    functions = require_functions()
    read = functions.read_progressive if scan.is_progressive else functions.read_scan
    read(call.ctypes.data)
    result = call[0]
    if result["outcome"] != RECODED:
        reached = result["reached"]
        where = f"in scan {reached + 1}" if scan.is_progressive else f"in MCU {reached} of {scan.num_mcus}"
        raise ScanError(int(result["outcome"]), where)
    return Tokens(tokens[: result["num_tokens"]], stops, counts, int(result["stop"]))


def write_tokens(tokens: Tokens, tables: NDArray[np.void]) -> tuple[bytes, NDArray[np.int64]]:
    """Write a scan.

    Args:
        tokens: The scan.
        tables: STORED_TABLE [8], with codes for all symbols of the scan.

    Returns:
        The data, and the number of bytes in each restart interval, without its marker, int64 [intervals].
    """
    num_tokens, num_intervals = len(tokens.tokens), len(tokens.stops)
    # A token has at most 27 bits. At worst, each byte is 0xFF and is followed by a stuffed 0; an interval ends in a
    # partial byte and a marker.
    data = scratch("recoded", 8 * num_tokens + 4 * num_intervals + _SLACK)
    lengths = np.empty(num_intervals, np.int64)
    call = np.zeros(1, SCAN_WRITING)
    call[0] = (
        *(tokens.tokens.ctypes.data, tokens.stops.ctypes.data, num_intervals, tables.ctypes.data),
        *(data.ctypes.data, lengths.ctypes.data, 0),
    )
    require_functions().write_scan(call.ctypes.data)
    return data[: call[0]["size"]].tobytes(), lengths


def decodes_if_tileable(content: bytes, *, max_pixels: int) -> bool:
    """Return whether :func:`shardio.images.decode_image` is certain to decode a JPEG that can be tiled.

    Args:
        content: A JPEG that :func:`tile_jpeg` has tiled without an error.
        max_pixels: The maximum number of pixels.
    """
    head = read_head(content)
    if not (max(head.height, head.width) <= MAX_SIDE and head.height * head.width <= max_pixels):
        return False
    ids, quantizers = _read_components(content, head)
    if len(set(ids)) < len(ids) or (len(ids) > 1 and head.factors not in USUAL_FACTORS):
        return False
    return quantizers <= _read_quantizers(content, head).keys() and _has_known_colors(content, head)


def _read_components(content: bytes, head: JpegHead) -> tuple[bytes, set[int]]:
    """Return the identifiers of the components, and the numbers of their quantization tables (B.2.2)."""
    first = head.frame_start + 10
    stop = first + 3 * len(head.factors)
    return content[first:stop:3], set(content[first + 2 : stop : 3])


def _read_quantizers(content: bytes, head: JpegHead) -> dict[int, int]:
    """Return the precision of each quantization table (0 means 8 bits), or {} if a segment is damaged (B.2.4.1)."""
    precisions = {}
    for segment in _find_segments(head, DQT):
        offset = segment.payload_start
        while offset < segment.stop:
            precision, table_id = content[offset] >> 4, content[offset] & 15
            offset += 1 + 64 * (1 + precision)
            if precision > 1 or table_id > MAX_TABLE_ID or offset > segment.stop:
                return {}
            precisions[table_id] = precision
    return precisions


def _has_known_colors(content: bytes, head: JpegHead) -> bool:
    for segment in _find_segments(head, APP0, APP14):
        payload = content[segment.payload_start : segment.stop]
        if payload.startswith(JFIF) and payload[JFIF_MAJOR : JFIF_MAJOR + 1] != b"\1":
            return False
        if payload.startswith(ADOBE) and payload[ADOBE_TRANSFORM : ADOBE_TRANSFORM + 1] not in (b"\0", b"\1"):
            return False
    return has_whole_profile(content, head)


def has_whole_profile(content: bytes, head: JpegHead) -> bool:
    """Return whether a JPEG's color profile is complete or absent. libjpeg warns about other profiles."""
    start = len(ICC_SIGNATURE)
    parts = [content[segment.payload_start + start : segment.stop] for segment in _find_profile(content, head)]
    # Each part begins with its one-based number and the number of parts (ICC.1:2022, B.4).
    numbers = [bytes([i, len(parts)]) for i in range(1, len(parts) + 1)] if len(parts) < 256 else []
    return sorted(part[:2] for part in parts) == numbers and (not parts or any(len(part) > 2 for part in parts))


def _find_profile(content: bytes, head: JpegHead) -> Iterator[Segment]:
    segments = _find_segments(head, APP2)
    return (segment for segment in segments if content.startswith(ICC_SIGNATURE, segment.payload_start))


def _find_segments(head: JpegHead, *markers: int) -> Iterator[Segment]:
    return (segment for segment in head.segments if segment.marker in markers)


def reencode_jpeg(
    content: bytes,
    *,
    max_side: int | None,
    quality: int,
    max_pixels: int,
    min_side: int | None = None,
    to_srgb: bool = False,
) -> bytes:
    """Decode a JPEG, turn it upright, shrink it, and encode it as a tiled JPEG.

    Color is stored as 4:2:0, and gray stays gray. CMYK becomes RGB and loses its color profile; other images keep their
    profiles. All other metadata is dropped.

    Args:
        content: A JPEG file.
        max_side: The maximum length of the longer side in pixels, or None for no limit. Larger images are shrunk by
            area averaging.
        quality: 1 to 100, on libjpeg's scale.
        max_pixels: The maximum number of pixels.
        min_side: The maximum length of the shorter side in pixels, or None for no limit.
        to_srgb: Whether to convert the colors from the profile to sRGB, before shrinking, and to drop the profile.

    Raises:
        ValueError: If the image is damaged or too large, or if its profile is needed but damaged.
    """
    pixels = decode_image(content, orientation="apply", max_pixels=max_pixels)
    head = read_head(content)
    if to_srgb:
        pixels = _convert_to_srgb(content, pixels, max_pixels)
    pixels = _shrink(pixels, fit_size(pixels.shape[0], pixels.shape[1], max_side, min_side))
    if len(head.factors) == 1:
        encoded = simplejpeg.encode_jpeg(pixels[..., :1].copy(), quality, "GRAY", "Gray")
    else:
        encoded = simplejpeg.encode_jpeg(pixels, quality, "RGB", "420")
    is_kept = not to_srgb and len(head.factors) < 4  # A CMYK profile does not apply to RGB.
    profile = _read_profile(content, head) if is_kept else b""
    return tile_jpeg(_insert_segments(encoded, profile))


def _convert_to_srgb(content: bytes, pixels: Pixels, max_pixels: int) -> Pixels:
    import PIL.Image  # Pillow is imported only when an image needs it: see crop_plan.py.

    from shardio.images.converting import convert_to_srgb, read_profile

    with opened_by_pillow(content) as stored:
        profile, mode = read_profile(stored), stored.mode
    if profile is None:
        return pixels
    if mode == "CMYK":
        image = decode_unconverted_pil(content, orientation="apply", max_pixels=max_pixels)
    else:
        image = PIL.Image.fromarray(pixels if mode == "RGB" else pixels[..., 0].copy())
    return np.array(convert_to_srgb(image, profile).convert("RGB"))


def _shrink(pixels: Pixels, size: tuple[int, int] | None) -> Pixels:
    if size is None:
        return pixels
    import cv2  # Imported here because importing OpenCV takes 0.1 s, and only re-encoding needs it.

    return cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_AREA)  # type: ignore[return-value]  # uint8 stays uint8


def _read_profile(content: bytes, head: JpegHead) -> bytes:
    if not has_whole_profile(content, head):
        return b""
    return b"".join(content[segment.start : segment.stop] for segment in _find_profile(content, head))


def _insert_segments(content: bytes, segments: bytes) -> bytes:
    first = read_head(content).segments[0]
    stop = first.stop if first.marker == APP0 else len(marker_bytes(SOI))
    return content[:stop] + segments + content[stop:]
