"""Huffman tables are valid, and cost no more bits than those of independent methods."""

from __future__ import annotations

import heapq
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from shardio.images.tiling import make_best_table, tile_jpeg, untile_jpeg
from tests.images.jpeg_corpus import small_corpus
from tests.images.jpeg_files import JpegFile
from tests.images.jpeg_tables import HuffmanTable
from tests.images.tiling_laws import Parts, take_apart

MAX_LENGTH = 16
SLACK = 16
"""Bits that a table of T.81, K.2 may cost above the best: it counts the unused code as if it occurred once."""

Counts = dict[int, int]

for_many_counts = settings(
    deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)


def _fibonacci(num_symbols: int) -> Counts:
    """Return the counts 1, 2, 3, 5, 8 …: with 1 for the unused code, each code is longer than the next."""
    values = [1, 2]
    while len(values) < num_symbols:
        values.append(values[-1] + values[-2])
    return dict(enumerate(values[:num_symbols]))


def _best_table(counts: Counts) -> HuffmanTable:
    array = np.zeros(256, np.int64)
    array[list(counts)] = list(counts.values())
    lengths, symbols = make_best_table(array)
    return HuffmanTable(counts=lengths, symbols=symbols)


def _cost(table: HuffmanTable, counts: Mapping[int, int]) -> int:
    """Return the bits of all codes."""
    codes = table.codes()
    return sum(codes[symbol][1] * count for symbol, count in counts.items())


def _longest(table: HuffmanTable) -> int:
    return max(num_bits for _, num_bits in table.codes().values())


def _huffmans_cost(weights: list[int]) -> int:
    """Return the bits of the best code of any length (Huffman 1952: each merge makes its codes a bit longer)."""
    heap = list(weights)
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


def _package_merge_cost(weights: list[int]) -> int:
    """Return the bits of the best code of at most 16 bits (Larmore and Hirschberg 1990)."""
    coins = sorted(weights)
    packages = list[int]()
    for _ in range(MAX_LENGTH):
        pairs = zip(packages[::2], packages[1::2], strict=False)
        packages = sorted(coins + [a + b for a, b in pairs])
    return sum(packages[: 2 * len(coins) - 2])


def _optimum(counts: Mapping[int, int]) -> int:
    """Return the bits of the best code of at most 16 bits; the code of all ones goes to a symbol without weight."""
    return _package_merge_cost([0, *counts.values()])


def _tables_of(parts: Parts) -> dict[int, HuffmanTable]:
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


def _symbols_of(parts: Parts) -> dict[int, Counter[int]]:
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
        for key, table in _tables_of(parts).items()
    }
    num_mcus = -(-height // (8 * v_max)) * -(-width // (8 * h_max))
    dri = parts.all_of(0xDD)
    step = int.from_bytes(dri[-1][4:], "big") if dri else 0
    counts = {key: Counter[int]() for key in codes}
    for start, interval in zip(range(0, num_mcus, step or num_mcus), parts.intervals, strict=True):
        bits = "".join(format(byte, "08b") for byte in interval.replace(b"\xff\x00", b"\xff"))
        for key, symbol in _read_symbols(bits, blocks * min(step or num_mcus, num_mcus - start), codes):
            counts[key][symbol] += 1
    return {key: counter for key, counter in counts.items() if counter}


def _read_symbols(bits: str, blocks: list[int], codes: dict[int, dict[str, int]]) -> Iterator[tuple[int, int]]:
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


FIBONACCI = _fibonacci(60)
POWERS = {symbol: 2**symbol for symbol in range(40)}
FEW = {7: 1}
ALL = dict.fromkeys(range(256), 1)


@for_many_counts
@given(some_counts())
@example(FIBONACCI)
@example(POWERS)
@example(FEW)
@example(ALL)
def test_a_table_has_a_code_for_each_symbol_and_none_of_all_ones(counts: Counts) -> None:
    table = _best_table(counts)
    assert sorted(table.symbols) == sorted(counts)
    assert len(table.counts) == MAX_LENGTH
    codes = [format(code, f"0{num_bits}b") for code, num_bits in table.codes().values()]
    assert sum(2 ** (MAX_LENGTH - len(code)) for code in codes) <= 2**MAX_LENGTH - 1
    assert len(set(codes)) == len(codes)
    assert all("0" in code and len(code) <= MAX_LENGTH for code in codes)
    assert not {code[:length] for code in codes for length in range(1, len(code))} & set(codes)


@for_many_counts
@given(some_counts())
@example(ALL)
def test_more_frequent_symbols_have_no_longer_codes_unless_codes_were_shortened(counts: Counts) -> None:
    lengths = defaultdict[int, list[int]](list)
    for symbol, (_, num_bits) in _best_table(counts).codes().items():
        lengths[counts[symbol]].append(num_bits)
    by_count = [lengths[count] for count in sorted(lengths)]
    if max(by_count[0]) < MAX_LENGTH:
        assert all(min(rarer) >= max(more) for rarer, more in pairwise(by_count))


@for_many_counts
@given(some_counts())
@example(FEW)
@example(ALL)
@example(_fibonacci(16))
def test_a_table_costs_what_huffmans_method_costs_unless_codes_were_shortened(counts: Counts) -> None:
    table = _best_table(counts)
    if _longest(table) < MAX_LENGTH:
        # The unused code is among the longest.
        assert _cost(table, counts) == _huffmans_cost([1, *counts.values()]) - _longest(table)
        assert _cost(table, counts) <= _optimum(counts) + SLACK


@for_many_counts
@given(some_counts())
@example(FIBONACCI)
@example(POWERS)
@example(_fibonacci(17))
@example(_fibonacci(18))
def test_a_table_with_shortened_codes_costs_hardly_more_than_the_best(counts: Counts) -> None:
    cost, optimum = _cost(_best_table(counts), counts), _optimum(counts)
    assert optimum <= cost <= optimum * 1.01 + SLACK


@pytest.fixture(scope="module")
def files() -> list[JpegFile]:
    return [file for file in small_corpus() if file.tileable and file.readers and len(file.content) < 20_000]


def test_files_are_written_with_the_best_tables_for_their_symbols_and_no_others(files: list[JpegFile]) -> None:
    for file in files:
        for rewrite in (tile_jpeg, untile_jpeg):
            parts = take_apart(rewrite(file.content))
            tables, symbols = _tables_of(parts), _symbols_of(parts)
            assert tables.keys() == symbols.keys(), file.name
            for key, counts in symbols.items():
                assert sorted(tables[key].symbols) == sorted(counts), file.name
                assert _cost(tables[key], counts) <= _optimum(counts) * 1.001 + SLACK, file.name


def test_symbols_cost_no_more_bits_than_with_the_original_tables(files: list[JpegFile]) -> None:
    for file in files:
        before, after = take_apart(file.content), take_apart(untile_jpeg(file.content))
        old, new, symbols = _tables_of(before), _tables_of(after), _symbols_of(after)
        if all(counts.keys() <= set(old[key].symbols) for key, counts in symbols.items()):
            by_old = sum(_cost(old[key], counts) for key, counts in symbols.items())
            assert sum(_cost(new[key], counts) for key, counts in symbols.items()) <= by_old, file.name


def test_untiling_a_file_without_restarts_keeps_all_symbols(files: list[JpegFile]) -> None:
    for file in files:
        before = take_apart(file.content)
        if not before.restarts:
            assert _symbols_of(take_apart(untile_jpeg(file.content))) == _symbols_of(before), file.name
