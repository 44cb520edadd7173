"""What Pillow's many readers raise for a damaged file, as one kind of error."""

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
    Warning,  # Where the user has warnings raised.
    struct.error,
    zlib.error,
    PIL.Image.DecompressionBombError,
)
"""Not MemoryError, which says nothing of the file, and no classes of the user's own, which a signal handler raises."""


@contextmanager
def errors_of_pillow() -> Iterator[None]:
    """Raise ValueError for whatever Pillow raises for a damaged file."""
    try:
        yield
    except PILLOW_ERRORS as error:
        let_through(error)
        if isinstance(error, ValueError):
            raise
        if isinstance(error, PIL.UnidentifiedImageError):  # Its own words name an address in memory.
            raise ValueError("it is no image of a format that is known here") from error
        raise ValueError(str(error) or repr(error)) from error
