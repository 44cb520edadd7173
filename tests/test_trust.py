"""Code is loaded only from files that no user but this one and root can have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from shardio import files
from shardio.files import UntrustedError, make_folder, read_trusted

OTHER_USER = 12345
"""A user other than root and the one that runs the tests."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir(mode=0o755)
    path = tmp_path / "folder" / "code"
    path.write_bytes(b"ours")
    path.chmod(0o644)
    return path


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_that_only_its_owner_may_write_to_is_read(path: Path) -> None:
    for mode, folder_mode in product((0o644, 0o600, 0o755, 0o444), (0o755, 0o700)):
        path.chmod(mode)
        path.parent.chmod(folder_mode)
        assert read_trusted(path) == b"ours"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o777, 0o620, 0o1777])
@pytest.mark.parametrize("which", ["file", "folder"])
def test_what_other_users_may_write_to_is_not_read(path: Path, which: str, mode: int) -> None:
    writable = path if which == "file" else path.parent
    writable.chmod(mode | 0o100 if which == "folder" else mode)
    found = f"the {which} {writable} belongs to .* and has mode {mode_of(writable):04o}"
    with pytest.raises(UntrustedError, match=found):
        read_trusted(path)


@as_root
@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_file_of_another_user_is_not_read(path: Path, which: str) -> None:
    others = path if which == "file" else path.parent
    os.chown(others, OTHER_USER, -1)
    with pytest.raises(UntrustedError, match=f"the {which} {others} belongs to uid {OTHER_USER} and has mode"):
        read_trusted(path)


def test_the_target_of_a_symbolic_link_is_checked(path: Path, tmp_path: Path) -> None:
    link, outside = path.with_name("link"), tmp_path / "outside"
    outside.write_bytes(b"others'")
    link.symlink_to(outside)
    outside.chmod(0o644)
    assert read_trusted(link) == b"others'"
    outside.chmod(0o666)
    with pytest.raises(UntrustedError):
        read_trusted(link)
    (tmp_path / "alias").symlink_to(path.parent)
    assert read_trusted(tmp_path / "alias" / "code") == b"ours"
    path.parent.chmod(0o777)
    with pytest.raises(UntrustedError):
        read_trusted(tmp_path / "alias" / "code")


@pytest.mark.parametrize("replaced", ["file", "folder"])
def test_a_replacement_after_the_check_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str) -> None:
    check = files._check

    def check_and_replace(status: os.stat_result, checked: Path) -> None:
        check(status, checked)
        if checked == (path if replaced == "file" else path.parent):
            checked.rename(checked.with_name("before"))
            checked.parent.mkdir(exist_ok=True)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"others'")

    monkeypatch.setattr(files, "_check", check_and_replace)
    assert read_trusted(path) == b"ours"


def test_a_pipe_is_refused_without_waiting_for_it(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(UntrustedError, match="not a regular file"):
        read_trusted(path)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_a_new_folder_can_be_read_by_all_users_and_written_by_one(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        make_folder(tmp_path / "a" / "b" / "c")
    assert (mode_of(tmp_path / "a" / "b"), mode_of(tmp_path / "a" / "b" / "c")) == (0o755, 0o755)


def test_an_existing_folder_loses_only_write_access_for_others(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    for before, after in ((0o777, 0o755), (0o770, 0o750), (0o700, 0o700)):
        folder.chmod(before)
        folder.parent.chmod(0o700)
        make_folder(folder)
        assert (mode_of(folder), mode_of(folder.parent)) == (after, 0o700)


@as_root
def test_a_folder_of_another_user_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    os.chown(folder, OTHER_USER, -1)
    with pytest.raises(UntrustedError, match=f"belongs to uid {OTHER_USER} and has mode 0777"):
        make_folder(folder)
    assert mode_of(folder) == 0o777
