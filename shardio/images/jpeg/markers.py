"""The head of a JPEG file: its segments up to the entropy-coded data (ITU-T T.81, annex B)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

SOI, EOI, SOS, DQT, DHT, DRI, DAC = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xDD, 0xCC
SOF0, SOF1, SOF2, SOF9 = 0xC0, 0xC1, 0xC2, 0xC9
RST0 = 0xD0
APP0, APP1, APP2, APP9, APP14, COM = 0xE0, 0xE1, 0xE2, 0xE9, 0xEE, 0xFE

FRAME_MARKERS = frozenset({*range(0xC0, 0xD0)} - {DHT, 0xC8, DAC})
"""SOF0 … SOF15: C4 is DHT, C8 is reserved, CC is DAC (table B.1)."""

_KNOWN = FRAME_MARKERS | {DHT, DAC, DQT, DRI, SOS, COM, *range(APP0, APP0 + 16)}
"""What may stand before the image data (table B.1); files with anything else are left to libjpeg, which knows or
refuses them."""

MAX_BLOCKS_IN_MCU = 10
"""Of an interleaved scan (B.2.3)."""


class Segment(NamedTuple):
    """A marker segment: its marker, where its 0xFF lies, and where the next segment begins."""

    marker: int
    start: int
    stop: int

    @property
    def payload_start(self) -> int:
        """Where the bytes after the marker and the length begin."""
        return self.start + 4


Factors = tuple[tuple[int, int], ...]
"""The sampling factors of each component of a frame, across and down."""


class JpegHead(NamedTuple):
    """What stands before a JPEG's first entropy-coded data.

    Attributes:
        segments: In order, up to and with the first SOS.
        process: The frame's marker: SOF0 is baseline, SOF1 extended sequential, SOF2 progressive.
        precision: Bits a sample.
        height: In pixels; 0 where a DNL segment tells it later.
        width: In pixels.
        factors: Of the components of the frame.
        sampling: The largest sampling factors, across and down; (1, 1) for one component, whose MCU is one block
            (A.2.2).
        is_subsampled: Whether some component has fewer samples than the picture has pixels, across and down.
        frame_start: Where the frame header's 0xFF lies.
        restart_interval: In MCUs; 0 where there are no restart markers.
        scan_start: Where the entropy-coded data begins.
        is_single_scan: Whether the first scan holds all components, whole.
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
        """The MCU rows, and the MCUs in each."""
        mcu_height, mcu_width = self.mcu_size
        return -(-self.height // mcu_height), -(-self.width // mcu_width)


def read_head(content: bytes) -> JpegHead:
    """Parse the segments of a JPEG by their lengths.

    Raises:
        ValueError: If the bytes do not follow the standard; the message says what is wrong, and where.
    """
    try:
        return _parse(content)
    except IndexError:
        raise ValueError(f"the JPEG ends after {len(content)} bytes, before any image data") from None


def why_irregular(head: JpegHead) -> str | None:
    """Return why an image cannot be decoded in parts, or None if it can.

    In parts means: baseline or extended sequential Huffman coding, 8 bits, 1 or 3 components in one scan. The
    answers are few and short, so that they can be counted.
    """
    if head.process not in (SOF0, SOF1):
        return "progressive" if head.process == SOF2 else f"coded by process SOF{head.process - SOF0}"
    if head.precision != 8:
        return f"{head.precision} bits a sample"
    if len(head.factors) not in (1, 3):
        return f"{len(head.factors)} components"
    if not head.is_single_scan:
        return "several scans"
    if head.height == 0:
        return "no height in the frame header"
    if head.width == 0:
        return "no width in the frame header"
    return _why_odd(head.factors)


@lru_cache(maxsize=256)
def _why_odd(factors: Factors) -> str | None:
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
    position, end = 2, len(content)
    while True:
        start = position
        if content[position] != 0xFF:
            raise ValueError(f"a marker is expected at byte {position}, and there is 0x{content[position]:02x}")
        while content[position + 1] == 0xFF:  # Fill bytes (B.1.1.2).
            position += 1
        marker = content[position + 1]
        if marker not in _KNOWN:
            raise ValueError(
                f"marker 0x{marker:02x} at byte {start} is not one that is known to stand before image data"
            )
        length = content[position + 2] << 8 | content[position + 3]
        stop = position + 2 + length
        if length < 2 or stop > end:
            raise ValueError(f"the segment of marker 0x{marker:02x} at byte {start} is longer than the file")
        segments.append(Segment(marker, position, stop))
        if marker in FRAME_MARKERS:
            if frame_start:
                raise ValueError(f"there is a second frame header at byte {start}")
            frame_start, frame_stop = position, stop
        elif marker == DAC:
            conditioning_start = start
        elif marker == DRI:
            if length != 4:
                raise ValueError(f"the segment with the restart interval at byte {start} has {length} bytes, not 4")
            restart_interval = content[position + 4] << 8 | content[position + 5]
        elif marker == SOS:
            break
        position = stop
    if not frame_start:
        raise ValueError(f"there is no frame header before the image data at byte {stop}")
    if conditioning_start and content[frame_start + 1] < SOF9:
        raise ValueError(f"marker 0x{DAC:02x} at byte {conditioning_start} is none of Huffman coding")
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
        _is_whole_scan(content, position, stop, ids),
    )


def _read_components(content: bytes, start: int, stop: int) -> tuple[bytes, Factors]:
    """Return the numbers and the sampling factors of the components of a frame header (B.2.2)."""
    first, num_components = start + 10, content[start + 9]
    if stop != first + 3 * num_components or not num_components:
        raise ValueError(f"the frame header at byte {start} does not have the length of {num_components} components")
    factors = tuple([(byte >> 4, byte & 15) for byte in content[first + 1 : stop : 3]])
    for across, down in factors:
        if not (1 <= across <= 4 and 1 <= down <= 4):
            raise ValueError(f"the frame header at byte {start} has sampling factors outside of 1 to 4")
    return content[first:stop:3], factors


def _is_whole_scan(content: bytes, start: int, stop: int, ids: bytes) -> bool:
    """Say whether a scan holds all components, and all coefficients without approximation (B.2.3)."""
    num_components = content[start + 4]
    if stop != start + 8 + 2 * num_components:
        raise ValueError(f"the scan header at byte {start} does not have the length of {num_components} components")
    return content[start + 5 : stop - 3 : 2] == ids and content[stop - 3 : stop] == b"\x00\x3f\x00"


@lru_cache(maxsize=256)
def _is_subsampled(factors: Factors) -> tuple[bool, bool]:
    across, down = _largest(factors)
    return any(a < across for a, _ in factors), any(d < down for _, d in factors)
