"""The kernel renders the same pixels as libjpeg-turbo and OpenCV, and does not render damaged images.

``test_crops.py``, ``test_verdict.py`` and the campaigns in ``tools/`` check every crop of small images, the JPEG
corpus, and damaged files.
"""

from __future__ import annotations

import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from shardio.images import CropPlan, Resampling, open_image, render_chunk, rendering, why_not_by_kernel
from shardio.images.jpeg import Box
from shardio.images.tiling import tile_jpeg
from shardio.kernel import find_kernel, require_functions
from shardio.kernel.functions import Kernel
from shardio.kernel.records import OPENCV_BILINEAR, PLAN
from tests.images import naive
from tests.images.crop_laws import draw_plan, render_chunk_by_kernel, render_parts, shows_picture
from tests.images.jpeg_corpus import ODD_FACTORS, small_corpus
from tests.images.jpeg_files import SAMPLINGS, by_pillow, make_jpeg, noise
from tests.images.jpeg_writer import segment
from tests.images.mutations import without_ac_codes
from tests.images.pictures import TURNS, exif_of, make_picture, save


@pytest.fixture(scope="module")
def contents() -> list[bytes]:
    files = []
    for i, factors in enumerate(SAMPLINGS.values()):
        file = make_jpeg("", make_picture(60 + 9 * i, 95 - 7 * i), factors=factors, quality=85).content
        files += [file, tile_jpeg(file)]
    return files


@pytest.mark.parametrize("orientation", TURNS)
def test_it_renders_the_turned_full_decode_cropped_resized_cropped_and_mirrored(orientation: int) -> None:
    random = np.random.default_rng(orientation)
    for factors, resampling in itertools.product(SAMPLINGS.values(), get_args(Resampling)):
        stored = make_jpeg("", make_picture(63, 91), factors=factors, quality=90).content
        content = stored[:2] + segment(0xE1, exif_of(orientation).tobytes()) + stored[2:]
        whole = TURNS[orientation](np.asarray(simplejpeg.decode_jpeg(content)))
        for kind in (content, tile_jpeg(content)):
            plan = draw_plan([whole.shape[:2]] * 4, (39, 50), resampling, random)
            rows = np.zeros((4, 39, 50, 3), np.uint8)
            is_rendered = render_chunk_by_kernel([open_image(kind, orientation="apply")] * 4, plan, rows)
            np.testing.assert_array_equal(is_rendered, shows_picture(plan))
            for i in np.flatnonzero(is_rendered).tolist():
                np.testing.assert_array_equal(rows[i], naive.render(whole, plan, i), err_msg=f"{i} of {plan}")


def test_images_depend_neither_on_others_nor_on_the_kernel(
    contents: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [by_pillow(make_picture(50, 60), progressive=True), save(make_picture(40, 70), "PNG")]
    pictures = [open_image(content) for content in [*contents, *others]]
    plans = draw_plan([picture.size for picture in pictures], (60, 50), "bilinear", np.random.default_rng(3))
    expected = render_chunk(pictures, plans).images

    def render_some(seed: int) -> None:
        some = np.random.default_rng(seed).permutation(len(pictures))[: 1 + seed % len(pictures)]
        rendered = render_chunk([pictures[i] for i in some], plans.take(some)).images
        for i, pixels in zip(some.tolist(), rendered, strict=True):
            np.testing.assert_array_equal(pixels, expected[i])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(render_some, range(100)))
    monkeypatch.setattr(rendering, "find_kernel", lambda: None)
    render_some(len(pictures) - 1)


def test_rows_of_several_sizes_are_rendered_one_by_one(contents: list[bytes]) -> None:
    pictures = [open_image(content) for content in contents]
    plans = CropPlan.whole(np.array([picture.size for picture in pictures]))
    rows = [np.zeros((*picture.size, 3), np.uint8) for picture in pictures]
    assert render_chunk_by_kernel(pictures, plans, rows).all()
    for content, row in zip(contents, rows, strict=True):
        np.testing.assert_array_equal(row, simplejpeg.decode_jpeg(content))


