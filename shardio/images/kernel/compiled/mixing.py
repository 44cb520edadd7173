"""Mix neighbouring pixels of an image, with the results of Pillow (Geometry.c): its BILINEAR and BICUBIC.

Pillow computes with 64 bits, in a certain order, and rounds towards 0. Weighted sums with 32 bits give the same in less
time, unless a result is so close to a whole number that their errors matter. Such pixels are computed as by Pillow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from shardio.images.kernel.compiled.memory import elements

MARGINS = {2: 2.0**-12, 4: 2.0**-10}
"""More than twice the errors of weighted sums, by the number of columns and rows.

The absolute values of two weights add up to 1, and those of four to up to 1.5. Rounding weights, products and sums
changes the sum of a row by up to 3 × 255 × 2^-24, or 5 × 1.5 × 255 × 2^-24. The error of the final sum is twice that of
a row, or three times.
"""

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_BYTES, _INTEGERS = ir.VectorType(_BYTE, 4), ir.VectorType(_WORD, 4)
_FLOATS, _DOUBLES = ir.VectorType(ir.FloatType(), 4), ir.VectorType(ir.DoubleType(), 4)


@intrinsic
def mix_quickly(_context: Any, before: Any, columns: Any, rows: Any, x_weights: Any, y_weights: Any) -> Any:
    """Return a mixture of the pixels in some columns and rows, int32: three bytes. Return -1 if it may be wrong.

    Args:
        before: uint8 [...], the image; the byte after a pixel is read, too.
        columns: Two or four columns: the index of the first byte of each in a row, uint64.
        rows: As many rows: the index of the first byte of each, uint64.
        x_weights: The weight of each column, float32.
        y_weights: The weight of each row, float32.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def mix(values: Sequence[Any], weights: Any) -> Any:
            kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
            add = get_or_insert_function(builder.module, kind, "llvm.fmuladd.v4f32")
            total = ir.Constant(_FLOATS, None)
            for i, value in enumerate(values):
                weight = _repeat(builder, builder.extract_value(weights, i))
                total = builder.call(add, [value, weight, total]) if i else builder.fmul(value, weight)
            return total

        mixed = _mix(context, builder, signature, arguments, mix, _FLOATS)
        margin = ir.Constant(_FLOATS, [MARGINS[signature.args[1].count]] * 4)
        low, high = (_round(builder, operation(mixed, margin)) for operation in (builder.fsub, builder.fadd))
        lanes = builder.bitcast(builder.icmp_unsigned("!=", low, high), ir.IntType(4))
        is_certain = builder.icmp_unsigned("==", lanes, ir.Constant(ir.IntType(4), 0))
        colours = builder.and_(_as_pixel(builder, high), ir.Constant(_WORD, (1 << 24) - 1))
        return builder.select(is_certain, colours, ir.Constant(_WORD, -1))

    return types.int32(before, columns, rows, x_weights, y_weights), generate


@intrinsic
def mix_exactly(_context: Any, before: Any, columns: Any, rows: Any, dx: Any, dy: Any) -> Any:
    """Return a mixture of the pixels in some columns and rows, int32: three bytes.

    Args:
        before: See :func:`mix_quickly`.
        columns: Two columns for Pillow's BILINEAR, or four for its BICUBIC.
        rows: As many rows.
        dx: The distance from the first of two columns, or from the second of four, float64.
        dy: The same for rows.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def mix(values: Sequence[Any], distance: Any) -> Any:
            return _MIXTURES[len(values)](builder, values, _repeat(builder, distance))

        return _as_pixel(builder, _round(builder, _mix(context, builder, signature, arguments, mix, _DOUBLES)))

    return types.int32(before, columns, rows, dx, dy), generate


@intrinsic
def load_pixel(_context: Any, data: Any, at: Any) -> Any:
    """Return the pixel at an index of ``data``, uint8, and the byte after it, as int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, at = arguments
        place = elements(context, builder, signature.args[0], data, at, 4, _WORD)
        return builder.load(place, align=1)

    return types.int32(data, at), generate


@intrinsic
def store_pixel(_context: Any, pixel: Any, out: Any, to: Any) -> Any:
    """Write the first three bytes of an int32 to an index of ``out``, uint8. The next pixel may be finished already."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pixel, out, to = arguments
        for first, kind in ((0, ir.IntType(16)), (2, _BYTE)):
            start = builder.add(to, ir.Constant(to.type, first))
            place = elements(context, builder, signature.args[1], out, start, kind.width // 8, kind)
            builder.store(builder.trunc(builder.lshr(pixel, ir.Constant(_WORD, 8 * first)), kind), place, align=1)
        return context.get_dummy_value()

    return types.void(pixel, out, to), generate


def _mix(context: Any, builder: Any, signature: Any, arguments: Any, mix: Callable[..., Any], kind: Any) -> Any:
    """Add code that mixes the pixels of each row by their columns' weights, and the results by the rows' weights.

    Returns:
        The mixed colours, four numbers of a kind. The last one is none of the pixel's.
    """
    before, columns, rows, x, y = arguments
    mixed = []
    for i in range(signature.args[2].count):
        pixels = []
        for j in range(signature.args[1].count):
            start = builder.add(builder.extract_value(rows, i), builder.extract_value(columns, j))
            place = elements(context, builder, signature.args[0], before, start, 4, _BYTES)
            pixels.append(builder.sitofp(builder.zext(builder.load(place, align=1), _INTEGERS), kind))
        mixed.append(mix(pixels, x))
    return mix(mixed, y)


def _add_linear(builder: Any, values: Sequence[Any], distance: Any) -> Any:
    """Add code for Pillow's BILINEAR."""
    one, other = values
    return builder.fadd(one, builder.fmul(builder.fsub(other, one), distance))


def _add_cubic(builder: Any, values: Sequence[Any], distance: Any) -> Any:
    """Add code for Pillow's BICUBIC, in its order."""
    add, subtract, multiply = builder.fadd, builder.fsub, builder.fmul
    v1, v2, v3, v4 = values
    difference = subtract(v1, v2)
    p2 = subtract(v3, v1)
    p3 = subtract(add(add(difference, difference), v3), v4)
    p4 = add(subtract(subtract(v2, v1), v3), v4)
    total = add(p2, multiply(distance, add(p3, multiply(distance, p4))))
    return add(v2, multiply(distance, total))


_MIXTURES = {2: _add_linear, 4: _add_cubic}
"""Pillow's ways to mix values, by their number."""


def _round(builder: Any, values: Any) -> Any:
    """Add code that limits numbers to 0 to 255 and rounds them towards 0."""
    for sign, limit in (("<", 0.0), (">", 255.0)):
        constant = ir.Constant(values.type, [limit] * 4)
        values = builder.select(builder.fcmp_ordered(sign, values, constant), constant, values)
    return builder.fptosi(values, _INTEGERS)


def _as_pixel(builder: Any, values: Any) -> Any:
    """Add code that joins four values from 0 to 255 to an int32."""
    return builder.bitcast(builder.trunc(values, _BYTES), _WORD)


def _repeat(builder: Any, number: Any) -> Any:
    """Add code for a vector of four equal numbers."""
    vector = ir.Constant(ir.VectorType(number.type, 4), ir.Undefined)
    for lane in range(4):
        vector = builder.insert_element(vector, number, ir.Constant(_WORD, lane))
    return vector
