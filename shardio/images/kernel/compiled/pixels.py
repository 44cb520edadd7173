"""Compute pixels from coefficients: the last steps of decoding, for a part of the lanes at a time.

So what one step writes is still in a near cache when the next one reads it. The pixels are stored row by row.
"""

from __future__ import annotations

from shardio.images.kernel.compiled.colour import convert_row
from shardio.images.kernel.compiled.heads import GRAY, YCC
from shardio.images.kernel.compiled.idct import transform_block
from shardio.images.kernel.compiled.memory import kernel_function, shaped
from shardio.images.kernel.compiled.records import LANES_AT_ONCE
from shardio.images.kernel.compiled.regions import find_margin
from shardio.images.kernel.compiled.upsampling import extend_borders, upsample


@kernel_function
def make_pixels(member, work):
    """Compute the pixels of a member's region.

    Returns:
        Whether all numbers are in the range that libjpeg-turbo computes with. If so, ``work.pixels`` holds the rows of
        the region's MCUs, one after the other. Each row has one more MCU at its end, whose pixels mean nothing.
    """
    head, region = work.heads[member], work.regions[member]
    lanes, margin = region.num_lanes, find_margin(region)
    height, width = 8 * head.down, 8 * head.across
    row_length = region.stride * width
    first = region.coefficients + lanes
    blocks = shaped(work.coefficients, first, (region.num_blocks, 8, 8, lanes))
    chroma = shaped(work.chroma, 0, (2, 8, 8, margin + lanes + margin))
    if head.colour != GRAY and not _make_chroma(blocks, chroma, margin, head, region, work):
        return False
    for lane in range(lanes):
        work.places[lane] = lane // region.stride * height * row_length + lane % region.stride * width
    for first in range(0, lanes, LANES_AT_ONCE):
        n = min(LANES_AT_ONCE, lanes - first)
        luma = shaped(work.samples[0], 0, (height, width, n))
        between = shaped(work.between, 0, (8, 8, n))
        quantiser = head.quantisers[head.quantiser[0]]
        for block in range(head.across * head.down):
            row, column = block // head.across * 8, block % head.across * 8
            if not transform_block(blocks[block], first, quantiser, between, luma, row, column, 0):
                return False
        places = work.places[first : first + n]
        if head.colour == GRAY:
            for row in range(height):
                convert_row(luma[row], luma[row], luma[row], False, work.pixels, places, row * row_length)
            continue
        sums = shaped(work.sums, 0, (8, n + 2))
        cb, cr = shaped(work.samples[1], 0, (height, width, n)), shaped(work.samples[2], 0, (height, width, n))
        upsample(chroma[0], margin + first, head, region.stride, sums, cb)
        upsample(chroma[1], margin + first, head, region.stride, sums, cr)
        for row in range(height):
            convert_row(luma[row], cb[row], cr[row], head.colour == YCC, work.pixels, places, row * row_length)
    return True


@kernel_function
def _make_chroma(blocks, chroma, margin, head, region, work):
    """Transform the chroma of all lanes: upsampling needs those above and below. Return whether it is in range."""
    num_luma = head.across * head.down
    for c in range(2):
        quantiser = head.quantisers[head.quantiser[c + 1]]
        for first in range(0, region.num_lanes, LANES_AT_ONCE):
            between = shaped(work.between, 0, (8, 8, min(LANES_AT_ONCE, region.num_lanes - first)))
            coefficients = blocks[num_luma + c]
            if not transform_block(coefficients, first, quantiser, between, chroma[c], 0, 0, margin + first):
                return False
        extend_borders(chroma[c], margin, head, region)
    return True
