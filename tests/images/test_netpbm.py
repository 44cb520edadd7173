"""Binary PGM and PPM files: crops are rendered from their rows, with the same pixels as in Pillow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st

from shardio.files import HEAD_BYTES, Descriptor, FileRange
from shardio.images import CropPlan, DecodeError, Resampling, TooManyPixels, open_image, render_chunk, rendering
from shardio.images.jpeg import Box
from shardio.images.netpbm import PixelPicture, find_pixels
from tests.images import naive
from tests.images.crop_laws import draw_plan, render_chunk_by_kernel, shows_picture
from tests.images.pictures import make_picture, read_by_pillow, save
from tests.raising import assert_raises

Source = Callable[[bytes, Path], bytes | FileRange]


def in_memory(content: bytes, folder: Path) -> bytes:
    return content


def in_a_file(content: bytes, folder: Path) -> FileRange:
    path = folder / "images"
    path.write_bytes(b"before" + content + b"after")
    file, digest = Descriptor(str(path)), xxhash.xxh3_64_intdigest(content)
    return FileRange(file, 6, 6 + len(content), content[:HEAD_BYTES], digest)


each_source = pytest.mark.parametrize("source", [in_memory, in_a_file])


@each_source
@pytest.mark.parametrize("is_gray", [False, True])
@pytest.mark.parametrize("resampling", get_args(Resampling))
def test_crops_are_those_of_the_stored_picture(
    resampling: Resampling, is_gray: bool, source: Source, tmp_path: Path
) -> None:
    random = np.random.default_rng(get_args(Resampling).index(resampling))
    for size in ((1, 1), (7, 300), (99, 132)):
        content = save(make_picture(*size)[..., 0] if is_gray else make_picture(*size), "PPM")
        assert content[:2] == (b"P5" if is_gray else b"P6")
        picture, plan = open_image(source(content, tmp_path)), draw_plan([size] * 40, (50, 61), resampling, random)
        assert isinstance(picture, PixelPicture)
        rows = np.zeros((40, 50, 61, 3), np.uint8)
        is_drawn = render_chunk_by_kernel([picture] * 40, plan, rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendering, "find_kernel", lambda: None)
            by_libraries = render_chunk([picture] * 40, plan)
        assert set(by_libraries.decoder_names) == {"raw"}
        for row in range(40):
            box = Box(*plan.box[row].tolist())
            np.testing.assert_array_equal(picture.read(box), naive.crop(read_by_pillow(content), box))
            expected = naive.render(read_by_pillow(content), plan, row)
            np.testing.assert_array_equal(by_libraries.images[row], expected, err_msg=f"{size}, row {row}")
            if is_drawn[row]:
                np.testing.assert_array_equal(rows[row], expected, err_msg=f"{size}, row {row}")
        np.testing.assert_array_equal(is_drawn, shows_picture(plan))


GAPS = st.sampled_from([b" ", b"\n", b"\t \r\n", b" # a comment\n", b"\n#\n#5 7\n "])


@given(
    kind=st.sampled_from([b"P5", b"P6"]), gaps=st.tuples(GAPS, GAPS, GAPS), zeros=st.sampled_from([b"", b"00"]),
    end=st.sampled_from([b" ", b"\n", b"\t"]), excess=st.binary(max_size=3), missing=st.integers(0, 2)
)  # fmt: skip
def test_every_head_means_what_it_means_to_pillow(
    kind: bytes, gaps: tuple[bytes, bytes, bytes], zeros: bytes, end: bytes, excess: bytes, missing: int
) -> None:
    head = kind + gaps[0] + zeros + b"5" + gaps[1] + b"7" + gaps[2] + b"255" + end
    content = head + bytes(range(105 if kind == b"P6" else 35)) + excess
    content = content[: len(content) - missing]
    layout = find_pixels(content)
    assert (layout is None) == (missing > len(excess))
    if layout is None:
        assert_raises(ValueError, "truncated", open_image(content).read, Box(0, 0, 7, 5))
    else:
        assert layout == (len(head), 7, 5, 3 if kind == b"P6" else 1, 255, False)
        np.testing.assert_array_equal(open_image(content).read(Box(0, 0, 7, 5)), read_by_pillow(content))


PLAIN = [b"P2 2 2 255\n1 2 3 4", b"P3 1 1 255 1 2 3"]
OTHERS = [*PLAIN, b"P6 1 1 65535 " + bytes(6), b"P5 2 2 100 " + bytes(4), b"P4 1 1 \0"]


@pytest.mark.parametrize("content", [*OTHERS, save(make_picture(20, 30), "PNG")])
def test_other_kinds_are_left_to_pillow(content: bytes, tmp_path: Path) -> None:
    assert find_pixels(content) is None
    height, width = read_by_pillow(content).shape[:2]
    for found in (content, in_a_file(content, tmp_path)):
        np.testing.assert_array_equal(open_image(found).read(Box(0, 0, height, width)), read_by_pillow(content))


def test_the_limit_of_pixels_is_checked_before_the_pixels_are_read(tmp_path: Path) -> None:
    for found in (save(make_picture(20, 30), "PPM"), in_a_file(save(make_picture(20, 30), "PPM"), tmp_path)):
        assert open_image(found, max_pixels=600).size == (20, 30)
        assert_raises(TooManyPixels, "30×20 pixels, more than max_pixels=599", open_image, found, max_pixels=599)


def test_a_file_truncated_after_opening_is_an_error_that_names_the_row(tmp_path: Path) -> None:
    content = save(make_picture(20, 30), "PPM")
    found = in_a_file(content, tmp_path)
    picture, other = open_image(found), open_image(save(make_picture(20, 30, seed=1), "PPM"))
    os.truncate(tmp_path / "images", len(content) // 2)
    top, whole = (
        CropPlan.whole(np.full((2, 2), (rows, 30))).resize(np.full((2, 2), 9)) for rows in (8, 20)
    )  # fmt: skip
    assert len(render_chunk([other, picture], top).images) == 2  # The file still contains these rows.
    rows: Any = np.full((2, 9, 9, 3), 77, np.uint8)
    assert render_chunk_by_kernel([other, picture], whole, rows).tolist() == [True, False]
    assert (rows[1] == 77).all()
    with pytest.raises(DecodeError, match="truncated while it was in use") as caught:
        render_chunk([other, picture], whole)
    assert caught.value.row == 1
