"""The kernel renders the pixels of libjpeg-turbo and OpenCV, and leaves damaged images alone.

``test_crops.py``, ``test_crop_damage.py`` and the campaigns in ``tools/`` check every crop of small images, the JPEG
corpus, and damaged files.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray

from shardio.images import CropPlan, Resampling, open_image, render_chunk, rendering
from shardio.images.jpeg.regions import Box
from shardio.images.kernel import find_kernel
from shardio.images.kernel.compiled.records import OPENCV_BILINEAR, PLAN
from shardio.images.tiling import tile_jpeg
from tests.images import naive
from tests.images.by_kernel import render_chunk_by_kernel, render_parts
from tests.images.crop_laws import assert_parts_by_kernel, random_boxes
from tests.images.jpeg_files import SAMPLINGS, Factors, by_pillow, extremes, make_jpeg, noise, waves
from tests.images.pictures import make_picture

KINDS: dict[str, dict[str, Any]] = {
    "untouched": {},
    "one MCU an interval": {"restart_interval": 1},
    "three MCUs": {"restart_interval": 3},
    "many rows": {"restart_interval": 70},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("factors", SAMPLINGS.values(), ids=SAMPLINGS)
def test_it_renders_every_kind_that_it_supports(factors: Factors, options: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    for size in [(97, 161), (8, 200), (200, 8)]:
        content = make_jpeg("", noise(*size), factors=factors, quality=90, **options).content
        expected = np.asarray(simplejpeg.decode_jpeg(content))
        boxes = random_boxes(*size, 40, random)
        for kind in (content, tile_jpeg(content)):
            assert assert_parts_by_kernel(kind, expected, boxes) == len(boxes)


@pytest.mark.parametrize("quality", [5, 50, 98])
@pytest.mark.parametrize("make", [extremes, waves], ids=lambda make: make.__name__)
def test_large_coefficients_are_right_or_left_to_libjpeg(make: Any, quality: int) -> None:
    for factors in (SAMPLINGS["4:2:0"], SAMPLINGS["4:4:4"]):
        content = make_jpeg("", make(80, 72), factors=factors, quality=quality).content
        assert_parts_by_kernel(
            content, np.asarray(simplejpeg.decode_jpeg(content)), [Box(0, 0, 80, 72), Box(9, 7, 50, 40)]
        )


def _no_kernel(crops: Any, _: Any) -> NDArray[np.bool_]:
    return np.zeros((len(crops[0].pictures), len(crops)), np.bool_)


@pytest.fixture(scope="module")
def contents() -> list[bytes]:
    """Images of all samplings, each untouched and tiled."""
    files = []
    for i, factors in enumerate(SAMPLINGS.values()):
        file = make_jpeg("", make_picture(60 + 9 * i, 95 - 7 * i), factors=factors, quality=85).content
        files += [file, tile_jpeg(file)]
    return files


def _draw_plans(sizes: list[tuple[int, int]], random: np.random.Generator) -> CropPlan:
    """Return random plans that give images of one size."""
    height, width = random.integers(1, 90, 2).tolist()
    boxes, afters, windows = [], [], []
    for size in sizes:
        (box,) = random_boxes(*size, 1, random)
        after = [(height, width), (box.height, box.width), tuple(random.integers(1, 120, 2).tolist())][
            random.integers(3)
        ]
        corner = (0, 0) if after == (height, width) and random.random() < 0.5 else random.integers(-20, 80, 2).tolist()
        boxes.append(box)
        afters.append(after)
        windows.append((*corner, height, width))
    flips = random.integers(0, 2, len(sizes)).astype(np.bool_)
    resampling = random.choice(get_args(Resampling))
    return CropPlan(
        box=np.array(boxes), size=np.array(afters), window=np.array(windows), flip=flips, resampling=resampling
    )


@pytest.mark.parametrize("seed", range(20))
def test_it_renders_the_full_decode_cropped_resized_and_mirrored(seed: int, contents: list[bytes]) -> None:
    random = np.random.default_rng(seed)
    pictures = [open_image(content) for content in contents]
    plans = _draw_plans([picture.size for picture in pictures], random)
    rows = np.zeros((len(contents), *plans.output_size[0], 3), np.uint8)
    is_drawn = render_chunk_by_kernel(pictures, plans, rows)
    corner, size = plans.window[:, :2], plans.window[:, 2:]
    is_black = ((corner >= plans.size) | (corner + size <= 0)).any(axis=1)
    np.testing.assert_array_equal(is_drawn, ~is_black)
    for i in np.flatnonzero(is_drawn).tolist():
        whole = np.asarray(simplejpeg.decode_jpeg(contents[i]))
        part = naive.crop(whole, Box(*plans.box[i].tolist()))
        resized = naive.resize(part, *plans.size[i].tolist(), resampling=plans.resampling)
        window = naive.crop(resized, Box(*plans.window[i].tolist()))
        expected = window[:, ::-1] if plans.flip[i] else window
        np.testing.assert_array_equal(rows[i], expected, err_msg=f"image {i} of {plans}")


def test_pixels_do_not_depend_on_whether_there_is_a_kernel(
    contents: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [open_image(content) for content in [*contents, by_pillow(make_picture(50, 60), progressive=True)]]
    plans = _draw_plans([picture.size for picture in pictures], np.random.default_rng(3))
    with_it = render_chunk(pictures, plans).images
    monkeypatch.setattr(rendering, "render_by_kernel", _no_kernel)
    for one, other in zip(with_it, render_chunk(pictures, plans).images, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_image_does_not_depend_on_what_else_is_decoded(contents: list[bytes]) -> None:
    """Neither the rest of the chunk, nor other threads, nor earlier content of the memory change it."""
    random = np.random.default_rng(1)
    pictures = [open_image(content) for content in contents]
    plans = _draw_plans([picture.size for picture in pictures], random)
    expected = render_chunk(pictures, plans).images

    def render_some(seed: int) -> None:
        some = np.random.default_rng(seed).permutation(len(pictures))[: 1 + seed % len(pictures)]
        rendered = render_chunk([pictures[i] for i in some], plans.take(some)).images
        for i, pixels in zip(some.tolist(), rendered, strict=True):
            np.testing.assert_array_equal(pixels, expected[i])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(render_some, range(200)))


def without_last_row(sizes: NDArray[np.int64]) -> CropPlan:
    """Return a plan for pictures of these sizes: whole ones would be left to libjpeg-turbo."""
    top_left, after = np.zeros_like(sizes), sizes - [1, 0]
    return CropPlan.whole(sizes).crop(np.concatenate([top_left, after], axis=1))


def test_rows_of_different_sizes_are_rendered_one_by_one(
    contents: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [open_image(content) for content in contents]
    plans = without_last_row(np.array([picture.size for picture in pictures]))
    rows = [np.zeros((picture.size[0] - 1, picture.size[1], 3), np.uint8) for picture in pictures]
    assert render_chunk_by_kernel(pictures, plans, rows).all()
    for content, row in zip(contents, rows, strict=True):
        np.testing.assert_array_equal(row, simplejpeg.decode_jpeg(content)[:-1])


def _others() -> dict[str, bytes]:
    picture = make_picture(40, 50)
    whole = make_jpeg("", picture, factors=SAMPLINGS["4:2:0"], restart_interval=2).content
    jfif, table = by_pillow(picture), whole.index(b"\xff\xc4")
    last_symbol = table + 5 + 16 + sum(whole[table + 5 : table + 21]) - 1
    return {
        "JFIF 2, a libjpeg warning": jfif.replace(b"JFIF\0\1", b"JFIF\0\2"),
        "a DC table with a symbol above 15": whole[:last_symbol] + b"\x20" + whole[last_symbol + 1 :],
        "progressive": by_pillow(picture, progressive=True),
        "CMYK": by_pillow(np.dstack([picture, picture[..., 0]])),
        "4:1:0": make_jpeg("", picture, factors=((4, 2), (1, 1), (1, 1))).content,
        "truncated": whole[:-40],
        "without its end": whole[:-2],
        "one byte more": whole + b"\0",
        "not a JPEG": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "nothing": b"",
    }


@pytest.mark.parametrize("content", _others().values(), ids=_others())
def test_unsupported_images_are_left_to_libjpeg(content: bytes) -> None:
    _, (is_drawn,) = render_parts(content, [Box(0, 0, 40, 50)])
    assert not is_drawn


@pytest.mark.parametrize("restart_interval", [0, 2])
def test_with_any_byte_of_the_scan_changed_it_agrees_with_libjpeg_or_leaves_the_image_to_it(
    restart_interval: int,
) -> None:
    """Where libjpeg-turbo reports damage, the kernel renders nothing."""
    content = make_jpeg(
        "", noise(20, 36), factors=SAMPLINGS["4:2:0"], quality=60, restart_interval=restart_interval
    ).content
    random, num_drawn = np.random.default_rng(0), 0
    start = content.index(b"\xff\xda")
    for offset in range(start, len(content)):
        changed = bytearray(content)
        changed[offset] ^= int(random.integers(1, 256))
        (pixels,), (is_drawn,) = render_parts(bytes(changed), [Box(0, 0, 20, 36)])
        if is_drawn:
            np.testing.assert_array_equal(
                pixels, simplejpeg.decode_jpeg(bytes(changed), strict=True), err_msg=str(offset)
            )
            num_drawn += 1
    assert num_drawn, "most changes of a value give another image without an error"


def test_a_row_is_written_completely_or_not_at_all() -> None:
    content = make_jpeg("", noise(64, 64), factors=SAMPLINGS["4:2:0"], quality=60).content
    damaged = bytearray(content)
    damaged[-60:-2] = bytes(58)
    rows = np.full((1, 64, 64, 3), 77, np.uint8)
    kernel = find_kernel()
    assert kernel is not None
    plans = np.zeros(1, PLAN)
    plans[0] = (0, 0, 64, 64, 64, 64, 0, 0, 0, OPENCV_BILINEAR)
    assert not kernel.decode([bytes(damaged)], plans, np.zeros(1, np.int64), rows)[0]
    assert (rows == 77).all()


def test_images_that_do_not_fit_into_one_group_are_rendered_in_several() -> None:
    content = by_pillow(noise(700, 700), quality=98, subsampling=0)
    assert len(content) > 1.1 * 2**20, "three of them do not fit into the workspace"
    plans = without_last_row(np.full((7, 2), 700))
    expected = np.asarray(simplejpeg.decode_jpeg(content))[:-1]
    rows = np.zeros((7, 699, 700, 3), np.uint8)
    small = by_pillow(make_picture(700, 700), quality=50)
    contents = [content, content, small, content, content, content, small]
    assert render_chunk_by_kernel([open_image(content) for content in contents], plans, rows).all()
    for i in (0, 1, 3, 4, 5):
        np.testing.assert_array_equal(rows[i], expected)


def test_colours_are_libjpegs() -> None:
    """Check all combinations of samples: jdcolor.c, build_ycc_rgb_table and ycc_rgb_convert."""
    convert_row = pytest.importorskip("shardio.images.kernel.compiled.colour", exc_type=ImportError).convert_row
    luma, cr = np.repeat(np.arange(256, dtype=np.uint8), 256), np.tile(np.arange(256, dtype=np.uint8), 256)
    columns = 4, 1 << 14
    rows, places = np.zeros(columns[::-1], np.uint32), np.arange(0, 1 << 16, 4)  # The columns of an MCU are adjacent.
    y, red = luma.astype(np.int64), cr.astype(np.int64) - 128
    for cb in range(256):
        blue = cb - 128
        constant = np.full(columns, cb, np.uint8)
        convert_row(luma.reshape(columns), constant, cr.reshape(columns), True, rows.reshape(-1), places, 0)
        pixels = rows.T.reshape(-1)
        added: list[NDArray[np.int64]] = [91881 * red, -22554 * blue - 46802 * red, np.full_like(y, 116130 * blue)]
        for i, colour in enumerate(added):
            expected = np.clip(y + ((colour + 32768) >> 16), 0, 255)
            np.testing.assert_array_equal(pixels >> 8 * i & 255, expected)


@pytest.mark.parametrize("resampling", get_args(Resampling))
def test_resizing_is_opencvs_or_pillows(resampling: Resampling) -> None:
    """If one of them rounded differently, crops would depend on the decoder."""
    random = np.random.default_rng(0)
    for _ in range(60):
        height, width = random.integers(1, 150, 2).tolist()
        content = by_pillow(noise(height, width), quality=95)
        after = random.integers(1, 200, 2)
        plan = CropPlan.whole(np.array([[height, width]])).resize(after[np.newaxis], resampling)
        rows = np.zeros((1, *after.tolist(), 3), np.uint8)
        if render_chunk_by_kernel([open_image(content)], plan, rows)[0]:
            whole = np.asarray(simplejpeg.decode_jpeg(content))
            expected = naive.resize(whole, *after.tolist(), resampling=resampling)
            np.testing.assert_array_equal(rows[0], expected, err_msg=f"{height}×{width} to {after}")


def test_damaged_images_raise_the_same_error_as_without_the_kernel() -> None:
    content = by_pillow(make_picture(64, 64), quality=60)[:-100] + b"\xff\xd9"
    rows = np.zeros((1, 64, 64, 3), np.uint8)
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        render_chunk([open_image(content)], CropPlan.whole(np.array([[64, 64]])), rows)
