"""Call the kernel with all memory between inaccessible pages, or compiled with a sanitizer.

The functions get copies of their arrays in guarded memory. Inputs are read-only, and results are copied back.
"""

from __future__ import annotations

import ctypes
import math
import platform
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardio.images.tiled import COUNTED, lay_out
from shardio.kernel.functions import Functions
from shardio.kernel.records import (
    BATCH,
    BEST_TABLE,
    CALL,
    CHUNK_PADDING,
    COLLECTION,
    COMPONENT,
    EDIT,
    IMAGE,
    LOCATION,
    NORMALIZATION,
    OPERATION,
    PLAN,
    ROW,
    SCAN_READING,
    SCAN_WRITING,
    STORED_TABLE,
    TARGET,
    TILED_IMAGE,
    WORKSPACE_BYTES,
)
from shardio.kernel.targets import FOLDER, Target, list_source
from tools.guard_pages import GuardedMemory

_RECORDS = {
    "decode_chunk": CALL,
    "collect_tiles": COLLECTION,
    "decode_tiles": BATCH,
    "edit_images": EDIT,
    "normalize_image": NORMALIZATION,
    "read_scan": SCAN_READING,
    "read_progressive": SCAN_READING,
    "write_scan": SCAN_WRITING,
    "make_best_table": BEST_TABLE,
}

_COMPILERS = (*(f"clang-{version}" for version in range(22, 15, -1)), "clang")

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = [ctypes.c_void_p], None


class Sanitizer(str, Enum):
    """A kind of check that a compiler adds to the code.

    ADDRESS detects undefined behavior and out-of-bounds accesses, including those to arrays that the kernel allocates.
    ADDRESS needs clang 16 or newer, for instance from Debian's packages clang-19 and libclang-rt-19-dev. UNDEFINED
    detects only undefined behavior, with the clang in the ziglang package.
    """

    ADDRESS = "address"
    UNDEFINED = "undefined"


class HeapMemory:
    """Memory for one array at a time: a block from malloc, whose ends AddressSanitizer guards."""

    def __init__(self) -> None:
        self._address: int | None = None

    def place(
        self, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, at_end: bool, content: Any = None
    ) -> NDArray[Any]:
        """Return an array. See :meth:`GuardedMemory.place`."""
        kind = np.dtype(dtype)
        num_bytes = kind.itemsize * _count(shape)
        _libc.free(self._address)
        self._address = _libc.malloc(num_bytes)
        assert self._address is not None, "there is not enough memory"
        array = np.ndarray(shape, kind, memoryview((ctypes.c_char * num_bytes).from_address(self._address)))
        if content is not None:
            array[...] = content
        return array


