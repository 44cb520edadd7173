"""The compiled functions as C functions that take one address each, for processes that do not load numba."""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, types  # type: ignore[attr-defined]  # It is not in __all__.

from shardio.images.kernel.compiled.best_table import make_best_table
from shardio.images.kernel.compiled.chunk import decode_chunk
from shardio.images.kernel.compiled.memory import pointer
from shardio.images.kernel.compiled.normalizing import normalize_image
from shardio.images.kernel.compiled.operation_records import EDIT, NORMALIZATION, OPERATION
from shardio.images.kernel.compiled.operations import edit_images
from shardio.images.kernel.compiled.records import BEST_TABLE, CALL, CODED_SCAN, IMAGE, PLAN, ROW, SCAN, WORKSPACE
from shardio.images.kernel.compiled.scan_reading import read_scan
from shardio.images.kernel.compiled.scan_writing import write_scan


def _decode_chunk(address):
    call = carray(pointer(address), 1, CALL)[0]
    n, num_crops = call.num_images, call.num_crops
    decode_chunk(
        carray(pointer(call.images), n, IMAGE),
        carray(pointer(call.plans), (n, num_crops), PLAN),
        carray(pointer(call.order), n, np.int64),
        carray(pointer(call.rows), (n, num_crops), ROW),
        carray(pointer(call.is_done), n, np.uint8),
        carray(pointer(call.workspace), 1, WORKSPACE)[0],
    )


def _edit_images(address):
    call = carray(pointer(address), 1, EDIT)[0]
    edit_images(
        carray(pointer(call.rows), call.num_images, ROW),
        carray(pointer(call.operations), (call.num_images, call.num_operations), OPERATION),
        carray(pointer(call.scratch), call.scratch_length, np.uint8),
    )


def _normalize_image(address):
    call = carray(pointer(address), 1, NORMALIZATION)[0]
    normalize_image(
        carray(pointer(call.pixels), 3 * call.num_pixels, np.uint8),
        carray(pointer(call.planes), 3 * call.num_pixels, np.uint8),
        call.means,
        call.deviations,
        carray(pointer(call.result), 3 * call.num_pixels, np.float32),
    )


def _read_scan(address):
    read_scan(carray(pointer(address), 1, SCAN)[0])


def _write_scan(address):
    write_scan(carray(pointer(address), 1, CODED_SCAN)[0])


def _make_best_table(address):
    make_best_table(carray(pointer(address), 1, BEST_TABLE)[0])


ENTRIES = {
    "shardio_decode_chunk": _decode_chunk,
    "shardio_edit_images": _edit_images,
    "shardio_normalize_image": _normalize_image,
    "shardio_read_scan": _read_scan,
    "shardio_write_scan": _write_scan,
    "shardio_make_best_table": _make_best_table,
}
"""The functions by the names that they have in compiled code. Each takes the address of its arguments."""


def compile_entries() -> dict[str, tuple[str, str]]:
    """Compile the functions. Return the LLVM code of each, and the name that it has there."""
    compile_function = cfunc(types.void(types.int64), error_model="numpy")
    compiled = {name: compile_function(function) for name, function in ENTRIES.items()}
    return {name: (function.inspect_llvm(), function.native_name) for name, function in compiled.items()}