_PICTURE = make_picture(40, 50)
_BASELINE = make_jpeg("", _PICTURE, factors=SAMPLINGS["4:2:0"], restart_interval=2).content
_TABLE = _BASELINE.index(b"\xff\xc4")
_LAST_SYMBOL = _TABLE + 5 + 16 + sum(_BASELINE[_TABLE + 5 : _TABLE + 21]) - 1
OTHERS: dict[str, tuple[bytes, str | None]] = {
    "CMYK": (by_pillow(np.dstack([_PICTURE, _PICTURE[..., :1]])), "4 components"),
    "several scans": (make_jpeg("", _PICTURE, scans=((0,), (1,), (2,))).content, "several scans"),
    "4:1:0": (make_jpeg("", _PICTURE, factors=ODD_FACTORS["4:1:0"]).content, "unusual sampling factors"),
    "unusual head": (_BASELINE[:20] + b"\0" + _BASELINE[20:], "unusual head"),
    "one byte more": (_BASELINE + b"\0", "no end-of-image marker"),
    "without its end": (_BASELINE[:-2], "no end-of-image marker"),
    "not a JPEG": (save(_PICTURE, "PNG"), "not a JPEG"),
    "nothing": (b"", "not a JPEG"),
    "truncated": (_BASELINE[:-40], "no end-of-image marker"),
    "JFIF 2, a libjpeg warning": (by_pillow(_PICTURE).replace(b"JFIF\0\1", b"JFIF\0\2"), None),
    "a DC table with a symbol above 15": (_BASELINE[:_LAST_SYMBOL] + b"\x20" + _BASELINE[_LAST_SYMBOL + 1 :], None),
}
"""Files that the kernel does not render, each with the reason that its head shows, or None if its head shows none."""


@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_images_are_left_to_libjpeg_for_a_short_reason(name: str) -> None:
    content, reason = OTHERS[name]
    _, (is_drawn,) = render_parts(content, [Box(0, 0, 40, 49)])
    assert not is_drawn
    assert why_not_by_kernel(content) == reason


def test_an_image_without_ac_codes_is_not_rendered() -> None:
    kernel = Kernel(require_functions())  # A new kernel has no tables from earlier images.
    plans, rows = np.array([(0, 0, 40, 50, 40, 50, 0, 0, 0, OPENCV_BILINEAR)], PLAN), np.zeros((1, 40, 50, 3), np.uint8)
    assert not kernel.decode([without_ac_codes(_BASELINE)], plans, np.zeros(1, np.int64), rows)[0]


@pytest.mark.parametrize("interval", [0, 2])
def test_with_any_byte_of_the_scan_changed_it_agrees_with_libjpeg_or_leaves_it(interval: int) -> None:
    picture, factors = noise(20, 36), SAMPLINGS["4:2:0"]
    content = make_jpeg("", picture, factors=factors, quality=60, restart_interval=interval).content
    random, num_drawn = np.random.default_rng(0), 0
    for offset in range(content.index(b"\xff\xda"), len(content), 2):
        changed = bytearray(content)
        changed[offset] ^= int(random.integers(1, 256))
        (pixels,), (is_drawn,) = render_parts(bytes(changed), [Box(0, 0, 20, 36)])
        if is_drawn:
            expected = simplejpeg.decode_jpeg(bytes(changed), strict=True)
            np.testing.assert_array_equal(pixels, expected, err_msg=str(offset))
            num_drawn += 1
    assert num_drawn, "most changed values give a different image without an error"


