"""Overviews, pages (parsed with the standard library), and duplicates with equal bytes or similar perceptual hashes."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from contextlib import ExitStack
from itertools import combinations, pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image

import shardio
from shardio.cli.terminal import ProgressReporter
from shardio.shards import open_table
from shardio.viewer import DuplicateReport, Overview, find_duplicates, look_at, make_overview_page, open_source
from shardio.viewer.duplicates import SIDE, count_bits, find_near_pairs, hash_pictures, join_groups, reduce_picture
from shardio.viewer.overview import MAX_BINS, make_log_histogram
from tests.files import read_files
from tests.pages import Page
from tests.raising import assert_raises
from tests.sources import encode, write_images
from tests.tars import write_tar


def look(source: Path, num_thumbnails: int = 200, seed: int | None = None) -> Overview:
    with open_source(str(source)) as opened:
        return look_at(opened, num_thumbnails=num_thumbnails, seed=seed)


@given(st.lists(st.integers(0, 2**40), max_size=50))
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    histogram = make_log_histogram(np.array(values, np.int64))
    assert (sum(histogram.counts), list(histogram.edges)) == (len(values), sorted(set(histogram.edges)))
    if max(values, default=0) < 2**24:
        assert len(histogram.counts) <= MAX_BINS


def test_a_directory_and_its_shards_contain_the_same(images: Path, packed: Path) -> None:
    of_folder, of_shards = look(images), look(packed)
    contents = [path.read_bytes() for path in images.rglob("*.jpg")]
    for overview in (of_folder, of_shards):
        assert overview.class_counts == Counter({f"class-{number}": 7 for number in range(3)})
        assert (overview.num_images, overview.num_image_bytes) == (21, sum(map(len, contents)))
        assert (overview.headers.sizes, overview.headers.formats) == (Counter({(32, 48): 21}), Counter(JPEG=21))
        assert sum(overview.file_sizes.counts) == 21
        assert {thumbnail.label for thumbnail in overview.thumbnails} == {"class-0", "class-1", "class-2"}
    manifest = open_table(packed).manifest
    assert (of_shards.facts["digest"], of_shards.facts["bytes"]) == (manifest.digest, manifest.num_bytes)
    assert {use.name: use.num_samples for use in of_shards.fields} == {"cls": 21, "jpg": 21}


def test_thumbnails_are_small_images_with_the_same_proportions(tmp_path: Path) -> None:
    content = encode(1, width=800, height=300)
    (tmp_path / "a.jpg").write_bytes(content)
    (thumbnail,) = look(tmp_path).thumbnails
    assert (thumbnail.size, thumbnail.label) == ((300, 800), None)
    assert thumbnail.jpeg is not None
    with Image.open(io.BytesIO(thumbnail.jpeg)) as small, Image.open(io.BytesIO(content)) as image:
        assert small.size == (256, 96)
        expected = np.asarray(image.resize(small.size, Image.Resampling.BILINEAR), np.float64)
        assert np.abs(np.asarray(small, np.float64) - expected).mean() < 4


def test_thumbnails_are_evenly_spaced_or_random(images: Path) -> None:
    every = [thumbnail.key for thumbnail in look(images).thumbnails]
    assert [thumbnail.key for thumbnail in look(images, 3).thumbnails] == every[::7]
    chosen = [[thumbnail.key for thumbnail in look(images, 9, seed).thumbnails] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(keys == sorted(set(keys), key=every.index) and len(keys) == 9 for keys in chosen)


def test_names_are_text_on_the_page(tmp_path: Path) -> None:
    name, label = "<script>alert('1')</script>&\"x", "<img src=x onerror=1>\"'"
    members = [(f"{name}.jpg", encode(0)), (f"{name}.cls", label.encode())]
    write_tar(tmp_path / "x.tar", [*members, ("\udcff.jpg", encode(1)), ("\udcff.cls", b"\xff")])
    page = Page(make_overview_page(look(tmp_path / "x.tar")))
    assert all(text in page.text for text in (name, label, "\\udcff"))
    assert (page.find("script"), page.addresses()) == ([{}], {"data"})
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)


def test_the_page_loads_nothing_and_describes_its_images(packed: Path) -> None:
    page = Page(make_overview_page(look(packed, 5)))
    images, options = page.find("img"), {option["value"] for option in page.find("option")}
    assert [(image["alt"] or "").startswith("image of sample class-") for image in images] == [True] * 5
    assert page.addresses() == {"data"}
    assert {figure["data-class"] for figure in page.find("figure")} <= options
    assert list(page.plots) == ["Resolutions"]


def test_undecodable_images_have_placeholders(tmp_path: Path) -> None:
    write_images(tmp_path, classes=1, per_class=3)
    bad = ["class-0/name-001.jpg", "class-0/name-003.png"]
    for key, content in zip(bad, (encode(1)[:-60], b"not an image"), strict=True):
        (tmp_path / key).write_bytes(content)
    overview = look(tmp_path)
    assert [thumbnail.key for thumbnail in overview.thumbnails if thumbnail.jpeg is None] == bad
    assert [key for key, _ in overview.headers.unreadable] == bad[1:]
    text = Page(make_overview_page(overview)).text
    assert (text.count("cannot be decoded\n"), "2 of them cannot be decoded" in text, bad[1] in text) == (2, True, True)


def test_tars_without_images_have_a_page_and_directories_without_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert_raises(FileNotFoundError, "neither images", open_source, str(tmp_path))
    write_tar(tmp_path / "x.tar", [("a.txt", b"x")])
    overview = look(tmp_path / "x.tar")
    assert (overview.num_images, overview.thumbnails) == (0, ())
    assert "The samples have no classes" in Page(make_overview_page(overview)).text


def search(*sources: Path, threshold: int | None = 4, is_between: bool = False) -> DuplicateReport:
    with ExitStack() as stack:
        opened = [stack.enter_context(open_source(str(source))) for source in sources]
        return find_duplicates(opened, threshold=threshold, is_between=is_between)


def keys_of(report: DuplicateReport) -> list[list[str]]:
    return [[copy.key.partition(".")[0] for copy in group.copies] for group in report.groups]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Class folders with two copies of one image in one class, and three copies of another image in two classes."""
    root = tmp_path / "folder"
    write_images(root, per_class=4)
    shutil.copy(root / "class-0" / "name-000.jpg", root / "class-0" / "name-100.jpg")
    for name in ("class-1/name-101", "class-2/name-102"):
        shutil.copy(root / "class-1" / "name-002.jpg", root / f"{name}.jpg")
    return root


