"""Create JPEG files of every kind, far more than the tests use: all sizes, qualities, sampling factors and options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cv2
import numpy as np

from tests.images.jpeg_corpus import (
    ODD_FACTORS,
    ODD_FRAMES,
    TABLES,
    Sizes,
    contents,
    factors,
    metadata,
    options,
    progressive,
    real_encoders,
    restarts,
    small_corpus,
    untileable_jpegs,
)
from tests.images.jpeg_files import (
    CONTENTS,
    CV2_SAMPLINGS,
    GRAY,
    PILLOW_SAMPLINGS,
    SAMPLINGS,
    JpegFile,
    by_cv2,
    by_pillow,
    by_simplejpeg,
    make_jpeg,
)
from tests.images.pictures import Array, make_picture


def full_corpus() -> Iterator[JpegFile]:
    """Yield the small corpus, all sizes up to 70x70, all qualities, sampling factors and combinations of options."""
    yield from small_corpus()
    sizes = [(8, 8), (9, 15), (16, 16), (33, 65), (64, 1), (3, 100)]
    for quality in range(1, 101):
        if quality != 85:  # The small corpus has the files with quality 85.
            yield from real_encoders([(20, 35)], quality)
    yield from every_size(range(1, 71))
    single = [(h, v) for h in range(1, 5) for v in range(1, 5)]
    legal = [three for three in itertools.product(single, repeat=3) if sum(h * v for h, v in three) <= 10]
    kinds = {
        "exactly " + " ".join(f"{h}x{v}" for h, v in values): values for values in [*((one,) for one in single), *legal]
    }
    yield from factors([(37, 29), (9, 70)], kinds)
    everywhere = list(SAMPLINGS)
    yield from options(sizes, TABLES, everywhere)
    yield from options(sizes, ODD_FRAMES, [name for name in SAMPLINGS if SAMPLINGS[name] != GRAY])
    yield from restarts(sizes, [*range(40), 65535], everywhere)
    yield from contents(sizes, [1, 10, 50, 75, 95, 100], everywhere)
    yield from metadata(sizes)
    yield from progressive(sizes, [1, 50, 75, 100])
    yield from product([(23, 41)])
    yield from untileable_jpegs([(1, 1), (8, 8), (9, 15), (40, 100)])


def every_size(sides: range) -> Iterator[JpegFile]:
    """Yield one file for each width and height, from a random encoder with random options."""
    encoders: dict[str, tuple[list[str], Callable[[Array, str, int], bytes]]] = {
        "pillow": (["gray", *PILLOW_SAMPLINGS], _pillow_of),
        "cv2": (list(CV2_SAMPLINGS), _cv2_of),
        "simplejpeg": (list(SAMPLINGS), by_simplejpeg),
    }
    for height, width in itertools.product(sides, sides):
        random = np.random.default_rng([height, width])
        content, quality = str(random.choice(list(CONTENTS))), int(random.integers(1, 101))
        picture = CONTENTS[content](height, width)
        name = f"{content}, quality {quality}, any {width}x{height}"
        if random.random() < 0.5:
            encoder = str(random.choice(list(encoders)))
            sampling = str(random.choice(encoders[encoder][0]))
            yield JpegFile(
                name=f"{encoder} {sampling}, {name}", content=encoders[encoder][1](picture, sampling, quality)
            )
        else:
            sampling = str(random.choice(list(SAMPLINGS)))
            huffman = str(random.choice(["standard", "best", "deep", "flat"]))
            interval = [None, 1, 2, 3, 7, 1000][random.integers(6)]
            chosen: dict[str, Any] = {"factors": SAMPLINGS[sampling], "huffman": huffman, "restart_interval": interval}
            yield make_jpeg(f"{huffman}, interval {interval}, {sampling}, {name}", picture, quality=quality, **chosen)


def product(sizes: Sizes) -> Iterator[JpegFile]:
    """Yield a file for each combination of several options."""
    axes: dict[str, list[Any]] = {
        "factors": [*SAMPLINGS.values(), ODD_FACTORS["4:1:0"], ODD_FACTORS["larger chroma"]],
        "huffman": ["standard", "best", "deep"],
        "restart_interval": [None, 1, 3, 1000],
        "quality": [10, 75, 100],
        "sof": [0xC0, 0xC1],
        "padding": [0, 1],
        "one_dht": [False, True],
        "header": ["jfif", "adobe", "none"],
    }
    for (height, width), values in itertools.product(sizes, itertools.product(*axes.values())):
        chosen = dict(zip(axes, values, strict=True))
        yield make_jpeg(f"product {values}, {width}x{height}", make_picture(height, width), **chosen)


def _pillow_of(picture: Array, sampling: str, quality: int) -> bytes:
    optimize = quality % 2 == 0
    if sampling == "gray":
        return by_pillow(picture[..., 0].copy(), quality=quality, optimize=optimize)
    return by_pillow(picture, quality=quality, optimize=optimize, subsampling=PILLOW_SAMPLINGS[sampling])


def _cv2_of(picture: Array, sampling: str, quality: int) -> bytes:
    factor = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, CV2_SAMPLINGS[sampling])
    return by_cv2(picture, *factor, cv2.IMWRITE_JPEG_QUALITY, quality)
