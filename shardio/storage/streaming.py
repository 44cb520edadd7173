"""Read a file in pieces."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from shardio.storage.store import StoredFile

PIECE = 2**20
"""Bytes per piece, chosen for few requests and little memory."""

ALIGNED_FROM = 2**17
"""The size in bytes from which memory is aligned to pages. The C library takes smaller memory from its heap."""


def read_pieces(file: StoredFile, start: int = 0, num_bytes: int = PIECE) -> Iterator[memoryview]:
    """Yield a file's content from byte ``start`` on, in pieces of up to ``num_bytes``. Each piece overwrites the last.

    Raises:
        EOFError: If the file was truncated after it was opened.
        OSError: If it cannot be read.
    """
    buffer = _make_buffer(max(0, min(num_bytes, file.size - start)))
    for begin in range(start, file.size, num_bytes):
        piece = buffer[: file.size - begin]
        file.read_into([begin], [piece])
        yield piece


def _make_buffer(num_bytes: int) -> memoryview:
    """Return memory to read into.

    Large memory of a bytearray begins 16 bytes after a page does. Some AMD processors copy from the page cache to there
    at a quarter of the speed, so large memory begins where a page does.
    """
    return memoryview(mmap.mmap(-1, num_bytes) if num_bytes >= ALIGNED_FROM else bytearray(num_bytes))
