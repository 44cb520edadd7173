"""Sums of products of pixels and weights, in a few lines of LLVM.

Processors have an instruction that multiplies eight pairs of 16-bit numbers and adds the products of each pair (x86's
pmaddwd). LLVM uses it for this code, but not for a loop that numba compiles.

All indices are 64-bit numbers. Where columns are counted, four are computed at once: arrays of that many columns have
room for a multiple of four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shardio.images.kernel.compiled.memory import elements

LOW_BITS, WEIGHT_BITS = 15, 22
"""Weights of 22 bits are split into 15 low bits and the rest, so that both are 16-bit numbers."""

_THREE_OF_FOUR = [i for i in range(16) if i % 4 < 3] + [14] * 4


class _Code:
    """The code of a function: its arguments, and sums of products of them."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> None:
        self._context, self._builder = context, builder
        self._kinds, self._arguments = signature.args, arguments

    def load(self, argument: int, at: Any, count: int, kind: Any) -> Any:
        """Load elements of an argument that is an array."""
        return self._builder.load(self._address(argument, at, count, kind), align=self._alignment(argument))

    def store(self, value: Any, argument: int, at: Any) -> None:
        """Store a vector to as many elements of an argument that is an array."""
        address = self._address(argument, at, value.type.count, value.type)
        self._builder.store(value, address, align=self._alignment(argument))

    def _address(self, argument: int, at: Any, count: int, kind: Any) -> Any:
        array = self._arguments[argument]
        return elements(self._context, self._builder, self._kinds[argument], array, at, count, kind)

    def _alignment(self, argument: int) -> int:
        alignment: int = self._kinds[argument].dtype.bitwidth // 8
        return alignment

    def shuffle(self, one: Any, other: Any, indices: Sequence[int]) -> Any:
        mask = ir.Constant(_vector(32, len(indices)), list(indices))
        return self._builder.shuffle_vector(one, other, mask)

    def for_each_fourth(self, count: Any, write: Callable[[Any], None]) -> None:
        """Write code that is repeated for each fourth number below ``count``."""
        builder = self._builder
        with cgutils.for_range(builder, builder.lshr(builder.add(count, _number(3)), _number(2))) as loop:
            write(builder.mul(loop.index, _number(4)))

    def load_starts(self, argument: int, column: Any, start: Any) -> list[Any]:
        """Return the indices of four columns' first pixels: what an array holds for each, plus the row's start."""
        starts = self.load(argument, column, 4, _vector(64, 4))
        return [self._builder.add(self._builder.extract_element(starts, _number(i)), start) for i in range(4)]

    def load_pairs(self, argument: int, indices: Sequence[Any]) -> Any:
        """Return two adjacent pixels from each of four indices on: the two bytes of each of their colours together."""
        two = [self.load(argument, index, 2, _vector(8, 8)) for index in indices]
        four = [self.shuffle(two[i], two[i + 1], range(16)) for i in (0, 2)]
        order = [8 * i + 4 * j + colour for i in range(4) for colour in range(4) for j in range(2)]
        return self.shuffle(four[0], four[1], order)

    def sum_pairs(self, pairs: Any, weights: Any) -> Any:
        """Return the weighted sum of each two adjacent bytes.

        Args:
            pairs: 2 n bytes.
            weights: 2 n 16-bit numbers.
        """
        builder, count = self._builder, pairs.type.count
        factors = builder.zext(pairs, _vector(32, count)), builder.sext(weights, _vector(32, count))
        products = builder.mul(*factors)
        evens, odds = range(0, count, 2), range(1, count, 2)
        return builder.add(self.shuffle(products, products, evens), self.shuffle(products, products, odds))

    def sum_weighted(self, num_pairs: Any, load: Any, load_weights: Any) -> Any:
        """Return sixteen weighted sums of bytes, rounded and limited to bytes.

        Args:
            num_pairs: Half of the number of bytes in each sum, as an int or as LLVM's value.
            load: Returns the bytes of a pair, 32 bytes.
            load_weights: Returns the upper and the lower parts of the weights of a pair, 32 16-bit numbers each.
        """
        builder, kind = self._builder, _vector(32, 16)
        starts = _same(0, kind), _same(1 << WEIGHT_BITS - 1, kind)  # To round.

        def add(totals: Sequence[Any], pair: Any) -> list[Any]:
            pairs, weights = load(pair), load_weights(pair)
            return [builder.add(total, self.sum_pairs(pairs, w)) for total, w in zip(totals, weights, strict=True)]

        if isinstance(num_pairs, int):
            totals: Sequence[Any] = starts
            for pair in range(num_pairs):
                totals = add(totals, _number(pair))
        else:
            kept = [cgutils.alloca_once_value(builder, start) for start in starts]
            with cgutils.for_range(builder, num_pairs) as loop:
                for place, total in zip(kept, add([builder.load(place) for place in kept], loop.index), strict=True):
                    builder.store(total, place)
            totals = [builder.load(place) for place in kept]
        total = builder.add(builder.shl(totals[0], _same(LOW_BITS, kind)), totals[1])
        total = builder.ashr(total, _same(WEIGHT_BITS, kind))
        for sign, limit in ((">", 0), ("<", 255)):
            bound = _same(limit, kind)
            total = builder.select(builder.icmp_signed(sign, total, bound), total, bound)
        return builder.trunc(total, _vector(8, 16))

    def for_few_and_many(self, num_pairs: Any, write: Callable[[Any], None]) -> None:
        """Write code for any number of pairs, and code without a loop for each usual number."""
        builder = self._builder
        many, end = builder.append_basic_block("many"), builder.append_basic_block("end")
        switch = builder.switch(num_pairs, many)
        for count, block in [(count, builder.append_basic_block("few")) for count in (1, 2, 3)]:
            switch.add_case(_number(count), block)
            builder.position_at_end(block)
            write(count)
            builder.branch(end)
        builder.position_at_end(many)
        write(num_pairs)
        builder.branch(end)
        builder.position_at_end(end)


