"""Copies that other users may have written are not believed, unless the cache is shared with them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import typer

from shardio.cli.options import read_remote_arguments
from shardio.errors import StoreError
from shardio.storage import Location, make_access, parse_location
from shardio.storage.copies import BLOCK, COPY_SUFFIX, CachedCopy, name_copy
from tests.files import OTHER_USER, as_root, mode_of, umask
from tests.raising import assert_raises
from tests.storage.conftest import in_memory, put, write_copy

CONTENT, PLANTED = b"original" * BLOCK, b"planted!" * BLOCK


@pytest.fixture
def location() -> Location:
    return put(in_memory(), CONTENT)


def read(location: Location, cache: Path, *, shared: bool = False) -> bytes:
    with closing(parse_location(str(location), make_access(cache=cache, cache_shared=shared)).open()) as file:
        return file.read(0, file.size)


def plant(location: Location, cache: Path) -> Path:
    cache.mkdir(exist_ok=True)
    path = cache / name_copy(location.stat())
    write_copy(CachedCopy(path=str(path), size=len(PLANTED)), 0, PLANTED)
    return path


def link_to(path: Path) -> None:
    path.rename(path.with_suffix(".target"))
    path.symlink_to(path.with_suffix(".target"))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    "make_doubtful",
    [
        pytest.param(lambda path: os.chown(path, OTHER_USER, -1), marks=as_root, id="another's"),
        lambda path: path.chmod(0o666),
        link_to,
        make_fifo,
    ],
)
def test_a_doubtful_copy_is_replaced(
    make_doubtful: Callable[[Path], object], location: Location, tmp_path: Path
) -> None:
    path = plant(location, tmp_path / "cache")
    assert read(location, tmp_path / "cache") == PLANTED, "the copy is where it is looked for"
    make_doubtful(path)
    assert (read(location, tmp_path / "cache"), stat.S_IMODE(path.lstat().st_mode)) == (CONTENT, 0o600)
    assert path.lstat().st_uid == os.geteuid()


@pytest.mark.parametrize(
    ("owner", "mode"), [pytest.param(OTHER_USER, 0o755, marks=as_root), (None, 0o777), (None, 0o775)]
)
def test_a_folder_that_others_write_to_is_refused(
    owner: int | None, mode: int, location: Location, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "notes.txt").touch()  # It has other uses.
    cache.chmod(mode)
    if owner is not None:
        os.chown(cache, owner, -1)
    with pytest.raises(StoreError, match=rf"the cache {cache} belongs to .* has mode {mode:04o}.*cache_shared=True"):
        read(location, cache)
    assert (mode_of(cache), read(location, cache, shared=True)) == (mode, CONTENT)


def test_where_all_users_may_create_files_a_cache_has_a_folder_of_its_own(location: Location, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    planted = plant(location, tmp_path / "other")
    (cache := tmp_path / "cache").mkdir()
    cache.chmod(0o1777)  # As /tmp.
    planted.rename(cache / planted.name)
    assert read(location, cache) == CONTENT
    own = cache / f"shardio-{os.geteuid()}"
    assert (mode_of(own), mode_of(cache), read(location, cache, shared=True)) == (0o700, 0o1777, PLANTED)


def test_an_own_folder_for_a_cache_alone_is_closed_to_others(location: Location, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with umask(0):
        assert read(location, cache) == CONTENT
    assert mode_of(cache) == 0o700
    shutil.rmtree(cache)
    cache.mkdir()
    cache.chmod(0o775)  # As new folders are where each user has a group.
    assert (read(location, cache), mode_of(cache)) == (CONTENT, 0o755)


def test_a_shared_cache_may_be_deleted_at_any_time(location: Location, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        assert parse_location(str(location), make_access(cache=cache, cache_shared=True)).read_whole() == CONTENT
        shutil.rmtree(cache)


def test_a_cache_is_shared_only_if_that_is_wanted_and_it_has_a_folder(tmp_path: Path) -> None:
    assert_raises(ValueError, "cache_shared=True needs cache", make_access, cache_shared=True)
    assert_raises(TypeError, "cache_shared", make_access, cache="x", cache_shared="yes")
    assert read_remote_arguments(None, tmp_path, None, True)["cache_shared"]
    assert not read_remote_arguments(None, tmp_path, None, False)["cache_shared"]
    assert_raises(typer.BadParameter, "cache_shared=True needs cache", read_remote_arguments, None, None, None, True)


CHANGE_AS_ANOTHER_USER = textwrap.dedent("""
    import os, sys
    from shardio.storage.copies import CachedCopy
    os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
    copy = CachedCopy(path=sys.argv[2], size=int(sys.argv[3]), is_shared=True)
    (found,) = copy.read([0], [copy.size])
    copy.unmark(0, copy.size)
    with copy.adding(0, copy.size) as addition:
        addition.write(0, memoryview(found[::-1]))
        addition.mark()
    copy.touch()
""")


@as_root
def test_users_who_share_a_cache_read_and_fill_the_copies_of_each_other(location: Location) -> None:
    with tempfile.TemporaryDirectory() as name:  # Others cannot reach the folders of pytest.
        cache = Path(name)
        cache.chmod(0o2777)
        assert read(location, cache, shared=True) == CONTENT
        (copy,) = cache.glob(f"*{COPY_SUFFIX}")
        command = [sys.executable, "-c", CHANGE_AS_ANOTHER_USER, str(OTHER_USER), str(copy), str(len(CONTENT))]
        subprocess.run(command, check=True)
        assert read(location, cache, shared=True) == CONTENT[::-1]
