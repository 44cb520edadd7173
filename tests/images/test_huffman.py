"""Huffman tables are valid, and cost no more bits than those of independent methods."""

from __future__ import annotations

import heapq
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, example, given, settings, strategies as st

from shardio.images.tiling import make_best_table, tile_jpeg, untile_jpeg
from tests.images.jpeg_corpus import small_corpus
from tests.images.jpeg_tables import HuffmanTable
from tests.images.tiling_laws import Parts, take_apart

MAX_LENGTH = 16
SLACK = 16
"""Bits that a table of T.81, K.2 may cost above the best: it counts the unused code as if it occurred once."""

Counts = dict[int, int]


def fibonacci(num_symbols: int) -> Counts:
    """Return the counts 1, 2, 3, 5, 8 …: with 1 for the unused code, each code is longer than the next."""
    values = [1, 2]
    while len(values) < num_symbols:
        values.append(values[-1] + values[-2])
    return dict(enumerate(values[:num_symbols]))


def cost(table: HuffmanTable, counts: Mapping[int, int]) -> int:
    codes = table.codes()
    return sum(codes[symbol][1] * count for symbol, count in counts.items())


def huffmans_cost(weights: list[int]) -> int:
    """Return the bits of the best code of any length (Huffman 1952: each merge makes its codes a bit longer)."""
    heap, total = list(weights), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


def find_optimum(counts: Mapping[int, int]) -> int:
    """Return the bits of the best code of at most 16 bits; the code of all ones goes to a symbol without weight."""
    coins, packages = sorted([0, *counts.values()]), list[int]()
    for _ in range(MAX_LENGTH):  # Larmore and Hirschberg 1990.
        packages = sorted(coins + [a + b for a, b in zip(packages[::2], packages[1::2], strict=False)])
    return sum(packages[: 2 * len(coins) - 2])


@st.composite
def some_counts(draw: st.DrawFn) -> Counts:
    """Draw counts of some of the 256 symbols, similar or very different ones."""
    symbols = draw(st.lists(st.integers(0, 255), min_size=1, max_size=256, unique=True))
    largest = draw(st.sampled_from([1, 3, 100, 10**6, 2**40]))
    if draw(st.booleans()):
        return {symbol: draw(st.integers(1, largest)) for symbol in symbols[:40]}
    seed = draw(st.integers(0, 2**32))
    values = np.exp(np.random.default_rng(seed).uniform(0, np.log(largest), len(symbols)))
    return dict(zip(symbols, np.ceil(values).astype(int).tolist(), strict=True))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(some_counts())
@example(fibonacci(60))
@example(fibonacci(16))
@example(fibonacci(17))
@example(fibonacci(18))
@example({symbol: 2**symbol for symbol in range(40)})
@example({7: 1})
@example(dict.fromkeys(range(256), 1))
def test_a_table_has_a_code_for_each_symbol_and_none_of_all_ones_and_the_best_costs(counts: Counts) -> None:
    array = np.zeros(256, np.int64)
    array[list(counts)] = list(counts.values())
    num_codes, symbols = make_best_table(array)
    table = HuffmanTable(counts=num_codes, symbols=symbols)
    assert sorted(table.symbols) == sorted(counts)
    assert len(table.counts) == MAX_LENGTH
    codes = [format(code, f"0{num_bits}b") for code, num_bits in table.codes().values()]
    assert sum(2 ** (MAX_LENGTH - len(code)) for code in codes) <= 2**MAX_LENGTH - 1
    assert len(set(codes)) == len(codes)
    assert all("0" in code and len(code) <= MAX_LENGTH for code in codes)
    assert not {code[:length] for code in codes for length in range(1, len(code))} & set(codes)
    longest, optimum = max(map(len, codes)), find_optimum(counts)
    assert optimum <= cost(table, counts) <= optimum * 1.01 + SLACK
    if longest == MAX_LENGTH:  # Codes may have been shortened.
        return
    # The unused code is among the longest.
    assert cost(table, counts) == huffmans_cost([1, *counts.values()]) - longest
    assert cost(table, counts) <= optimum + SLACK
    lengths = defaultdict[int, list[int]](list)
    for symbol, (_, num_bits) in table.codes().items():
        lengths[counts[symbol]].append(num_bits)
    assert all(min(rarer) >= max(more) for rarer, more in pairwise(lengths[count] for count in sorted(lengths)))


