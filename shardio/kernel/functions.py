"""Provide the kernel's functions as methods that accept arrays."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.kernel.operations import BEGIN_MIXTURE, GAUSSIAN_BLUR, SLACK, count_blur_bytes, count_mixture_bytes
from shardio.kernel.records import (
    BEST_TABLE,
    CALL,
    CHUNK_PADDING,
    COLLECTION,
    EDIT,
    IMAGE,
    NORMALIZATION,
    OPERATION,
    PLAN,
    ROW,
    TILED_CROP,
    TILED_IMAGE,
    WORKSPACE_BYTES,
)
from shardio.process import call_at_fork, count_processors

CHUNK_ALIGNMENT = 16
"""The alignment, in bytes, of a chunk of tiles and of the records in it."""

Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3]."""

Rows = Pixels | Sequence[Pixels]
"""uint8 [n, height, width, 3], or n uint8 [height, width, 3] arrays."""


MAX_SCRATCH_BYTES = 64 * 2**20
"""The size, in bytes, of the largest scratch array to keep."""

_scratch_arrays = threading.local()


def scratch(purpose: str, num_bytes: int) -> NDArray[np.uint8]:
    """Return uint8 [num_bytes] with arbitrary content, valid until this thread's next call with the same purpose."""
    arrays: dict[str, NDArray[np.uint8]] = vars(_scratch_arrays)  # This thread's arrays.
    array = arrays.get(purpose)
    if array is None or array.size < num_bytes:
        array = np.empty(num_bytes, np.uint8)
        if num_bytes <= MAX_SCRATCH_BYTES:
            arrays[purpose] = array
    return array[:num_bytes]


def scratch_pixels(purpose: str, height: int, width: int) -> NDArray[np.uint8]:
    """Return scratch memory as uint8 [height, width, 3]."""
    return scratch(purpose, height * width * 3).reshape(height, width, 3)


class StoredPixels(NamedTuple):
    """Uncompressed pixels, row by row, in memory or in an open file.

    Attributes:
        content: The bytes that hold the pixels, or None if they are in a file.
        file: The descriptor of the open file, or None.
        offset: The offset of the first pixel.
        height: Height in pixels.
        width: Width in pixels.
        num_channels: 1 for gray, 3 for red, green and blue.
    """

    content: bytes | None
    file: int | None
    offset: int
    height: int
    width: int
    num_channels: int


class Kept(NamedTuple):
    """A JPEG whose decoded image is to be kept, or a kept image: see kept.c.

    Attributes:
        content: The bytes of a JPEG; None for a kept image.
        key: The key under which to keep the JPEG.
        cache: The address of the cache in which to keep it.
        cache_file: The descriptor of the cache's memory.
        kept: The address of the kept image.
    """

    content: bytes | None
    key: int = 0
    cache: int = 0
    cache_file: int = 0
    kept: int = 0


Content = bytes | Kept | StoredPixels
"""A JPEG, or another image that the kernel renders."""


class Functions:
    """The kernel's functions, in a shared object. Most of them take a record's address and release the GIL.

    Args:
        path: The shared object.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._library = ctypes.CDLL(str(path))
        short = ctypes.PyDLL(str(path))  # Calling short functions takes less time than releasing the GIL.
        self._read_size, self.find_kept = short.shardio_read_size, short.shardio_find_kept
        self._read_size.argtypes, self._read_size.restype = [ctypes.c_char_p, ctypes.c_int64], ctypes.c_int64
        self.find_kept.argtypes, self.find_kept.restype = [ctypes.c_int64, ctypes.c_uint64], ctypes.c_int64
        self.decode_chunk = self._find("shardio_decode_chunk")
        self.collect_tiles, self.decode_tiles = self._find("shardio_collect_tiles"), self._find("shardio_decode_tiles")
        self._edit_images = self._find("shardio_edit_images")
        self._normalize_image = self._find("shardio_normalize_image")
        self.read_scan = self._find("shardio_read_scan")
        self.read_progressive = self._find("shardio_read_progressive")
        self.write_scan = self._find("shardio_write_scan")
        self._make_best_table = self._find("shardio_make_best_table")

    def _find(self, name: str) -> Callable[[int], None]:
        function = self._library[name]
        function.argtypes, function.restype = [ctypes.c_int64], None
        return function

    def read_size(self, content: bytes) -> tuple[int, int] | None:
        """Return the height and width of a JPEG, or None if the kernel cannot read its head."""
        size = self._read_size(content, len(content))
        return (size >> 32, size & 0xFFFFFFFF) if size else None

    def edit_images(self, rows: Rows, operations: NDArray[np.void]) -> None:
        """Apply operations to images in place; see edit.c.

        Args:
            rows: The images, in contiguous arrays.
            operations: OPERATION [n, k], the operations on each image, in order.
        """
        assert operations.dtype == OPERATION, "the operations are read as raw memory"
        assert operations.flags.c_contiguous, "the operations are read as raw memory"
        assert len(operations) == len(rows), "each image has operations"
        destinations = _find_destinations(rows)
        length = 3 * int((destinations["height"] * destinations["width"]).max(initial=0)) + SLACK
        if (operations["code"] == BEGIN_MIXTURE).any():
            length += count_mixture_bytes(length)
        if (is_blur := operations["code"] == GAUSSIAN_BLUR).any():
            radius = operations["numbers"][is_blur][:, [0, 2]].max()
            length += count_blur_bytes(int(destinations["width"].max()), int(radius))
        memory, call = scratch("operations", length), np.zeros(1, EDIT)
        call[0] = (
            *(*operations.shape, destinations.ctypes.data, operations.ctypes.data),
            *(memory.ctypes.data, length),
        )
        self._edit_images(call.ctypes.data)

    def normalize_image(
        self, pixels: Pixels, means: NDArray[np.float32], deviations: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return (pixels / 255 - mean) / deviation, float32 [3, height, width].

        Args:
            pixels: uint8 [height, width, 3], contiguous.
            means: float32 [3].
            deviations: float32 [3].
        """
        assert pixels.flags.c_contiguous, "the pixels are read as raw memory"
        height, width, _ = pixels.shape
        result = np.empty((3, height, width), np.float32)
        call = np.zeros(1, NORMALIZATION)
        call[0] = (height * width, pixels.ctypes.data, result.ctypes.data, means, deviations)
        self._normalize_image(call.ctypes.data)
        return result

    def make_best_table(self, counts: NDArray[np.int64]) -> tuple[bytes, bytes]:
        """Return the best Huffman table: the number of codes of each length, 1 to 16, and the symbols in code order.

        Args:
            counts: int64 [256], the number of occurrences of each symbol.
        """
        work = np.empty(1, BEST_TABLE)
        work["counts"] = counts
        self._make_best_table(work.ctypes.data)
        lengths = work["num_codes"][0, 1:17]
        symbols = work["symbols"][0, : work["num_symbols"][0]]
        return lengths.astype(np.uint8).tobytes(), symbols.astype(np.uint8).tobytes()


