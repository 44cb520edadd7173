"""Destinations: which are accepted, which are refused, and what a pack leaves there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from filelock import FileLock

import shardio
from shardio.errors import FormatError, PackError
from shardio.files import find_target
from shardio.packing import PackSettings, RunOptions, pack_source
from shardio.progress import WorkProgress
from shardio.sample import Sample
from shardio.shards import ShardEntry, write_shard
from shardio.storage import Location, read_and_stat
from tests.files import read_files
from tests.sources import encode, write_images


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_images(tmp_path / "in", classes=2, per_class=2)
    return tmp_path / "in"


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return the content of everything below a folder, by relative path; None for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(source: Path, out: Path) -> None:
    """Assert that a pack is refused with an error that names the destination, and that it changes nothing."""
    before = snapshot(source.parent)
    with pytest.raises(PackError, match=re.escape(str(out))):
        shardio.pack(source, out)
    assert snapshot(source.parent) == before


@pytest.mark.parametrize("name", ["out", "a/b/c/out", "in-other", "i"])
def test_a_missing_directory_is_created(source: Path, name: str) -> None:
    assert shardio.pack(source, source.parent / name).num_samples == 4


def test_an_empty_directory_is_accepted(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert shardio.pack(source, tmp_path / "out").num_samples == 4


def make_file(out: Path) -> None:
    out.write_bytes(b"precious")


def make_nonempty(out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_bytes(b"precious")


def make_hidden_folder(out: Path) -> None:
    out.mkdir()
    (out / ".git").mkdir()


def make_foreign_tars(out: Path) -> None:
    out.mkdir()
    (out / "shard-000000.tar").write_bytes(b"precious")


def make_dangling_link(out: Path) -> None:
    out.symlink_to(out.parent / "nothing")


@pytest.mark.parametrize("make", [make_file, make_nonempty, make_hidden_folder, make_foreign_tars, make_dangling_link])
def test_a_destination_that_is_not_empty_is_refused(source: Path, make: Callable[[Path], None]) -> None:
    out = source.parent / "out"
    make(out)
    assert_refused(source, out)


def test_a_destination_below_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    assert_refused(source, tmp_path / "file" / "out")


def test_a_packed_directory_is_refused(source: Path, tmp_path: Path) -> None:
    shardio.pack(source, tmp_path / "out")
    assert_refused(source, tmp_path / "out")


@pytest.mark.parametrize("name", [".", "in", "in/out", "in/class-0", "in/class-0/a/b", "in/../in/x"])
def test_a_destination_that_overlaps_the_source_is_refused(source: Path, name: str) -> None:
    assert_refused(source, source.parent / name)


def test_a_destination_that_overlaps_the_source_through_a_link_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    assert_refused(source, tmp_path / "link" / "out")


def test_a_finished_pack_leaves_only_shards_indexes_and_the_manifest(source: Path, tmp_path: Path) -> None:
    shardio.pack(source, tmp_path / "out", max_shard_samples=2)
    names = ["shard-000000.tar", "shard-000000.tar.idx", "shard-000001.tar", "shard-000001.tar.idx", "shardio.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_a_packed_directory_may_be_moved(source: Path, tmp_path: Path) -> None:
    digest = shardio.pack(source, tmp_path / "out").digest
    shutil.move(tmp_path / "out", tmp_path / "moved")
    shutil.rmtree(source)
    assert shardio.ShardDataset(tmp_path / "moved").table.manifest.digest == digest


def test_an_unfinished_pack_of_different_images_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_the_last_file(path: str, num_bytes: int) -> tuple[bytes, os.stat_result]:
        if path.endswith("class-1/name-001.jpg"):
            raise OSError(5, "Input/output error", path)
        return read_and_stat(path, num_bytes)

    monkeypatch.setattr("shardio.packing.sources.files.read_and_stat", fail_at_the_last_file)
    with pytest.raises(PackError, match="Input/output error"):
        shardio.pack(source, tmp_path / "out", max_shard_samples=1)
    monkeypatch.undo()
    (source / "class-0" / "new.jpg").write_bytes(encode(99))
    with pytest.raises(PackError, match="unfinished pack of different images or with different settings: delete"):
        shardio.pack(source, tmp_path / "out", max_shard_samples=1)
    (source / "class-0" / "new.jpg").unlink()
    assert shardio.pack(source, tmp_path / "out", max_shard_samples=1).num_samples == 4


def test_a_destination_that_is_removed_during_the_pack_does_not_become_a_dataset(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first shards are lost."""
    finished = list[Location]()

    def write_and_remove(tar: Location, samples: Iterable[Sample]) -> tuple[ShardEntry, tuple[str, ...]]:
        written = write_shard(tar, samples)
        finished.append(tar)
        if len(finished) == 3:
            shutil.rmtree(tmp_path / "out")
            (tmp_path / "out").mkdir()
            write_shard(tar, [])
        return written

    monkeypatch.setattr("shardio.packing.shard_job.write_shard", write_and_remove)
    with pytest.raises(PackError, match=r"out was removed during the pack: delete the directory of that name"):
        shardio.pack(source, tmp_path / "out", max_shard_samples=1, num_workers=1)
    assert len(finished) == 4
    assert not (tmp_path / "out" / "shardio.json").exists()


