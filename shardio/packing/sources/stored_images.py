"""Images as other tools store them: raw pixels, and several encoded images in one value."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""The modes that Pillow stores in a PNG without loss. It stores most others in a TIFF."""


def encode_pixels(image: Any) -> bytes:
    """Return an image of Pillow as a PNG, or as a TIFF if a PNG cannot hold its mode. Both are lossless.

    Raises:
        OSError: If neither format can hold its mode.
    """
    file = io.BytesIO()
    image.save(file, "PNG" if image.mode in _PNG_MODES else "TIFF")
    return file.getvalue()


def encode_array(array: Any) -> bytes:
    """Return an array as a ``.npy`` file.

    Raises:
        ValueError: If it holds Python objects.
    """
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def split_contents(value: bytes) -> list[bytes]:
    """Return the contents in a value that MosaicML Streaming and LitData write for a list of images.

    The value has the number of contents and the size of each one, as uint32, and then the contents.

    Raises:
        ValueError: If the sizes do not match.
    """
    if len(value) < 4:
        raise ValueError(f"a list of images has only {len(value)} bytes")
    (num_contents,) = np.frombuffer(value, "<u4", 1).tolist()
    start = 4 + 4 * num_contents
    if len(value) < start:
        raise ValueError(f"a list of {num_contents} images has only {len(value)} bytes")
    ends = start + np.cumsum(np.frombuffer(value, "<u4", num_contents, 4), dtype=np.int64)
    if len(value) != (int(ends[-1]) if num_contents else start):
        raise ValueError(f"a list of images has {len(value)} bytes, which is not the sum of their sizes")
    return [value[begin:end] for begin, end in zip([start, *ends[:-1].tolist()], ends.tolist(), strict=False)]