class Kernel:
    """The decoder.

    Any number of threads may call the decoder at the same time, but only as many run as there are processors. So
    waiting threads need no workspaces, and the workspaces of running threads stay in the processor's caches.

    Args:
        functions: The kernel's functions.
    """

    def __init__(self, functions: Functions) -> None:
        self._decode, self._collect = functions.decode_chunk, functions.collect_tiles
        self._free = deque[NDArray[np.uint8]]()  # Workspaces.
        self._count_processors()
        # In a forked child, the parent's threads would never release the semaphore.
        call_at_fork(self, after_in_child=Kernel._count_processors)

    def decode(
        self,
        contents: Sequence[Content],
        plans: NDArray[np.void],
        order: NDArray[np.int64],
        rows: Rows,
        turns: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.bool_]:
        """Decode, crop, resize and mirror images; see chunk.c.

        Args:
            contents: n images.
            plans: PLAN [n * crops], the crops of the first image first.
            order: int64 [n], the order in which to decode the files.
            rows: A destination for each crop: uint8 [n * crops, height, width, 3], or n * crops
                uint8 [height, width, 3] arrays. Each must be contiguous.
            turns: uint8 [n], the turn that makes each stored picture upright (IMAGE.turn); by default, pictures stay as
                they are.

        Returns:
            bool [n], whether the crops of each image were rendered. The other images are left to libjpeg-turbo.
        """
        images, files = _describe_all(contents, turns)
        is_done = np.empty(len(contents), np.bool_)
        _check_raw(plans, PLAN)
        _check_raw(order, np.dtype(np.int64))
        destinations, num_crops = _find_destinations(rows), len(plans) // max(len(contents), 1)
        assert len(destinations) == len(plans) == num_crops * len(contents), "each image has the same number of crops"
        call = np.zeros(1, CALL)
        with self._workspace() as workspace:
            call[0] = (
                *(len(contents), num_crops, images.ctypes.data, plans.ctypes.data, order.ctypes.data),
                *(destinations.ctypes.data, is_done.ctypes.data, workspace),
                *next(
                    ((each.cache, each.cache_file) for each in contents if isinstance(each, Kept) and each.key), (0, 0)
                ),
            )
            self._decode(call.ctypes.data)
        del files
        return is_done

    def collect(
        self,
        contents: Sequence[Content],
        plans: NDArray[np.void],
        sizes: Sequence[tuple[int, int]],
        chunk: NDArray[np.uint8],
        turns: NDArray[np.uint8] | None = None,
    ) -> tuple[NDArray[np.bool_], int]:
        """Collect the tiles that image crops need, for a device to decode; see tiles.c.

        Args:
            contents: n images.
            plans: PLAN [n * crops], the crops of the first image first.
            sizes: The height and width of each crop, which are the same for all images.
            chunk: uint8 [...], aligned to 16 bytes, of the size that count_chunk_bytes returns.
            turns: As for :meth:`decode`.

        Returns:
            bool [n], whether the tiles of each image are in the chunk, and the number of bytes used. Images whose tiles
            are not in the chunk have an empty TILED_IMAGE.
        """
        images, files = _describe_all(contents, turns)
        _check_raw(plans, PLAN)
        assert len(plans) == len(sizes) * len(contents), "each image has a plan for each crop"
        assert len(chunk) >= count_chunk_bytes(len(contents), sizes), "the kernel does not check the chunk's size"
        assert chunk.ctypes.data % CHUNK_ALIGNMENT == 0, "the records in the chunk are aligned"
        is_done, rows = np.empty(len(contents), np.bool_), np.zeros((len(contents), len(sizes)), ROW)
        rows["height"], rows["width"] = np.array(sizes, np.int64).reshape(-1, 2).T
        call = np.zeros(1, COLLECTION)
        with self._workspace() as workspace:
            call[0] = (
                *(len(contents), len(sizes), images.ctypes.data, plans.ctypes.data, rows.ctypes.data),
                *(count_image_bytes(sizes), chunk.ctypes.data, is_done.ctypes.data, workspace, 0),
            )
            self._collect(call.ctypes.data)
        del files
        return is_done, int(call["num_used"][0])

    @contextmanager
    def _workspace(self) -> Iterator[int]:
        with self._processors:
            try:
                workspace = self._free.pop()  # The most recently used workspace.
            except IndexError:
                workspace = _make_workspace()
            try:
                yield workspace.ctypes.data
            finally:  # Ctrl-C must not lose the workspace, which points to more memory.
                self._free.append(workspace)

    def _count_processors(self) -> None:
        self._processors = threading.Semaphore(count_processors())


