"""Folders of tars that would lose or repeat samples are refused, or a warning says so."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio.errors import FormatError
from shardio.reading import SampleReader
from shardio.shards import Manifest, open_table, write_manifest
from shardio.storage import parse_location
from tests.sources import encode
from tests.tars import write_tar


def test_gaps_in_the_numbers_of_tars_are_named_once(tars: Path) -> None:
    (tars / "x-000002.tar").unlink()
    for i in range(3, 9):
        write_tar(tars / f"x-{2 * i:06d}.tar", [(f"{i}.txt", b"")])
    with pytest.warns(RuntimeWarning) as warned:
        open_table(tars)
    (message,) = [str(warning.message) for warning in warned]
    lost = [2, 4, 5, 7, 9, 11, 13, 15]
    assert f"{len(lost)} missing ({', '.join(f'x-{i:06d}.tar' for i in lost)}). Check" in message


@pytest.mark.parametrize(
    "names",
    [
        ["a", "b", "d"],
        ["x-3", "x-4", "x-5"],
        ["x-08", "x-9", "x-10"],
        ["photo-1234", "photo-99887", "photo-777"],
        ["2024-01-30", "2024-02-02", "2024-02-05"],
        ["cats-0", "cats-1", "dogs-0", "dogs-1"],
        ["x-00000-of-00003", "x-00001-of-00003", "x-00002-of-00003"],
    ],
)
def test_names_without_gaps_give_no_warning(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write_tar(tmp_path / f"{name}.tar", [(f"{name}.txt", b"")])
    assert len(open_table(tmp_path).tars) == len(names)


def test_files_that_macos_added_are_not_tars(tmp_path: Path) -> None:
    files = [tmp_path / f"._{number}.tar" for number in (0, 1, 3)]
    for file in files:
        file.write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"holds neither shardio\.json nor any \*\.tar"):
        open_table(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{re.escape(str(files[0]))} is a file that macOS added, not a tar"):
        open_table(files)
    write_tar(tmp_path / "a.tar", [("0.txt", b"")])
    with pytest.warns(RuntimeWarning) as warned:
        open_table(tmp_path)
    assert len(warned) == 1
    assert "0 in tars, and 3 next to them" in str(warned[0].message)


def test_files_that_macos_added_are_skipped_and_counted_once(tmp_path: Path) -> None:
    apple_double = bytes.fromhex("0005160700020000") + bytes(100)
    for i in range(2):
        members = [(f"cats/{prefix}{i}-{j}.{field}", b"%d" % j) for j in range(3) for field in ("jpg", "cls")
                   for prefix in ("._", "")]  # fmt: skip
        write_tar(tmp_path / f"{i}.tar", [("cats/.DS_Store", b"\0\0\0\1Bud1"), ("._cats", apple_double), *members])
        (tmp_path / f"._{i}.tar").write_bytes(apple_double)
    with pytest.warns(RuntimeWarning) as warned:
        table = open_table(tmp_path)
    assert [str(warning.message) for warning in warned] == [
        "skipped files that macOS added (._* and .DS_Store): 16 in tars, and 2 next to them"
    ]
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["jpg", "cls"])
    assert [(sample.key, dict(sample.fields)) for sample in samples] == [
        (f"cats/{i}-{j}", {"jpg": b"%d" % j, "cls": b"%d" % j}) for i in range(2) for j in range(3)
    ]
    assert table.manifest.fields == ("cls", "jpg")


def make_link(tar: Path) -> Path:
    (tar.parent / "link.tar").symlink_to(tar.name)
    return tar.parent / "link.tar"


def make_hard_link(tar: Path) -> Path:
    os.link(tar, tar.parent / "link.tar")
    return tar.parent / "link.tar"


def take_itself(tar: Path) -> Path:
    return tar


def go_round(tar: Path) -> Path:
    return tar.parent / ".." / tar.parent.name / tar.name


@pytest.mark.parametrize("name_again", [take_itself, go_round, make_link, make_hard_link])
def test_a_tar_that_is_named_twice_is_refused(tars: Path, name_again: Callable[[Path], Path]) -> None:
    tar = tars / "x-000001.tar"
    with pytest.raises(
        FormatError, match=r"x-000001\.tar.* so each of its samples would be delivered twice: name it once"
    ):
        open_table([tar, tars / "x-000002.tar", name_again(tar)])


def test_copies_of_a_tar_give_a_warning(tars: Path) -> None:
    shutil.copy(tars / "x-000001.tar", tars / "copy.tar")
    with pytest.warns(RuntimeWarning, match=r"equal contents: .*copy\.tar, .*x-000001\.tar\. Each .* 2 times"):
        assert open_table(tars).manifest.num_samples == 12


def test_empty_tars_are_not_copies(tars: Path) -> None:
    for name in "a", "b":
        write_tar(tars / f"{name}.tar", [])
    assert len(open_table(tars).tars) == 6


def test_a_manifest_that_lists_a_shard_twice_is_refused(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    shards = open_table(packed).manifest.shards
    write_manifest(parse_location(copy / "shardio.json"), Manifest(shards=(*shards, shards[1])))
    with pytest.raises(FormatError, match=r"shardio\.json is damaged: it lists shard-000001\.tar twice"):
        open_table(copy)


@pytest.mark.parametrize("name", ["y.tar.gz", "y.tgz", "y.tar.zst", "Y.TAR.GZ"])
@pytest.mark.parametrize("is_among_tars", [True, False])
def test_compressed_tars_are_not_silently_left_out(tars: Path, name: str, is_among_tars: bool) -> None:
    folder = tars if is_among_tars else tars.parent
    (folder / name).write_bytes(b"compressed")
    with pytest.raises(FormatError, match=rf"holds {re.escape(name)}, a compressed tar.*: decompress them"):
        open_table(folder)
    assert len(open_table(sorted(tars.glob("*.tar"))).tars) == 4


def test_the_tars_of_several_splits_are_not_read_as_one_dataset(tmp_path: Path) -> None:
    """Neither by a dataset nor by a command; the pattern in the error reads one split."""
    for split, count in (("train", 3), ("val", 1)):
        for number in range(count):
            (tmp_path / "tars").mkdir(exist_ok=True)
            write_tar(tmp_path / "tars" / f"x-{split}-{number:03d}.tar", [(f"{split}{number}.jpg", encode(number))])
    with pytest.raises(FormatError, match=r"train: 3 tars, x-train-000.tar to x-train-002.tar\n  val: 1") as caught:
        open_table(tmp_path / "tars")
    pattern = str(caught.value).split()[-1]
    assert pattern == str(tmp_path / "tars" / "x-train-{000..002}.tar")
    assert [key for (key,) in shardio.ShardDataset(pattern, fields=("key",))] == ["train0", "train1", "train2"]
    tars = sorted((tmp_path / "tars").glob("*.tar"))
    assert len(open_table(tars).tars) == 4
    with pytest.raises(FormatError, match="several splits"):
        shardio.open(tmp_path / "tars")


def test_names_that_say_how_many_files_there_are_have_gaps_at_the_end(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"x-{number:05d}-of-00005.tar", [(f"{number}.jpg", encode(number))])
    with pytest.warns(RuntimeWarning, match=r"2 missing \(x-00003-of-00005\.tar, x-00004-of-00005\.tar\)"):
        open_table(tmp_path)