def test_an_unfinished_pack_is_not_read_as_a_dataset(tmp_path: Path) -> None:
    write_images(tmp_path / "in")
    shardio.pack(tmp_path / "in", tmp_path / "out", max_shard_samples=5)
    (tmp_path / "out" / "shardio.json").unlink()
    (tmp_path / "out" / ".shardio-pack.partial").write_text("a plan's digest")
    with pytest.raises(FormatError, match="unfinished pack"):
        shardio.ShardDataset(tmp_path / "out")


def test_a_locked_destination_is_refused_and_the_lock_is_removed(tmp_path: Path) -> None:
    write_images(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out" / ".shardio-pack.lock"),
        pytest.raises(PackError, match=r"another process is writing to .*out"),
    ):
        shardio.pack(tmp_path / "in", tmp_path / "out")
    shardio.pack(tmp_path / "in", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "shard-000000.tar",
        "shard-000000.tar.idx",
        "shardio.json",
    ]


class Taking(WorkProgress):
    """Moves a file away after the scan."""

    def __init__(self, path: Path, to: Path) -> None:
        self._path, self._to = path, to

    def start(self, total: int, num_bytes: int | None = None) -> None:
        self._path.rename(self._to)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_after_an_error_all_workers_stop_and_leave_only_whole_files(tmp_path: Path, num_workers: int) -> None:
    write_images(tmp_path / "in", classes=2, per_class=100)
    path, elsewhere = tmp_path / "in" / "class-1" / "name-050.jpg", tmp_path / "elsewhere.jpg"
    settings = PackSettings(max_shard_size=1 << 30, max_shard_samples=10)
    with pytest.raises(PackError, match=r"class-1/name-050\.jpg is missing"):
        pack_source(
            tmp_path / "in",
            tmp_path / "out",
            settings,
            run=RunOptions(num_workers=num_workers),
            progress=Taking(path, elsewhere),
        )
    assert not [each.name for each in (tmp_path / "out").iterdir() if find_target(each.name)]
    elsewhere.rename(path)
    result = pack_source(tmp_path / "in", tmp_path / "out", settings, run=RunOptions(num_workers=num_workers))
    assert result.manifest.num_samples == 200
    pack_source(tmp_path / "in", tmp_path / "whole", settings)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


@pytest.mark.parametrize("names", [("", "out"), ("in", "")])
def test_an_empty_name_is_not_the_working_directory(
    source: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    monkeypatch.chdir(source.parent)
    before = snapshot(source.parent)
    with pytest.raises(ValueError, match="the path is empty"):
        shardio.pack(*names)
    assert snapshot(source.parent) == before
