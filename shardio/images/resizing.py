"""Image resizing by OpenCV and Pillow. The kernel resizes most images itself, with the same pixels.

Both libraries are imported when they are first needed, so worker processes that need neither start 50 ms sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from shardio.images.bilinear import is_opencv_equal, resize_bilinear
from shardio.images.pixels import Pixels

if TYPE_CHECKING:
    import PIL.Image

Resampling = Literal["bilinear", "plain bilinear", "antialiased bilinear", "antialiased bicubic"]
"""How to resize. "plain bilinear" computes each new pixel from the nearest four (:mod:`shardio.images.bilinear`). So
does "bilinear", unless a crop plan halves both sides: see CropPlan.is_halved. The others average over all pixels when
shrinking (Pillow's BILINEAR and BICUBIC)."""


def use_one_thread() -> None:
    """Limit OpenCV to one thread in this process: decode threads already keep all processors busy."""
    import cv2

    cv2.setNumThreads(0)


def resize(
    image: Pixels, height: int, width: int, resampling: Resampling = "bilinear", *, out: Pixels | None = None
) -> Pixels:
    """Resize an image.

    Args:
        image: uint8 [rows, columns, 3].
        height: The new number of rows.
        width: The new number of columns.
        resampling: How to resize it.
        out: uint8 [height, width, 3] to write to, or None to return a new array.

    Returns:
        uint8 [height, width, 3]: ``out``, if it is given.
    """
    if image.shape[:2] == (height, width):
        resized = image
    elif resampling not in ("bilinear", "plain bilinear"):
        resized = np.asarray(_resize_by_pillow(image, height, width, resampling))
    elif not is_opencv_equal():
        resized = resize_bilinear(image, height, width)
    else:
        import cv2

        resized = cv2.resize(image, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)  # type: ignore[assignment]
    if out is None:
        return resized
    if resized is not out:
        np.copyto(out, resized)
    return out


def _resize_by_pillow(image: Pixels, height: int, width: int, resampling: Resampling) -> PIL.Image.Image:
    """Resize an image across first, then down: the result is rounded in between.

    Pillow 13 decides by the sizes which of both comes first, and earlier versions resized across first.
    """
    import PIL.Image

    filters = {
        "antialiased bilinear": PIL.Image.Resampling.BILINEAR,
        "antialiased bicubic": PIL.Image.Resampling.BICUBIC,
    }
    across = PIL.Image.fromarray(image).resize((width, len(image)), filters[resampling])
    return across.resize((width, height), filters[resampling])


def flip(image: Pixels, out: Pixels) -> None:
    """Mirror an image left to right into ``out``, both uint8 [height, width, 3]."""
    import cv2

    if cv2.flip(image, 1, dst=out) is not out:
        np.copyto(out, image[:, ::-1])
