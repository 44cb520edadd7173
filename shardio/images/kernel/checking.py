"""Whether the kernel's pixels are, on this machine, those of the libraries that draw where it does not.

The kernel is written after libjpeg-turbo's and OpenCV's code. Both have other code for other processors, and other
versions may round otherwise: then what a crop looks like would depend on who draws it.
"""

from __future__ import annotations

from collections.abc import Iterator

import cv2
import numpy as np
import simplejpeg

from shardio.images.by_kernel import as_records
from shardio.images.drawing import prepare
from shardio.images.jpeg.regions import Box
from shardio.images.kernel.loading import Kernel
from shardio.images.pictures import open_image
from shardio.images.pixels import Pixels
from shardio.images.plans import CropPlans
from shardio.images.resizing import flip

_SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")
_HEIGHT, _WIDTH = 150, 203
_ROWS, _COLUMNS = 96, 101

_PLANS = CropPlans(
    box=np.array([(20, 30, 96, 101), (0, 0, 150, 203), (31, 47, 50, 41), (3, 90, 120, 77), (70, 6, 33, 160)]),
    size=np.array([(96, 101), (96, 101), (96, 101), (130, 140), (96, 101)]),
    window=np.array([(0, 0, 96, 101), (0, 0, 96, 101), (0, 0, 96, 101), (20, 25, 96, 101), (-9, 5, 96, 101)]),
    flip=np.array([False, True, False, True, False]),
)
"""As it is, made smaller, made larger, a window of what is larger, and one that reaches beyond; two are mirrored."""


def find_difference(kernel: Kernel) -> str | None:
    """Draw some pictures with the kernel and without it; return what differs, if anything does."""
    records, order = as_records(_PLANS), np.arange(len(_PLANS.box))
    for name, content in _make_files():
        rows = np.zeros((len(order), _ROWS, _COLUMNS, 3), np.uint8)
        is_drawn = kernel.decode([content] * len(order), records, order, rows)
        for number in order.tolist():
            what = f"{name}, {_PLANS.box[number].tolist()} to {_PLANS.size[number].tolist()}"
            if not is_drawn[number]:
                return f"{what}: not drawn"
            differences = np.abs(rows[number].astype(np.int64) - _draw(content, number))
            if differences.any():
                count = f"{np.count_nonzero(differences)} of {differences.size} values"
                return f"{what}: {count}, by {differences.max()} at the most"
    return None


def _make_files() -> Iterator[tuple[str, bytes]]:
    """Yield JPEGs of smooth pictures with some noise, of each sampling, and what to call them."""
    random = np.random.default_rng(0)
    for sampling in _SAMPLINGS:
        for quality in (60, 95):
            coarse = random.integers(0, 256, (7, 9, 3), np.uint8)
            picture = cv2.resize(coarse, (_WIDTH, _HEIGHT), interpolation=cv2.INTER_CUBIC).astype(np.int64)
            picture = (picture + random.integers(-20, 21, picture.shape)).clip(0, 255).astype(np.uint8)
            colours = (picture[..., :1].copy(), "GRAY") if sampling == "Gray" else (picture, "RGB")
            yield f"{sampling}, quality {quality}", simplejpeg.encode_jpeg(colours[0], quality, colours[1], sampling)


def _draw(content: bytes, number: int) -> Pixels:
    """Draw by libjpeg-turbo and OpenCV."""
    box, window = Box(*_PLANS.box[number].tolist()), Box(*_PLANS.window[number].tolist())
    height, width = _PLANS.size[number].tolist()
    row = np.zeros((_ROWS, _COLUMNS, 3), np.uint8)
    prepare(open_image(content), box, height, width, window, antialias=False)(row)
    if not _PLANS.flip[number]:
        return row
    mirrored = np.empty_like(row)
    flip(row, out=mirrored)
    return mirrored
