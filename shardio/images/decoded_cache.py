"""Keep decoded JPEGs in memory that all processes of a machine share, so that later epochs decode nothing.

The kernel keeps an image when it first decodes it, and renders later crops from the image's luma and chroma samples
(kept.c). Images are found by the hash of their file's content, so a changed file is a different image. Images that do
not fit, and those that the kernel does not decode, are decoded in every epoch.

The memory has no name in any file system, and is freed when the last process ends, even if it is killed. A process
that joins later opens the memory through another process's descriptor in /proc.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from shardio.errors import find_user_level
from shardio.files import FileRange, is_trusted
from shardio.images.jpeg.head import JPEG_START
from shardio.images.pictures import Turn
from shardio.kernel import find_functions, why_no_kernel
from shardio.kernel.records import CACHE, MIRRORED, SLOT, TRANSPOSED, UPSIDE_DOWN

MIN_BYTES = 1 << 20
"""The smallest cache."""

BYTES_PER_SLOT = 4096
"""The maximum number of bytes of memory per slot. Most decoded images need more bytes than this."""


class KeptImage(NamedTuple):
    """A decoded image in the cache.

    Attributes:
        address: The address of the image's samples, for the kernel.
        size: The height and width of the stored picture.
        turn: The turn that makes the image upright.
    """

    address: int
    size: tuple[int, int]
    turn: Turn


class _Member(NamedTuple):
    """A process that has the memory open: its id, its descriptor, and the memory's inode."""

    process_id: int
    descriptor: int
    inode: int

    def open(self, num_bytes: int) -> int | None:
        """Return a new descriptor for the memory, or None if the process has ended or has closed the memory."""
        path = f"/proc/{self.process_id}/fd/{self.descriptor}"
        try:
            status = os.stat(path)  # noqa: PTH116  # It is a string.
            is_same = (status.st_ino, status.st_size) == (self.inode, num_bytes)  # Another process may have the id now.
            return os.open(path, os.O_RDWR | os.O_CLOEXEC) if is_same else None
        except OSError:
            return None


class DecodedCache:
    """Memory for decoded JPEGs. Threads and processes can share it, even after pickling.

    Args:
        num_bytes: The size of the memory. Only pages in use occupy physical memory.
        name: A name that is the same for all processes that share the memory, and for no others. The name is part of
            a file name.

    Attributes:
        file: The descriptor of the memory in this process.
    """

    def __init__(self, num_bytes: int, name: str) -> None:
        self.num_bytes, self._name = num_bytes, name
        with _list_members(name) as members:
            found = next((each for member in members if (each := member.open(num_bytes)) is not None), None)
            self.file = _make_memory(num_bytes) if found is None else found
            members.append(_Member(os.getpid(), self.file, os.fstat(self.file).st_ino))
        weakref.finalize(self, os.close, self.file)

    @cached_property
    def _memory(self) -> mmap.mmap:
        return mmap.mmap(self.file, self.num_bytes)

    @cached_property
    def address(self) -> int:
        """The address of the memory in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def num_used_bytes(self) -> int:
        """The number of bytes in use."""
        return int(np.frombuffer(self._memory, CACHE, 1)["used"][0])

    def find(self, key: int) -> KeptImage | None:
        """Return a kept image."""
        functions = find_functions()
        if functions is None or not (address := functions.find_kept(self.address, key)):
            return None
        size, turn = ctypes.c_int64.from_address(address).value, ctypes.c_uint8.from_address(address + 8).value
        turned = Turn(*(bool(turn & bit) for bit in (UPSIDE_DOWN, MIRRORED, TRANSPOSED)))
        return KeptImage(address, (size >> 32, size & 0xFFFFFFFF), turned)

    def __reduce__(self) -> tuple[type[DecodedCache], tuple[int, str]]:
        return DecodedCache, (self.num_bytes, self._name)  # Another process opens the memory through this one.


def _make_memory(num_bytes: int) -> int:
    descriptor = os.memfd_create("shardio-decoded", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        head = np.zeros(1, CACHE)
        head["num_bytes"], head["num_slots"] = num_bytes, 1 << (num_bytes // BYTES_PER_SLOT).bit_length()
        head["used"] = CACHE.itemsize + head["num_slots"] * SLOT.itemsize
        os.pwrite(descriptor, head.tobytes(), 0)
    except BaseException:  # Close the descriptor even after Ctrl-C.
        os.close(descriptor)
        raise
    return descriptor


def find_key(content: bytes | FileRange) -> int:
    """Return the key under which a JPEG is cached, or 0 for any other file. A range's key comes from the index file."""
    if isinstance(content, FileRange):
        return content.digest if content.head.startswith(JPEG_START) else 0
    return xxhash.xxh3_64_intdigest(content) if content.startswith(JPEG_START) else 0


def make_cache(num_bytes: int, name: str) -> DecodedCache | None:
    """Return a cache. If this machine has no kernel or cannot share memory, warn and return None.

    Raises:
        ValueError: If the cache is larger than the machine's memory, or too small.
    """
    largest = _count_memory()
    if not MIN_BYTES <= num_bytes <= largest:
        raise ValueError(
            f"decoded_cache must be from {MIN_BYTES} bytes to {largest} (the memory of this machine), got {num_bytes}"
        )
    if find_functions() is None or not hasattr(os, "memfd_create"):
        reason = why_no_kernel() or "this operating system has no anonymous files"
        warnings.warn(f"decoded_cache is not used: {reason}", RuntimeWarning, stacklevel=find_user_level())
        return None
    return DecodedCache(num_bytes, xxhash.xxh3_64_hexdigest(f"{name} {num_bytes}".encode(errors="surrogateescape")))


def count_free_memory() -> int:
    """Return the number of bytes that new programs can use without swapping, or 0 if it is unknown."""
    with suppress(OSError, StopIteration), Path("/proc/meminfo").open() as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
        return min(int(line.split()[1]) * 1024, _count_memory())
    return 0


def _count_memory() -> int:
    """Return the memory of the machine in bytes, or the limit of the container if it is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # The file is missing or contains "max".
            total = min(total, int(Path(path).read_text()))
    return total


@contextmanager
def _list_members(name: str) -> Iterator[list[_Member]]:
    """Yield a list of the processes that share the memory, while other processes wait. The block may change the list.

    The list is empty if this user's folder cannot be trusted. Each process then has its own memory.
    """
    folder = Path(tempfile.gettempdir()) / f"shardio-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_trusted(folder.lstat()) or folder.is_symlink():
        yield []
        return
    with (folder / f"decoded-{name}").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        members = [_Member(*map(int, line.split())) for line in file]
        members = [member for member in members if Path(f"/proc/{member.process_id}").exists()]
        yield members
        file.truncate(0)
        file.writelines(f"{' '.join(map(str, member))}\n" for member in members)