GROUPS = [["class-0/name-000", "class-0/name-100"], ["class-1/name-002", "class-1/name-101", "class-2/name-102"]]


@pytest.mark.parametrize("threshold", [None, 0])
def test_files_with_the_same_bytes_are_groups(folder: Path, threshold: int | None) -> None:
    report = search(folder, threshold=threshold)
    assert (keys_of(report), [group.is_exact for group in report.groups]) == (GROUPS, [True, True])
    assert [group.labels for group in report.groups] == [("class-0",), ("class-1", "class-2")]
    assert (report.count_within(0), report.num_images) == ((2, 3), (15,))
    assert_raises(ValueError, "threshold", search, folder, threshold=17)


@pytest.mark.parametrize("threshold", [None, 0])
def test_shards_have_the_same_groups_with_their_places(folder: Path, tmp_path: Path, threshold: int | None) -> None:
    packed = tmp_path / "packed"
    shardio.pack(folder, packed, max_shard_samples=4)
    report = search(packed, threshold=threshold)
    assert sorted(map(sorted, keys_of(report))) == GROUPS
    progress, contents = ProgressReporter("hashing", "images"), read_files(packed)
    with open_source(str(packed)) as source:
        find_duplicates([source], threshold=threshold, progress=progress)
    assert progress.num_done == (0 if threshold is None else 15), "bytes are compared without reading shards"
    for group in report.groups:
        for copy in group.copies:
            offset = copy.place.offset
            assert offset is not None
            expected = (folder / f"{copy.key}.jpg").read_bytes()
            assert contents[copy.place.shard][offset : offset + len(expected)] == expected
            assert copy.label == copy.key.partition("/")[0]


