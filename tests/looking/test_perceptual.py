from __future__ import annotations

import io
from itertools import pairwise

import cv2
import numpy as np
import pytest
from PIL import Image

from shardio.viewer.duplicates import SIDE, hash_pictures, reduce_picture
from tests.sources import encode


def hash_of(content: bytes) -> int:
    hashes, has_contrast = hash_pictures(reduce_picture(content)[None])
    assert has_contrast.all()
    return int(hashes[0])


def again(image: Image.Image, image_format: str = "JPEG", **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def differing_bits(first: bytes, second: bytes) -> int:
    return (hash_of(first) ^ hash_of(second)).bit_count()


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("size", [(32, 32), (37, 91), (501, 333)])
def test_a_reduced_picture_is_an_average(size: tuple[int, int], suffix: str) -> None:
    content = encode(3, width=size[0], height=size[1], suffix=suffix)
    with Image.open(io.BytesIO(content)) as image:
        expected = cv2.resize(np.asarray(image.convert("L"), np.float32), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    assert np.abs(reduce_picture(content) - expected).mean() < 0.7


def test_the_bits_are_those_of_the_definition() -> None:
    fft = pytest.importorskip("scipy.fft")
    pictures = np.random.default_rng(0).random((20, SIDE, SIDE)).astype(np.float32) * 255
    low = fft.dctn(pictures.astype(np.float64), axes=(1, 2), norm="ortho")[:, :8, :8].reshape(20, 64)
    bits = low > np.median(low, axis=1, keepdims=True)
    expected = [int("".join("01"[bit] for bit in row.tolist()), 2) for row in bits]
    assert hash_pictures(pictures)[0].tolist() == expected


def test_copies_have_near_hashes_and_other_pictures_do_not() -> None:
    contents = [encode(seed, width=500, height=375, quality=92) for seed in range(12)]
    for content in contents:
        with Image.open(io.BytesIO(content)) as image:
            copies = [
                again(image, quality=60),
                again(image, "PNG"),
                again(image.resize((250, 188), Image.Resampling.LANCZOS), quality=80),
                again(image.resize((1000, 750), Image.Resampling.BICUBIC), quality=80),
                again(image.convert("L"), quality=90),
            ]
        assert max(differing_bits(content, copy) for copy in copies) <= 4
    for first, second in pairwise(contents):
        assert differing_bits(first, second) > 10


def test_even_pictures_have_no_hash() -> None:
    even = [np.full((SIDE, SIDE), level, np.float32) for level in (0, 128, 255)]
    noise = np.random.default_rng(0).normal(128, 1, (SIDE, SIDE)).astype(np.float32)
    _, has_contrast = hash_pictures(np.stack([*even, noise]))
    assert not has_contrast.any()
