from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from shardio.shards import open_table
from shardio.viewer import Overview, look_at, make_overview_page, open_source
from shardio.viewer.overview import MAX_BINS, make_log_histogram
from tests.sources import encode, write_images
from tests.tars import write_tar
from tests.viewer.pages import Page


def look(source: Path, num_thumbnails: int = 200, seed: int | None = None) -> Overview:
    with open_source(str(source)) as opened:
        return look_at(opened, num_thumbnails=num_thumbnails, seed=seed)


@given(st.lists(st.integers(0, 2**40), max_size=50))
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    histogram = make_log_histogram(np.array(values, np.int64))
    assert sum(histogram.counts) == len(values)
    assert list(histogram.edges) == sorted(set(histogram.edges))
    if max(values, default=0) < 2**24:
        assert len(histogram.counts) <= MAX_BINS


def test_a_directory_and_its_shards_contain_the_same(images: Path, packed: Path) -> None:
    of_folder, of_shards = look(images), look(packed)
    contents = [path.read_bytes() for path in images.rglob("*.jpg")]
    for overview in (of_folder, of_shards):
        assert overview.class_counts == Counter({f"class-{number}": 7 for number in range(3)})
        assert (overview.num_images, overview.num_image_bytes) == (21, sum(map(len, contents)))
        assert overview.headers.sizes == Counter({(32, 48): 21})
        assert overview.headers.formats == Counter(JPEG=21)
        assert sum(overview.file_sizes.counts) == 21
        assert {thumbnail.label for thumbnail in overview.thumbnails} == {"class-0", "class-1", "class-2"}
    manifest = open_table(packed).manifest
    assert of_shards.facts["digest"] == manifest.digest
    assert of_shards.facts["bytes"] == manifest.num_bytes
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
    name = "<script>alert('1')</script>&\"x"
    members = [(f"{name}-{number}.jpg", encode(number)) for number in range(2)]
    labelled = [
        (member[0].replace(".jpg", ".cls"), f"<img src=x onerror={number}>\"'".encode())
        for number, member in enumerate(members)
    ]
    write_tar(tmp_path / "x.tar", [member for pair in zip(members, labelled, strict=True) for member in pair])
    page = Page(make_overview_page(look(tmp_path / "x.tar")))
    assert f"{name}-0" in page.text
    assert "<img src=x onerror=1>\"'" in page.text
    assert len(page.find("script")) == 1
    assert page.addresses() == {"data"}
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)


def test_the_page_loads_nothing_and_describes_its_images(packed: Path) -> None:
    page = Page(make_overview_page(look(packed, 5)))
    images = page.find("img")
    assert len(images) == 5
    assert all((image["alt"] or "").startswith("image of sample class-") for image in images)
    assert page.addresses() == {"data"}
    assert {figure["data-class"] for figure in page.find("figure")} <= {
        option["value"] for option in page.find("option")
    }
    assert all("aria-label" in chart for chart in page.find("svg"))


def test_undecodable_images_have_placeholders(tmp_path: Path) -> None:
    write_images(tmp_path, classes=1, per_class=3)
    (tmp_path / "class-0" / "name-001.jpg").write_bytes(encode(1)[:-60])
    (tmp_path / "class-0" / "name-003.png").write_bytes(b"not an image")
    overview = look(tmp_path)
    bad = [thumbnail.key for thumbnail in overview.thumbnails if thumbnail.jpeg is None]
    assert bad == ["class-0/name-001.jpg", "class-0/name-003.png"]
    assert [key for key, _ in overview.headers.unreadable] == ["class-0/name-003.png"]
    page = Page(make_overview_page(overview))
    assert page.text.count("cannot be decoded\n") == 2
    assert "2 of them cannot be decoded" in page.text
    assert "class-0/name-003.png" in page.text


def test_bytes_that_are_not_utf8_are_shown_escaped(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("\udcff.jpg", encode(1)), ("\udcff.cls", b"\xff")])
    assert "\\udcff" in Page(make_overview_page(look(tmp_path / "x.tar"))).text


def test_tars_without_images_have_a_page(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.txt", b"x")])
    overview = look(tmp_path / "x.tar")
    assert (overview.num_images, overview.thumbnails) == (0, ())
    assert "The samples have no classes" in Page(make_overview_page(overview)).text


def test_a_directory_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match="neither images"):
        open_source(str(tmp_path))
