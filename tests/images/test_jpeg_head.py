"""Heads of JPEG files: reading finds the written values, and other content causes an error that states its position."""

from __future__ import annotations

import re
import struct

import pytest
from hypothesis import example, given, strategies as st

from shardio.images import why_not_by_kernel
from shardio.images.jpeg.head import JpegHead, read_head, why_irregular
from shardio.images.tiling import tile_jpeg
from shardio.kernel import require_functions
from tests.images.jpeg_corpus import small_corpus
from tests.images.jpeg_files import by_pillow, exif_with_thumbnail, make_jpeg, segments_of
from tests.images.jpeg_writer import segment
from tests.images.pictures import make_picture
from tests.raising import assert_raises

SOF, SOS, DRI = 0xC0, 0xDA, 0xDD


def _frame(height: int, width: int, parts: list[tuple[int, int, int]], precision: int = 8) -> bytes:
    listed = b"".join(bytes([component_id, across << 4 | down, 0]) for component_id, across, down in parts)
    return struct.pack(">BHHB", precision, height, width, len(parts)) + listed


def _scan(ids: list[int], selection: bytes = b"\0\x3f\0") -> bytes:
    return bytes([len(ids)]) + b"".join(bytes([component_id, 0]) for component_id in ids) + selection


def _check(head: JpegHead, content: bytes) -> None:
    """Check that a head lies within the content and agrees with it."""
    end = 2
    for marker, start, stop in head.segments:
        assert end <= start < start + 4 <= stop <= len(content)
        assert set(content[end : start + 1]) == {0xFF}
        assert content[start + 1] == marker not in (0, 0xFF)
        assert stop == start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")
        end = stop
    assert [kind for kind, *_ in head.segments].index(SOS) == len(head.segments) - 1
    assert head.scan_start == end
    frames = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
    ((start, stop),) = [(start, stop) for marker, start, stop in head.segments if marker in frames]
    assert head.frame_start == start
    assert head.factors == tuple((factors >> 4, factors & 15) for factors in content[start + 11 : stop : 3])
    largest = tuple(map(max, zip(*head.factors, strict=True)))
    assert head.sampling == (largest if len(head.factors) > 1 else (1, 1))
    assert (head.process, head.precision) == (content[start + 1], content[start + 4])
    assert struct.pack(">HHB", head.height, head.width, len(head.factors)) == content[start + 5 : start + 10]
    intervals = [content[start + 4 : start + 6] for marker, start, _ in head.segments if marker == DRI]
    assert head.restart_interval == int.from_bytes(intervals[-1] if intervals else b"\0", "big")


def _check_any(content: bytes) -> None:
    """Check that the content has a valid head, or that the error locates the problem.

    If the kernel also reads the head, Python must find the same size and no error.
    """
    message, size = "", None
    try:
        head = read_head(content)
        why_irregular(head)
    except ValueError as error:
        message = str(error)
    else:
        _check(head, content)
        size = head.height, head.width
    assert require_functions().read_size(content) in (None, size)
    assert not message or re.search(r"byte \d+|after \d+ bytes|does not begin", message)


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda noise: b"\xff\xd8\xff" + noise)))
@example(b"")
@example(b"\xff")
@example(b"\xff\xd8")
@example(b"\xff\xd8" + b"\xff" * 300)
def test_any_bytes_are_an_error_or_a_head_that_lies_within_them(content: bytes) -> None:
    _check_any(content)


REAL = [
    by_pillow(make_picture(20, 30), exif=exif_with_thumbnail(by_pillow(make_picture(8, 8))), comment="ein Bär"),
    by_pillow(make_picture(20, 30), progressive=True),
    tile_jpeg(make_jpeg("restarts", make_picture(20, 30), restart_interval=2, fill_in_scan=1).content),
    make_jpeg("fill bytes", make_picture(8, 8), fill=3).content,
    make_jpeg("gray", make_picture(8, 8), factors=((2, 2),)).content,
]
positions = st.integers(0, 699)


@given(
    st.sampled_from(REAL),
    st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1, max_size=5),
    positions,
    st.one_of(st.binary(), st.just(b"\xff\xd8\xff\xd9\xff\xda\x00\x08\xff\xc0\x00\x0b\xff\xd0\xff")),
)
def test_damaged_heads_are_errors_or_lie_within(
    real: bytes, changes: list[tuple[int, int]], cut: int, inserted: bytes
) -> None:
    content = bytearray(real)
    for position, value in changes:
        content[position % len(content)] = value
    for damaged in (content, content[:cut], content[:cut] + inserted + content[cut:]):
        _check_any(bytes(damaged))


