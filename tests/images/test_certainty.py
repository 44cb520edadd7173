"""JPEGs that can be tiled are decoded without an error, except for a few kinds that are known by their heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from shardio.images import DEFAULT_MAX_PIXELS, TooManyPixels, decode_image
from shardio.images.tiling import NotTileable, decodes_if_tileable, tile_jpeg
from tests.images.fuzz_laws import make_damaged_file
from tests.images.jpeg_corpus import small_corpus
from tests.images.jpeg_files import SAMPLINGS, by_pillow, make_jpeg, noise, scan_start, segments_of
from tests.images.jpeg_writer import segment
from tests.images.mutations import write_originals
from tests.images.pictures import exif_of, make_picture

PICTURE = make_picture(40, 72)
GOOD = by_pillow(PICTURE)
PROFILE = np.random.default_rng(0).bytes(70_000)


RIGHT = {"certain", "not tileable", "uncertain, but decodable", "uncertain and not decodable"}
"""The outcomes that break no promise."""


def _outcome(content: bytes) -> str:
    """Return what the check says of a file, and whether it is right."""
    try:
        tiled = tile_jpeg(content)
    except NotTileable:
        return "not tileable"
    is_certain = decodes_if_tileable(content, max_pixels=DEFAULT_MAX_PIXELS)
    assert decodes_if_tileable(tiled, max_pixels=DEFAULT_MAX_PIXELS) == is_certain
    try:
        decode_image(content)
        decode_image(tiled)
    except ValueError as error:
        return f"certain, but {error}" if is_certain else "uncertain and not decodable"
    return "certain" if is_certain else "uncertain, but decodable"


def test_undamaged_files_of_common_encoders_are_certain() -> None:
    files = [
        *(make_jpeg(name, PICTURE, factors=factors).content for name, factors in SAMPLINGS.items()),
        by_pillow(PICTURE, icc_profile=PROFILE, exif=exif_of(6), comment=b"a comment", dpi=(300, 300)),
        by_pillow(PICTURE, keep_rgb=True),
        by_pillow(PICTURE[..., 0].copy(), icc_profile=PROFILE[:500]),
        tile_jpeg(GOOD),
    ]
    assert {_outcome(content) for content in files} == {"certain"}


def test_no_file_of_the_corpus_is_certain_but_not_decodable() -> None:
    outcomes = Counter(_outcome(file.content) for file in small_corpus())
    assert outcomes["certain"] > 140
    assert set(outcomes) <= RIGHT


def _damaged_scans() -> Iterator[bytes]:
    """Yield files whose entropy-coded data has flipped bits, foreign bytes, or an early end."""
    rng = np.random.default_rng(1)
    files = [make_jpeg("", noise(24, 40), factors=factors).content for factors in SAMPLINGS.values()]
    files += [GOOD, tile_jpeg(GOOD), make_jpeg("", PICTURE, restart_interval=2).content]
    for content in files:
        start = scan_start(content)
        for _ in range(60):
            flipped = bytearray(content)
            for at in rng.integers(start, len(content), rng.integers(1, 4)).tolist():
                flipped[at] ^= 1 << int(rng.integers(8))
            at = int(rng.integers(start, len(content)))
            yield bytes(flipped)
            yield content[:at]
            yield content[:at] + b"\xff\xd9"
            yield content[:at] + rng.bytes(2) + content[at:]
            yield content[:at] + content[at + 1 :]


def test_no_damage_to_the_scan_is_hidden_by_tiling() -> None:
    outcomes = Counter(map(_outcome, _damaged_scans()))
    assert set(outcomes) == {"certain", "not tileable"}
    assert outcomes["certain"] > 100


def test_no_file_with_random_damage_is_certain_but_not_decodable() -> None:
    originals = write_originals()
    contents = (make_damaged_file(seed, originals)[0] for seed in range(1500))
    outcomes = Counter(_outcome(content) for content in contents if content.startswith(b"\xff\xd8\xff"))
    assert set(outcomes) <= RIGHT
    assert outcomes["certain"] > 100


def test_no_flipped_bit_in_a_head_makes_a_certain_file_undecodable() -> None:
    content = by_pillow(make_picture(16, 16), icc_profile=PROFILE[:20], quality=50)
    outcomes = Counter[str]()
    for at in range(2, scan_start(content)):
        for bit in {at % 8, 7}:
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            outcomes[_outcome(bytes(flipped))] += 1
    assert set(outcomes) <= RIGHT
    assert outcomes["uncertain and not decodable"] > 5


def _without(content: bytes, marker: int) -> bytes:
    for found, start, end in segments_of(content):
        if found == marker:
            return content[:start] + content[end:]
    raise AssertionError("there is no such segment")


UNDECODABLE = {
    "no quantisation table": _without(GOOD, 0xDB),
    "too wide": make_jpeg("", np.zeros((8, 65_528, 3), np.uint8), factors=((1, 1),)).content,
}
"""Files that can be tiled, but not decoded."""

UNCERTAIN = {
    "JFIF 2": GOOD.replace(b"JFIF\0\1", b"JFIF\0\2"),
    "unknown Adobe transform": GOOD[:2] + segment(0xEE, b"Adobe\0\x64\0\0\0\0\7") + _without(GOOD, 0xE0)[2:],
    "a part of a profile": _without(by_pillow(PICTURE, icc_profile=PROFILE), 0xE2),
    "an empty profile": GOOD[:2] + segment(0xE2, b"ICC_PROFILE\0\1\1") + GOOD[2:],
}
"""Files that libjpeg warns of. Their pixels are right, which takes a second look at them."""


@pytest.mark.parametrize("content", UNDECODABLE.values(), ids=UNDECODABLE)
def test_these_files_can_be_tiled_but_not_decoded(content: bytes) -> None:
    assert tile_jpeg(content)
    with pytest.raises(ValueError, match=r".+"):
        decode_image(content)
    assert not decodes_if_tileable(content, max_pixels=DEFAULT_MAX_PIXELS)


@pytest.mark.parametrize("content", UNCERTAIN.values(), ids=UNCERTAIN)
def test_these_files_are_decoded_but_not_certain(content: bytes) -> None:
    assert _outcome(content) == "uncertain, but decodable"


def test_the_limit_of_pixels_is_that_of_decoding() -> None:
    assert decodes_if_tileable(GOOD, max_pixels=40 * 72)
    assert not decodes_if_tileable(GOOD, max_pixels=40 * 72 - 1)
    with pytest.raises(TooManyPixels):
        decode_image(GOOD, max_pixels=40 * 72 - 1)
