"""The constants of the JPEG standard, and the head of a JPEG file: its segments up to the entropy-coded data (annex B).

The standard is ITU-T Recommendation T.81 (ISO/IEC 10918-1). Where comments in :mod:`shardio.images` name a section,
table, figure or annex without a source, they refer to this standard.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

# The second bytes of markers; the first is 0xFF (table B.1).
SOI, EOI, SOS, DQT, DHT, DRI, DAC, COM = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xDD, 0xCC, 0xFE
SOF0, SOF1, SOF2, SOF9, JPG = 0xC0, 0xC1, 0xC2, 0xC9, 0xC8
APP0, APP1, APP2, APP9, APP14, APP15 = 0xE0, 0xE1, 0xE2, 0xE9, 0xEE, 0xEF
RST0 = 0xD0
"""The first of eight restart markers, which are used in rotation: RST0 + i % 8 (E.1.4)."""

FRAME_MARKERS = frozenset(range(SOF0, SOF0 + 16)) - {DHT, JPG, DAC}
"""SOF0 to SOF15, without the three markers in that range that mean something else."""

MAX_SEGMENT_LENGTH = 65535
"""The maximum length of a segment in bytes, without its marker but with its two length bytes (B.1.1.4)."""

MAX_BLOCKS_IN_MCU = 10
"""The maximum number of blocks in an MCU, in a scan of several components (B.2.3)."""

USUAL_FACTORS = frozenset((luma, (1, 1), (1, 1)) for luma in [(1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (1, 4)])
"""Sampling factors of 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:4:1."""

MAX_TABLE_ID = 3
"""Quantization tables are numbered 0 to 3, and so are DC and AC Huffman tables (B.2.4)."""

FIRST_AC_TABLE = 4
NUM_HUFFMAN_TABLES = 8
"""The tables that a scan can name, in one sequence: DC 0 to 3, then AC 0 to 3."""

MAX_CODE_LENGTH = 16
"""The maximum length of a Huffman code in bits (C.1)."""

MAX_DC_SIZE, MAX_AC_SIZE = 11, 10
"""The maximum sizes in bits of a DC difference and an AC coefficient of 8-bit baseline images (tables F.1 and F.2)."""

MAX_DC = 2047
"""The largest absolute value of a DC coefficient. The sum of the differences must fit into 12 bits."""

MAX_DC_SYMBOL = 15
"""The largest DC symbol. libjpeg refuses tables with larger symbols, even if the scan does not use them (jdhuff.c)."""

ICC_SIGNATURE = b"ICC_PROFILE\0"
"""The beginning of an APP2 segment that contains a part of a color profile (ICC.1:2022, annex B.4)."""

EOB, ZRL = 0x00, 0xF0
"""The AC symbols for the end of the block and for sixteen zeros (F.1.2.2)."""

NATURAL_ORDER = np.array(
    [
        *(0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5),
        *(12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28),
        *(35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51),
        *(58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63),
    ],
    np.int64,
)
"""int64 [64]: the index in a block, row by row, of each coefficient of the zigzag sequence (figure A.6)."""


def marker_bytes(marker: int) -> bytes:
    """Return a marker as it appears in a file."""
    return bytes([0xFF, marker])


JPEG_START = marker_bytes(SOI) + b"\xff"
"""The first bytes of a JPEG file: SOI and the start of another marker (B.2.1)."""

_KNOWN = FRAME_MARKERS | {DHT, DAC, DQT, DRI, SOS, COM, *range(APP0, APP15 + 1)}
"""Markers that may precede the image data. Files with other markers are left to libjpeg."""


class Segment(NamedTuple):
    """A marker segment: its marker, the offset of the marker's 0xFF, and the offset of the next segment."""

    marker: int
    start: int
    stop: int

    @property
    def payload_start(self) -> int:
        """The offset of the first byte after the marker and the length."""
        return self.start + 4


Factors = tuple[tuple[int, int], ...]
"""The horizontal and vertical sampling factors of each component of a frame."""


