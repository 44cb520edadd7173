"""Destinations that are accepted or refused, and sources that change during a pack."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import shardio
from shardio.errors import PackError
from shardio.packing import packer
from shardio.packing.packer import scan_source
from shardio.sample import Sample
from shardio.shards import ShardEntry, write_shard
from shardio.storage import Location
from tests.files import read_files
from tests.packing.packs import Change, Interrupt, pack, read_packed, write_files
from tests.raising import assert_raises
from tests.sources import encode, write_images


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_images(tmp_path / "in", classes=2, per_class=2)
    return tmp_path / "in"


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(source: Path, out: Path) -> None:
    before = snapshot(source.parent)
    assert_raises(PackError, re.escape(str(out)), shardio.pack, source, out)
    assert snapshot(source.parent) == before


@pytest.mark.parametrize("name", ["out", "a/b/c/out", "in-other", "i"])
def test_a_missing_directory_is_created(source: Path, name: str) -> None:
    assert shardio.pack(source, source.parent / name).num_samples == 4


@pytest.mark.parametrize("name", ["out", "out/thesis.tex", "out/.git/", "out/shard-000000.tar", "link"])
def test_a_destination_that_is_not_empty_is_refused(source: Path, name: str) -> None:
    if name == "link":
        (source.parent / "out").symlink_to(source.parent / "nothing")
    else:
        write_files(source.parent, {f"{name}x" if name.endswith("/") else name: b"precious"})
    assert_refused(source, source.parent / "out")


@pytest.mark.parametrize(
    "name", [".", "in", "in/out", "in/class-0", "in/class-0/a/b", "in/../in/x", "link/out", "file/out", "packed"]
)
def test_a_destination_that_overlaps_the_source_or_a_file_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "file").write_bytes(b"precious")
    shardio.pack(source, tmp_path / "packed")
    assert_refused(source, tmp_path / name)


def test_a_packed_directory_holds_only_its_files_and_may_be_moved(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    digest = shardio.pack(source, tmp_path / "out", max_shard_samples=2).digest
    shards = {f"shard-00000{number}.tar{suffix}" for number in range(2) for suffix in ("", ".idx")}
    assert read_files(tmp_path / "out").keys() == shards | {"shardio.json"}
    shutil.move(tmp_path / "out", tmp_path / "moved")
    shutil.rmtree(source)
    assert shardio.ShardDataset(tmp_path / "moved").table.manifest.digest == digest


def test_a_removed_destination_is_no_dataset(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = list[Location]()

    def write_and_remove(tar: Location, samples: Iterable[Sample]) -> tuple[ShardEntry, tuple[str, ...]]:
        written = write_shard(tar, samples)
        finished.append(tar)
        if len(finished) == 3:
            shutil.rmtree(tmp_path / "out")
            (tmp_path / "out").mkdir()
            write_shard(tar, [])
        return written

    monkeypatch.setattr("shardio.packing.executors.write_shard", write_and_remove)
    message = r"out was removed during the pack: delete any directory with that name"
    options: dict[str, Any] = {"max_shard_samples": 1, "num_workers": 1}
    assert_raises(PackError, message, shardio.pack, source, tmp_path / "out", **options)
    assert len(finished) == 4
    assert not (tmp_path / "out" / "shardio.json").exists()


def test_only_one_process_writes_at_a_time_and_its_lock_is_removed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def assert_excluded() -> None:
        assert_raises(PackError, r"another process is writing to .*out", shardio.pack, source, out)

    with FileLock(out / ".shardio-pack.lock"):
        assert_excluded()
    pack(source, out, Change(assert_excluded))
    assert sorted(read_files(out)) == ["shard-000000.tar", "shard-000000.tar.idx", "shardio.json"]


def test_an_empty_name_is_not_the_working_directory(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    before = snapshot(source.parent)
    for names in ("", "out"), ("in", ""):
        assert_raises(ValueError, "the path is empty", shardio.pack, *names)
    assert snapshot(source.parent) == before


@pytest.mark.parametrize("first", [0, 1], ids=["the smaller one scans", "the larger one scans"])
def test_a_pack_that_ends_during_a_scan_is_kept(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    for number in range(2):
        write_images(tmp_path / str(number), classes=1, per_class=2 + number)

    def pack_after_the_scan(*arguments: Any) -> Any:
        scan = scan_source(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(packer, "scan_source", scan_source)
            assert shardio.pack(tmp_path / str(1 - first), out).num_samples == 3 - first
        return scan

    monkeypatch.setattr(packer, "scan_source", pack_after_the_scan)
    message = re.escape(f"{out} already holds a packed dataset")
    assert_raises(PackError, message, shardio.pack, tmp_path / str(first), out)
    assert (len(shardio.ShardDataset(out)), shardio.verify(out)) == (3 - first, [])


def overwrite_with_the_same_size(path: Path) -> None:
    """Change the content and, by a nanosecond, the modification time."""
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content[:-9] + bytes(9))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def append(path: Path) -> None:
    """Append a byte, but keep the modification time."""
    status = path.stat()
    path.write_bytes(path.read_bytes() + b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[Callable[[Path], object], str] = {
    lambda path: path.write_text("no longer an image."): "changed from {} to 19 bytes",
    overwrite_with_the_same_size: "changed: its modification time differs by",
    append: "changed from {} to ",
    lambda path: os.truncate(path, 100): "changed from {} to 100 bytes",
    Path.unlink: "is missing",
    make_directory: "",  # Reading the first directory fails, and the sizes of the other directories differ.
}


def change_files(change: Callable[[Path], object], paths: Iterable[Path]) -> Change:
    return Change(lambda: [change(path) for path in paths])


IN_ORDER: dict[str, Any] = {"max_shard_samples": 2, "shuffle_seed": None}
SKIP: dict[str, Any] = {"on_changed": "skip"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with the subdirectory ``in``, which has six images of one class, and a JSON file for the third."""
    write_images(tmp_path / "in", classes=1, per_class=6)
    (tmp_path / "in" / "class-0" / "name-002.json").write_text('{"a": 1}'.ljust(200))
    return tmp_path


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_named_or_their_samples_left_out(root: Path, change: Callable[[Path], object]) -> None:
    before = {path.name: path.read_bytes() for path in (root / "in" / "class-0").iterdir()}
    names = ["name-005.jpg", "name-001.jpg", "name-002.json"]
    for out in ("raise", "skip"):
        source = Path(shutil.copytree(root / "in", root / f"in-{out}", copy_function=shutil.copy2))
        paths = [source / "class-0" / name for name in names]
        changing = change_files(change, paths)
        if out == "raise":
            caught = str(assert_raises(PackError, None, pack, source, root / out, changing, **IN_ORDER))
            for path in paths:
                assert f"{path} {CHANGES[change].format(len(before[path.name]))}" in caught
            assert "name-003.jpg" not in caught
            assert "--on-changed skip (on_changed='skip')" in caught
            assert not (root / out / "shardio.json").exists()
        else:
            result = pack(source, root / out, changing, **SKIP, **IN_ORDER)
            assert {key: sample["jpg"] for key, sample in read_packed(root / out).items()} == {
                f"class-0/name-{i:03d}": before[f"name-{i:03d}.jpg"] for i in (0, 3, 4)
            }
            assert [problem.path for problem in result.changed] == sorted(paths)