def test_heads_of_the_corpus_are_those_of_an_independent_reader() -> None:
    for file in small_corpus():
        if file.tileable and "fill bytes" not in file.name:
            head = read_head(file.content)
            _check(head, file.content)
            assert [tuple(span) for span in head.segments] == list(segments_of(file.content)), file.name
            assert why_irregular(head) in (None, "progressive") or not file.readers, file.name
            is_for_kernel = why_not_by_kernel(file.content) is None
            assert require_functions().read_size(file.content) == ((head.height, head.width) if is_for_kernel else None)


GOOD = make_jpeg("good", make_picture(9, 9), restart_interval=2).content
SPANS = {marker: (start, end) for marker, start, end in segments_of(GOOD)}


def _replace(marker: int, by: bytes) -> bytes:
    start, end = SPANS[marker]
    return GOOD[:start] + by + GOOD[end:]


FRAME, SCAN = SPANS[SOF], SPANS[SOS]
BAD: dict[str, tuple[bytes, int]] = {
    "stray byte": (GOOD[: FRAME[0]] + b"\0" + GOOD[FRAME[0] :], FRAME[0]),
    "second soi": (GOOD[: FRAME[0]] + b"\xff\xd8" + GOOD[FRAME[0] :], FRAME[0]),
    "tem": (GOOD[: FRAME[0]] + b"\xff\x01" + GOOD[FRAME[0] :], FRAME[0]),
    "stuffed byte": (GOOD[: FRAME[0]] + b"\xff\x00" + GOOD[FRAME[0] :], FRAME[0]),
    "second frame": (GOOD[: FRAME[1]] + GOOD[FRAME[0] :], FRAME[1]),
    "no frame": (GOOD[: FRAME[0]] + GOOD[FRAME[1] :], SCAN[1] - (FRAME[1] - FRAME[0])),
    "no components": (_replace(SOF, segment(SOF, _frame(9, 9, []))), FRAME[0]),
    "long frame": (_replace(SOF, segment(SOF, _frame(9, 9, [(1, 1, 1)]) + b"\0")), FRAME[0]),
    "factor 0": (_replace(SOF, segment(SOF, _frame(9, 9, [(1, 0, 1)]))), FRAME[0]),
    "factor 5": (_replace(SOF, segment(SOF, _frame(9, 9, [(1, 1, 5)]))), FRAME[0]),
    "long scan header": (_replace(SOS, segment(SOS, _scan([1, 2, 3]) + b"\0")), SCAN[0]),
    "short scan header": (_replace(SOS, segment(SOS, _scan([1, 2, 3])[:-1])), SCAN[0]),
    "long dri": (_replace(DRI, segment(DRI, b"\0\2\0")), SPANS[DRI][0]),
    "empty dri": (_replace(DRI, segment(DRI)), SPANS[DRI][0]),
}


@pytest.mark.parametrize("name", BAD)
def test_an_error_says_where(name: str) -> None:
    content, offset = BAD[name]
    assert_raises(ValueError, rf"at byte {offset}\b", read_head, content)


@pytest.mark.parametrize("marker", [0xE0, 0xC0, 0xC4, 0xDD, 0xDA])
def test_a_segment_of_an_impossible_length_is_an_error_that_says_where(marker: int) -> None:
    start, _ = SPANS[marker]
    for length in (0, 1, 60_000):
        content = GOOD[: start + 2] + length.to_bytes(2, "big") + GOOD[start + 4 :]
        assert_raises(ValueError, rf"0x{marker:02x} at byte {start}\b", read_head, content)


def test_a_head_that_ends_too_early_is_an_error_that_says_after_how_many_bytes() -> None:
    for stop in (0, 1, 2, 3, 5, SCAN[0], SCAN[1] - 1):
        assert_raises(ValueError, rf"ends after {stop} bytes|has a length of", read_head, GOOD[:stop])


def test_a_scan_of_some_components_or_coefficients_is_not_complete() -> None:
    assert read_head(GOOD).is_single_scan
    assert read_head(_replace(SOS, segment(SOS, _scan([1, 2, 3])))).is_single_scan
    for ids, selection in [
        ([1], b"\0\x3f\0"),
        ([3, 2, 1], b"\0\x3f\0"),
        ([1, 2, 3], b"\0\0\0"),
        ([1, 2, 3], b"\1\x3f\0"),
        ([1, 2, 3], b"\0\x3f\1"),
    ]:
        assert not read_head(_replace(SOS, segment(SOS, _scan(ids, selection)))).is_single_scan
