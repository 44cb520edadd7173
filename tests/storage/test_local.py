"""What only local files have: descriptors, links, and paths."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from shardio.files import write_whole
from shardio.storage import Location, ReplacedError, parse_location, walk_files
from shardio.storage.local import open_files
from tests.files import count_open_files


@pytest.fixture
def file(tmp_path: Path) -> Location:
    (tmp_path / "file").write_bytes(b"0123456789")
    return parse_location(tmp_path / "file")


@pytest.mark.parametrize("name", ["pread", "preadv"])
def test_short_reads_are_completed(file: Location, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read: Callable[..., object] = getattr(os, name)

    def read_few(descriptor: int, what: int | list[memoryview], start: int) -> object:
        few = min(what, 3) if isinstance(what, int) else [what[0][:3]]
        return read(descriptor, few, start)

    monkeypatch.setattr(os, name, read_few)
    buffer = bytearray(8)
    with closing(file.open()) as opened:
        opened.read_into([1], [memoryview(buffer)])
        assert opened.read(1, 9) == buffer == b"12345678"


def test_closing_frees_the_descriptor(file: Location) -> None:
    before = count_open_files()
    opened = file.open()
    assert count_open_files() == before + 1
    opened.close()
    opened.close()
    assert count_open_files() == before


def test_a_file_that_nothing_refers_to_frees_its_descriptor(file: Location) -> None:
    before = count_open_files()
    for _ in range(5):
        file.open()
    assert count_open_files() == before


def test_a_refused_directory_leaves_nothing_open(tmp_path: Path) -> None:
    before = count_open_files()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: .*test_a_refused"):
        parse_location(tmp_path).open()
    assert count_open_files() == before


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["pipe", "device"])
def test_what_is_not_a_regular_file_does_not_exist(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """Reading a pipe could block for ever."""
    make(tmp_path / "other")
    location = parse_location(tmp_path / "other")
    before = count_open_files()
    assert not location.exists()
    for access in location.open, location.stat:
        with pytest.raises(FileNotFoundError, match=r"Not a regular file: .*other"):
            access()
    assert count_open_files() == before


def close_descriptors() -> None:
    """Close the descriptors of all open files, as the budget does when others need them."""
    open_files()._shrink(0)


def test_a_file_is_opened_again_when_it_is_needed(file: Location) -> None:
    with closing(file.open()) as opened:
        close_descriptors()
        assert opened.read(2, 4) == b"23"


def test_a_descriptor_that_another_thread_closes_at_once_is_kept_until_the_file_is_known(
    file: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat = os.fstat

    def close_and_fstat(descriptor: int) -> os.stat_result:
        close_descriptors()
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", close_and_fstat)
    with closing(file.open()) as opened:
        assert opened.size == 10


def test_a_file_that_changed_before_it_is_opened_again_is_refused(file: Location) -> None:
    with closing(file.open()) as opened:
        Path(file.key).write_bytes(b"longer than before")
        close_descriptors()
        with pytest.raises(ReplacedError, match=r"file changed while it was in use: expected 10 bytes .* got 18 bytes"):
            opened.read(2, 4)


def test_a_location_is_read_by_another_process(file: Location) -> None:
    program = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).read_whole())"
    found = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(file), capture_output=True, check=True)
    assert found.stdout == b"0123456789"


def test_links_have_the_identity_of_their_file(file: Location) -> None:
    path = Path(file.key)
    (path.parent / "link").symlink_to(path.name)
    os.link(path, path.parent / "hard")
    for name in "link", "hard":
        assert (file.folder / name).stat() == file.stat()
    assert (file.folder / "link").resolve() == file.resolve()


def test_files_that_are_being_written_are_not_listed(tmp_path: Path) -> None:
    with write_whole(tmp_path / "file"):
        assert len(list(tmp_path.iterdir())) == 1
        assert parse_location(tmp_path).list() == []
    assert parse_location(tmp_path).list() == ["file"]


def test_a_link_that_leads_nowhere_or_in_a_circle_is_listed_as_a_file(tmp_path: Path) -> None:
    """It does not hide the rest of the directory."""
    for name in "loop", "missing":
        (tmp_path / name).symlink_to(name if name == "loop" else "nothing")
    (tmp_path / "file").touch()
    assert parse_location(tmp_path).list() == ["file", "loop", "missing"]
    assert [path.name for path in walk_files(tmp_path)] == ["file", "loop", "missing"]


# Paths


def test_a_relative_path_stays_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    names: list[str | Path] = ["a", "./b//c/", "../d", Path("e")]
    expected = ["folder/a", "folder/b/c", "d", "folder/e"]
    assert [str(parse_location(name)) for name in names] == [f"{tmp_path}/{name}" for name in expected]


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the path"):
        parse_location(name)


def test_a_directory_that_looks_like_a_url_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run:" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_location("run:/a").is_folder()


def test_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.tar")
    path.write_bytes(b"1")
    assert parse_location(path).read_whole() == b"1"
    assert parse_location(tmp_path).list() == [path.name]


# Walks


def test_a_walk_is_sorted_within_each_directory(tmp_path: Path) -> None:
    for name in ["b/2", "b/1", "a", "b.x", ".hidden", "b/.cache/z", "b/c/d/deep", "Z"]:
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
    with pytest.raises(OSError, match="inner/loop is a symbolic link to a directory that contains it"):
        list(walk_files(tmp_path))
