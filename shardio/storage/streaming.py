"""Read a file in pieces."""

from __future__ import annotations

from collections.abc import Iterator

from shardio.storage.store import StoredFile

PIECE = 2**20
"""Bytes per piece, chosen for few requests and little memory."""


def read_pieces(file: StoredFile, start: int = 0, num_bytes: int = PIECE) -> Iterator[memoryview]:
    """Yield a file's content from byte ``start`` on, in pieces of up to ``num_bytes``. Each piece overwrites the last.

    Raises:
        EOFError: If the file was truncated after it was opened.
        OSError: If it cannot be read.
    """
    buffer = memoryview(bytearray(max(0, min(num_bytes, file.size - start))))
    for begin in range(start, file.size, num_bytes):
        piece = buffer[: file.size - begin]
        file.read_into([begin], [piece])
        yield piece
