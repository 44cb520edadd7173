"""A JPEG encoder written directly from ITU-T T.81, for files that no real encoder writes. It is slow."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ZIGZAG = sorted(range(64), key=lambda i: (i // 8 + i % 8, (i // 8 if (i // 8 + i % 8) % 2 else i % 8)))
"""The indices of the coefficients, row * 8 + column, in zigzag order (figure A.6)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HuffmanTable:
    """The number of codes of each length from 1 to 16 bits, and the symbols in the order of their codes (T.81, C.1)."""

    counts: bytes
    symbols: bytes

    def codes(self) -> dict[int, tuple[int, int]]:
        codes: dict[int, tuple[int, int]] = {}
        code = 0
        symbols = iter(self.symbols)
        for num_bits, count in enumerate(self.counts, start=1):
            for _ in range(count):
                codes[next(symbols)] = (code, num_bits)
                code += 1
            code *= 2
        return codes

    @staticmethod
    def from_counts(counts: Mapping[int, int]) -> HuffmanTable:
        """Build the optimal table for symbols with these counts (T.81 K.2)."""
        # The extra symbol 256 reserves the code of all ones, which no table may contain.
        frequency = {**counts, 256: 1}
        num_bits = dict.fromkeys(frequency, 0)
        groups = {symbol: [symbol] for symbol in frequency}
        while len(frequency) > 1:
            first, second = sorted(frequency, key=lambda symbol: (frequency[symbol], -symbol))[:2]
            frequency[first] += frequency.pop(second)
            groups[first] += groups.pop(second)
            for symbol in groups[first]:
                num_bits[symbol] += 1
        bits = Counter(num_bits.values())
        for length in range(max(bits), 16, -1):  # figure K.3
            while bits[length] > 0:
                shorter = next(n for n in range(length - 2, 0, -1) if bits[n])
                bits[length] -= 2
                bits[length - 1] += 1
                bits[shorter + 1] += 2
                bits[shorter] -= 1
        bits[max(n for n in bits if bits[n])] -= 1
        symbols = sorted(counts, key=lambda symbol: (num_bits[symbol], symbol))
        return HuffmanTable(counts=bytes(bits[n] for n in range(1, 17)), symbols=bytes(symbols))


DC_SYMBOLS = range(12)
AC_SYMBOLS = [0x00, 0xF0, *(run << 4 | size for run in range(16) for size in range(1, 11))]
DEEP = {
    0: HuffmanTable.from_counts({symbol: 2**symbol for symbol in DC_SYMBOLS}),
    1: HuffmanTable.from_counts({symbol: 2**i for i, symbol in enumerate(AC_SYMBOLS)}),
}
"""Wasteful tables: the most common symbols have the longest codes, up to 16 bits."""
FLAT = {
    0: HuffmanTable.from_counts(dict.fromkeys(DC_SYMBOLS, 1)),
    1: HuffmanTable.from_counts(dict.fromkeys(AC_SYMBOLS, 1)),
}


