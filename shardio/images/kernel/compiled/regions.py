"""Determine the MCUs that a part of an image needs, and the places of their samples in memory.

A *lane* is an MCU's index in every array: arrays are [..., lanes]. So adjacent elements are the same sample of adjacent
MCUs, and each loop over lanes is a vector loop. After the lanes of an MCU row there is one more. It holds no MCU, but
the samples beyond the image's border.
"""

from __future__ import annotations

from shardio.images.kernel.compiled.memory import kernel_function
from shardio.images.kernel.compiled.vectors import LENGTH


@kernel_function
def lay_out_region(head, top, left, height, width, region):
    """Determine the MCUs that a box of the image, in pixels, depends on, and lay them out.

    Where chroma is subsampled, the box needs a margin of one chroma sample, from which libjpeg interpolates
    (jdsample.c).
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
    # An odd number of whole vectors: a power of two would map all coefficients to the same cache lines.
    region.num_lanes = ((used + LENGTH - 1) // LENGTH | 1) * LENGTH
    num_first = head.across * head.down  # Blocks of the first component; the others have one each.
    region.num_blocks = num_first + head.num_components - 1
    for block in range(region.num_blocks):
        region.component[block] = max(block - num_first + 1, 0)


@kernel_function
def find_margin(region):
    """Return how many lanes before the first and after the last one are needed, for the neighbours of all MCUs."""
    return region.stride + 1