def tables_of(parts: Parts) -> dict[int, HuffmanTable]:
    """Return the tables of a file by class and identifier; the last definition of each is in force."""
    tables = {}
    for segment in parts.all_of(0xC4):
        offset = 4
        while offset < len(segment):
            stop = offset + 17 + sum(segment[offset + 1 : offset + 17])
            counts, symbols = segment[offset + 1 : offset + 17], segment[offset + 17 : stop]
            tables[segment[offset]] = HuffmanTable(counts=counts, symbols=symbols)
            offset = stop
    return tables


def symbols_of(parts: Parts) -> dict[int, Counter[int]]:
    """Return how often each symbol occurs in a file's scan, by the class and identifier of its table."""
    frame, header = parts.all_of(0xC0, 0xC1)[0], parts.others[-1]
    height, width, num_components = struct.unpack_from(">HHB", frame, 5)
    factors = [(factor >> 4, factor & 15) for factor in frame[11::3]] if num_components > 1 else [(1, 1)]
    h_max, v_max = (max(column) for column in zip(*factors, strict=True))
    blocks = [
        table_ids
        for table_ids, (h, v) in zip(header[6 : 6 + 2 * num_components : 2], factors, strict=True)
        for _ in range(h * v)
    ]
    codes = {
        key: {format(code, f"0{num_bits}b"): symbol for symbol, (code, num_bits) in table.codes().items()}
        for key, table in tables_of(parts).items()
    }
    num_mcus = -(-height // (8 * v_max)) * -(-width // (8 * h_max))
    dri = parts.all_of(0xDD)
    step = int.from_bytes(dri[-1][4:], "big") if dri else 0
    counts = {key: Counter[int]() for key in codes}
    for start, interval in zip(range(0, num_mcus, step or num_mcus), parts.intervals, strict=True):
        bits = "".join(format(byte, "08b") for byte in interval.replace(b"\xff\x00", b"\xff"))
        for key, symbol in read_symbols(bits, blocks * min(step or num_mcus, num_mcus - start), codes):
            counts[key][symbol] += 1
    return {key: counter for key, counter in counts.items() if counter}


def read_symbols(bits: str, blocks: list[int], codes: dict[int, dict[str, int]]) -> Iterator[tuple[int, int]]:
    """Yield the tables and symbols of blocks, given by the identifiers of their tables, read bit by bit."""
    start = 0
    for table_ids in blocks:
        index = 0
        while index < 64:
            key = 0x10 | table_ids & 15 if index else table_ids >> 4
            stop = start + 1
            while bits[start:stop] not in codes[key]:
                assert stop - start < MAX_LENGTH, "an unknown code"
                stop += 1
            symbol = codes[key][bits[start:stop]]
            yield key, symbol
            start = stop + symbol % 16
            index = 64 if index and symbol == 0 else index + (symbol // 16 if index else 0) + 1


def test_files_are_written_with_the_best_tables_for_their_symbols_and_no_others() -> None:
    """Untiling keeps the symbols. The tables of the files themselves are no better."""
    for file in small_corpus():
        if not file.tileable or not file.readers or len(file.content) >= 10_000:
            continue
        before = take_apart(file.content)
        for rewrite in (tile_jpeg, untile_jpeg):
            after = take_apart(rewrite(file.content))
            tables, symbols = tables_of(after), symbols_of(after)
            assert tables.keys() == symbols.keys(), file.name
            for key, counts in symbols.items():
                assert sorted(tables[key].symbols) == sorted(counts), file.name
                assert cost(tables[key], counts) <= find_optimum(counts) * 1.001 + SLACK, file.name
        if not before.restarts:
            assert symbols == symbols_of(before), file.name
        old = tables_of(before)
        if all(counts.keys() <= set(old[key].symbols) for key, counts in symbols.items()):
            by_old = sum(cost(old[key], counts) for key, counts in symbols.items())
            assert sum(cost(tables[key], counts) for key, counts in symbols.items()) <= by_old, file.name
