"""The head of a JPEG file: its segments up to the entropy-coded data (ITU-T T.81, annex B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SOI, EOI, SOS, DQT, DHT, DRI, DNL = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xDD, 0xDC
SOF0, SOF1, SOF2 = 0xC0, 0xC1, 0xC2
RST0 = 0xD0
APP0, APP1, APP2, APP9, APP14, COM = 0xE0, 0xE1, 0xE2, 0xE9, 0xEE, 0xFE

FRAME_MARKERS = frozenset({*range(0xC0, 0xD0)} - {DHT, 0xC8, 0xCC})
"""SOF0 … SOF15: C4 is DHT, C8 is reserved, CC is DAC (table B.1)."""

_STANDALONE = frozenset({0x01, SOI, EOI, *range(RST0, RST0 + 8)})

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


class Component(NamedTuple):
    """A component of the frame: its number and its sampling factors."""

    component_id: int
    across: int
    down: int


@dataclass(frozen=True, slots=True)
class JpegHead:
    """What stands before a JPEG's first entropy-coded data.

    Attributes:
        segments: In order, up to and with the first SOS.
        process: The frame's marker: SOF0 is baseline, SOF1 extended sequential, SOF2 progressive.
        precision: Bits a sample.
        height: In pixels; 0 where a DNL segment tells it later.
        width: In pixels.
        components: Of the frame.
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
    components: list[Component]
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
    if len(head.components) not in (1, 3):
        return f"{len(head.components)} components"
    if not head.is_single_scan:
        return "several scans"
    if head.height == 0:
        return "no height in the frame header"
    across, down = head.sampling
    if any(across % c.across or down % c.down for c in head.components) and len(head.components) > 1:
        return "fractional sampling factors"
    if len(head.components) > 1 and sum(c.across * c.down for c in head.components) > MAX_BLOCKS_IN_MCU:
        return f"more than {MAX_BLOCKS_IN_MCU} blocks in an MCU"
    return None


def _parse(content: bytes) -> JpegHead:
    if content[0] != 0xFF or content[1] != SOI:
        raise ValueError("the file does not begin with a JPEG's SOI marker")
    segments: list[Segment] = []
    frame: Segment | None = None
    restart_interval = 0
    position = 2
    while True:
        start = position
        if content[position] != 0xFF:
            raise ValueError(f"a marker is expected at byte {position}, and there is 0x{content[position]:02x}")
        while content[position + 1] == 0xFF:  # Fill bytes (B.1.1.2).
            position += 1
        marker = content[position + 1]
        if marker in _STANDALONE or marker == 0:
            raise ValueError(f"marker 0x{marker:02x} at byte {start} has no place before the image data")
        length = content[position + 2] << 8 | content[position + 3]
        segment = Segment(marker, position, position + 2 + length)
        if length < 2 or segment.stop > len(content):
            raise ValueError(f"the segment of marker 0x{marker:02x} at byte {start} is longer than the file")
        segments.append(segment)
        position = segment.stop
        if marker in FRAME_MARKERS:
            if frame is not None:
                raise ValueError(f"there is a second frame header at byte {start}")
            frame = segment
        elif marker == DRI:
            restart_interval = content[segment.start + 4] << 8 | content[segment.start + 5]
        elif marker == SOS:
            break
    if frame is None:
        raise ValueError(f"there is no frame header before the image data at byte {position}")
    at = frame.start
    components = [
        Component(content[i], content[i + 1] >> 4, content[i + 1] & 15)
        for i in range(at + 10, at + 10 + 3 * content[at + 9], 3)
    ]
    if frame.stop != at + 10 + 3 * len(components) or not components:
        raise ValueError(f"the frame header at byte {at} does not have the length of {len(components)} components")
    if any(not (1 <= c.across <= 4 and 1 <= c.down <= 4) for c in components):
        raise ValueError(f"the frame header at byte {at} has sampling factors outside of 1 to 4")
    across = down = 1
    if len(components) > 1:
        across, down = max([c.across for c in components]), max([c.down for c in components])
    scan = segments[-1]
    num_scanned = content[scan.start + 4]
    if scan.stop != scan.start + 8 + 2 * num_scanned:
        raise ValueError(f"the scan header at byte {scan.start} does not have the length of {num_scanned} components")
    scanned = [content[i] for i in range(scan.start + 5, scan.stop - 3, 2)]
    is_whole = content[scan.stop - 3 : scan.stop] == b"\x00\x3f\x00"  # All coefficients, without approximation.
    return JpegHead(
        segments,
        content[frame.start + 1],
        content[at + 4],
        content[at + 5] << 8 | content[at + 6],
        content[at + 7] << 8 | content[at + 8],
        components,
        (across, down),
        (min([c.across for c in components]) < across, min([c.down for c in components]) < down),
        at,
        restart_interval,
        scan.stop,
        is_whole and scanned == [c.component_id for c in components],
    )