def test_a_leak_between_a_directory_and_shards_is_found(folder: Path, tmp_path: Path) -> None:
    packed, validation = tmp_path / "packed", tmp_path / "validation"
    shardio.pack(folder, packed)
    write_images(validation, classes=1, per_class=1)
    for number in range(2):
        shutil.copy(folder / "class-2" / "name-003.jpg", validation / "class-0" / f"{number}.jpg")
    (validation / "class-0" / "name-000.jpg").write_bytes(encode(77))
    report = search(packed, validation, threshold=None, is_between=True)
    assert keys_of(report) == [["class-2/name-003", "class-0/0", "class-0/1"]]
    assert (report.list_between(), report.groups[0].labels) == ([[0, 1, 1, 1, 2]], ("class-0", "class-2"))
    assert len(search(packed, validation, threshold=None).groups) == 3


def test_similar_pictures_are_groups(tmp_path: Path) -> None:
    for seed in range(2):
        content = encode(seed, width=400, height=300)
        (tmp_path / f"{seed}-large.jpg").write_bytes(content)
        with Image.open(io.BytesIO(content)) as image:
            image.resize((100, 75), Image.Resampling.BOX).save(tmp_path / f"{seed}-small.png")
    report = search(tmp_path)
    assert keys_of(report) == [["0-large", "0-small"], ["1-large", "1-small"]]
    assert not any(group.is_exact for group in report.groups)
    assert all(group.copies[1].distance is not None and group.copies[1].distance <= 4 for group in report.groups)
    assert search(tmp_path, threshold=None).groups == ()


def test_damaged_and_even_images_are_compared_by_their_bytes(tmp_path: Path) -> None:
    for name, level in (("a", 0), ("b", 255)):
        (tmp_path / f"damaged-{name}.jpg").write_bytes(encode(1)[:500])
        Image.new("L", (40, 40), level).save(tmp_path / f"even-{name}.png")
    (tmp_path / "not-an-image.png").write_bytes(b"text")
    (tmp_path / "vanished.jpg").symlink_to(tmp_path / "nothing")
    report = search(tmp_path)
    assert (keys_of(report), report.num_even) == ([["damaged-a", "damaged-b"]], 2)
    unreadable = {image.key: image.reason for image in report.unreadable}
    assert list(unreadable) == ["damaged-a.jpg", "damaged-b.jpg", "not-an-image.png", "vanished.jpg"]
    assert "No such file" in unreadable["vanished.jpg"]


def test_samples_without_images_are_not_compared(tmp_path: Path) -> None:
    image = encode(1)
    members = [("a.jpg", image), ("a.cls", b"0"), ("b.cls", b"0"), ("c.cls", b"1"), ("d.png", image), ("d.txt", b"x")]
    write_tar(tmp_path / "x.tar", members)
    report = search(tmp_path / "x.tar", threshold=None)
    assert (keys_of(report), report.num_images) == ([["a", "d"]], (2,))
    assert [copy.label for copy in report.groups[0].copies] == ["0", None]


def check_pairs(hashes: NDArray[np.uint64], threshold: int) -> None:
    """Check that the near pairs are those that a comparison of all pairs finds."""
    numbers = hashes.tolist()
    expected = {
        (first, second)
        for first, second in combinations(range(len(numbers)), 2)
        if (numbers[first] ^ numbers[second]).bit_count() <= threshold
    }
    batches = [np.stack(pairs, axis=1).tolist() for pairs in find_near_pairs(hashes, threshold)]
    assert {(min(pair), max(pair)) for batch in batches for pair in batch} == expected