def _read_standard_tables() -> tuple[dict[int, list[int]], dict[tuple[int, bool], HuffmanTable]]:
    """Return the tables of Annex K from a file that libjpeg wrote: quantization (K.1, K.2) and Huffman (K.3 to K.6)."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG", quality=50)
    content, start, huffman = file.getvalue(), 0, {}
    while (start := content.find(b"\xff\xc4", start)) >= 0:
        key, counts = content[start + 4], content[start + 5 : start + 21]
        symbols = content[start + 21 : start + 21 + sum(counts)]
        huffman[key >> 4, bool(key & 15)] = HuffmanTable(counts=counts, symbols=symbols)
        start += 21
    quantization: dict[int, list[int]] = Image.open(file).quantization  # type: ignore[attr-defined]  # of JPEG images
    return quantization, huffman


QUANTIZATION, STANDARD = _read_standard_tables()

Array = NDArray[np.uint8]
TableKey = tuple[int, int]
"""Class (0: DC, 1: AC) and identifier of a Huffman table."""
Event = tuple[TableKey, int, int, int]
"""Huffman table, symbol, value of the bits after the symbol, number of these bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegOptions:
    """The options of a file, which has one component for each item of ``factors``.

    Args:
        quality: libjpeg's scale of the quantization tables, 1 to 100.
        wide_quantization: Whether the tables have unclipped 16-bit values, which only SOF1 allows.
        huffman: The tables of Annex K, optimal ones, those with the longest codes or those with codes of equal length.
        restart_interval: Number of MCUs between restart markers; 0 writes a DRI that disables them.
        precision: The number of bits that the frame header claims; samples always have 8 bits.
        dnl: Whether a DNL segment after the first scan gives the height, instead of the frame header.
        parts: Order of the segments before the first scan. Parts that are bytes are written unchanged.
        fill: Number of FF bytes before each marker up to the first scan.
        fill_in_scan: Number of FF bytes before each marker after the first scan.
    """

    factors: tuple[tuple[int, int], ...] = ((1, 1), (1, 1), (1, 1))
    component_ids: tuple[int, ...] = (1, 2, 3, 4)
    rgb: bool = False
    quality: int = 90
    wide_quantization: bool = False
    quantization_ids: tuple[int, ...] = (0, 1, 1, 1)
    huffman: Literal["standard", "best", "deep", "flat"] = "standard"
    dc_ids: tuple[int, ...] = (0, 1, 1, 1)
    ac_ids: tuple[int, ...] = (0, 1, 1, 1)
    one_dht: bool = False
    one_dqt: bool = False
    restart_interval: int | None = None
    scans: tuple[tuple[int, ...], ...] | None = None
    sof: int = 0xC0
    precision: int = 8
    dnl: bool = False
    header: Literal["jfif", "adobe", "none"] = "jfif"
    parts: tuple[str | bytes, ...] = ("header", "dqt", "sof", "dht", "dri")
    fill: int = 0
    fill_in_scan: int = 0
    padding: Literal[0, 1] = 1


def segment(marker: int, payload: bytes = b"") -> bytes:
    return bytes([0xFF, marker]) + (len(payload) + 2).to_bytes(2, "big") + payload


def dht_segment(tables: Mapping[TableKey, HuffmanTable]) -> bytes:
    parts = [bytes([table[0] << 4 | table[1]]) + value.counts + value.symbols for table, value in tables.items()]
    return segment(0xC4, b"".join(parts))


def dqt_segment(tables: Mapping[int, Sequence[int]], *, wide: bool = False) -> bytes:
    values = {number: np.array(table, dtype=">u2" if wide else np.uint8)[ZIGZAG] for number, table in tables.items()}
    return segment(0xDB, b"".join(bytes([wide << 4 | number]) + table.tobytes() for number, table in values.items()))


def write_jpeg(picture: Array, **chosen: Any) -> bytes:
    """Encode a picture, uint8 [height, width] or [height, width, component], with the chosen :class:`JpegOptions`."""
    options = JpegOptions(**chosen)
    samples = picture.reshape(*picture.shape[:2], -1)
    quantization = _quantization(options)
    blocks = [
        _blocks(plane, quantization[number])
        for plane, number in zip(_planes(samples, options), options.quantization_ids, strict=False)
    ]
    scans = options.scans or (tuple(range(len(blocks))),)
    events = [[list(_events(blocks, mcus, options)) for mcus in _intervals(samples, scan, options)] for scan in scans]
    huffman = _huffman(events, options)
    segments = _segments(samples, quantization, huffman, options)
    codes = {key: table.codes() for key, table in huffman.items()}
    file = bytearray(b"\xff\xd8")
    for content in segments:
        file += b"\xff" * options.fill + content
    fill = b"\xff" * options.fill
    for number, (scan, intervals) in enumerate(zip(scans, events, strict=True)):
        tables = b"".join(bytes([options.component_ids[c], options.dc_ids[c] << 4 | options.ac_ids[c]]) for c in scan)
        file += fill + segment(0xDA, bytes([len(scan)]) + tables + bytes([0, 63, 0]))
        fill = b"\xff" * options.fill_in_scan
        for index, interval in enumerate(intervals):
            file += (fill + bytes([0xFF, 0xD0 + (index - 1) % 8])) if index else b""
            file += _entropy_coded(interval, codes, options.padding)
        if options.dnl and number == 0:
            file += fill + segment(0xDC, samples.shape[0].to_bytes(2, "big"))
    return bytes(file) + fill + b"\xff\xd9"


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _largest(options: JpegOptions) -> tuple[int, int]:
    return max(h for h, _ in options.factors), max(v for _, v in options.factors)