@intrinsic
def mix_columns(_context: Any, pixels: Any, start: Any, starts: Any, weights: Any, n: Any, out: Any) -> Any:
    """Mix two adjacent pixels of a row for each column of the resized row.

    Args:
        pixels: uint32 [...].
        start: The index of the row's first pixel.
        starts: int64 [n], the first of the two pixels, counted from the row's first one.
        weights: uint32 [n], two 16-bit weights each.
        n: The number of columns.
        out: int16 [3 n + 4], for three bytes of each column: the weighted sums, without their lowest four bits.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)

        def mix_four(column: Any) -> None:
            for i, first in enumerate(code.load_starts(2, column, arguments[1])):
                two = code.load(0, first, 2, _vector(8, 8))
                factors = code.load(3, builder.add(column, _number(i)), 1, _vector(16, 2))
                sums = code.sum_pairs(
                    code.shuffle(two, two, (0, 4, 1, 5, 2, 6, 3, 7)), code.shuffle(factors, factors, (0, 1) * 4)
                )
                mixed = builder.trunc(builder.lshr(sums, _same(4, sums.type)), _vector(16, 4))
                code.store(mixed, 5, builder.add(builder.mul(column, _number(3)), _number(3 * i)))

        code.for_each_fourth(arguments[4], mix_four)
        return context.get_dummy_value()

    return types.void(pixels, start, starts, weights, n, out), generate


@intrinsic
def sum_columns(
    _context: Any, pixels: Any, start: Any, starts: Any, taps: Any, lower: Any, num_pairs: Any, n: Any, out: Any,
    to: Any,
) -> Any:  # fmt: skip
    """Sum adjacent pixels of a row, by weight, for each column of the resized row.

    Args:
        pixels: uint32 [...].
        start: The index of the row's first pixel.
        starts: int64 [n], the first pixel that each sum adds, counted from the row's first one.
        taps: uint32 [...]: [num_pairs, n, 4], the upper parts of the weights of two pixels each, four times in a row.
        lower: The index of the lower parts among ``taps``.
        num_pairs: How many times two pixels are added. Weights may be 0.
        n: The number of columns, a multiple of 4.
        out: uint8 [...], for three bytes of each column. Four more are overwritten.
        to: The index of the first one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, n = _Code(context, builder, signature, arguments), arguments[6]

        def sum_all(num_pairs: Any) -> None:
            def sum_four(column: Any) -> None:
                first = code.load_starts(2, column, arguments[1])

                def load(pair: Any) -> Any:
                    return code.load_pairs(0, [builder.add(index, builder.mul(pair, _number(2))) for index in first])

                def load_weights(pair: Any) -> list[Any]:
                    at = builder.mul(builder.add(builder.mul(pair, n), column), _number(4))
                    return [code.load(3, index, 16, _vector(16, 32)) for index in (at, builder.add(at, arguments[4]))]

                sums = code.sum_weighted(num_pairs, load, load_weights)
                to = builder.add(arguments[8], builder.mul(column, _number(3)))
                code.store(code.shuffle(sums, sums, _THREE_OF_FOUR), 7, to)

            code.for_each_fourth(n, sum_four)

        code.for_few_and_many(arguments[5], sum_all)
        return context.get_dummy_value()

    return types.void(pixels, start, starts, taps, lower, num_pairs, n, out, to), generate