class GuardedFunctions(Functions):
    """The kernel's functions, which get copies of their arrays in guarded memory.

    Args:
        path: The shared object.
        kind: The kind of memory.

    Attributes:
        at_end: Whether arrays lie at the end of the accessible memory rather than at its start.
    """

    def __init__(self, path: Path, kind: type[GuardedMemory | HeapMemory] = GuardedMemory) -> None:
        self.at_end = True
        self._memories = defaultdict[str, GuardedMemory | HeapMemory](kind)
        self._workspace = GuardedMemory().place(WORKSPACE_BYTES, at_end=True)
        self._results: list[tuple[int, NDArray[Any]]] = []  # The addresses of the caller's arrays, and the copies.
        super().__init__(path)

    def scratch(self, purpose: str, num_bytes: int) -> NDArray[np.uint8]:
        """Return an array for temporary bytes; this method replaces shardio.kernel.functions.scratch."""
        return self._memories[purpose].place(num_bytes, at_end=self.at_end)

    def _find(self, name: str) -> Callable[[int], None]:
        function = super()._find(name)
        name = name.removeprefix("shardio_")
        record, move = _RECORDS[name], getattr(self, f"_move_{name}")

        def call(address: int) -> None:
            self._results.clear()
            moved = _read(address, 1, record)
            move(moved[0])
            if name in {"decode_chunk", "decode_tiles", "edit_images", "normalize_image"}:
                function(self._place(name, moved))
            else:  # The record also holds results.
                ctypes.memmove(address, moved.ctypes.data, record.itemsize)
                function(self._lend(name, address, 1, record))
            for before, after in self._results:
                ctypes.memmove(before, after.ctypes.data, after.nbytes)

        return call

    def _place(self, name: str, content: NDArray[Any]) -> int:
        """Return the address of a copy that the kernel only reads."""
        memory = self._memories[name]
        return int(memory.place(content.shape, content.dtype, at_end=self.at_end, content=content).ctypes.data)

    def _copy(self, name: str, address: int, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8) -> int:
        return self._place(name, _read(address, shape, dtype))

    def _lend(self, name: str, address: int, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8) -> int:
        """Return the address of a copy that the kernel may change."""
        array = self._memories[name].place(shape, dtype, at_end=self.at_end)
        ctypes.memmove(array.ctypes.data, int(address), array.nbytes)
        self._results.append((int(address), array))
        return int(array.ctypes.data)

    def _lend_rows(self, address: int, count: int) -> int:
        rows = _read(address, count, ROW)
        for i, (pixels, height, width) in enumerate(rows):
            rows["pixels"][i] = self._lend(f"row {i}", pixels, (height, width, 3))
        return self._place("rows", rows)

    def _move_decode_chunk(self, call: Any) -> None:
        num_images, num_rows = int(call["num_images"]), int(call["num_images"] * call["num_crops"])
        call["images"] = self._move_images(call["images"], num_images)
        call["plans"] = self._copy("plans", call["plans"], num_rows, PLAN)
        call["order"] = self._copy("order", call["order"], num_images, np.int64)
        call["rows"] = self._lend_rows(call["rows"], num_rows)
        call["is_done"] = self._lend("is_done", call["is_done"], num_images)
        call["workspace"] = self._workspace.ctypes.data

    def _move_images(self, address: int, num_images: int) -> int:
        images = _read(address, num_images, IMAGE)
        for i, (content, length) in enumerate(images[["content", "length"]].tolist()):
            if content:
                images["content"][i] = self._copy(f"file {i}", content, length)
        return self._place("images", images)

    def _move_collect_tiles(self, call: Any) -> None:
        num_images, num_rows = int(call["num_images"]), int(call["num_images"] * call["num_crops"])
        call["images"] = self._move_images(call["images"], num_images)
        call["plans"] = self._copy("plans", call["plans"], num_rows, PLAN)
        call["rows"] = self._copy("rows", call["rows"], num_rows, ROW)
        num_bytes = num_images * (TILED_IMAGE.itemsize + int(call["max_bytes"])) + CHUNK_PADDING
        call["chunk"] = self._lend("chunk", call["chunk"], -(-num_bytes // 16) * 16)
        call["is_done"] = self._lend("is_done", call["is_done"], num_images)
        call["workspace"] = self._workspace.ctypes.data

    def _move_decode_tiles(self, batch: Any) -> None:
        num_images, num_crops = int(batch["num_images"]), int(batch["num_crops"])
        locations = _read(batch["locations"], num_images, LOCATION)
        (address,), (num_bytes,) = set(locations["chunk"].tolist()), set(locations["num_bytes"].tolist())
        images = _read(address, num_images, TILED_IMAGE)[COUNTED]
        for name, length in lay_out(images, locations, []).lengths.items():
            batch[name] = self._lend(name, batch[name], length)
        batch["is_damaged"] = self._lend("is_damaged", batch["is_damaged"], num_images, np.int32)
        locations["chunk"] = self._copy("tiles", address, num_bytes)
        batch["locations"] = self._place("locations", locations)
        targets = _read(batch["targets"], num_crops, TARGET)
        for i, target in enumerate(targets):
            shape: tuple[int, ...] = num_images, int(target["height"]), int(target["width"]), 3
            target["pixels"] = self._lend(f"target {i}", target["pixels"], shape)
        batch["targets"] = self._place("targets", targets)

    def _move_edit_images(self, call: Any) -> None:
        num_images = int(call["num_images"])
        call["rows"] = self._lend_rows(call["rows"], num_images)
        shape = num_images, int(call["num_operations"])
        call["operations"] = self._copy("operations", call["operations"], shape, OPERATION)
        length = -(-int(call["scratch_length"]) // 16) * 16  # The memory is aligned as memory from malloc is.
        call["scratch"] = self.scratch("operations' scratch", length).ctypes.data

    def _move_normalize_image(self, call: Any) -> None:
        num_pixels = int(call["num_pixels"])
        call["pixels"] = self._copy("pixels", call["pixels"], (num_pixels, 3))
        call["result"] = self._lend("result", call["result"], (3, num_pixels), np.float32)

    def _move_read_scan(self, call: Any) -> None:
        num_intervals = -(-call["num_mcus"] // call["new_interval"]) if call["new_interval"] else 1
        call["data"] = self._copy("data", call["data"], call["num_bytes"])
        call["tables"] = self._copy("tables", call["tables"], 8, STORED_TABLE)
        call["components"] = self._lend("components", call["components"], call["num_components"], COMPONENT)
        call["blocks"] = self._copy("blocks", call["blocks"], call["num_blocks"], np.int64)
        call["counts"] = self._lend("counts", call["counts"], (8, 256), np.int64)
        call["stops"] = self._lend("stops", call["stops"], num_intervals, np.int64)

    _move_read_progressive = _move_read_scan

    def _move_write_scan(self, call: Any) -> None:
        num_intervals = call["num_intervals"]
        num_tokens = _read(call["stops"], num_intervals, np.int64)[-1]
        call["tokens"] = self._copy("tokens to write", call["tokens"], num_tokens, np.uint32)
        call["stops"] = self._copy("stops to write", call["stops"], num_intervals, np.int64)
        call["tables"] = self._copy("tables to write", call["tables"], 8, STORED_TABLE)
        call["lengths"] = self._lend("lengths", call["lengths"], num_intervals, np.int64)

    def _move_make_best_table(self, call: Any) -> None:
        pass


def _read(address: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return a copy of the array at an address."""
    kind = np.dtype(dtype)
    content = ctypes.string_at(int(address), kind.itemsize * _count(shape))
    return np.frombuffer(bytearray(content), kind).reshape(shape)


def _count(shape: int | tuple[int, ...]) -> int:
    return int(math.prod(shape) if isinstance(shape, tuple) else shape)


def find_compiler() -> tuple[str, Path]:
    """Return a compiler with AddressSanitizer, and the library that processes must preload.

    Raises:
        LookupError: If no such compiler is installed.
    """
    for compiler in filter(shutil.which, _COMPILERS):
        name = f"libclang_rt.asan-{platform.machine()}.so"
        found = subprocess.run([compiler, f"--print-file-name={name}"], capture_output=True, text=True, check=True)
        if (path := Path(found.stdout.strip())).is_absolute():
            return compiler, path
    raise LookupError("found no clang 16 or newer with AddressSanitizer: install clang-19 and libclang-rt-19-dev")


def build_sanitized(sanitizer: Sanitizer, target: Target, folder: Path) -> Path:
    """Compile the kernel for a target, with a sanitizer, into a folder. Return the path of the shared object."""
    options = runpy.run_path(str(Path(__file__).parent / "build_kernel.py"))["OPTIONS"]
    kept = [option for option in options if option not in {"-g0", "-fno-sanitize=all", "-Werror"}]
    checks = ["-g", "-fno-sanitize-recover=all", "-Wno-psabi"]
    if sanitizer is Sanitizer.UNDEFINED:
        command = [sys.executable, "-m", "ziglang", "cc", f"-mcpu={target.processor}"]
        checks += ["-fsanitize=undefined,float-cast-overflow", "-fsanitize-trap=all"]
    else:
        level, *features = target.processor.split("+")
        is_x86 = level.startswith("x86")
        command = [find_compiler()[0], f"-march={level.replace('_', '-')}" if is_x86 else f"-mcpu={level}"]
        command += [f"-m{feature}" for feature in features]
        checks += ["-fsanitize=address,undefined,float-cast-overflow", "-shared-libasan", "-fno-omit-frame-pointer"]
    path = folder / f"{target.name}-{sanitizer.value}.so"
    sources = [str(source) for source in list_source() if source.suffix == ".c"]
    subprocess.run([*command, *kept, *checks, "-o", str(path), *sources, "-lm"], cwd=FOLDER.parents[1], check=True)
    return path
