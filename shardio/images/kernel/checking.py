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
from shardio.images.crop_plan import CropPlan
from shardio.images.jpeg.regions import Box
from shardio.images.kernel.loading import Kernel
from shardio.images.opening import open_image
from shardio.images.pixels import Pixels
from shardio.images.rendering import prepare_render
from shardio.images.resizing import flip
from shardio.images.tiling import tile_jpeg

_SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")
_HEIGHT, _WIDTH = 150, 203
_ROWS, _COLUMNS = 96, 101

_PLANS = CropPlan(
    box=np.array([(20, 30, 96, 101), (0, 0, 150, 203), (31, 47, 50, 41), (3, 90, 120, 77), (70, 6, 33, 160)]),
    size=np.array([(96, 101), (96, 101), (96, 101), (130, 140), (96, 101)]),
    window=np.array([(0, 0, 96, 101), (0, 0, 96, 101), (0, 0, 96, 101), (20, 25, 96, 101), (-9, 5, 96, 101)]),
    flip=np.array([False, True, False, True, False]),
)
"""As it is, made smaller, made larger, a window of what is larger, and one that reaches beyond; two are mirrored."""


def find_difference(kernel: Kernel) -> str | None:
    """Draw some pictures with the kernel and without it; return what differs, if anything does."""
    names, files = zip(*_make_files(), strict=True)
    # One call, in which neighbours are different files.
    tasks = [(file, plan) for plan in range(len(_PLANS.box)) for file in range(len(files))]
    records, order = as_records(_PLANS)[[plan for _, plan in tasks]], np.arange(len(tasks))
    rows = np.zeros((len(tasks), _ROWS, _COLUMNS, 3), np.uint8)
    is_drawn = kernel.decode([files[file] for file, _ in tasks], records, order, rows)
    for (file, plan), row, is_done in zip(tasks, rows, is_drawn.tolist(), strict=True):
        what = f"{names[file]}, {_PLANS.box[plan].tolist()} to {_PLANS.size[plan].tolist()}"
        if not is_done:
            return f"{what}: not drawn"
        differences = np.abs(row.astype(np.int64) - _draw(files[file], plan))
        if differences.any():
            count = f"{np.count_nonzero(differences)} of {differences.size} values"
            return f"{what}: {count}, by {differences.max()} at the most"
    return None


def _make_files() -> Iterator[tuple[str, bytes]]:
    """Yield JPEGs of smooth pictures with some noise, of each sampling, untouched and tiled, and what to call them."""
    random = np.random.default_rng(0)
    for sampling in _SAMPLINGS:
        for quality in (60, 95):
            coarse = random.integers(0, 256, (7, 9, 3), np.uint8)
            picture = cv2.resize(coarse, (_WIDTH, _HEIGHT), interpolation=cv2.INTER_CUBIC).astype(np.int64)
            picture = (picture + random.integers(-20, 21, picture.shape)).clip(0, 255).astype(np.uint8)
            colours = (picture[..., :1].copy(), "GRAY") if sampling == "Gray" else (picture, "RGB")
            content = simplejpeg.encode_jpeg(colours[0], quality, colours[1], sampling)
            yield f"{sampling}, quality {quality}", content
            yield f"{sampling}, quality {quality}, tiled", tile_jpeg(content)


def _draw(content: bytes, number: int) -> Pixels:
    """Draw by libjpeg-turbo and OpenCV."""
    box, window = Box(*_PLANS.box[number].tolist()), Box(*_PLANS.window[number].tolist())
    height, width = _PLANS.size[number].tolist()
    row = np.zeros((_ROWS, _COLUMNS, 3), np.uint8)
    prepare_render(open_image(content), box, height, width, window, antialias=False)(row)
    if not _PLANS.flip[number]:
        return row
    mirrored = np.empty_like(row)
    flip(row, out=mirrored)
    return mirrored
