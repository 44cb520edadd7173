"""The corpus holds what it promises, and its writer follows T.81 and libjpeg."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from tests.images.jpeg_corpus import ODD_FACTORS, JpegFile, small_corpus, truncations
from tests.images.jpeg_files import BOTH, CONTENTS, SAMPLINGS, by_pillow, flat, noise, readers_of
from tests.images.jpeg_tables import STANDARD, ZIGZAG, HuffmanTable
from tests.images.jpeg_writer import JpegOptions, write_jpeg
from tests.images.pictures import Array, make_picture, read_by_pillow


@pytest.fixture(scope="module")
def files() -> list[JpegFile]:
    return list(small_corpus())


@pytest.fixture(scope="module")
def tileable(files: list[JpegFile]) -> list[JpegFile]:
    return [file for file in files if file.tileable]


def _read_by_simplejpeg(content: bytes) -> Array:
    return np.asarray(simplejpeg.decode_jpeg(content, strict=True))


READERS = {"simplejpeg": _read_by_simplejpeg, "pillow": read_by_pillow}


def _segments(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the markers and payloads of a file up to EOI; entropy-coded data belongs to SOS."""
    start = 2
    while start < len(content):
        marker_start = start
        while content[start] == 0xFF:
            start += 1
        assert start > marker_start
        marker = content[start]
        end = start + 1 if marker == 0xD9 else start + 1 + int.from_bytes(content[start + 1 : start + 3], "big")
        if marker == 0xDA:
            while content[end] != 0xFF or content[end + 1] in (0x00, 0xFF, *range(0xD0, 0xD8)):
                end += 1
        yield marker, content[start + 3 : end]
        start = end


def _smooth(height: int, width: int) -> Array:
    """Return the corner of a large image that changes so slowly that subsampling loses little."""
    corners = Image.fromarray(make_picture(4, 4, seed=3))
    return np.asarray(corners.resize((256, 256), Image.Resampling.BICUBIC))[:height, :width]


