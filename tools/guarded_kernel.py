"""Guard the kernel: an access outside its own memory ends the process or raises an error."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.kernel.compiled import records
from shardio.images.kernel.compiled.records import CALL, IMAGE, PLAN, ROW, WORKSPACE
from tools.guard_pages import GuardedMemory

MAX_FILES = 16
"""The maximum number of files in a chunk."""

UNTOUCHED = 77
"""The value that rows are filled with."""

LARGE = (
    *("streams", "bits", "coefficients", "chroma", "places", "pixels", "turned"),
    *("columns", "column_weights", "column_taps", "rows", "row_taps", "weights", "resized", "resized_rows"),
)
"""The arrays of a workspace that small images use only in part."""


class ForeignAccessError(AssertionError):
    """The error for a kernel that accesses memory other than its own."""


class Chunk(NamedTuple):
    """The arguments of one call of the kernel.

    Attributes:
        contents: The bytes of n files.
        plans: The fields of one or more PLANs for each file.
        turns: The turn that makes each image upright.
        shape: Height and width of the rows.
        at_end: Whether arrays lie at the end or at the start of the accessible memory.
    """

    contents: list[bytes]
    plans: list[tuple[int, ...]]
    turns: list[int]
    shape: tuple[int, int]
    at_end: bool


Render = Callable[[Chunk], NDArray[np.uint8]]
"""A function that renders a chunk, and returns whether each file was rendered, uint8 [n]."""


def load_guarded() -> Render:
    """Return the kernel as users run it. An access outside its memory ends the process."""
    from shardio.images.kernel import compiled_functions

    return _between_guards(compiled_functions().decode_chunk, _second_halves(WORKSPACE))


def compile_checked(max_pixels: int | None = None) -> Render:
    """Compile the kernel with a check of every index, in a process that has not yet imported the kernel's functions.

    Args:
        max_pixels: The capacity of the kernel's arrays, which small images can then fill.
    """
    os.environ["NUMBA_BOUNDSCHECK"] = "1"
    from shardio.images.kernel.compiled import memory

    for name, function in _checked_memory().items():
        setattr(memory, name, function)
    with suppress(IndexError):
        raise AssertionError(
            f"numba does not check indices: {memory.kernel_function(lambda array: array[9])(np.zeros(9))}"
        )
    if max_pixels is not None:
        _make_small(max_pixels)
    from shardio.images.kernel.compiled.entry import _decode_chunk

    return _between_guards(memory.kernel_function(_decode_chunk), ())


def _between_guards(function: Callable[[int], object], forbidden: Iterable[tuple[int, int]]) -> Render:
    """Return a function that calls the kernel with all of its memory between inaccessible pages.

    Inputs are read-only, and rows of images that are not rendered must not change.

    Args:
        function: The kernel, which receives the address of a CALL.
        forbidden: Parts of the workspace that are also inaccessible.
    """
    files = [GuardedMemory() for _ in range(MAX_FILES)]
    names = "images", "plans", "order", "rows", "destinations", "is_done", "call"
    memories = {name: GuardedMemory() for name in names}
    spaces, num_bytes = {at_end: GuardedMemory() for at_end in (False, True)}, records.WORKSPACE.itemsize
    works = {at_end: space.place(num_bytes, at_end=at_end) for at_end, space in spaces.items()}
    for start, stop in forbidden:
        spaces[False].forbid(start, stop)
        before = -num_bytes % mmap.PAGESIZE
        spaces[True].forbid(before + start, before + stop)

    def render(chunk: Chunk) -> NDArray[np.uint8]:
        at_end, n = chunk.at_end, len(chunk.contents)
        data = [
            memory.place(len(content), at_end=at_end, content=np.frombuffer(content, np.uint8))
            for memory, content in zip(files, chunk.contents, strict=False)
        ]
        inputs = {
            "images": np.array(
                [(array.ctypes.data, len(array), turn) for array, turn in zip(data, chunk.turns, strict=True)], IMAGE
            ),
            "plans": np.array(chunk.plans, PLAN),
            "order": np.arange(n),
        }
        arrays = {
            name: memories[name].place(content.shape, content.dtype, at_end=at_end, content=content)
            for name, content in inputs.items()
        }
        rows = memories["rows"].place((len(chunk.plans), *chunk.shape, 3), at_end=at_end)
        rows[...] = UNTOUCHED
        destinations = np.array([(row.ctypes.data, *chunk.shape) for row in rows], ROW)
        arrays["rows"] = memories["destinations"].place(len(rows), ROW, at_end=at_end, content=destinations)
        arrays["is_done"] = is_done = memories["is_done"].place(n, at_end=at_end)
        arrays["workspace"] = works[at_end]
        call = np.zeros(1, CALL)
        call["num_images"], call["num_crops"] = n, len(chunk.plans) // max(n, 1)
        for name, array in arrays.items():
            call[name] = array.ctypes.data
        try:
            function(memories["call"].place(1, CALL, at_end=at_end, content=call).ctypes.data)
        except IndexError as error:
            raise ForeignAccessError(str(error)) from error
        if n and (rows.reshape(n, -1)[is_done == 0] != UNTOUCHED).any():
            raise ForeignAccessError("rows of images that were not rendered have changed")
        return is_done

    return render


def _second_halves(workspace: np.dtype[np.void]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the second half of each large array, to detect an overrun of one array into the next."""
    assert workspace.fields is not None
    for name in LARGE:
        kind, start = workspace.fields[name][:2]
        num_rows = kind.shape[0] if len(kind.shape) > 1 else 1
        length = kind.itemsize // num_rows
        for row in range(num_rows):
            yield start + row * length + length // 2, start + (row + 1) * length


def _checked_memory() -> dict[str, Callable[..., Any]]:
    """Return checked versions of the functions in the kernel's memory.py that numba does not check."""
    from numba import carray  # type: ignore[attr-defined]  # It is not in __all__.

    from shardio.images.kernel.compiled import memory

    kernel_function: Any = memory.kernel_function
    pointer: Any = memory.pointer  # numba's intrinsics are called with arguments other than those in their definitions.

    @kernel_function
    def shaped(array, start, shape):  # type: ignore[no-untyped-def]
        part = carray(pointer(array.ctypes.data + start * array.itemsize), shape, array.dtype)
        if start < 0 or start + part.size > array.size:
            raise IndexError("a part of an array extends beyond it")
        return part

    return {"shaped": shaped}


def _make_small(max_pixels: int) -> None:
    """Shrink the arrays of records.py, before any module imports their sizes."""
    smaller = {
        "MAX_PIXELS = 1 << 20": f"MAX_PIXELS = {max_pixels}",
        "MAX_STREAMS = 1 << 15": "MAX_STREAMS = 4",
        "MAX_BYTES = 3 << 20": f"MAX_BYTES = {max_pixels // 4}",
    }
    source = Path(records.__file__).read_text()
    for usual, small in smaller.items():
        assert source.count(usual) == 1, f"{records.__file__} does not say {usual!r}"
        source = source.replace(usual, small)
    exec(source, vars(records))
