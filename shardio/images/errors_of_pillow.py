"""Turn what Pillow's many readers raise for a damaged file into one kind of error."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import PIL.Image

from shardio.interruptions import let_through

PILLOW_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,  # The user may turn warnings into errors.
    struct.error,
    zlib.error,
    PIL.Image.DecompressionBombError,
)
"""Not MemoryError, which says nothing about the file, nor the user's own classes, which a signal handler may raise."""


@contextmanager
def errors_of_pillow() -> Iterator[None]:
    """Raise ValueError for whatever Pillow raises for a damaged file."""
    try:
        yield
    except PILLOW_ERRORS as error:
        let_through(error)
        if isinstance(error, ValueError):
            raise
        if isinstance(error, PIL.UnidentifiedImageError):  # Pillow's message names a memory address.
            raise ValueError("it is not an image of a known format") from error
        raise ValueError(str(error) or repr(error)) from error
