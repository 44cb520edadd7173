"""Arrays in the npy and npz formats (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html)."""

from __future__ import annotations

import io
import math
import zlib
from typing import Any

import numpy as np


def decode_npy(content: bytes, *, trusted: bool = False) -> Any:
    """Return the array in an npy file, in native byte order, which torch requires.

    Unlike ``np.load``, this function refuses zip archives and bare pickles, and checks that the file holds all declared
    values before it allocates the array.

    Args:
        content: The bytes of the file.
        trusted: Whether objects may be unpickled.

    Raises:
        ValueError: If the file is damaged, or holds objects and is not trusted.
    """
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    # Version 3 differs from version 2 only in how it encodes field names.
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        if not trusted:
            raise ValueError("it holds Python objects, which can run code when unpickled: set trusted=True to allow it")
    elif min(shape, default=0) < 0 or math.prod(shape) * max(dtype.itemsize, 1) > len(content) - file.tell():
        raise ValueError(
            f"it declares an array of shape {shape!s:.200} and dtype {dtype!s:.200}, but only "
            f"{len(content) - file.tell()} bytes follow: the file is damaged or truncated"
        )
    file.seek(0)
    array = np.lib.format.read_array(file, allow_pickle=trusted)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def decode_npz(content: bytes, *, trusted: bool = False) -> dict[str, Any]:
    """Return the arrays in an npz file, by name. Arguments and errors are those of :func:`decode_npy`."""
    import zipfile  # It takes 1 ms.

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return {
                name.removesuffix(".npy"): decode_npy(archive.read(name), trusted=trusted)
                for name in archive.namelist()
            }
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, EOFError) as error:
        # zipfile raises NotImplementedError for compression methods that it does not know.
        raise ValueError(f"it is not an intact npz file: {error}") from error
