from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from shardio.errors import StaleIndexError
from shardio.shards import open_table
from tests.tars import write_tar


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    write_tar(folder / "a.tar", [(f"{i}.jpg", bytes([i]) * 100) for i in range(50)])
    return folder / "a.tar"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which is not there yet."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache"


def forbid_writing_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say what the system says to everybody but root."""
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: (Path(path) != folder or not mode & os.W_OK) and access(path, mode)
    )


def test_the_index_is_made_beside_the_tar(tar: Path, cache: Path) -> None:
    assert open_table(tar).indexes == (tar.with_name("a.tar.idx"),)
    assert sorted(path.name for path in tar.parent.iterdir()) == ["a.tar", "a.tar.idx"]
    assert not cache.exists()


def test_the_index_is_made_once(tar: Path) -> None:
    open_table(tar)
    index = tar.with_name("a.tar.idx")
    made = index.stat()
    open_table(tar)
    assert (index.stat().st_ino, index.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


def test_where_the_tar_lies_read_only_its_index_goes_to_the_cache(
    tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_writing_in(tar.parent, monkeypatch)
    table = open_table(tar)
    assert list(tar.parent.iterdir()) == [tar]
    assert cache / "shardio" in table.indexes[0].parents
    assert table.manifest.num_samples == 50
    made = table.indexes[0].stat().st_ino
    again = open_table(tar)
    assert (again.indexes, again.indexes[0].stat().st_ino) == (table.indexes, made)


def test_tars_of_one_name_have_indexes_of_their_own_in_the_cache(
    tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tar.parent.parent / "other" / "a.tar"
    other.parent.mkdir()
    write_tar(other, [("z.jpg", b"")])
    for path in tar, other:
        forbid_writing_in(path.parent, monkeypatch)
    sizes = [open_table(path).manifest.num_samples for path in (tar, other, tar)]
    assert sizes == [50, 1, 50]
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 2


def test_both_places_hold_the_same_index(tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = open_table(tar).indexes[0].read_bytes()
    tar.with_name("a.tar.idx").unlink()
    forbid_writing_in(tar.parent, monkeypatch)
    cached = open_table(tar).indexes[0]
    assert cache in cached.parents
    assert cached.read_bytes() == beside


def test_a_tar_that_changed_after_it_was_indexed_is_refused(tar: Path) -> None:
    open_table(tar)
    write_tar(tar, [("other.jpg", b"1")])
    with pytest.raises(StaleIndexError, match=r"delete .*a\.tar\.idx to have it made again"):
        open_table(tar)
    tar.with_name("a.tar.idx").unlink()
    assert open_table(tar).manifest.num_samples == 1


def test_processes_that_index_at_once_agree(tar: Path) -> None:
    program = "import sys; from shardio.shards import open_table; print(open_table(sys.argv[1]).manifest.digest)"
    write_tar(tar, [(f"{i}.jpg", bytes(100)) for i in range(3000)])
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tar)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    digests = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert digests == {open_table(tar).manifest.digest}
    assert sorted(path.name for path in tar.parent.iterdir()) == ["a.tar", "a.tar.idx"]
