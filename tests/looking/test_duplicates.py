from __future__ import annotations

import io
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image

import shardio
from shardio.viewer import DuplicateReport, find_duplicates, open_source
from tests.files import read_files
from tests.sources import encode, write_images
from tests.tars import write_tar


def search(*sources: Path, threshold: int | None = 4, is_between: bool = False) -> DuplicateReport:
    with ExitStack() as stack:
        opened = [stack.enter_context(open_source(str(source))) for source in sources]
        return find_duplicates(opened, threshold=threshold, is_between=is_between)


def keys_of(report: DuplicateReport) -> list[list[str]]:
    return [[copy.key.partition(".")[0] for copy in group.copies] for group in report.groups]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Class folders with two copies of one image in one class, and three of another in two classes."""
    root = tmp_path / "folder"
    write_images(root, per_class=4)
    shutil.copy(root / "class-0" / "name-000.jpg", root / "class-0" / "name-100.jpg")
    for name in ("class-1/name-101", "class-2/name-102"):
        shutil.copy(root / "class-1" / "name-002.jpg", root / f"{name}.jpg")
    return root


GROUPS = [
    ["class-0/name-000", "class-0/name-100"],
    ["class-1/name-002", "class-1/name-101", "class-2/name-102"],
]


@pytest.mark.parametrize("threshold", [None, 0])
def test_files_with_the_same_bytes_are_groups(folder: Path, threshold: int | None) -> None:
    report = search(folder, threshold=threshold)
    assert keys_of(report) == GROUPS
    assert [group.is_exact for group in report.groups] == [True, True]
    assert [group.labels for group in report.groups] == [("class-0",), ("class-1", "class-2")]
    assert report.count_within(0) == (2, 3)
    assert report.num_images == (15,)


@pytest.mark.parametrize("threshold", [None, 0])
def test_shards_have_the_same_groups_and_show_where_they_are(
    folder: Path, tmp_path: Path, threshold: int | None
) -> None:
    packed = tmp_path / "packed"
    shardio.pack(folder, packed, max_shard_samples=4)
    report = search(packed, threshold=threshold)
    assert sorted(map(sorted, keys_of(report))) == GROUPS
    contents = read_files(packed)
    for group in report.groups:
        for copy in group.copies:
            offset = copy.place.offset
            assert offset is not None
            expected = (folder / f"{copy.key}.jpg").read_bytes()
            assert contents[copy.place.shard][offset : offset + len(expected)] == expected
            assert copy.label == copy.key.partition("/")[0]


def test_bytes_are_compared_without_reading_shards(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    shardio.pack(folder, packed)
    numbers = list[int]()
    with open_source(str(packed)) as source:
        report = find_duplicates([source], threshold=None, start=numbers.append)
    assert numbers == [0]
    assert len(report.groups) == 2


def test_a_leak_between_a_directory_and_shards_is_found(folder: Path, tmp_path: Path) -> None:
    packed, validation = tmp_path / "packed", tmp_path / "validation"
    shardio.pack(folder, packed)
    for number in range(2):
        path = validation / "class-0" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / "class-2" / "name-003.jpg").read_bytes())
    (validation / "class-0" / "other.jpg").write_bytes(encode(77))
    report = search(packed, validation, threshold=None, is_between=True)
    assert keys_of(report) == [["class-2/name-003", "class-0/0", "class-0/1"]]
    assert report.count_between(0, 1) == (1, 1, 2)
    assert report.groups[0].labels == ("class-0", "class-2")
    assert len(search(packed, validation, threshold=None).groups) == 3


def write_variants(folder: Path) -> None:
    """Write two pictures, each as a JPEG and as a small PNG."""
    folder.mkdir()
    for seed in range(2):
        content = encode(seed, width=400, height=300)
        (folder / f"{seed}-large.jpg").write_bytes(content)
        with Image.open(io.BytesIO(content)) as image:
            image.resize((100, 75), Image.Resampling.BOX).save(folder / f"{seed}-small.png")


def test_pictures_that_look_alike_are_groups(tmp_path: Path) -> None:
    write_variants(tmp_path / "images")
    report = search(tmp_path / "images")
    assert keys_of(report) == [["0-large", "0-small"], ["1-large", "1-small"]]
    assert not any(group.is_exact for group in report.groups)
    assert all(group.copies[1].distance is not None and group.copies[1].distance <= 4 for group in report.groups)
    assert search(tmp_path / "images", threshold=None).groups == ()


def test_damaged_and_even_images_are_compared_by_their_bytes(tmp_path: Path) -> None:
    root = tmp_path / "images"
    root.mkdir()
    for name in ("a", "b"):
        (root / f"damaged-{name}.jpg").write_bytes(encode(1)[:500])
    for name, level in (("a", 0), ("b", 255)):
        Image.new("L", (40, 40), level).save(root / f"even-{name}.png")
    (root / "not-an-image.png").write_bytes(b"text")
    (root / "vanished.jpg").symlink_to(root / "nothing")
    report = search(root)
    assert keys_of(report) == [["damaged-a", "damaged-b"]]
    assert report.num_even == 2
    unreadable = {image.key: image.reason for image in report.unreadable}
    assert list(unreadable) == ["damaged-a.jpg", "damaged-b.jpg", "not-an-image.png", "vanished.jpg"]
    assert "No such file" in unreadable["vanished.jpg"]


def test_samples_without_images_are_not_compared(tmp_path: Path) -> None:
    image = encode(1)
    members = [("a.jpg", image), ("a.cls", b"0"), ("b.cls", b"0"), ("c.cls", b"1"), ("d.png", image), ("d.txt", b"x")]
    write_tar(tmp_path / "x.tar", members)
    report = search(tmp_path / "x.tar", threshold=None)
    assert keys_of(report) == [["a", "d"]]
    assert report.num_images == (2,)
    assert [copy.label for copy in report.groups[0].copies] == ["0", None]


def test_a_threshold_out_of_range_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="threshold"):
        search(folder, threshold=17)
