"""Read a file in pieces."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from shardio.storage.store import StoredFile

PIECE = 2**20
"""Bytes per piece, chosen for few requests and little memory."""

REMOTE_PIECE = 8 * 2**20
"""Bytes per piece of a remote file. Each piece is a request, and waits for the latency of the store."""

ALIGNED_FROM = 2**17
"""The size in bytes from which memory is aligned to pages. The C library takes smaller memory from its heap."""


def read_pieces(file: StoredFile, start: int = 0, num_bytes: int | None = None) -> Iterator[memoryview]:
    """Yield a file's content from byte ``start`` on, in pieces. Each piece overwrites the last.

    Args:
        file: The file.
        start: Where to begin.
        num_bytes: The size of a piece in bytes; by default, 1 MiB, and 8 MiB if the file is remote.

    Raises:
        EOFError: If the file was truncated after it was opened.
        OSError: If it cannot be read.
    """
    num_bytes = num_bytes or (PIECE if file.is_local else REMOTE_PIECE)
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
