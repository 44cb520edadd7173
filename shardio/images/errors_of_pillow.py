"""Convert the errors that Pillow's readers raise for damaged files to ValueError, and ignore their warnings."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from shardio.interruptions import let_through


@cache
def pillow_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Pillow raises for damaged files.

    MemoryError is not one of them, because it says nothing about the file. Neither are users' own classes, which a
    signal handler may raise.
    """
    import PIL.Image  # Not before an image needs it: see resizing.py.

    return (
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


def ignore_pillows_warnings() -> None:
    """Ignore the warnings that Pillow gives about files, from now on in this process.

    They do not name the file, and concern metadata; what is wrong with pixels is an error. The user's own filters take
    precedence. Call this in processes that belong to shardio.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.", append=True)


@contextmanager
def errors_of_pillow() -> Iterator[None]:
    """Convert any error that Pillow raises for a damaged file to ValueError."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except pillow_errors() as error:
        let_through(error)
        if isinstance(error, ValueError):
            raise
        if isinstance(error, UnidentifiedImageError):  # Pillow's message names a memory address.
            raise ValueError("it is not an image in a known format") from error
        raise ValueError(str(error) or repr(error)) from error
