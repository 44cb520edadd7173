from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import platformdirs
import pytest

from shardio.errors import StaleIndexError
from shardio.reading import SampleReader
from shardio.shards import open_table
from tests.files import files_of_at_most
from tests.raising import assert_raises
from tests.tars import change_metadata, index_of, paths_of, write_tar


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    write_tar(folder / "a.tar", [(f"{i}.jpg", bytes([i]) * 100) for i in range(50)])
    return folder / "a.tar"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which does not exist yet."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache"


def forbid_writing_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer as the operating system answers users other than root."""
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: (Path(path) != folder or not mode & os.W_OK) and access(path, mode)
    )


def test_the_index_is_created_once_next_to_the_tar(tar: Path, cache: Path) -> None:
    assert paths_of(open_table(tar).indexes) == [index_of(tar)]
    assert sorted(path.name for path in tar.parent.iterdir()) == ["a.tar", "a.tar.idx"]
    made = index_of(tar).stat()
    open_table(tar)
    assert (index_of(tar).stat().st_ino, index_of(tar).stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert not cache.exists()


def test_indexes_of_read_only_folders_are_in_the_cache(tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = open_table(tar).indexes[0].read_whole()
    index_of(tar).unlink()
    forbid_writing_in(tar.parent, monkeypatch)
    table = open_table(tar)
    assert list(tar.parent.iterdir()) == [tar]
    (index,) = paths_of(table.indexes)
    assert cache / "shardio" in index.parents
    assert (index.read_bytes(), table.manifest.num_samples) == (beside, 50)
    made = index.stat().st_ino
    again = open_table(tar)
    assert (again.indexes, index.stat().st_ino) == (table.indexes, made)


def test_tars_of_one_name_have_indexes_of_their_own(tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tar.parent.parent / "other" / "a.tar"
    other.parent.mkdir()
    write_tar(other, [("z.jpg", b"")])
    for path in tar, other:
        forbid_writing_in(path.parent, monkeypatch)
    sizes = [open_table(path).manifest.num_samples for path in (tar, other, tar)]
    assert (sizes, len([path for path in cache.rglob("*") if path.is_file()])) == ([50, 1, 50], 2)


def members(*numbers: int) -> list[tuple[str, bytes]]:
    return [(f"{number}.txt", b"%03d" % number) for number in numbers]


def read_all(tar: Path) -> dict[str, bytes]:
    table = open_table(tar)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["txt"])
    return {sample.key: sample.fields["txt"] for sample in samples}


@pytest.mark.parametrize("how", ["in place", "by rename, with the time of the old one"])
def test_a_tar_that_changed_only_in_the_middle_is_indexed_again(tar: Path, how: str) -> None:
    write_tar(tar, members(1, 2, 3, 4))
    assert read_all(tar) == {str(number): b"%03d" % number for number in (1, 2, 3, 4)}
    before = tar.stat()
    if how == "in place":
        write_tar(tar, members(1, 3, 2, 4))
    else:
        write_tar(tar.with_name("new"), members(1, 3, 2, 4))
        tar.with_name("new").replace(tar)
        os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tar.stat().st_size == before.st_size
    assert read_all(tar) == {str(number): b"%03d" % number for number in (1, 3, 2, 4)}


@pytest.mark.parametrize("order", [(1, 3, 2, 4), (1, 2, 5, 4)], ids=["swapped", "another"])
def test_a_change_that_the_file_system_hides_is_found_at_reading(tar: Path, order: tuple[int, ...]) -> None:
    write_tar(tar, [(f"{number}.txt", b"same") for number in (1, 2, 3, 4)])
    open_table(tar)
    before = tar.stat()
    write_tar(tar, [(f"{number}.txt", b"same") for number in order])
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    reader, index = SampleReader(open_table(tar)), 1 if order[1] == 3 else 2
    assert [sample.key for sample in reader.read(np.array([0, 3]), ["txt"])] == ["1", "4"]
    found = f"'txt' of sample {index + 1} is expected in .*a\\.tar at byte {1024 * index + 512}, but the tar holds "
    assert_raises(StaleIndexError, found + rf"{order[index]}\.txt there", reader.read, np.arange(4), ["txt"])


def rewrite_header(index: Path, **values: object) -> None:
    """Write an index again as earlier versions of shardio did: in format 1, without its tar's version."""

    def change(header: dict[str, object]) -> None:
        del header["version"], header["num_scattered"]
        header.update(values, format=1)

    index.write_bytes(change_metadata(index.read_bytes(), change))


@pytest.mark.parametrize("name", ["a.tar", "shard-000000.tar"])
def test_an_index_of_unknown_version_is_created_again(tar: Path, name: str) -> None:
    tar = tar.rename(tar.with_name(name))
    with tarfile.open(tar, "w") as file:
        for member, content in members(1, 2, 3, 4):
            info = tarfile.TarInfo(member)
            info.size, info.mtime = len(content), 1_700_000_000
            file.addfile(info, io.BytesIO(content))
    open_table(tar)
    index = index_of(tar)
    new = index.read_bytes()
    rewrite_header(index)
    assert read_all(tar.parent) == {str(number): b"%03d" % number for number in (1, 2, 3, 4)}
    assert index.read_bytes() == new


def test_an_index_that_records_the_tars_time_and_inode_stays_valid(tar: Path) -> None:
    open_table(tar)
    status = tar.stat()
    rewrite_header(index_of(tar), mtime_ns=status.st_mtime_ns, inode=status.st_ino)
    old = index_of(tar).read_bytes()
    assert (open_table(tar).manifest.num_samples, index_of(tar).read_bytes()) == (50, old)
    os.utime(tar, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert open_table(tar).manifest.num_samples == 50
    assert index_of(tar).read_bytes() != old


@pytest.mark.slow
def test_processes_that_index_a_changed_tar_at_once_agree(tar: Path) -> None:
    program = "import sys; from shardio.shards import open_table; print(open_table(sys.argv[1]).manifest.digest)"
    open_table(tar)
    write_tar(tar, [(f"{i}.jpg", bytes(100)) for i in range(3000)])
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tar)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    digests = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert digests == {open_table(tar).manifest.digest}
    assert sorted(path.name for path in tar.parent.iterdir()) == ["a.tar", "a.tar.idx"]


def test_an_index_on_a_full_disk_names_the_file_and_the_remedy(tar: Path) -> None:
    with (
        files_of_at_most(1000),
        pytest.raises(OSError, match=r"File too large: cannot write the index of .*a\.tar\. .*a\.tar\.idx'"),
    ):
        open_table(tar)
    assert (list(tar.parent.iterdir()), open_table(tar).manifest.num_samples) == ([tar], 50)


def test_a_cache_folder_that_is_a_file_is_named(tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_writing_in(tar.parent, monkeypatch)
    cache.touch()
    assert_raises(OSError, r"cannot write the index of .*a\.tar\. .* or set XDG_CACHE_HOME .*cache/", open_table, tar)
    assert list(tar.parent.iterdir()) == [tar]