def count_chunk_bytes(num_images: int, sizes: Sequence[tuple[int, int]]) -> int:
    """Return the size of a chunk of tiles. The chunk can hold the pixels of all crops instead; see tiles.h."""
    return num_images * (TILED_IMAGE.itemsize + count_image_bytes(sizes)) + CHUNK_PADDING


def count_image_bytes(sizes: Sequence[tuple[int, int]]) -> int:
    """Return the number of bytes that an image may take in a chunk of tiles, not counting its record."""
    crops = sum(TILED_CROP.itemsize + 3 * height * width for height, width in sizes)
    return crops + 2 * CHUNK_ALIGNMENT  # Crops and tiles are aligned.


def _check_raw(array: NDArray[np.generic], kind: np.dtype[Any]) -> None:
    assert array.dtype == kind, "the kernel reads plans and orders as raw memory"
    assert array.flags.c_contiguous, "the kernel reads plans and orders as raw memory"


def _describe_all(contents: Sequence[Content], turns: NDArray[np.uint8] | None) -> tuple[NDArray[np.void], object]:
    """Return the images, IMAGE [n], and an object that keeps the files in memory."""
    images = np.array([_describe(each) for each in contents], IMAGE)
    in_memory = [each if isinstance(each, bytes) else each.content for each in contents]
    files = (ctypes.c_char_p * len(contents))(*in_memory)
    images["content"] += np.frombuffer(memoryview(files).cast("B"), np.int64)
    images["turn"] = 0 if turns is None else turns
    return images, files


def _describe(content: Content) -> tuple[int, ...]:
    """Return an image's IMAGE, with the offset of its first byte in the content instead of the address."""
    if isinstance(content, bytes):
        return 0, len(content), *[0] * 8
    if isinstance(content, Kept):
        return 0, len(content.content or b""), content.kept, content.key, *[0] * 6
    in_memory, file, offset, height, width, num_channels = content
    length = height * width * num_channels
    if file is not None:
        return 0, length, 0, 0, offset, height, width, file, num_channels, 0
    assert in_memory is not None
    assert offset + length <= len(in_memory), "the content holds the pixels"
    return offset, length, 0, 0, 0, height, width, 0, num_channels, 0


def _find_destinations(rows: Rows) -> NDArray[np.void]:
    """Return the addresses and sizes of rows, ROW [n]."""
    destinations = np.empty(len(rows), ROW)
    if isinstance(rows, np.ndarray):
        for pixels in rows[:1]:
            _check_row(pixels)
        destinations["pixels"] = rows.ctypes.data + rows.strides[0] * np.arange(len(rows))
        destinations["height"], destinations["width"] = rows.shape[1:3]
        return destinations
    for row, pixels in enumerate(rows):
        _check_row(pixels)
        destinations[row] = (pixels.ctypes.data, *pixels.shape[:2])
    return destinations


def _check_row(pixels: Pixels) -> None:
    assert pixels.dtype == np.uint8, "rows are uint8 [height, width, 3]"
    assert pixels.shape[2:] == (3,), "rows are uint8 [height, width, 3]"
    assert pixels.flags.carray, "rows are written as raw memory"


def _make_workspace() -> NDArray[np.uint8]:
    """Return a workspace in small pages: images use little of each array, and unused pages take no memory."""
    memory = mmap.mmap(-1, WORKSPACE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # The operating system has no huge pages.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
