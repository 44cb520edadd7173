"""Recode a scan's entropy-coded data with other Huffman tables and restart intervals, but the same coefficients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.kernel import compiled_functions
from shardio.images.kernel.compiled.records import DAMAGED, EXCESS_DATA, OUT_OF_RANGE, RECODED, SCAN, WRONG_MARKER

_MESSAGES = {
    DAMAGED: "damaged: the data ends early or contains an unknown code",
    EXCESS_DATA: "damaged: there is more data than the image needs",
    WRONG_MARKER: "damaged: a restart marker is missing or wrong",
    OUT_OF_RANGE: "coefficients out of range",
}


class Scan(NamedTuple):
    """A scan to recode.

    Attributes:
        data: uint8, the file from the scan's first byte on.
        coding: CODING [8], the scan's Huffman tables.
        components: COMPONENT [components].
        blocks: int64 [blocks per MCU], the index of each block's component.
        num_mcus: The number of MCUs in the scan.
        interval: MCUs between restart markers; 0 if there are none.
    """

    data: NDArray[np.uint8]
    coding: NDArray[np.void]
    components: NDArray[np.void]
    blocks: NDArray[np.int64]
    num_mcus: int
    interval: int


class ScanError(ValueError):
    """A scan's data violates the standard or the limits of a baseline image."""


def count_symbols(scan: Scan, interval: int) -> int:
    """Count in ``scan.coding`` the symbols of the scan with another restart interval, and return the scan's end.

    Raises:
        ScanError: If the scan cannot be recoded.
    """
    _, stop = _recode(scan, interval, np.empty(0, np.uint8), np.empty(0, np.int64))
    return stop


def write_scan(scan: Scan, interval: int) -> tuple[bytes, NDArray[np.int64]]:
    """Recode a scan with the codes in ``scan.coding``, which must contain the counts of its symbols.

    Args:
        scan: The scan.
        interval: MCUs between restart markers; 0 for none.

    Returns:
        The data, and the bytes of each restart interval without its marker, int64 [intervals].
    """
    num_intervals = -(-scan.num_mcus // interval) if interval else 1
    # A symbol's code is followed by as many bits as the symbol's low four bits say, in AC and DC alike.
    lengths_of_codes = (scan.coding["codes"] >> 16).astype(np.int64)
    num_bits = int((scan.coding["counts"] * (lengths_of_codes + np.arange(256) % 16)).sum())
    # At worst each byte is 0xFF and is followed by a stuffed 0; an interval ends in a partial byte and a marker.
    data = np.empty(2 * (num_bits // 8 + num_intervals) + 2 * num_intervals + 8, np.uint8)
    lengths = np.empty(num_intervals, np.int64)
    size, _ = _recode(scan, interval, data, lengths)
    return data[:size].tobytes(), lengths


def _recode(scan: Scan, interval: int, out: NDArray[np.uint8], lengths: NDArray[np.int64]) -> tuple[int, int]:
    """Recode a scan, or count its symbols if ``out`` is empty; return the bytes written, and where the scan ends."""
    call = np.zeros(1, SCAN)
    call[0] = (
        *(scan.data.ctypes.data, len(scan.data), scan.coding.ctypes.data),
        *(scan.components.ctypes.data, len(scan.components), scan.blocks.ctypes.data, len(scan.blocks)),
        *(scan.num_mcus, scan.interval, interval, out.ctypes.data, len(out), lengths.ctypes.data, len(lengths)),
        *(0, 0, 0, 0),
    )
    compiled_functions().recode_scan(call)
    result = call[0]
    if result["outcome"] != RECODED:
        raise ScanError(f"{_MESSAGES[int(result['outcome'])]} (in MCU {result['mcu']} of {scan.num_mcus})")
    return int(result["size"]), int(result["stop"])