def _psnr_db(image: Array, other: Array) -> float:
    error = np.mean((image.astype(float) - other) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else np.inf


def test_names_are_unique(files: list[JpegFile]) -> None:
    names = [file.name for file in files]
    assert len(set(names)) == len(names) > 200


def test_the_corpus_is_the_same_each_time(files: list[JpegFile]) -> None:
    assert list(small_corpus()) == files


@pytest.mark.parametrize("reader", READERS)
def test_tileable_files_are_read_by_the_decoders_that_support_their_sampling(
    tileable: list[JpegFile], reader: str
) -> None:
    for file in tileable:
        if reader in file.readers:
            assert READERS[reader](file.content).ndim == 3, file.name
        else:
            with pytest.raises((ValueError, OSError)):
                READERS[reader](file.content)


def test_decoders_agree_on_tileable_files(tileable: list[JpegFile]) -> None:
    for file in tileable:
        if file.readers == BOTH:
            by_turbojpeg, by_libjpeg = _read_by_simplejpeg(file.content), read_by_pillow(file.content)
            np.testing.assert_array_equal(by_turbojpeg, by_libjpeg, err_msg=file.name)


def test_tileable_files_have_one_baseline_scan_of_all_components_and_end_at_eoi(tileable: list[JpegFile]) -> None:
    for file in tileable:
        segments = list(_segments(file.content))
        kinds = [kind for kind, _ in segments]
        frame = next(payload for kind, payload in segments if kind in (0xC0, 0xC1))
        scan = next(payload for kind, payload in segments if kind == 0xDA)
        assert kinds[-2:] == [0xDA, 0xD9], file.name
        assert kinds.count(0xDA) == kinds.count(0xD9) == 1, file.name
        assert frame[0] == 8, file.name
        assert frame[5] == scan[0] in (1, 3), file.name
        assert 0 not in (int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")), file.name


def test_the_corpus_has_files_of_each_kind(files: list[JpegFile]) -> None:
    assert {file.readers for file in files if file.tileable} == {BOTH, ("pillow",), ()}
    assert sum(not file.tileable for file in files) > 50
    contents = [file.content for file in files if file.tileable]
    assert any(b"\xff\xd7" in content for content in contents)
    assert any(content.count(b"\xff\x00") > 20 for content in contents)


def test_truncations_are_all_prefixes() -> None:
    content = by_pillow(flat(8, 8))
    cut = list(truncations(content))
    assert [len(part) for part in cut] == list(range(len(content)))
    assert all(content.startswith(part) for part in cut)


@pytest.mark.parametrize("factors", [*SAMPLINGS.values(), *ODD_FACTORS.values()], ids=str)
@pytest.mark.parametrize("size", [(64, 64), (1, 1), (17, 40), (61, 35)], ids=str)
def test_decoding_gives_back_what_was_written(factors: tuple[tuple[int, int], ...], size: tuple[int, int]) -> None:
    picture = _smooth(*size)
    expected = np.repeat(picture[..., :1], 3, axis=2) if len(factors) == 1 else picture
    written = picture[..., 0].copy() if len(factors) == 1 else picture
    content = write_jpeg(written, JpegOptions(factors=factors))
    for reader in readers_of(factors):
        assert _psnr_db(READERS[reader](content), expected) > 30


@pytest.mark.parametrize("scans", [None, ((0,), (1,), (2,)), ((0,), (1, 2))], ids=str)
@pytest.mark.parametrize("restart_interval", [None, 1, 5, 100])
@pytest.mark.parametrize("huffman", ["standard", "best", "deep", "flat"])
def test_the_coding_does_not_change_the_pixels(huffman: Any, restart_interval: Any, scans: Any) -> None:
    factors = SAMPLINGS["4:2:0"]
    plain = write_jpeg(noise(37, 50), JpegOptions(factors=factors))
    other = JpegOptions(factors=factors, huffman=huffman, restart_interval=restart_interval, scans=scans, one_dht=True)
    np.testing.assert_array_equal(_read_by_simplejpeg(write_jpeg(noise(37, 50), other)), _read_by_simplejpeg(plain))


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("quality", [1, 30, 75, 90, 100])
def test_files_of_uniform_blocks_are_those_of_libjpeg(quality: int, optimize: bool) -> None:
    # The coefficients of uniform gray blocks need no rounding, so the files must be equal.
    grays = np.random.default_rng(quality).integers(0, 256, (6, 9), dtype=np.uint8)
    picture = np.kron(grays, np.ones((8, 8), np.uint8))[:45, :70]
    options = JpegOptions(factors=((1, 1),), quality=quality, huffman="best" if optimize else "standard")
    assert write_jpeg(picture, options) == by_pillow(picture, quality=quality, optimize=optimize)


@pytest.mark.parametrize("optimize", [False, True])
def test_some_files_of_noisy_images_are_those_of_libjpeg(optimize: bool) -> None:
    # libjpeg's transform sometimes rounds differently, but not in all of them.
    options = JpegOptions(quality=30, huffman="best" if optimize else "standard")
    pictures = [make_picture(20, 20, seed) for seed in range(30)]
    files = [by_pillow(picture, quality=30, subsampling=0, optimize=optimize) for picture in pictures]
    assert sum(write_jpeg(picture, options) == file for picture, file in zip(pictures, files, strict=True)) >= 5


@pytest.mark.parametrize("quality", [1, 10, 49, 50, 51, 90, 100])
def test_tables_and_sizes_are_those_of_libjpeg(quality: int) -> None:
    for content in CONTENTS.values():
        picture = content(20, 30)
        with (
            Image.open(io.BytesIO(write_jpeg(picture, JpegOptions(quality=quality)))) as ours,
            Image.open(io.BytesIO(by_pillow(picture, quality=quality))) as libjpegs,
        ):
            assert ours.quantization == libjpegs.quantization  # type: ignore[attr-defined]  # of JPEG images only
            assert (ours.size, ours.mode, ours.info["jfif"]) == (libjpegs.size, libjpegs.mode, libjpegs.info["jfif"])


@pytest.mark.parametrize("seed", range(20))
def test_best_tables_are_prefix_codes_without_the_code_of_all_ones(seed: int) -> None:
    random = np.random.default_rng(seed)
    symbols = random.choice(256, random.integers(1, 257), replace=False)
    counts = {int(symbol): int(2 ** random.uniform(0, 40)) for symbol in symbols}
    _check_prefix_code(HuffmanTable.from_counts(counts), set(counts))


def test_standard_tables_hold_all_symbols() -> None:
    sizes = {run << 4 | size for run in range(16) for size in range(1, 11)}
    for (table_class, _), table in STANDARD.items():
        _check_prefix_code(table, {0x00, 0xF0} | sizes if table_class else set(range(12)))


def test_the_zigzag_order_is_that_of_the_standard() -> None:
    assert sorted(ZIGZAG) == list(range(64))
    assert ZIGZAG[:10] == [0, 1, 8, 16, 9, 2, 3, 10, 17, 24]
    assert ZIGZAG[-3:] == [55, 62, 63]


def _check_prefix_code(table: HuffmanTable, symbols: set[int]) -> None:
    codes = {format(code, f"0{num_bits}b") for code, num_bits in table.codes().values()}
    assert set(table.codes()) == symbols
    assert len(codes) == len(symbols) == sum(table.counts) == len(table.symbols)
    assert all("0" in code and len(code) <= 16 for code in codes)
    assert not any(code[:length] in codes for code in codes for length in range(1, len(code)))
