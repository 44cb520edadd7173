"""Perceptual hashes: 64 bits that change little when a picture is resized or compressed again.

The hash is pHash as Krawetz describes it ("Looks Like It", 2011, https://www.hackerfactor.com/blog) and as the Python
package ImageHash computes it: the picture is reduced to 32×32 grey pixels, and the bits say which of the 8×8 lowest
frequencies of its discrete cosine transform exceed their median. The hash of the same name by Zauner
(https://www.phash.org, 2010) leaves out the constant frequencies, which makes the hash less stable.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardio.images import open_image
from shardio.looking.small_images import read_small

SIDE = 32
"""The sides of the reduced picture in pixels."""

NUM_FREQUENCIES = 8
"""The number of frequencies in each direction."""

MIN_CONTRAST = 2.0
"""The least standard deviation, in grey levels of 0 to 255, that the kept frequencies give a picture that has a hash.

The bits of an even picture, such as a black one, would depend on noise alone.
"""

_GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""The weights of red, green and blue (ITU-R BT.601), as in Pillow's mode L."""

Floats = NDArray[np.float32]


def reduce_picture(content: bytes) -> Floats:
    """Return an image reduced to the grey pixels that its hash is computed from, float32 [32, 32].

    Each pixel is an average. A JPEG's pixels are decoded at a smaller scale, which changes their averages little.

    Raises:
        ValueError: If the image cannot be decoded.
    """
    picture = open_image(content)
    pixels, scale = read_small(picture, SIDE)
    height, width = picture.size
    rows, columns = _make_averages(len(pixels), height / scale), _make_averages(pixels.shape[1], width / scale)
    red, green, blue = (rows @ pixels[..., channel].astype(np.float32) for channel in range(3))
    grey: Floats = (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue) @ columns.T
    return grey


def hash_pictures(reduced: Floats) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the hashes of some reduced pictures.

    Args:
        reduced: float32 [n, 32, 32].

    Returns:
        The hashes, uint64 [n], and which pictures have enough contrast for a hash, bool [n].
    """
    waves = _make_waves()
    frequencies = (waves @ reduced @ waves.T).reshape(len(reduced), NUM_FREQUENCIES**2)
    bits = frequencies > np.median(frequencies, axis=1, keepdims=True)
    hashes = np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)
    contrast = np.sqrt((frequencies[:, 1:] ** 2).sum(axis=1)) / SIDE
    return hashes, contrast >= MIN_CONTRAST


def count_bits(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the number of bits that are set in each word (Warren, "Hacker's Delight", section 5-1).

    >>> count_bits(np.array([0, 5, 2**64 - 1], np.uint64)).tolist()
    [0, 2, 64]
    """
    ones, twos, fours, bytes_ = (np.uint64(mask * 0x0101010101010101) for mask in (0x55, 0x33, 0x0F, 0x01))
    words = words - ((words >> np.uint64(1)) & ones)
    words = (words & twos) + ((words >> np.uint64(2)) & twos)
    words = (words + (words >> np.uint64(4))) & fours
    return ((words * bytes_) >> np.uint64(56)).astype(np.int64)


def _make_averages(length: int, extent: float) -> Floats:
    """Return the weights that reduce a side to 32 pixels, each the average of an equal part of it.

    Args:
        length: The number of pixels.
        extent: The length of the picture in these pixels. The last pixel may reach beyond the picture.

    Returns:
        float32 [32, length].
    """
    bounds = np.linspace(0, extent, SIDE + 1)
    starts = np.maximum(bounds[:-1, None], np.arange(length))
    stops = np.minimum(bounds[1:, None], np.arange(1, length + 1))
    weights: Floats = (np.maximum(stops - starts, 0) * (SIDE / extent)).astype(np.float32)
    return weights


@cache
def _make_waves() -> Floats:
    """Return the cosines of the frequencies 0 to 7 of an orthonormal DCT-II, float32 [8, 32]."""
    frequencies = np.arange(NUM_FREQUENCIES)[:, None]
    waves: NDArray[np.float64] = np.cos(np.pi / SIDE * (np.arange(SIDE) + 0.5) * frequencies) * np.sqrt(2 / SIDE)
    waves[0] /= np.sqrt(2)
    return waves.astype(np.float32)