class JpegHead(NamedTuple):
    """The contents of a JPEG before its first entropy-coded data.

    Attributes:
        segments: The segments in order, up to and including the first SOS.
        process: The frame's marker: SOF0 is baseline, SOF1 extended sequential, SOF2 progressive.
        precision: Bits per sample.
        height: The height in pixels; 0 if a DNL segment specifies it later.
        width: The width in pixels.
        factors: The sampling factors of the frame's components.
        sampling: The largest horizontal and vertical sampling factors; (1, 1) for a single component, whose MCU is one
            block (A.2.2).
        is_subsampled: Two flags, horizontal and vertical: whether any component has fewer samples than the image has
            pixels in that direction.
        frame_start: The offset of the frame header's 0xFF.
        restart_interval: The restart interval in MCUs; 0 if there are no restart markers.
        scan_start: The offset of the first entropy-coded byte.
        is_single_scan: Whether the first scan holds all coefficients of all components.
    """

    segments: list[Segment]
    process: int
    precision: int
    height: int
    width: int
    factors: Factors
    sampling: tuple[int, int]
    is_subsampled: tuple[bool, bool]
    frame_start: int
    restart_interval: int
    scan_start: int
    is_single_scan: bool

    @property
    def mcu_size(self) -> tuple[int, int]:
        """The height and width of an MCU in pixels."""
        across, down = self.sampling
        return 8 * down, 8 * across

    @property
    def num_mcus(self) -> tuple[int, int]:
        """The number of MCU rows, and the number of MCUs in each row."""
        mcu_height, mcu_width = self.mcu_size
        return -(-self.height // mcu_height), -(-self.width // mcu_width)


def read_head(content: bytes) -> JpegHead:
    """Parse the segments of a JPEG that precede its image data.

    Raises:
        ValueError: If the bytes violate the standard. The message names the violation and its offset.
    """
    try:
        return _parse(content)
    except IndexError:
        raise ValueError(f"the JPEG ends after {len(content)} bytes, before any image data") from None


def why_irregular(head: JpegHead) -> str | None:
    """Return the reason why parts of an image cannot be decoded separately, or None if they can.

    Decoding parts separately requires baseline or extended sequential Huffman coding, 8 bits per sample, and 1 or 3
    components in one scan. There are only a few distinct reasons, all short, so callers can count images by reason.
    """
    if head.process not in (SOF0, SOF1):
        return "progressive" if head.process == SOF2 else f"coded by process SOF{head.process - SOF0}"
    if head.precision != 8:
        return f"{head.precision} bits per sample"
    if len(head.factors) not in (1, 3):
        return f"{len(head.factors)} components"
    if not head.is_single_scan:
        return "several scans"
    if head.height == 0:
        return "no height in the frame header"
    if head.width == 0:
        return "no width in the frame header"
    return _why_unsupported(head.factors)


@lru_cache(maxsize=256)
def _why_unsupported(factors: Factors) -> str | None:
    if len(factors) == 1:
        return None
    across, down = _largest(factors)
    if any(across % a or down % d for a, d in factors):
        return "fractional sampling factors"
    if sum(a * d for a, d in factors) > MAX_BLOCKS_IN_MCU:
        return f"more than {MAX_BLOCKS_IN_MCU} blocks in an MCU"
    return None


@lru_cache(maxsize=256)
def _largest(factors: Factors) -> tuple[int, int]:
    return max(a for a, _ in factors), max(d for _, d in factors)


def _parse(content: bytes) -> JpegHead:
    if content[0] != 0xFF or content[1] != SOI:
        raise ValueError("the file does not begin with a JPEG's SOI marker")
    segments: list[Segment] = []
    frame_start = restart_interval = conditioning_start = 0
    offset, end = 2, len(content)
    while True:
        start = offset
        if content[offset] != 0xFF:
            raise ValueError(f"expected a marker at byte {offset}, got 0x{content[offset]:02x}")
        while content[offset + 1] == 0xFF:  # Fill bytes (B.1.1.2).
            offset += 1
        marker = content[offset + 1]
        if marker not in _KNOWN:
            raise ValueError(f"marker 0x{marker:02x} at byte {start} is not expected before the image data")
        length = content[offset + 2] << 8 | content[offset + 3]
        stop = offset + 2 + length
        if length < 2 or stop > end:
            raise ValueError(
                f"the segment of marker 0x{marker:02x} at byte {start} has a length of {length} bytes, "
                f"expected 2 to {end - offset - 2}"
            )
        segments.append(Segment(marker, offset, stop))
        if marker in FRAME_MARKERS:
            if frame_start:
                raise ValueError(f"there is a second frame header at byte {start}")
            frame_start, frame_stop = offset, stop
        elif marker == DAC:
            conditioning_start = start
        elif marker == DRI:
            if length != 4:
                raise ValueError(f"the restart interval's segment at byte {start} has {length} bytes, expected 4")
            restart_interval = content[offset + 4] << 8 | content[offset + 5]
        elif marker == SOS:
            break
        offset = stop
    if not frame_start:
        raise ValueError(f"there is no frame header before the image data at byte {stop}")
    if conditioning_start and content[frame_start + 1] < SOF9:
        raise ValueError(
            f"marker 0x{DAC:02x} at byte {conditioning_start} belongs to arithmetic coding, "
            "but the image is Huffman-coded"
        )
    ids, factors = _read_components(content, frame_start, frame_stop)
    across, down = _largest(factors) if len(factors) > 1 else (1, 1)
    return JpegHead(
        segments,
        content[frame_start + 1],
        content[frame_start + 4],
        content[frame_start + 5] << 8 | content[frame_start + 6],
        content[frame_start + 7] << 8 | content[frame_start + 8],
        factors,
        (across, down),
        _is_subsampled(factors),
        frame_start,
        restart_interval,
        stop,
        _is_complete_scan(content, offset, stop, ids),
    )


def _read_components(content: bytes, start: int, stop: int) -> tuple[bytes, Factors]:
    """Return the identifiers and the sampling factors of the components of a frame header (B.2.2)."""
    first, num_components = start + 10, content[start + 9]
    if stop != first + 3 * num_components or not num_components:
        raise ValueError(
            f"the frame header at byte {start} has {stop - start} bytes, the wrong size for {num_components} components"
        )
    factors = tuple([(byte >> 4, byte & 15) for byte in content[first + 1 : stop : 3]])
    for across, down in factors:
        if not (1 <= across <= 4 and 1 <= down <= 4):
            raise ValueError(f"the frame header at byte {start} has sampling factors outside 1 to 4")
    return content[first:stop:3], factors


def _is_complete_scan(content: bytes, start: int, stop: int, ids: bytes) -> bool:
    """Return whether a scan holds all components and all coefficients without approximation (B.2.3)."""
    num_components = content[start + 4]
    if stop != start + 8 + 2 * num_components:
        raise ValueError(
            f"the scan header at byte {start} has {stop - start} bytes, the wrong size for {num_components} components"
        )
    return content[start + 5 : stop - 3 : 2] == ids and content[stop - 3 : stop] == b"\x00\x3f\x00"


@lru_cache(maxsize=256)
def _is_subsampled(factors: Factors) -> tuple[bool, bool]:
    across, down = _largest(factors)
    return any(a < across for a, _ in factors), any(d < down for _, d in factors)
