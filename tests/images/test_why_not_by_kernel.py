"""``why_not_by_kernel`` predicts from a file whether the kernel renders it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from shardio.images import CropPlan, open_image, why_no_kernel, why_not_by_kernel
from shardio.images.jpeg.regions import Box
from shardio.images.kernel import find_kernel, finding
from shardio.images.kernel.building import build
from shardio.images.kernel.compiled.records import MAX_SIDE, WORKSPACE
from shardio.images.tiling import tile_jpeg
from tests.images.by_kernel import render_chunk_by_kernel
from tests.images.jpeg_corpus import ODD_FACTORS, small_corpus
from tests.images.jpeg_files import SAMPLINGS, JpegFile, by_pillow, make_jpeg, noise
from tests.images.kernel_machines import _not_built, folder
from tests.images.pictures import make_picture, save

__all__ = ["_not_built", "folder"]

ENOUGH = MAX_SIDE // 16
"""A crop with sides up to this length is never too large for the kernel."""


def is_rendered(content: bytes, *, num_copies: int = 2) -> bool | None:
    """Return whether the kernel renders the upper left corners of an image, or None if the image cannot be read.

    They are resized, because whole untiled images that are not are left to libjpeg-turbo.

    Args:
        content: The image's file.
        num_copies: How many are rendered at once.
    """
    try:
        picture = open_image(content)
    except ValueError:
        return None
    height, width = (min(side, ENOUGH) for side in picture.size)
    plan = _crop(picture.size, Box(0, 0, height, width)).resize(np.array([[height + 1, width]]))
    plan = plan.take(np.zeros(num_copies, np.int64))
    rows = np.zeros((num_copies, height + 1, width, 3), np.uint8)
    return bool(render_chunk_by_kernel([picture] * num_copies, plan, rows).all())


def _crop(size: tuple[int, int], box: Box) -> CropPlan:
    """Return a plan that takes a box of a picture without resizing it."""
    after = np.array([[box.height, box.width]])
    return CropPlan.whole(np.array([size])).crop(np.array([box])).resize(after)


@pytest.fixture(scope="module")
def files() -> list[JpegFile]:
    return list(small_corpus())


def test_every_rendered_file_was_predicted(files: list[JpegFile]) -> None:
    rendered = [file for file in files if is_rendered(file.content)]
    assert [file.name for file in rendered if why_not_by_kernel(file.content) is not None] == []
    assert len(rendered) > 150


def test_every_predicted_file_is_rendered_unless_it_is_damaged(files: list[JpegFile]) -> None:
    for file in files:
        # No encoder writes bytes between an interval and its marker; only reading the whole scan would find them.
        if file.tileable and "fill bytes in the scan" not in file.name:
            assert is_rendered(file.content) == (why_not_by_kernel(file.content) is None), file.name


def test_tiling_does_not_change_the_prediction(files: list[JpegFile]) -> None:
    for file in files:
        if file.tileable and why_not_by_kernel(file.content) is None:
            tiled = tile_jpeg(file.content)
            assert why_not_by_kernel(tiled) is None, file.name
            assert is_rendered(tiled), file.name


def test_whole_images_are_left_to_libjpeg_unless_they_are_tiled_or_resized() -> None:
    content, whole = by_pillow(make_picture(200, 300)), CropPlan.whole(np.array([[200, 300]]))
    part = whole.crop(np.array([[0, 0, 200, 299]]))
    resized = whole.resize(np.array([[150, 150]]))
    for given, plan, expected in (
        (content, whole, False),
        (tile_jpeg(content), whole, True),
        (content, part, True),
        (content, resized, True),
    ):
        rows = np.zeros((1, *plan.output_size[0], 3), np.uint8)
        assert render_chunk_by_kernel([open_image(given)], plan, rows).all() == expected


_PICTURE = make_picture(20, 30)
_BASELINE = make_jpeg("", _PICTURE, factors=SAMPLINGS["4:2:0"]).content
REASONS = {
    "progressive": by_pillow(_PICTURE, progressive=True),
    "4 components": by_pillow(np.dstack([_PICTURE, _PICTURE[..., :1]])),
    "several scans": make_jpeg("", _PICTURE, factors=SAMPLINGS["4:2:0"], scans=((0,), (1,), (2,))).content,
    "unusual sampling factors": make_jpeg("", _PICTURE, factors=ODD_FACTORS["4:1:0"]).content,
    "unusual head": _BASELINE[:20] + b"\0" + _BASELINE[20:],
    "no end-of-image marker": _BASELINE + b"\n",
    "not a JPEG": save(_PICTURE, "PNG"),
}


@pytest.mark.parametrize(("reason", "content"), REASONS.items(), ids=REASONS)
def test_reasons_are_short(reason: str, content: bytes) -> None:
    assert why_not_by_kernel(content) == reason
    assert not is_rendered(content)


def test_the_kernel_leaves_files_that_exceed_its_memory_unless_they_are_tiled() -> None:
    side = 1200
    content = by_pillow(noise(side, side), quality=100, subsampling=0)
    assert len(content) > WORKSPACE["bits"].itemsize
    assert why_not_by_kernel(content) == "more than 3 MiB and not tiled"
    assert not is_rendered(content)
    tiled = tile_jpeg(content)
    assert len(tiled) > WORKSPACE["bits"].itemsize
    assert why_not_by_kernel(tiled) is None
    plan = _crop((side, side), Box(300, 300, 200, 200))
    assert render_chunk_by_kernel([open_image(tiled)], plan, np.zeros((1, 200, 200, 3), np.uint8)).all()


@pytest.mark.usefixtures("folder")
def test_why_no_kernel_says_that_it_was_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it is not checked on this machine yet" in str(why_no_kernel())
    build()
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    assert find_kernel() is not None
    assert why_no_kernel() is None


@pytest.mark.usefixtures("folder", "_not_built")
def test_why_no_kernel_says_that_it_was_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it is not compiled on this machine yet" in str(why_no_kernel())
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    expected = "shardio was built without it for this processor, and numba is not installed (pip install numba)"
    assert why_no_kernel() == expected
