"""Operations on single numbers that LLVM vectorises in loops, which those of plain numba prevent.

A condition becomes a selection instead of a branch, and a conversion to an integer is one to 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shardio.images.kernel.compiled.memory import kernel_function

_I = np.int32


@intrinsic
def choose(_context: Any, condition: Any, one: Any, other: Any) -> Any:
    """Return ``one`` if the condition is true, else ``other``."""
    assert one == other, f"{one} and {other} are different types"

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return one(types.boolean, one, other), generate


@intrinsic
def truncate(_context: Any, number: Any) -> Any:
    """Return a floating-point number as int32, rounded towards 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fptosi(arguments[0], ir.IntType(32))

    return types.int32(number), generate


@kernel_function
def clamp(number):
    """Return an int32 as uint8, limited to 0 to 255."""
    return np.uint8(min(max(number, _I(0)), _I(255)))