@pytest.mark.parametrize("threshold", [0, 1, 4, 7, 16])
@pytest.mark.parametrize("num_hashes", [1, 2, 300])
def test_the_pairs_are_those_of_comparing_all(threshold: int, num_hashes: int) -> None:
    random = np.random.default_rng(threshold)
    centers = random.integers(0, 2**64, max(1, num_hashes // 6), dtype=np.uint64)
    flips = np.uint64(1) << random.integers(0, 64, (num_hashes, 10), dtype=np.uint64)
    flips[random.random(flips.shape) < 0.6] = 0
    hashes = np.unique(np.bitwise_xor.reduce(flips, axis=1) ^ random.choice(centers, num_hashes))
    check_pairs(hashes, threshold)


@given(st.sets(st.integers(0, 2**64 - 1), max_size=12), st.integers(0, 16))
def test_any_hashes(numbers: set[int], threshold: int) -> None:
    hashes = np.array(sorted(numbers), np.uint64)
    check_pairs(hashes, threshold)
    assert count_bits(hashes).tolist() == [number.bit_count() for number in sorted(numbers)]


@given(st.integers(1, 30), st.data())
def test_groups_are_the_connected_components(num_items: int, data: st.DataObject) -> None:
    item = st.integers(0, num_items - 1)
    batches = data.draw(st.lists(st.lists(st.tuples(item, item), max_size=8), max_size=4))
    expected = list(range(num_items))
    for first, second in (pair for batch in batches for pair in batch):
        old, new = sorted((expected[first], expected[second]), reverse=True)
        expected = [new if group == old else group for group in expected]
    arrays = (np.array(batch, np.int64).reshape(-1, 2).T for batch in batches)
    assert join_groups(num_items, ((first, second) for first, second in arrays)).tolist() == expected


def hash_of(content: bytes) -> int:
    hashes, has_contrast = hash_pictures(reduce_picture(content)[None])
    assert has_contrast.all()
    return int(hashes[0])


def differing_bits(first: bytes, second: bytes) -> int:
    return (hash_of(first) ^ hash_of(second)).bit_count()


def again(image: Image.Image, image_format: str = "JPEG", **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_reduced_picture_is_an_average(suffix: str) -> None:
    for width, height in ((32, 32), (37, 91), (501, 333)):
        content = encode(3, width=width, height=height, suffix=suffix)
        with Image.open(io.BytesIO(content)) as image:
            gray = np.asarray(image.convert("L"), np.float32)
        expected = cv2.resize(gray, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        assert np.abs(reduce_picture(content) - expected).mean() < 0.7


def test_the_bits_are_those_of_the_definition() -> None:
    fft = pytest.importorskip("scipy.fft")
    pictures = np.random.default_rng(0).random((20, SIDE, SIDE)).astype(np.float32) * 255
    low = fft.dctn(pictures.astype(np.float64), axes=(1, 2), norm="ortho")[:, :8, :8].reshape(20, 64)
    bits = low > np.median(low, axis=1, keepdims=True)
    expected = [int("".join("01"[bit] for bit in row.tolist()), 2) for row in bits]
    assert hash_pictures(pictures)[0].tolist() == expected


def test_copies_have_near_hashes_and_other_pictures_do_not() -> None:
    contents = [encode(seed, width=500, height=375, quality=92) for seed in range(5)]
    for content in contents:
        with Image.open(io.BytesIO(content)) as image:
            copies = [
                again(image, quality=60),
                again(image, "PNG"),
                again(image.resize((250, 188), Image.Resampling.LANCZOS), quality=80),
                again(image.resize((1000, 750), Image.Resampling.BICUBIC), quality=80),
                again(image.convert("L"), quality=90),
            ]
        assert max(differing_bits(content, copy) for copy in copies) <= 4
    for first, second in pairwise(contents):
        assert differing_bits(first, second) > 10


def test_even_pictures_have_no_hash() -> None:
    even = [np.full((SIDE, SIDE), level, np.float32) for level in (0, 128, 255)]
    noise = np.random.default_rng(0).normal(128, 1, (SIDE, SIDE)).astype(np.float32)
    _, has_contrast = hash_pictures(np.stack([*even, noise]))
    assert not has_contrast.any()
