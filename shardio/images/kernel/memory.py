"""How the kernel's functions are compiled, and what plain numba has no words for, in a few lines of LLVM each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]  # It is not in __all__.
from numba.extending import intrinsic


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of the kernel. numba keeps no code of it: it would not see that another file has changed.

    Numbers are divided as numpy does it, without a check for zeros that could raise an error.
    """
    return njit(nogil=True, error_model="numpy")(function)


@intrinsic
def load_word(_context: Any, data: Any, at: Any) -> Any:
    """Return the eight bytes of ``data``, uint8, from ``at`` on as one number, the first being the highest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        word = ir.IntType(64)
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), word.as_pointer())
        swap = builder.module.declare_intrinsic("llvm.bswap", [word])
        return builder.call(swap, [builder.load(place, align=1)])

    return types.uint64(data, at), generate


@intrinsic
def pointer(_context: Any, address: Any) -> Any:
    """Return a pointer to an address, for ``numba.carray``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@compiled
def shaped(array, start, shape):
    """Return a part of a flat array, from ``start`` on, in another shape; ``reshape`` can fail, which takes Python."""
    return carray(pointer(array.ctypes.data + start * array.itemsize), shape, array.dtype)
