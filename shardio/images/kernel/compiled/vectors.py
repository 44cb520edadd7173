"""Formulas that are applied to sixteen numbers at once.

LLVM vectorises plain loops, but with few numbers per vector: numba computes in 64 bits, or in 32 if each step is cast.
A processor does twice as many multiplications of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shardio.images.kernel.compiled.memory import elements

LENGTH = 16


class Vector:
    """Sixteen integers in LLVM's code. An integer operand applies to all of them."""

    def __init__(self, builder: Any, value: Any) -> None:
        self._builder = builder
        self.value = value

    def _binary(self, operation: str, other: Vector | int) -> Vector:
        value = other.value if isinstance(other, Vector) else ir.Constant(self.value.type, [other] * LENGTH)
        return Vector(self._builder, getattr(self._builder, operation)(self.value, value))

    def __add__(self, other: Vector | int) -> Vector:
        return self._binary("add", other)

    def __sub__(self, other: Vector | int) -> Vector:
        return self._binary("sub", other)

    def __mul__(self, other: Vector | int) -> Vector:
        return self._binary("mul", other)

    def __or__(self, other: Vector) -> Vector:
        return self._binary("or_", other)

    def __lshift__(self, count: int) -> Vector:
        return self._binary("shl", count)

    def __rshift__(self, count: int) -> Vector:
        return self._binary("ashr", count)

    def _resized(self, operation: str, bits: int) -> Vector:
        return Vector(self._builder, getattr(self._builder, operation)(self.value, _kind(bits)))

    def signed(self, bits: int) -> Vector:
        """Return the integers, taken as signed, with more bits."""
        return self._resized("sext", bits)

    def unsigned(self, bits: int) -> Vector:
        """Return the integers, taken as unsigned, with more bits."""
        return self._resized("zext", bits)

    def low(self, bits: int) -> Vector:
        """Return the lowest bits of the integers."""
        return self._resized("trunc", bits)

    def clamp(self, low: int, high: int) -> Vector:
        """Return the integers, taken as signed, limited to ``low`` to ``high``."""
        builder, value = self._builder, self.value
        for sign, limit in ((">", low), ("<", high)):
            bound = ir.Constant(value.type, [limit] * LENGTH)
            value = builder.select(builder.icmp_signed(sign, value, bound), value, bound)
        return Vector(builder, value)


def upper_half_of_product(one: Vector, other: Vector | int) -> Vector:
    """Return the upper half of each product of two 16-bit numbers. It costs less than the 32-bit product."""
    return (one.signed(32) * (other.signed(32) if isinstance(other, Vector) else other) >> 16).low(16)


def sixteen_at_once(formula: Callable[..., Vector | tuple[Vector, ...]]) -> Callable[..., None]:
    """Return a function for the kernel that applies a formula.

    It takes a tuple of operands, arrays and numbers, a tuple of arrays for the results, and the index, uint64, of the
    first of sixteen elements of each array. A number is repeated sixteen times.
    """

    @intrinsic
    def apply(_context: Any, operands: Any, results: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def address(kind: Any, array: Any) -> Any:
                return elements(context, builder, kind, array, arguments[2], LENGTH, _kind(kind.dtype.bitwidth))

            def load(kind: Any, operand: Any) -> Vector:
                if isinstance(kind, types.Array):
                    return Vector(builder, builder.load(address(kind, operand), align=1))
                one = builder.insert_element(ir.Constant(_kind(kind.bitwidth), ir.Undefined), operand, _FIRST)
                return Vector(builder, builder.shuffle_vector(one, one, ir.Constant(_kind(32), [0] * LENGTH)))

            kinds, outs = signature.args[0].types, signature.args[1].types
            made = formula(*(load(kind, builder.extract_value(arguments[0], i)) for i, kind in enumerate(kinds)))
            for i, result in enumerate(made if isinstance(made, tuple) else (made,)):
                builder.store(result.value, address(outs[i], builder.extract_value(arguments[1], i)), align=1)
            return context.get_dummy_value()

        return types.void(operands, results, at), generate

    function: Callable[..., None] = apply
    return function


def sixteen_in_four_columns(formula: Callable[..., Vector]) -> Callable[..., None]:
    """Return a function for the kernel that applies a formula to four columns, and puts their results side by side.

    The formula returns 32-bit numbers. The function takes a tuple of arrays, those of the first operand's four columns
    first, and the index, uint64, of the first of sixteen elements of each. Further arguments are an array for the
    results, uint32, and where they belong there: sixteen indices from the same index of an array, int64, on, and what
    to add to them. At each index, it writes four numbers: one element's result in each column.
    """

    @intrinsic
    def apply(_context: Any, operands: Any, at: Any, results: Any, places: Any, added: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def load(i: int) -> Vector:
                kind = signature.args[0].types[i]
                array = builder.extract_value(arguments[0], i)
                address = elements(context, builder, kind, array, arguments[1], LENGTH, _kind(kind.dtype.bitwidth))
                return Vector(builder, builder.load(address, align=1))

            def interleave(one: Any, other: Any, first: int, length: int) -> Any:
                """Take ``length`` numbers of each of two vectors by turns, from a half of each four numbers."""
                indices = [
                    4 * four + first + i + vector * LENGTH + j
                    for four in range(LENGTH // 4)
                    for i in range(0, 2, length)
                    for vector in range(2)
                    for j in range(length)
                ]
                return builder.shuffle_vector(one, other, ir.Constant(_kind(32), indices))

            num_operands = len(signature.args[0].types) // 4
            made = [formula(*(load(4 * i + column) for i in range(num_operands))).value for column in range(4)]
            pairs = [interleave(made[i], made[i + 1], first, 1) for i in (0, 2) for first in (0, 2)]
            fours = [interleave(pairs[i], pairs[i + 2], first, 2) for i in (0, 1) for first in (0, 2)]
            kind = ir.VectorType(ir.IntType(32), 4)
            index_address = elements(
                context, builder, signature.args[3], arguments[3], arguments[1], LENGTH, ir.IntType(64)
            )
            for i in range(LENGTH):
                indices = ir.Constant(kind, list(range(i // 4 * 4, i // 4 * 4 + 4)))
                index = builder.load(builder.gep(index_address, [ir.Constant(ir.IntType(64), i)]))
                index = builder.add(index, arguments[4])
                four = builder.shuffle_vector(fours[i % 4], fours[i % 4], indices)
                builder.store(
                    four, elements(context, builder, signature.args[2], arguments[2], index, 4, kind), align=4
                )
            return context.get_dummy_value()

        return types.void(operands, at, results, places, added), generate

    function: Callable[..., None] = apply
    return function


def _kind(bits: int) -> Any:
    return ir.VectorType(ir.IntType(bits), LENGTH)


_FIRST = ir.Constant(ir.IntType(32), 0)
