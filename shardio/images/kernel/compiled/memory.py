"""Compile the kernel's functions, and access memory in ways that plain numba cannot express, in a few lines of LLVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, config, njit, types  # type: ignore[attr-defined]  # It is not in __all__.
from numba.extending import intrinsic


def kernel_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of the kernel with numba, without numba's cache, which does not notice changes in other files.

    Division follows numpy: it does not check for zero, because the kernel cannot raise errors.
    """
    return njit(nogil=True, error_model="numpy")(function)


def elements(context: Any, builder: Any, kind: Any, array: Any, start: Any, count: int, as_type: Any) -> Any:
    """Return a pointer to elements of an array, for intrinsics.

    The elements must exist. This is checked only if numba checks indices (NUMBA_BOUNDSCHECK).

    Args:
        context: numba's context.
        builder: LLVM's builder.
        kind: The array's type; its elements are contiguous.
        array: The array.
        start: The first element's index, uint64.
        count: The number of elements.
        as_type: The type that the pointer points to.
    """
    assert (kind.ndim, kind.layout) == (1, "C"), f"{kind} is not one-dimensional and contiguous"
    structure = context.make_array(kind)(context, builder, array)
    if config.BOUNDSCHECK:  # type: ignore[attr-defined]  # It is set from the environment.
        word = start.type
        stop = builder.add(start, ir.Constant(word, count))
        length = builder.extract_value(structure.shape, 0)
        is_outside = builder.or_(builder.icmp_unsigned("<", stop, start), builder.icmp_unsigned(">", stop, length))
        with builder.if_then(is_outside):
            context.call_conv.return_user_exc(builder, IndexError, (f"{count} elements are not in the array",))
    return builder.bitcast(builder.gep(structure.data, [start]), as_type.as_pointer())


@intrinsic
def load_word(_context: Any, data: Any, at: Any) -> Any:
    """Return the eight bytes of ``data``, uint8, from ``at`` on as one big-endian number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        address = elements(context, builder, signature.args[0], arguments[0], arguments[1], 8, word)
        swap = builder.module.declare_intrinsic("llvm.bswap", [word])
        return builder.call(swap, [builder.load(address, align=1)])

    return types.uint64(data, at), generate


@intrinsic
def store_word(_context: Any, out: Any, at: Any, word: Any) -> Any:
    """Write a number, uint64, to the eight bytes of ``out``, uint8, from ``at`` on, in big-endian order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.IntType(64)
        address = elements(context, builder, signature.args[0], arguments[0], arguments[1], 8, kind)
        swap = builder.module.declare_intrinsic("llvm.bswap", [kind])
        builder.store(builder.call(swap, [arguments[2]]), address, align=1)
        return context.get_dummy_value()

    return types.void(out, at, word), generate


COPIED_AT_ONCE = 32
"""The number of bytes that :func:`copy_up_to_ff` copies."""


@intrinsic
def copy_up_to_ff(_context: Any, data: Any, at: Any, out: Any, to: Any) -> Any:
    """Copy some bytes of ``data``, uint8, to ``out``, uint8. Return how many of them come before the first 0xFF."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, number = ir.VectorType(ir.IntType(8), COPIED_AT_ONCE), ir.IntType(COPIED_AT_ONCE)
        source, place = (
            elements(context, builder, signature.args[i], arguments[i], arguments[i + 1], COPIED_AT_ONCE, vector)
            for i in (0, 2)
        )
        copied = builder.load(source, align=1)
        builder.store(copied, place, align=1)
        is_ff = builder.icmp_unsigned("==", copied, ir.Constant(vector, [0xFF] * COPIED_AT_ONCE))
        count = builder.cttz(builder.bitcast(is_ff, number), ir.Constant(ir.IntType(1), False))
        return builder.zext(count, ir.IntType(64))

    return types.uint64(data, at, out, to), generate


@intrinsic
def copy_four(_context: Any, data: Any, at: Any, out: Any, to: Any) -> Any:
    """Copy four bytes of ``data``, uint8, to ``out``, uint8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        four = ir.IntType(32)
        source, place = (
            elements(context, builder, signature.args[i], arguments[i], arguments[i + 1], 4, four) for i in (0, 2)
        )
        builder.store(builder.load(source, align=1), place, align=1)
        return context.get_dummy_value()

    return types.void(data, at, out, to), generate


@intrinsic
def pointer(_context: Any, address: Any) -> Any:
    """Return an address as a pointer, for ``numba.carray``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@kernel_function
def shaped(array, start, shape):
    """Return a part of a flat array from ``start`` on in another shape. ``reshape`` could raise, which needs Python."""
    return carray(pointer(array.ctypes.data + start * array.itemsize), shape, array.dtype)