def _mcu_counts(samples: Array, options: JpegOptions) -> tuple[int, int]:
    """Return the rows and columns of the MCUs of a scan with several components (A.2.4)."""
    h_max, v_max = _largest(options)
    return _ceil(samples.shape[0], 8 * v_max), _ceil(samples.shape[1], 8 * h_max)


def _planes(samples: Array, options: JpegOptions) -> list[NDArray[np.float64]]:
    """Return the components, centered around 0 and subsampled, with the padding of the last MCUs."""
    values = samples.astype(np.float64) - 128
    if samples.shape[2] == 3 and not options.rgb:  # JFIF 1.02
        weights = [[0.299, -0.168736, 0.5], [0.587, -0.331264, -0.418688], [0.114, 0.5, -0.081312]]
        values = np.rint(samples @ np.array(weights)) - [128, 0, 0]
    rows, columns = _mcu_counts(samples, options)
    h_max, v_max = _largest(options)
    below, right = rows * v_max * 8 - samples.shape[0], columns * h_max * 8 - samples.shape[1]
    padded = np.pad(values, ((0, below), (0, right), (0, 0)), mode="edge")
    planes = []
    for number, (h, v) in enumerate(options.factors):
        # A sample is the mean over its area, which may span one and a half pixels.
        image = Image.fromarray(padded[..., number].astype(np.float32))
        planes.append(np.asarray(image.resize((columns * h * 8, rows * v * 8), Image.Resampling.BOX), np.float64))
    return planes


