"""The kernel: the pixels of libjpeg-turbo and OpenCV, for all that it draws, and none for what is damaged.

That every crop of small pictures, the zoo and damaged files are right where the kernel draws them, is seen by
``test_crops.py``, ``test_crop_damage.py`` and the campaigns in ``tools/``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray

from shardio.images import CropPlan, chunk, open_image, render_chunk
from shardio.images.by_kernel import render_by_kernel
from shardio.images.jpeg.regions import Box
from shardio.images.kernel import find_kernel
from shardio.images.kernel.colour import convert_ycc
from shardio.images.kernel.records import PLAN
from shardio.images.tiling import tile_jpeg
from tests.images import naive
from tests.images.animals import SAMPLINGS, Factors, by_pillow, extremes, noise, own, waves
from tests.images.by_kernel import draw_parts
from tests.images.crop_laws import assert_parts_by_kernel, random_boxes
from tests.images.pictures import Array, make_picture

KINDS: dict[str, dict[str, Any]] = {
    "untouched": {},
    "one MCU an interval": {"restart_interval": 1},
    "three MCUs": {"restart_interval": 3},
    "many rows": {"restart_interval": 70},
}


@pytest.mark.parametrize("tiled", [False, True], ids=["", "tiled"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("factors", SAMPLINGS.values(), ids=SAMPLINGS)
def test_all_it_is_made_for_is_drawn(factors: Factors, options: dict[str, Any], tiled: bool) -> None:
    random = np.random.default_rng(0)
    for size in [(97, 161), (8, 200), (200, 8), (131, 66)]:
        content = own("", noise(*size), factors=factors, quality=90, **options).content
        expected = np.asarray(simplejpeg.decode_jpeg(content))
        boxes = random_boxes(*size, 100, random)
        assert assert_parts_by_kernel(tile_jpeg(content) if tiled else content, expected, boxes) == len(boxes)


@pytest.mark.parametrize("quality", [5, 50, 98])
@pytest.mark.parametrize("make", [extremes, waves], ids=lambda make: make.__name__)
def test_large_coefficients_are_right_or_left_alone(make: Any, quality: int) -> None:
    for factors in (SAMPLINGS["4:2:0"], SAMPLINGS["4:4:4"]):
        content = own("", make(80, 72), factors=factors, quality=quality).content
        assert_parts_by_kernel(
            content, np.asarray(simplejpeg.decode_jpeg(content)), [Box(0, 0, 80, 72), Box(9, 7, 50, 40)]
        )


def _no_kernel(images: Any, *_: Any) -> NDArray[np.bool_]:
    return np.zeros(len(images), np.bool_)


@pytest.fixture(scope="module")
def contents() -> list[bytes]:
    """Pictures of all samplings, untouched and tiled, beside each other."""
    files = []
    for number, factors in enumerate(SAMPLINGS.values()):
        file = own("", make_picture(60 + 9 * number, 95 - 7 * number), factors=factors, quality=85).content
        files += [file, tile_jpeg(file)]
    return files


def _draw_plans(sizes: list[tuple[int, int]], random: np.random.Generator) -> CropPlan:
    """Return plans of any kind that give pictures of one size."""
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
    return CropPlan(box=np.array(boxes), size=np.array(afters), window=np.array(windows), flip=flips)


@pytest.mark.parametrize("seed", range(40))
def test_what_it_draws_is_the_full_decode_cropped_resized_and_mirrored(seed: int, contents: list[bytes]) -> None:
    random = np.random.default_rng(seed)
    pictures = [open_image(content) for content in contents]
    plans = _draw_plans([picture.size for picture in pictures], random)
    rows = np.zeros((len(contents), *plans.output_size[0], 3), np.uint8)
    is_drawn = render_by_kernel(pictures, plans, rows)
    box = plans.box[:, 2:]
    is_scaled = (box >= 2 * plans.size).all(axis=1) & (box.min(axis=1) >= 8) | (box == 2 * plans.size).all(axis=1)
    corner, size = plans.window[:, :2], plans.window[:, 2:]
    is_black = ((corner >= plans.size) | (corner + size <= 0)).any(axis=1)
    np.testing.assert_array_equal(is_drawn, ~(is_scaled | is_black))
    for number in np.flatnonzero(is_drawn).tolist():
        whole = np.asarray(simplejpeg.decode_jpeg(contents[number]))
        part = naive.crop(whole, Box(*plans.box[number].tolist()))
        resized = naive.resize(part, *plans.size[number].tolist(), antialias=False)
        window = naive.crop(resized, Box(*plans.window[number].tolist()))
        expected = window[:, ::-1] if plans.flip[number] else window
        np.testing.assert_array_equal(rows[number], expected, err_msg=f"image {number} of {plans}")


def test_pixels_do_not_depend_on_whether_there_is_a_kernel(
    contents: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [open_image(content) for content in [*contents, by_pillow(make_picture(50, 60), progressive=True)]]
    plans = _draw_plans([picture.size for picture in pictures], np.random.default_rng(3))
    with_it = render_chunk(pictures, plans).images
    monkeypatch.setattr(chunk, "render_by_kernel", _no_kernel)
    for one, other in zip(with_it, render_chunk(pictures, plans).images, strict=True):
        np.testing.assert_array_equal(one, other)


def test_images_do_not_depend_on_what_is_decoded_beside_them(contents: list[bytes]) -> None:
    """Nor on the threads that decode at the same time, or on what their memory was used for."""
    random = np.random.default_rng(1)
    pictures = [open_image(content) for content in contents]
    plans = _draw_plans([picture.size for picture in pictures], random)
    expected = render_chunk(pictures, plans).images

    def draw_some(seed: int) -> None:
        some = np.random.default_rng(seed).permutation(len(pictures))[: 1 + seed % len(pictures)]
        drawn = render_chunk([pictures[number] for number in some], plans.take(some)).images
        for number, pixels in zip(some.tolist(), drawn, strict=True):
            np.testing.assert_array_equal(pixels, expected[number])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(draw_some, range(200)))


def test_rows_of_different_sizes_are_drawn_one_by_one(contents: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [open_image(content) for content in contents]
    plans = CropPlan.whole(np.array([picture.size for picture in pictures]))
    rows = [np.zeros((*picture.size, 3), np.uint8) for picture in pictures]
    assert render_by_kernel(pictures, plans, rows).all()
    for content, row in zip(contents, rows, strict=True):
        np.testing.assert_array_equal(row, simplejpeg.decode_jpeg(content))


def _others() -> dict[str, bytes]:
    picture = make_picture(40, 50)
    whole = own("", picture, factors=SAMPLINGS["4:2:0"], restart_interval=2).content
    jfif, table = by_pillow(picture), whole.index(b"\xff\xc4")
    last_symbol = table + 5 + 16 + sum(whole[table + 5 : table + 21]) - 1
    return {
        "JFIF 2, of which libjpeg warns": jfif.replace(b"JFIF\0\1", b"JFIF\0\2"),
        "a DC table with a symbol above 15": whole[:last_symbol] + b"\x20" + whole[last_symbol + 1 :],
        "progressive": by_pillow(picture, progressive=True),
        "CMYK": by_pillow(np.dstack([picture, picture[..., 0]])),
        "4:1:0": own("", picture, factors=((4, 2), (1, 1), (1, 1))).content,
        "truncated": whole[:-40],
        "without its end": whole[:-2],
        "one byte more": whole + b"\0",
        "no JPEG": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "nothing": b"",
    }


@pytest.mark.parametrize("content", _others().values(), ids=_others())
def test_what_it_is_not_made_for_is_left_alone(content: bytes) -> None:
    _, (is_drawn,) = draw_parts(content, [Box(0, 0, 40, 50)])
    assert not is_drawn


@pytest.mark.parametrize("restart_interval", [0, 2])
def test_whatever_byte_of_the_scan_changes_libjpeg_agrees_or_decides(restart_interval: int) -> None:
    """Where libjpeg-turbo finds something wrong, the kernel does, too: it draws nothing then."""
    content = own("", noise(20, 36), factors=SAMPLINGS["4:2:0"], quality=60, restart_interval=restart_interval).content
    random, num_drawn = np.random.default_rng(0), 0
    start = content.index(b"\xff\xda")
    for place in range(start, len(content)):
        changed = bytearray(content)
        changed[place] ^= int(random.integers(1, 256))
        (pixels,), (is_drawn,) = draw_parts(bytes(changed), [Box(0, 0, 20, 36)])
        if is_drawn:
            np.testing.assert_array_equal(
                pixels, simplejpeg.decode_jpeg(bytes(changed), strict=True), err_msg=str(place)
            )
            num_drawn += 1
    assert num_drawn, "most changes within a value give another picture and no error"


def test_a_row_is_written_whole_or_not_at_all() -> None:
    content = own("", noise(64, 64), factors=SAMPLINGS["4:2:0"], quality=60).content
    damaged = bytearray(content)
    damaged[-60:-2] = bytes(58)
    rows = np.full((1, 64, 64, 3), 77, np.uint8)
    kernel = find_kernel()
    assert kernel is not None
    plans = np.zeros(1, PLAN)
    plans[0] = (0, 0, 64, 64, 64, 64, 0, 0, 0)
    assert not kernel.decode([bytes(damaged)], plans, np.zeros(1, np.int64), rows)[0]
    assert (rows == 77).all()


def test_images_that_do_not_fit_beside_each_other_are_drawn_one_after_the_other() -> None:
    content = by_pillow(noise(700, 700), quality=98, subsampling=0)
    assert len(content) > 1.1 * 2**20, "three of them are more than the workspace holds"
    plans = CropPlan.whole(np.full((7, 2), 700))
    expected = np.asarray(simplejpeg.decode_jpeg(content))
    rows = np.zeros((7, 700, 700, 3), np.uint8)
    small = by_pillow(make_picture(700, 700), quality=50)
    contents = [content, content, small, content, content, content, small]
    assert render_by_kernel([open_image(content) for content in contents], plans, rows).all()
    for number in (0, 1, 3, 4, 5):
        np.testing.assert_array_equal(rows[number], expected)


def test_colours_are_libjpegs() -> None:
    """For all samples that there are: jdcolor.c, build_ycc_rgb_table and ycc_rgb_convert."""
    luma, cr = np.repeat(np.arange(256, dtype=np.uint8), 256), np.tile(np.arange(256, dtype=np.uint8), 256)
    pixels = np.zeros(1 << 16, np.uint32)
    y, red = luma.astype(np.int64), cr.astype(np.int64) - 128
    for cb in range(256):
        blue = cb - 128
        convert_ycc(luma, np.full(1 << 16, cb, np.uint8), cr, pixels)
        added: list[NDArray[np.int64]] = [91881 * red, -22554 * blue - 46802 * red, np.full_like(y, 116130 * blue)]
        for place, colour in enumerate(added):
            expected = np.clip(y + ((colour + 32768) >> 16), 0, 255)
            np.testing.assert_array_equal(pixels >> 8 * place & 255, expected)


def test_resizing_is_opencvs() -> None:
    """On every machine: where OpenCV were another one, crops would depend on who draws them."""
    random = np.random.default_rng(0)
    for _ in range(60):
        height, width = random.integers(1, 150, 2).tolist()
        picture: Array = noise(height, width)
        content = by_pillow(picture, quality=95)
        plans = CropPlan.whole(np.array([[height, width]]))
        after = random.integers(1, 200, 2)
        resized = plans.resize(after[np.newaxis], antialias=False)
        rows = np.zeros((1, *after.tolist(), 3), np.uint8)
        if render_by_kernel([open_image(content)], resized, rows)[0]:
            whole = np.asarray(simplejpeg.decode_jpeg(content))
            expected = cv2.resize(whole, after[::-1].tolist(), interpolation=cv2.INTER_LINEAR)
            np.testing.assert_array_equal(rows[0], expected, err_msg=f"{height}×{width} to {after}")


def test_damaged_images_are_errors_as_without_the_kernel() -> None:
    content = by_pillow(make_picture(64, 64), quality=60)[:-100] + b"\xff\xd9"
    rows = np.zeros((1, 64, 64, 3), np.uint8)
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        render_chunk([open_image(content)], CropPlan.whole(np.array([[64, 64]])), rows)
