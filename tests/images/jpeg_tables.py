"""Tables of JPEG files (ITU-T T.81): the zigzag, the standard ones of Annex K, and Huffman tables of every shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

ZIGZAG = sorted(range(64), key=lambda i: (i // 8 + i % 8, (i // 8 if (i // 8 + i % 8) % 2 else i % 8)))
"""The indices of the coefficients, row * 8 + column, in zigzag order (figure A.6)."""

LUMA = (
    "16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 14 17 22 29 51 87 80 62 "
    "18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99"
)
CHROMA = "17 18 24 47 99 99 99 99 18 21 26 66 99 99 99 99 24 26 56 99 99 99 99 99 47 66 99 99 99 99 99 99 " + "99 " * 32
"""Quantisation tables K.1 and K.2, row by row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HuffmanTable:
    """The number of codes of 1 to 16 bits, and the symbols in the order of their codes (T.81, C.1)."""

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
        """Build the best table for symbols that occur so often (T.81 K.2)."""
        # The symbol 256 gets the code of all ones, which no table may contain.
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
STANDARD = {  # class, whether it is for chroma: tables K.3 to K.6
    (0, False): HuffmanTable(counts=bytes.fromhex("00010501010101010100000000000000"), symbols=bytes(DC_SYMBOLS)),
    (0, True): HuffmanTable(counts=bytes.fromhex("00030101010101010101010000000000"), symbols=bytes(DC_SYMBOLS)),
    (1, False): HuffmanTable(
        counts=bytes.fromhex("0002010303020403050504040000017d"),
        symbols=bytes.fromhex(
            "01020300041105122131410613516107227114328191a1082342b1c11552d1f02433627282090a161718191a25262728292a3435"
            "363738393a434445464748494a535455565758595a636465666768696a737475767778797a838485868788898a92939495969798"
            "999aa2a3a4a5a6a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae1e2e3e4e5e6e7e8e9eaf1f2f3f4"
            "f5f6f7f8f9fa"
        ),
    ),
    (1, True): HuffmanTable(
        counts=bytes.fromhex("00020102040403040705040400010277"),
        symbols=bytes.fromhex(
            "000102031104052131061241510761711322328108144291a1b1c109233352f0156272d10a162434e125f11718191a262728292a"
            "35363738393a434445464748494a535455565758595a636465666768696a737475767778797a82838485868788898a9293949596"
            "9798999aa2a3a4a5a6a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae2e3e4e5e6e7e8e9eaf2f3f4"
            "f5f6f7f8f9fa"
        ),
    ),
}