def _quantization(options: JpegOptions) -> dict[int, Sequence[int]]:
    scale = 5000 // options.quality if options.quality < 50 else 200 - 2 * options.quality
    tables: dict[int, Sequence[int]] = {}
    for number in options.quantization_ids[: len(options.factors)]:
        base = np.array(QUANTIZATION[number != options.quantization_ids[0]], np.int64)
        largest = 32767 if options.wide_quantization else 255
        tables[number] = np.clip((base * scale + 50) // 100, 1, largest).tolist()
    return tables


def _blocks(plane: NDArray[np.float64], quantization: Sequence[int]) -> list[list[list[int]]]:
    """Return quantized coefficients [row][column][zigzag]."""
    frequency, position = np.mgrid[:8, :8]
    cosines = np.cos((2 * position + 1) * frequency * np.pi / 16) * np.where(frequency == 0, np.sqrt(1 / 8), 0.5)
    rows, columns = plane.shape[0] // 8, plane.shape[1] // 8
    blocks = plane.reshape(rows, 8, columns, 8).swapaxes(1, 2)  # [row, column, y, x]
    coefficients = (cosines @ blocks @ cosines.T).reshape(rows, columns, 64) / np.array(quantization)
    rounded = np.trunc(coefficients + np.copysign(0.5, coefficients))  # Round halves away from zero, as libjpeg does.
    # Baseline JPEGs have no codes for coefficients outside these limits (tables F.1 and F.2).
    lowest = np.where(np.arange(64) == 0, -1024, -1023)
    quantized: list[list[list[int]]] = np.clip(rounded, lowest, 1023).astype(int)[..., ZIGZAG].tolist()
    return quantized


def _intervals(
    samples: Array, scan: tuple[int, ...], options: JpegOptions
) -> Iterator[list[list[tuple[int, int, int]]]]:
    """Yield the MCUs of each restart interval. An MCU is a list of its blocks' components, rows and columns."""
    if len(scan) == 1:  # In a scan of one component, each MCU is one block, without additional padding (A.2.2).
        (h, v), (h_max, v_max) = options.factors[scan[0]], _largest(options)
        rows = _ceil(_ceil(samples.shape[0] * v, v_max), 8)
        columns = _ceil(_ceil(samples.shape[1] * h, h_max), 8)
        mcus = [[(scan[0], row, column)] for row in range(rows) for column in range(columns)]
    else:
        rows, columns = _mcu_counts(samples, options)
        mcus = [
            [
                (c, row * options.factors[c][1] + v, column * options.factors[c][0] + h)
                for c in scan
                for v in range(options.factors[c][1])
                for h in range(options.factors[c][0])
            ]
            for row in range(rows)
            for column in range(columns)
        ]
    step = options.restart_interval or len(mcus)
    for start in range(0, len(mcus), step):
        yield mcus[start : start + step]


def _events(
    blocks: list[list[list[list[int]]]], mcus: list[list[tuple[int, int, int]]], options: JpegOptions
) -> Iterator[Event]:
    """Yield the codes of a restart interval (F.1.2)."""
    last_dc = dict.fromkeys(range(len(blocks)), 0)
    for component, row, column in (block for mcu in mcus for block in mcu):
        block = blocks[component][row][column]
        difference, last_dc[component] = block[0] - last_dc[component], block[0]
        yield _event((0, options.dc_ids[component]), 0, difference)
        table = (1, options.ac_ids[component])
        last = 0
        for k in range(1, 64):
            if block[k]:
                while k - last > 16:
                    yield table, 0xF0, 0, 0
                    last += 16
                yield _event(table, k - last - 1, block[k])
                last = k
        if last < 63:
            yield table, 0x00, 0, 0


def _event(table: TableKey, run: int, value: int) -> Event:
    size = abs(value).bit_length()
    return table, run << 4 | size, value if value > 0 else value + (1 << size) - 1, size


def _huffman(scans: list[list[list[Event]]], options: JpegOptions) -> dict[TableKey, HuffmanTable]:
    counts: dict[TableKey, Counter[int]] = {}
    for table, symbol, _, _ in (event for scan in scans for interval in scan for event in interval):
        counts.setdefault(table, Counter())[symbol] += 1
    order = sorted(counts, key=lambda key: key[::-1])
    if options.huffman == "best":
        return {key: HuffmanTable.from_counts(counts[key]) for key in order}
    if options.huffman == "standard":
        luma = (options.dc_ids[0], options.ac_ids[0])
        return {key: STANDARD[key[0], key[1] != luma[key[0]]] for key in order}
    return {key: (DEEP if options.huffman == "deep" else FLAT)[key[0]] for key in order}


def _entropy_coded(events: list[Event], codes: Mapping[TableKey, Mapping[int, tuple[int, int]]], padding: int) -> bytes:
    coded = [(codes[table][symbol], value, size) for table, symbol, value, size in events]
    values = np.array([code << size | value for (code, _), value, size in coded])
    lengths = np.array([num_bits + size for (_, num_bits), _, size in coded])
    ends = np.cumsum(lengths)
    shifts = np.repeat(ends, lengths) - 1 - np.arange(ends[-1])
    bits = (np.repeat(values, lengths) >> shifts & 1).astype(np.uint8)
    filled = np.append(bits, np.full(-len(bits) % 8, padding, np.uint8))
    return np.packbits(filled).tobytes().replace(b"\xff", b"\xff\x00")


def _segments(
    samples: Array,
    quantization: Mapping[int, Sequence[int]],
    huffman: Mapping[TableKey, HuffmanTable],
    options: JpegOptions,
) -> Iterator[bytes]:
    height, width = samples.shape[:2]
    size = (0 if options.dnl else height).to_bytes(2, "big") + width.to_bytes(2, "big")
    components = zip(options.component_ids, options.factors, options.quantization_ids, strict=False)
    frame = b"".join(bytes([number, h << 4 | v, table]) for number, (h, v), table in components)
    quantizations = [quantization] if options.one_dqt else [{key: table} for key, table in quantization.items()]
    huffmans = [huffman] if options.one_dht else [{key: table} for key, table in huffman.items()]
    transform = len(options.factors) == 3 and not options.rgb
    headers = {
        "jfif": [segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")],
        "adobe": [segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))],
        "none": [],
    }
    interval = options.restart_interval
    known = {
        "header": headers[options.header],
        "dqt": [dqt_segment(tables, wide=options.wide_quantization) for tables in quantizations],
        "sof": [segment(options.sof, bytes([options.precision]) + size + bytes([len(options.factors)]) + frame)],
        "dht": [dht_segment(tables) for tables in huffmans],
        "dri": [] if interval is None else [segment(0xDD, interval.to_bytes(2, "big"))],
    }
    for part in options.parts:
        yield from [part] if isinstance(part, bytes) else known[part]
