"""The stages of a device decode tiles to the same pixels as the kernel, and find the same damage.

``tools/crop_campaign.py`` and ``tools/fuzz_kernel.py`` check many more crops and damaged files.
"""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from shardio.images import CropPlan, PlannedCrop, Resampling, open_image, render_crops, sizes_of
from shardio.images.jpeg.head import read_head
from shardio.images.rendering import as_records
from shardio.images.tiled import collect_tiles
from shardio.images.tiling import tile_jpeg
from shardio.kernel import find_kernel, require_functions
from shardio.kernel.functions import CHUNK_ALIGNMENT, count_chunk_bytes
from shardio.kernel.records import PLAN, TILED_IMAGE
from tests.images.crop_laws import draw_plan
from tests.images.jpeg_files import SAMPLINGS, Factors, by_pillow, extremes, make_jpeg, noise, waves
from tests.images.pictures import Array, make_picture, save
from tests.images.tiled_laws import decode_tiles, render_by_stages


def check_stages(
    contents: list[bytes], plans: NDArray[np.void], turns: NDArray[np.uint8] | None = None
) -> NDArray[np.bool_]:
    """Check that the stages render what the kernel renders. Return which images the kernel rendered, bool [n]."""
    kernel, turns = find_kernel(), np.zeros(len(contents), np.uint8) if turns is None else turns
    assert kernel is not None, "conftest.py compiles it"
    rows = np.zeros((len(plans), 40, 50, 3), np.uint8)
    is_done = kernel.decode(contents, plans, np.arange(len(contents)), rows, turns)
    is_tiled, crops, is_damaged = render_by_stages(require_functions(), kernel, contents, plans, turns, rows.shape)
    np.testing.assert_array_equal(is_damaged[is_tiled], ~is_done[is_tiled])
    assert (is_tiled | ~is_done).all(), "tiles are missing"
    is_equal = (crops == rows).reshape(len(contents), -1).all(axis=1)
    assert is_equal[is_done].all()
    return is_done


@pytest.mark.parametrize("factors", SAMPLINGS.values(), ids=SAMPLINGS)
def test_crops_of_every_sampling_and_turn_equal_the_kernels(factors: Factors) -> None:
    random, resamplings = np.random.default_rng(0), itertools.cycle(get_args(Resampling))
    for turn, make in itertools.product(range(8), (noise, waves)):
        sizes = [(57, 91), (8, 130), (130, 8), (3, 2), (64, 64)]
        contents = [tile_jpeg(make_jpeg("", make(*size), factors=factors, quality=90).content) for size in sizes]
        upright = [size[::-1] if turn & 4 else size for size in sizes for _ in range(4)]
        plans = as_records(draw_plan(upright, (40, 50), next(resamplings), random))
        check_stages(contents, plans, np.full(len(sizes), turn, np.uint8))


@pytest.mark.parametrize("quality", [5, 50, 98])
def test_large_coefficients_are_right_or_damage_as_for_the_kernel(quality: int) -> None:
    plans = as_records(CropPlan.whole(np.array([[80, 72]])).crop(np.array([[9, 7, 40, 50]])))
    for factors in (SAMPLINGS["4:2:0"], SAMPLINGS["4:4:4"]):
        contents = [tile_jpeg(make_jpeg("", extremes(80, 72), factors=factors, quality=quality).content)]
        check_stages(contents, plans)


def test_with_any_byte_of_the_scan_changed_the_stages_find_what_the_kernel_finds() -> None:
    content = tile_jpeg(by_pillow(make_picture(40, 48), quality=60))
    plans = np.array([(0, 0, 40, 48, 40, 50, 0, 0, 0, 0)], PLAN)
    start, num_intact = read_head(content).scan_start, 0
    for offset in range(start, len(content) - 2):
        changed = bytearray(content)
        changed[offset] ^= 1 << offset % 8
        num_intact += check_stages([bytes(changed)], plans).sum()
    assert 0 < num_intact < len(content) - start, "some changes are damage, and some are not"


def test_a_tile_that_is_not_in_the_chunk_is_damage() -> None:
    kernel, content = find_kernel(), tile_jpeg(by_pillow(make_picture(160, 160), quality=50))
    assert kernel is not None, "conftest.py compiles it"
    plans, sizes = np.array([(0, 0, 160, 160, 160, 160, 0, 0, 0, 0)], PLAN), [(160, 160)]
    chunk = np.zeros(count_chunk_bytes(1, sizes) + CHUNK_ALIGNMENT, np.uint8)
    chunk = chunk[-chunk.ctypes.data % CHUNK_ALIGNMENT :]
    is_tiled, num_used = kernel.collect([content], plans, sizes, chunk)
    assert is_tiled.all()
    for num_bytes in (num_used + 8, num_used + 7):  # Less than CHUNK_PADDING.
        _, is_damaged = decode_tiles(require_functions(), chunk[:num_bytes], 1, sizes)
        assert is_damaged.tolist() == [num_bytes == num_used + 7]


def tiled_pictures(number: int) -> list[Array]:
    return [make_picture(120 + 8 * i, 150, seed=i) for i in range(number)]


def test_images_that_no_device_decodes_are_rendered_among_the_others() -> None:
    pictures = tiled_pictures(6)
    contents = [tile_jpeg(by_pillow(picture, quality=75)) for picture in pictures]
    contents[1] = by_pillow(pictures[1], quality=75)  # This file has no tiles.
    contents[3] = save(pictures[3], "png")
    contents[4] = tile_jpeg(by_pillow(np.asarray(noise(500, 600)), quality=100))  # This file is larger than its crops.
    opened = [open_image(content) for content in contents]
    crops = [
        PlannedCrop(opened, CropPlan.whole(sizes_of(opened)).resize(np.array([size] * 6)))
        for size in ((64, 80), (50, 50))
    ]
    collected = collect_tiles(crops)
    assert collected is not None
    chunk, names = collected
    assert names == ["device", "kernel", "device", "pillow", "kernel", "device"]
    assert chunk.memory is not None
    images = chunk.memory[: 6 * TILED_IMAGE.itemsize].view(TILED_IMAGE)
    assert images["is_tiled"].tolist() == [1, 0, 1, 0, 0, 1]
    found, is_damaged = decode_tiles(require_functions(), chunk.memory[: chunk.num_bytes], 6, chunk.sizes)
    assert not is_damaged.any()
    for one, other in zip(found, render_crops(crops, [None, None]), strict=True):
        np.testing.assert_array_equal(one, np.stack(other.images))


def test_crops_that_differ_in_size_are_not_collected() -> None:
    opened = [open_image(by_pillow(picture)) for picture in tiled_pictures(2)]
    assert collect_tiles([PlannedCrop(opened, CropPlan.whole(sizes_of(opened)))]) is None
