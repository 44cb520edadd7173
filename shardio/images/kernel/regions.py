"""Which MCUs a part of a picture needs, and where their samples lie in memory.

A *lane* is one MCU's place in every array: arrays are [..., lanes], so that neighbours in memory are the same sample of
neighbouring MCUs, and each loop over lanes does one thing to many of them. The lanes of an MCU row are followed by one
more that belongs to no MCU; it holds what lies beyond the picture's border.
"""

from __future__ import annotations

from shardio.images.kernel.memory import compiled
from shardio.images.kernel.vectors import LENGTH


@compiled
def lay_out_region(head, top, left, height, width, region):
    """Find out which MCUs a box of the picture, in pixels, depends on, and lay them out.

    Beside its own MCUs the box needs one chroma sample around it, where chroma is subsampled: by it libjpeg
    interpolates (jdsample.c).
    """
    down, across = 8 * head.down, 8 * head.across
    margin_down = head.down if head.down > 1 else 0
    margin_across = head.across if head.across > 1 else 0
    region.first_row = max(top - margin_down, 0) // down
    region.stop_row = min((top + height + margin_down + down - 1) // down, head.rows)
    region.first_column = max(left - margin_across, 0) // across
    region.stop_column = min((left + width + margin_across + across - 1) // across, head.columns)
    region.stride = region.stop_column - region.first_column + 1
    used = (region.stop_row - region.first_row) * region.stride
    # Whole vectors, of an odd number: a power of two would put all coefficients into the same lines of the cache.
    region.num_lanes = ((used + LENGTH - 1) // LENGTH | 1) * LENGTH
    num_first = head.across * head.down  # Blocks of the first component; the others have one each.
    region.num_blocks = num_first + head.num_components - 1
    for block in range(region.num_blocks):
        region.component[block] = max(block - num_first + 1, 0)
