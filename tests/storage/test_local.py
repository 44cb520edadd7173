from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardio.sample import ByteRange
from shardio.storage import LocalFile, walk_files, write_whole
from tests.files import count_open_files


def test_each_range_of_a_file_reads_as_a_slice_of_it(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3
    (tmp_path / "file").write_bytes(content)
    file = LocalFile(tmp_path / "file")
    for start, stop in [(0, 0), (0, 768), (5, 6), (255, 700), (768, 768)]:
        assert file.read(ByteRange(start=start, stop=stop)) == content[start:stop]
    assert file.size == 768
    file.close()


def test_reading_behind_the_end_names_the_file_and_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    file = LocalFile(tmp_path / "file")
    with pytest.raises(EOFError, match=r"file ends at byte 10, but bytes 8 to 14 were asked for"):
        file.read(ByteRange(start=8, stop=14))
    file.close()


def test_short_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    file, pread = LocalFile(tmp_path / "file"), os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, start: pread(descriptor, min(size, 3), start))
    assert file.read(ByteRange(start=1, stop=9)) == b"12345678"
    file.close()


def test_closing_again_does_nothing_and_frees_the_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = count_open_files()
    file = LocalFile(tmp_path / "file")
    file.close()
    file.close()
    assert count_open_files() == before


def test_a_file_that_is_no_longer_referred_to_frees_its_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = count_open_files()
    for _ in range(5):
        LocalFile(tmp_path / "file")
    assert count_open_files() == before


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        LocalFile(tmp_path / "nothing")


def test_a_file_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with write_whole(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        hidden = list(tmp_path.iterdir())
        assert [name.name.startswith(".") for name in hidden] == [True]
    assert path.read_bytes() == b"half"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail() -> None:
        with write_whole(path) as file:
            file.write(b"new")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"old"}


def test_a_written_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old and long")
    with write_whole(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_two_writers_of_one_path_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with write_whole(path) as first, write_whole(path) as second:
        first.write(b"first" * 1000)
        second.write(b"second")
    assert path.read_bytes() in (b"first" * 1000, b"second")
    assert list(tmp_path.iterdir()) == [path]


def test_a_walk_is_sorted_and_skips_what_is_hidden(tmp_path: Path) -> None:
    for name in ["b/2", "b/1", "a", "b.x", ".hidden", ".git/config", "b/.cache/z", "b/c/d/deep", "Z"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    found = [str(path.relative_to(tmp_path)) for path in walk_files(tmp_path)]
    assert found == ["Z", "a", "b/1", "b/2", "b/c/d/deep", "b.x"]


def test_a_walk_follows_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "other").symlink_to(tmp_path / "elsewhere" / "file")
    assert list(walk_files(root)) == [root / "linked" / "file", root / "other"]


def test_a_link_to_a_directory_that_holds_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "loop").symlink_to(tmp_path)
    with pytest.raises(OSError, match="inner/loop is a symbolic link to a directory that holds it"):
        list(walk_files(tmp_path))