@intrinsic
def sum_rows(
    _context: Any, rows: Any, start: Any, row_step: Any, taps: Any, at: Any, lower: Any, step: Any, num_pairs: Any,
    out: Any, to: Any,
) -> Any:  # fmt: skip
    """Sum sixteen columns of some rows, by weight.

    Args:
        rows: uint8 [...].
        start: The index of the sixteen numbers in the first row.
        row_step: The distance from one row to the next.
        taps: uint32 [...], the weights of two rows each.
        at: The index of the upper parts of the first two rows' weights.
        lower: The distance to the lower parts.
        step: The distance to the next two rows' weights.
        num_pairs: How many times two rows are added. Weights may be 0.
        out: uint8 [...], for the sums.
        to: The index of the first one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)

        def load(pair: Any) -> Any:
            above = builder.add(arguments[1], builder.mul(builder.mul(pair, _number(2)), arguments[2]))
            below = builder.add(above, arguments[2])
            one, other = code.load(0, above, 16, _vector(8, 16)), code.load(0, below, 16, _vector(8, 16))
            return code.shuffle(one, other, [j for i in range(16) for j in (i, i + 16)])

        def load_weights(pair: Any) -> list[Any]:
            at = builder.add(arguments[4], builder.mul(pair, arguments[6]))
            loaded = [code.load(3, index, 1, _vector(16, 2)) for index in (at, builder.add(at, arguments[5]))]
            return [code.shuffle(weights, weights, (0, 1) * 16) for weights in loaded]

        code.store(code.sum_weighted(arguments[7], load, load_weights), 8, arguments[9])
        return context.get_dummy_value()

    return types.void(rows, start, row_step, taps, at, lower, step, num_pairs, out, to), generate


@intrinsic
def pack_pixels(_context: Any, pixels: Any, first: Any, out: Any, to: Any) -> Any:
    """Copy three bytes of each of four elements of ``pixels``, uint32, to ``out``, uint8. Four more are overwritten."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        four = code.load(0, arguments[1], 4, _vector(8, 16))
        code.store(code.shuffle(four, four, _THREE_OF_FOUR), 2, arguments[3])
        return context.get_dummy_value()

    return types.void(pixels, first, out, to), generate


def _vector(bits: int, count: int) -> Any:
    return ir.VectorType(ir.IntType(bits), count)


def _number(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _same(value: int, kind: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)
