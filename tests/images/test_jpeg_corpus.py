"""The corpus holds what it promises, and its writer follows T.81 and libjpeg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from tests.images.jpeg_corpus import small_corpus
from tests.images.jpeg_files import BOTH, SAMPLINGS, by_pillow, noise
from tests.images.jpeg_writer import JpegOptions, write_jpeg
from tests.images.pictures import Array, make_picture, read_by_pillow
from tests.images.tiling_laws import read_by_simplejpeg

READERS: dict[str, Callable[[bytes], Array]] = {"simplejpeg": read_by_simplejpeg, "pillow": read_by_pillow}


def test_decoders_agree_on_tileable_files_if_they_support_their_sampling() -> None:
    files = small_corpus()
    assert len({file.name for file in files}) == len(files) > 200
    assert {file.readers for file in files if file.tileable} == {BOTH, ("pillow",), ()}
    for file in files:
        for reader, read in READERS.items():
            if file.tileable and reader in file.readers:
                np.testing.assert_array_equal(read(file.content), read_by_pillow(file.content), err_msg=file.name)
            elif file.tileable:
                with pytest.raises((ValueError, OSError)):
                    read(file.content)


@pytest.mark.parametrize("scans", [None, ((0,), (1,), (2,)), ((0,), (1, 2))], ids=str)
def test_the_coding_does_not_change_the_pixels(scans: tuple[tuple[int, ...], ...] | None) -> None:
    factors = SAMPLINGS["4:2:0"]
    expected = read_by_simplejpeg(write_jpeg(noise(21, 30), JpegOptions(factors=factors)))
    for interval in (None, 1, 5, 100):
        options = JpegOptions(factors=factors, huffman="deep", restart_interval=interval, scans=scans, one_dht=True)
        np.testing.assert_array_equal(read_by_simplejpeg(write_jpeg(noise(21, 30), options)), expected)


@pytest.mark.parametrize("optimize", [False, True])
def test_some_files_are_those_of_libjpeg(optimize: bool) -> None:
    """The coefficients of uniform gray blocks need no rounding. libjpeg's transform rounds others differently."""
    huffman: Literal["best", "standard"] = "best" if optimize else "standard"
    for quality in (1, 30, 49, 50, 51, 90, 100):
        grays = np.random.default_rng(quality).integers(0, 256, (6, 9), dtype=np.uint8)
        picture = np.kron(grays, np.ones((8, 8), np.uint8))[:45, :70]
        options = JpegOptions(factors=((1, 1),), quality=quality, huffman=huffman)
        assert write_jpeg(picture, options) == by_pillow(picture, quality=quality, optimize=optimize)
    pictures = [make_picture(20, 20, seed) for seed in range(30)]
    files = [by_pillow(picture, quality=30, subsampling=0, optimize=optimize) for picture in pictures]
    written = [write_jpeg(picture, JpegOptions(quality=30, huffman=huffman)) for picture in pictures]
    assert sum(map(bytes.__eq__, written, files)) >= 5
