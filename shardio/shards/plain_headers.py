"""Compare many tar headers with names and sizes at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.shards.tar import MAX_PLAIN_NAME

_DIGIT_SHIFTS = np.arange(30, -1, -3)
"""Where the 11 octal digits of a size begin, in bits."""


def are_plain_headers(blocks: NDArray[np.uint8], names: Sequence[bytes], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which blocks are the plain headers of members with these names and sizes, bool [n].

    False means only that :func:`~shardio.shards.tar.header_fits` has to decide: names of 100 bytes, and names and sizes
    that a header may also encode in other ways, are not compared.

    Args:
        blocks: uint8 [n, 512], the blocks.
        names: n names.
        sizes: int64 [n], sizes in bytes, not negative.
    """
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    width = min(int(lengths.max(initial=0)) + 1, MAX_PLAIN_NAME)  # With at least one of the zeros that fill the field.
    stored_names = np.ascontiguousarray(blocks[:, :width]).view(f"S{width}")[:, 0]
    fits: NDArray[np.bool_] = (stored_names == np.array(names, f"S{width}")) & (lengths < width) & (sizes < 8**11)
    digits = (sizes[:, None] >> _DIGIT_SHIFTS & 7).astype(np.uint8) + ord("0")
    fits &= (blocks[:, 124:135] == digits).all(axis=1) & (blocks[:, 135] == 0)
    fits &= blocks[:, 345] == 0  # Otherwise, the name has a folder, which is stored there.
    return fits