def test_a_shard_without_samples_is_not_written(root: Path) -> None:
    paths = [root / "in" / "class-0" / f"name-{i:03d}.jpg" for i in (2, 3)]
    result = pack(root / "in", root / "out", change_files(Path.unlink, paths), **SKIP, **IN_ORDER)
    assert [shard.name for shard in result.manifest.shards] == ["shard-000000.tar", "shard-000002.tar"]
    expected = {f"{shard.name}{suffix}" for shard in result.manifest.shards for suffix in ("", ".idx")}
    assert set(read_files(root / "out")) == {*expected, "shardio.json"}


def test_changed_files_are_sorted_by_name_and_not_all_may_change(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=9)
    paths = sorted((tmp_path / "in" / "class-0").iterdir())
    result = pack(tmp_path / "in", tmp_path / "out", change_files(Path.unlink, paths[:8]), **SKIP)
    assert [problem.path for problem in result.changed] == paths[:8]
    last, message = Change(paths[8].unlink), r"all samples of .*in changed"
    assert_raises(PackError, message, pack, tmp_path / "in", tmp_path / "none", last, **SKIP)


def test_a_resumed_pack_includes_samples_whose_files_are_back(root: Path) -> None:
    moved = root / "in" / "class-0" / "name-001.jpg"

    class MoveFileAndInterrupt(Interrupt):
        def start(self, total: int, num_bytes: int | None = None) -> None:
            moved.rename(root / moved.name)

    moving = MoveFileAndInterrupt(2)
    assert_raises(KeyboardInterrupt, None, pack, root / "in", root / "out", moving, **SKIP, **IN_ORDER)
    assert (root / "out" / "shard-000000.tar").exists()
    (root / "name-001.jpg").rename(moved)
    for out in ("out", "uninterrupted"):
        assert pack(root / "in", root / out, **IN_ORDER).manifest.num_samples == 6
    assert read_files(root / "out") == read_files(root / "uninterrupted")


def test_an_error_names_twenty_files_and_counts_the_rest(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=30, width=8, height=8)
    paths = [tmp_path / "in" / "class-0" / f"name-{i:03d}.jpg" for i in range(1, 30)]
    changing = change_files(next(iter(CHANGES)), paths)
    caught = assert_raises(PackError, "and 9 more", pack, tmp_path / "in", tmp_path / "out", changing, **IN_ORDER)
    assert str(caught).count(" to 19 bytes") == 20


def test_a_file_that_changes_while_it_is_read_is_detected(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fstat = os.fstat

    def write_before_the_check(descriptor: int) -> os.stat_result:
        path = Path(f"/dev/fd/{descriptor}").resolve()
        if path.name == "name-003.jpg":
            path.write_bytes(encode(77))
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", write_before_the_check)
    assert_raises(shardio.PackError, r"name-003\.jpg changed", shardio.pack, root / "in", root / "out")
