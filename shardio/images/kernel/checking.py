"""Check that the kernel gives the same pixels, on this machine, as the libraries that decode other images.

The kernel follows the code of libjpeg-turbo and Pillow. These libraries have different code for other processors, and
other versions of them may round differently. In that case, the pixels of a crop would depend on its decoder.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from shardio.images.crop_plan import resize, resize_bilinear
from shardio.images.kernel.compiled.records import OPENCV_BILINEAR, PILLOW_BICUBIC, PILLOW_BILINEAR, PLAN
from shardio.images.kernel.functions import RESAMPLINGS, Functions, Kernel
from shardio.images.tiling import tile_jpeg

_SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")
_HEIGHT, _WIDTH = 150, 203
_ROWS, _COLUMNS = 96, 101

_PLANS = np.array(
    [
        (20, 30, 96, 101, 96, 101, 0, 0, False, OPENCV_BILINEAR),  # Not resized.
        (0, 0, 150, 203, 96, 101, 0, 0, True, OPENCV_BILINEAR),  # Shrunk.
        (31, 47, 50, 41, 96, 101, 0, 0, False, OPENCV_BILINEAR),  # Enlarged.
        (3, 90, 120, 77, 130, 140, 20, 25, True, OPENCV_BILINEAR),  # A window of an enlarged part.
        (70, 6, 33, 160, 96, 101, -9, 5, False, OPENCV_BILINEAR),  # A window that extends beyond the part.
        (0, 0, 150, 203, 96, 101, 0, 0, False, PILLOW_BILINEAR),  # Shrunk, antialiased.
        (31, 47, 50, 41, 130, 140, 20, 25, True, PILLOW_BICUBIC),
        (0, 9, 150, 63, 96, 101, 0, 0, True, PILLOW_BICUBIC),
    ],
    PLAN,
)


def find_difference(functions: Functions) -> str | None:
    """Render images with the kernel and with the libraries. Return the first difference, or None."""
    names, files = zip(*_make_files(), strict=True)
    # Render all images in one call, in which adjacent images are different files.
    tasks = [(file, plan) for plan in range(len(_PLANS)) for file in range(len(files))]
    rows = np.zeros((len(tasks), _ROWS, _COLUMNS, 3), np.uint8)
    plans = _PLANS[[plan for _, plan in tasks]]
    is_rendered = Kernel(functions).decode([files[file] for file, _ in tasks], plans, np.arange(len(tasks)), rows)
    for (file, _), plan, row, is_done in zip(tasks, plans, rows, is_rendered.tolist(), strict=True):
        top, left, height, width, new_height, new_width = plan.tolist()[:6]
        what = f"{names[file]}, {[top, left, height, width]} to {[new_height, new_width]}"
        if not is_done:
            return f"{what}: not rendered"
        differences = np.abs(row.astype(np.int64) - _render(files[file], plan))
        if differences.any():
            count = f"{np.count_nonzero(differences)} of {differences.size} values"
            return f"{what}: {count} differ by up to {differences.max()}"
    return None


def _make_files() -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of JPEGs of smooth images with noise, for each subsampling, untiled and tiled."""
    random = np.random.default_rng(0)
    for sampling in _SAMPLINGS:
        for quality in (60, 95):
            coarse = random.integers(0, 256, (7, 9, 3), np.uint8)
            smooth = resize_bilinear(coarse, _HEIGHT, _WIDTH).astype(np.int64)
            image = (smooth + random.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8)
            pixels, colors = (image[..., :1].copy(), "GRAY") if sampling == "Gray" else (image, "RGB")
            content = simplejpeg.encode_jpeg(pixels, quality, colors, sampling)
            yield f"{sampling}, quality {quality}", content
            yield f"{sampling}, quality {quality}, tiled", tile_jpeg(content)


def _render(content: bytes, plan: np.void) -> NDArray[np.uint8]:
    """Render an image with libjpeg-turbo, and with numpy or Pillow."""
    top, left, height, width, new_height, new_width, window_top, window_left, is_flipped, resampling = plan.tolist()
    box = simplejpeg.decode_jpeg(content)[top : top + height, left : left + width]
    if resampling == OPENCV_BILINEAR:
        box = resize_bilinear(box, new_height, new_width)
    else:
        names = {number: name for name, number in RESAMPLINGS.items()}
        box = resize(np.ascontiguousarray(box), new_height, new_width, names[resampling])
    padded = np.pad(box, ((_ROWS, _ROWS), (_COLUMNS, _COLUMNS), (0, 0)))  # Black beyond the box.
    window = padded[_ROWS + window_top :, _COLUMNS + window_left :][:_ROWS, :_COLUMNS]
    return window[:, ::-1] if is_flipped else window