@pytest.mark.parametrize("kind", ["baseline", "tiled", "progressive"])
def test_an_images_rows_are_written_completely_or_not_at_all(kind: str) -> None:
    content = by_pillow(noise(64, 64), quality=60, progressive=kind == "progressive")
    if kind == "tiled":
        content = tile_jpeg(content)
    damaged = content[:-60] + content[-2:]
    rows = np.full((6, 64, 64, 3), 77, np.uint8)
    plans = np.zeros(6, PLAN)
    # The first crop needs only data before the damage, unless the image is progressive.
    plans[0::2] = (0, 0, 16, 16, 64, 64, 0, 0, 0, OPENCV_BILINEAR)
    plans[1::2] = (0, 0, 64, 64, 64, 64, 0, 0, 0, OPENCV_BILINEAR)
    kernel = find_kernel()
    assert kernel is not None
    is_done = kernel.decode([damaged, content, damaged], plans, np.arange(3), rows)
    assert is_done.tolist() == [False, True, False]
    np.testing.assert_array_equal(rows[3], simplejpeg.decode_jpeg(content))
    assert (rows[[0, 1, 4, 5]] == 77).all()


@pytest.mark.slow
def test_colors_of_all_chroma_samples_are_libjpegs() -> None:
    """Compare the pixels with libjpeg's formulas (jdcolor.c, build_ycc_rgb_table and ycc_rgb_convert)."""
    samples = np.arange(256, dtype=np.uint8)
    blue, red = samples.astype(np.int64)[:, np.newaxis] - 128, samples.astype(np.int64) - 128
    sums = [91881 * red + 0 * blue, -22554 * blue - 46802 * red, 116130 * blue + 0 * red]
    differences = (np.stack(sums, axis=-1) + 32768) >> 16
    # Each block has one color, so its only coefficient is a multiple of 8, and quantization by 8 changes no samples.
    picture = np.empty((256, 8, 256, 8, 3), np.uint8)
    picture[..., 1], picture[..., 2] = samples[:, np.newaxis, np.newaxis, np.newaxis], samples[:, np.newaxis]
    for luma in range(0, 256, 5):
        picture[..., 0] = luma
        file = io.BytesIO()
        image = Image.frombytes("YCbCr", (2048, 2048), picture.tobytes())
        image.save(file, "JPEG", subsampling=0, qtables=[[8] * 64] * 2)
        (pixels,), (is_drawn,) = render_parts(file.getvalue(), [Box(0, 0, 2048, 2048)])
        assert is_drawn
        expected = np.clip(luma + differences, 0, 255).astype(np.uint8)
        assert (pixels.reshape(picture.shape) == expected[:, np.newaxis, :, np.newaxis]).all(), luma


def test_large_images_are_rendered_beside_small_ones() -> None:
    large, small = by_pillow(noise(700, 700), quality=98, subsampling=0), by_pillow(make_picture(700, 700), quality=50)
    contents, rows = [large, large, small, large, large, large, small], np.zeros((7, 700, 700, 3), np.uint8)
    pictures = [open_image(content) for content in contents]
    assert render_chunk_by_kernel(pictures, CropPlan.whole(np.full((7, 2), 700)), rows).all()
    for content, row in zip(contents, rows, strict=True):
        np.testing.assert_array_equal(row, simplejpeg.decode_jpeg(content))


def test_files_are_rendered_as_predicted_unless_they_are_damaged_and_tiling_changes_nothing() -> None:
    num_rendered = 0

    def predict_and_render(content: bytes) -> tuple[bool, bool]:
        return why_not_by_kernel(content) is None, bool(render_parts(content, [Box(0, 0, 1, 1)])[1][0])

    for file in small_corpus():
        is_predicted, is_done = predict_and_render(file.content)
        num_rendered += is_done
        assert is_predicted or not is_done, file.name
        # No encoder writes fill bytes between an interval and its marker, and the head does not show such bytes.
        assert not file.tileable or is_done == is_predicted or "fill bytes in the scan" in file.name, file.name
        if file.tileable and is_predicted:
            assert predict_and_render(tile_jpeg(file.content)) == (True, True), file.name
    assert num_rendered > 150
