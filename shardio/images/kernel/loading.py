"""Load the compiled kernel from a cache folder, and call it. This needs LLVM, but not numba."""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import cv2
import llvmlite.binding as llvm
import numpy as np
import simplejpeg
import xxhash
from numpy.typing import NDArray
from platformdirs import site_cache_path, user_cache_path

from shardio.forks import call_at_fork
from shardio.images.kernel.records import CALL, PLAN, WORKSPACE
from shardio.images.trust import UntrustedError, read_trusted, why_untrusted
from shardio.processors import count_processors

_MAGIC = b"shardio kernel\0\0"
_HEADER = struct.Struct("<16sQQ")  # _MAGIC, the xxh3 hash of what follows, the length of the name.

_NOT_COMPILED = ("__init__", "__main__", "background", "finding", "loading")
_COMPILED_IN_JPEG = ("standard", "tile_table")
"""The files outside this folder whose names are compiled in as constants."""


@cache
def kernel_name() -> str:
    """Return the name of the kernel's file, a hash of its source, compiler, processor and reference libraries."""
    hasher = xxhash.xxh3_128()
    here = Path(__file__).parent
    sources = [source for source in sorted(here.glob("*.py")) if source.stem not in _NOT_COMPILED]
    for source in (*sources, *(here.parent / "jpeg" / f"{name}.py" for name in _COMPILED_IN_JPEG)):
        hasher.update(source.read_bytes())
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = (llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    # They define the correct pixels. OpenCV's build information names the libraries it was built from, which differ.
    libraries = (simplejpeg.__version__, cv2.getBuildInformation())
    hasher.update(repr((machine, version("numba"), version("llvmlite"), libraries)).encode())
    return f"{hasher.hexdigest()}.kernel"


def kernel_path() -> Path:
    """Return the path of the kernel in the user's cache folder, whether it exists or not."""
    return user_cache_path("shardio") / "kernels" / kernel_name()


def system_kernel_path() -> Path:
    """Return the path of the kernel for all users of the machine or container image, whether it exists or not."""
    return site_cache_path("shardio") / "kernels" / kernel_name()


def pack_kernel(name: str, code: bytes) -> bytes:
    """Return the content of a kernel's file.

    Args:
        name: The name of the kernel's function, or the reason why it must not be used.
        code: Its object file. Empty if the kernel must not be used.
    """
    content = name.encode() + code
    return _HEADER.pack(_MAGIC, xxhash.xxh3_64_intdigest(content), len(name.encode())) + content


def unpack_kernel(content: bytes) -> tuple[str, bytes] | None:
    """Return the arguments of :func:`pack_kernel`, or None if the file is damaged."""
    body = content[_HEADER.size :]
    if len(content) < _HEADER.size:
        return None
    magic, digest, name_length = _HEADER.unpack_from(content)
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != digest:
        return None
    return body[:name_length].decode(), body[name_length:]


def read_kernel(*paths: Path) -> tuple[str, bytes] | None:
    """Return the name and the object file of the kernel's function, or None if there is no intact, trusted file.

    If the kernel's pixels differ from the libraries', the name says how, and the object file is empty.

    Args:
        paths: The files to try; by default the user's own kernel, and then the one for all users.
    """
    for path in paths or (kernel_path(), system_kernel_path()):
        with suppress(OSError, UntrustedError):
            if (kernel := unpack_kernel(read_trusted(path))) is not None:
                return kernel
    return None


def why_untrusted_kernel() -> str | None:
    """Return why an existing kernel file is not trusted, or None if there is no such file."""
    return why_untrusted(kernel_path()) or why_untrusted(system_kernel_path())


class Kernel:
    """The kernel, loaded into this process.

    Any number of threads may call it at the same time. It runs in only as many of them as there are processors. So
    waiting threads take no memory, and running threads find theirs in the processor's caches.

    Args:
        name: The name of its function.
        code: Its object file.
    """

    def __init__(self, name: str, code: bytes) -> None:
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        # The engine owns the code's memory. Code and data refer to each other by 32-bit distances (x86-64's
        # R_X86_64_PC32; aarch64's ADRP reaches 4 GiB). LLVM's own memory manager maps each section separately, so with
        # many libraries they may be too far apart, and LLVM aborts the process. llvmlite's manager maps them together.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        address = self._engine.get_function_address(name)
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)  # ctypes releases the GIL.
        self._free = deque[NDArray[np.void]]()  # Workspaces.
        self._count_processors()
        # In a forked child, the parent's threads would never release the semaphore.
        call_at_fork(self, after_in_child=Kernel._count_processors)

    def decode(
        self, contents: Sequence[bytes], plans: NDArray[np.void], order: NDArray[np.int64], rows: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Decode, crop, resize and mirror some JPEGs; see :func:`shardio.images.kernel.chunk.decode_chunk`.

        Args:
            contents: The bytes of n files.
            plans: PLAN [n].
            order: int64 [n], the order in which to decode them.
            rows: uint8 [n, height, width, 3], contiguous.

        Returns:
            bool [n], whether each was rendered. The others are left to libjpeg-turbo.
        """
        files = (ctypes.c_char_p * len(contents))(*contents)
        lengths = np.array([len(content) for content in contents], np.int64)
        is_done = np.empty(len(contents), np.bool_)
        assert plans.dtype == PLAN, "the kernel reads plans as raw memory"
        assert rows.flags.c_contiguous, "the kernel writes rows as raw memory"
        call = np.zeros(1, CALL)
        with self._processors:
            try:
                workspace = self._free.pop()  # The most recently used one.
            except IndexError:
                workspace = _make_workspace()
            call[0] = (
                *(len(contents), ctypes.addressof(files), lengths.ctypes.data, plans.ctypes.data, order.ctypes.data),
                *(rows.ctypes.data, rows.shape[1], rows.shape[2], is_done.ctypes.data, workspace.ctypes.data),
            )
            self._function(call.ctypes.data)
            self._free.append(workspace)
        return is_done

    def _count_processors(self) -> None:
        self._processors = threading.Semaphore(count_processors())


def _make_workspace() -> NDArray[np.void]:
    """Return a workspace. Untouched pages take no memory. They are small, as only a little of each array is used."""
    memory = mmap.mmap(-1, WORKSPACE.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # The operating system has no huge pages.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, WORKSPACE)


def load_kernel() -> Kernel | None:
    """Load the kernel that was compiled for this machine. Return None if there is none, or if its pixels differ."""
    name, code = read_kernel() or ("", b"")
    return Kernel(name, code) if code else None
