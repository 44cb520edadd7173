"""The kernel as a C function that takes one address, for processes that do not load numba."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, types  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.chunk import decode_chunk
from shardio.images.kernel.memory import pointer
from shardio.images.kernel.records import CALL, PLAN, WORKSPACE


def _decode_chunk(address):
    call = carray(pointer(address), 1, CALL)[0]
    n = call.num_images
    decode_chunk(
        carray(pointer(call.files), n, np.int64),
        carray(pointer(call.lengths), n, np.int64),
        carray(pointer(call.plans), n, PLAN),
        carray(pointer(call.order), n, np.int64),
        carray(pointer(call.rows), (n, call.height, call.width, 3), np.uint8),
        carray(pointer(call.is_done), n, np.uint8),
        carray(pointer(call.workspace), 1, WORKSPACE)[0],
    )


def compile_entry() -> tuple[str, str]:
    """Compile the kernel. Return its LLVM code, and the name of the function that takes the address of a CALL."""
    function = cfunc(types.void(types.int64), error_model="numpy")(_decode_chunk)
    return function.inspect_llvm(), function.native_name
