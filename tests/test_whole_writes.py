"""Files are written whole or not at all, and are on disk before they have their names."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardio.files import create_whole, find_target, remove_unfinished, write_whole
from tests.files import files_of_at_most, read_files


def test_a_file_does_not_appear_and_replaces_none_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for old, new in ((None, b"old and long"), (b"old and long", b"new")):
        with write_whole(path) as file:
            file.write(new)
            file.flush()
            assert (path.read_bytes() if path.exists() else None) == old
            assert all(each.name.startswith(".") for each in tmp_path.iterdir() if each != path)
        assert read_files(tmp_path) == {"file": new}


@pytest.mark.parametrize("old", [{}, {"file": b"old"}])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, old: dict[str, bytes], error: type[BaseException]
) -> None:
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error), write_whole(tmp_path / "file") as file:  # noqa: PT012  # The write fails in between.
        file.write(b"new")
        raise error
    assert read_files(tmp_path) == old


def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    named = pytest.raises(OSError, match=f"'{tmp_path}/file'")
    with files_of_at_most(1000), named, write_whole(tmp_path / "file") as file:
        file.write(bytes(100_000))
    assert read_files(tmp_path) == {"file": b"old"}


def test_two_writers_of_one_path_do_not_mix(tmp_path: Path) -> None:
    with write_whole(tmp_path / "file") as first, write_whole(tmp_path / "file") as second:
        first.write(b"first" * 1000)
        second.write(b"second")
    assert read_files(tmp_path) == {"file": b"first" * 1000}


def test_a_file_is_synced_before_it_is_renamed_and_its_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power keeps the old file or the whole new one."""
    steps, fsync, replace = list[tuple[str, str, int]](), os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        steps.append(("sync", "directory" if path == tmp_path else "file", path.stat().st_size))
        fsync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        steps.append(("rename", target.name, path.stat().st_size))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    with write_whole(tmp_path / "file") as file:
        file.write(bytes(100))
    assert steps[:2] == [("sync", "file", 100), ("rename", "file", 100)]
    assert [step[:2] for step in steps[2:]] == [("sync", "directory")]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_directories_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An error of the disk is still raised."""
    fsync = os.fsync

    def refuse_directories(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    expected = pytest.raises(OSError, match="Input/output error") if number == errno.EIO else nullcontext()
    with expected, write_whole(tmp_path / "file") as file:
        file.write(b"1")
    assert read_files(tmp_path) == {"file": b"1"}


def test_only_unfinished_files_are_removed(tmp_path: Path) -> None:
    kept = [".notes.partial", ".a.0123abcg.partial", "b.0123abcd.partial", "..0123abcd.partial", "c"]
    for name in kept:
        (tmp_path / name).touch()
        assert find_target(name) is None
    with write_whole(tmp_path / "a"), write_whole(tmp_path / "b"):
        names = {find_target(path.name): path.name for path in tmp_path.iterdir()}
        assert set(names) == {None, "a", "b"}
        remove_unfinished(tmp_path, ["a"])
        assert {path.name for path in tmp_path.iterdir()} == {*kept, names["b"]}
        (tmp_path / names["a"]).touch()
        remove_unfinished(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {*kept}
        for name in "a", "b":
            (tmp_path / names[name]).touch()  # So that the writes can finish.


@pytest.mark.parametrize(("mode", "expected"), [(None, 0o600), (0o644, 0o644), (0o600, 0o600)])
def test_a_mode_holds_whatever_the_umask(tmp_path: Path, mode: int | None, expected: int) -> None:
    old = os.umask(0o077)
    try:
        with write_whole(tmp_path / "file", mode=mode) as file:
            file.write(b"1")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == expected


def test_a_file_is_created_whole_and_only_if_there_is_none(tmp_path: Path) -> None:
    assert create_whole(tmp_path / "a", b"first")
    assert not create_whole(tmp_path / "a", b"second")
    assert read_files(tmp_path) == {"a": b"first"}
    with pytest.raises(FileNotFoundError):
        create_whole(tmp_path / "missing" / "a", b"")
