"""Read PGM and PPM files. These files store pixels row by row, so a part can be read without the rest."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.files import HEAD_BYTES, FileRange
from shardio.images.jpeg import Box
from shardio.images.pictures import Part, Picture, Pixels, check_size
from shardio.values import count

_GAP = rb"(?:\s|#[^\n]*\n)+"
_HEAD = re.compile(rb"P([2356])" + (_GAP + rb"(\d{1,9})") * 3 + rb"\s")
"""The header of a gray or color image: the kind, the width, the height and the value of white."""


class PixelLayout(NamedTuple):
    """The header of a PGM or PPM.

    Attributes:
        offset: The offset of the first pixel.
        height: Height in pixels.
        width: Width in pixels.
        num_channels: 1 for gray, 3 for red, green and blue.
        white: The maximum value. If this is above 255, each value in a binary file takes two bytes.
        is_text: Whether the values are written as text.
    """

    offset: int
    height: int
    width: int
    num_channels: int
    white: int
    is_text: bool

    @property
    def num_values(self) -> int:
        """The number of values in all pixels."""
        return self.height * self.width * self.num_channels


def read_layout(content: bytes) -> PixelLayout | None:
    """Read the header of a PGM or PPM. Return None for other files."""
    if (head := _HEAD.match(content)) is None:
        return None
    kind, width, height, white = map(int, head.groups())
    return PixelLayout(head.end(), height, width, 3 if kind in (3, 6) else 1, white, is_text=kind in (2, 3))


def find_pixels(content: bytes | FileRange) -> PixelLayout | None:
    """Return where a file stores its pixels.

    Return None if the file is not a complete 8-bit binary PGM or PPM, or if comments make its header very long.
    """
    layout = read_layout(content[:HEAD_BYTES] if isinstance(content, bytes) else content.head)
    if layout is None or layout.is_text or layout.white != 255:
        return None
    num_bytes = (len(content) if isinstance(content, bytes) else content.num_bytes) - layout.offset
    return layout if 0 < layout.num_values <= num_bytes else None


def decode_netpbm(content: bytes) -> NDArray[Any]:
    """Return the values that a PGM or PPM stores, in native byte order: [height, width] or [height, width, 3].

    Raises:
        ValueError: If there are too few values, or a value is greater than the value of white.
    """
    layout = read_layout(content)
    assert layout is not None, "the header has been read"
    shape = (layout.height, layout.width, 3) if layout.num_channels == 3 else (layout.height, layout.width)
    dtype = np.dtype(np.uint8 if layout.white < 256 else ">u2")
    num_values, raster = layout.num_values, content[layout.offset :]
    if layout.is_text:
        numbers = raster.split(maxsplit=num_values)[:num_values]
        values: NDArray[Any] = np.array(numbers, np.int64) if all(map(bytes.isdigit, numbers)) else np.empty(0)
    else:
        values = np.frombuffer(raster[: num_values * dtype.itemsize], dtype)
    if len(values) != num_values or values.max(initial=0) > layout.white:
        raise ValueError(
            f"the image is truncated or damaged: it declares {count(num_values, 'value')}, each at most {layout.white}"
        )
    return values.reshape(shape).astype(dtype.newbyteorder("="))


class PixelPicture(Picture):
    """An 8-bit binary PGM or PPM. A part is read without the rows above and below it.

    Attributes:
        source: The file's content, or where to read it.
        layout: Where the pixels are.
    """

    decoder_name = "raw"

    def __init__(self, source: bytes | FileRange, layout: PixelLayout) -> None:
        self.source, self.layout = source, layout
        self.size = layout.height, layout.width

    def part(self, box: Box) -> Part:
        return lambda: self._read(box)

    def _read(self, box: Box) -> Pixels:
        width, num_channels = self.layout.width, self.layout.num_channels
        stride = num_channels * width
        offset, num_bytes = self.layout.offset + box.top * stride, box.height * stride
        if isinstance(self.source, bytes):
            rows = np.frombuffer(self.source, np.uint8, num_bytes, offset)
        else:
            rows = np.frombuffer(self.source.read(num_bytes, offset), np.uint8)
        pixels = rows.reshape(box.height, width, num_channels)[:, box.left : box.left + box.width]
        return pixels if num_channels == 3 else pixels.repeat(3, axis=2)


def open_pixels(content: bytes | FileRange, max_pixels: int) -> PixelPicture | None:
    """Open an 8-bit binary PGM or PPM. Return None for other files.

    Raises:
        TooManyPixels: If the image is too large.
    """
    if isinstance(content, bytes) and not content.startswith(b"P"):
        return None
    if (layout := find_pixels(content)) is None:
        return None
    check_size(layout.height, layout.width, max_pixels)
    return PixelPicture(content, layout)
