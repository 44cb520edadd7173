"""Files are written whole, locked by one process, and trusted only if no other user could have written them."""

from __future__ import annotations

import errno
import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardio.files import WorkLock, create_whole, find_target, remove_unfinished, write_whole
from tests.files import files_of_at_most, mode_of, read_files, suspended_holder, umask
from tests.raising import assert_raises


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_no_file(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), write_whole(tmp_path / "file") as file:  # noqa: PT012  # The write must fail midway.
        file.write(b"new")
        raise error
    assert read_files(tmp_path) == {}


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    assert_raises(FileNotFoundError, None, create_whole, tmp_path / "missing" / "a", b"")


def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    named = pytest.raises(OSError, match=f"'{tmp_path}/file'")
    with files_of_at_most(1000), named, write_whole(tmp_path / "file") as file:
        file.write(bytes(100_000))
    assert read_files(tmp_path) == {"file": b"old"}


def test_a_file_is_synced_before_its_renaming_its_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order, the old file or the whole new one remains if the machine loses power."""
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
def test_a_file_system_may_not_sync_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
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
            (tmp_path / names[name]).touch()  # The pending writes need their temporary files.


def test_a_suspended_holder_is_named_and_gone_around(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = WorkLock(tmp_path / "lock", 0.2)
    with suspended_holder(tmp_path / "lock") as process, caplog.at_level(logging.WARNING, "shardio"):
        for _ in range(3):
            with lock.held():
                pass
        (message,) = caplog.messages
        assert f"process {process.pid} on" in message
        assert str(tmp_path / "lock") in message
        process.send_signal(signal.SIGCONT)
        assert process.communicate()[0] == "released\n"
    caplog.clear()
    with lock.held():
        assert not caplog.messages
        with WorkLock(tmp_path / "lock", 0).held():
            assert f"process {os.getpid()} on" in caplog.messages[0], "the lock can be acquired again"


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    lock, inside, found = WorkLock(tmp_path / "lock", 60), [0], list[int]()

    def work(_: int) -> None:
        with lock.held():
            inside[0] += 1
            found.append(inside[0])
            inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(20)))
    assert found == [1] * 20


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_a_mode_holds_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        with WorkLock(tmp_path / "lock", 1, 0o660).held():
            assert mode_of(tmp_path / "lock") == 0o660
        with write_whole(tmp_path / "file"):
            pass
        assert mode_of(tmp_path / "file") == 0o666 & ~mask


def test_no_file_is_needed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"content")
    (tmp_path / "link").symlink_to(target)
    for path in (tmp_path / "no folder" / "lock", tmp_path / "link"):
        with WorkLock(path, 1).held():
            pass
    assert target.read_bytes() == b"content", "links are not followed"
