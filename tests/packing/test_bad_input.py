"""Bad sources: each is refused with an error that names the path, and nothing looks finished."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import PackError
from shardio.storage import read_and_stat
from tests.sources import encode, write_images

IMAGE = encode(0)


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(IMAGE)


def assert_refused(root: Path, *, names: str, **options: Any) -> None:
    """Assert that ``root/in`` is refused with an error that names a path, and that nothing is written."""
    with pytest.raises(PackError, match=re.escape(str(root / names))):
        shardio.pack(root / "in", root / "out", **options)
    assert not (root / "out").exists()


def list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, outermost first; fail if an error is among its own causes."""
    chain = list[BaseException]()
    cause: BaseException | None = error
    while cause is not None:
        assert all(cause is not one for one in chain), f"{cause!r} is its own cause"
        chain.append(cause)
        cause = cause.__cause__
    return chain


def make_empty(root: Path) -> None:
    root.mkdir()


def make_only_texts(root: Path) -> None:
    write(root, "c/a.txt", "README")


def make_only_hidden(root: Path) -> None:
    write(root, "c/.a.jpg", ".c/a.jpg")


def make_file(root: Path) -> None:
    root.write_bytes(IMAGE)


def make_nothing(root: Path) -> None:
    assert not root.exists()


@pytest.mark.parametrize("make", [make_empty, make_only_texts, make_only_hidden, make_file, make_nothing])
def test_a_source_without_images_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "in")
    assert_refused(tmp_path, names="in")


# The files in the source, and the path that the error must name.
UNPACKABLE = {
    "dot-in-stem": (["c/a.jpg", "c/b.x.jpg"], "in/c/b.x.jpg"),
    "dot-in-stem-flat": (["b.x.jpg"], "in/b.x.jpg"),
    "only-a-suffix-after-a-dot": (["c/a.jpg", "c/b..jpg"], "in/c/b..jpg"),
    "image-or-mask": (["a.jpg", "a.png"], "in/a.png"),
    "text-of-two-images": (["c/a.jpg", "c/a.png", "c/a.txt"], "in/c/a.txt"),
    "same-key-as-with-suffix": (["c/a.jpg", "c/a.png", "c/a_png.jpg"], "in/c/a_png.jpg"),
    "letter-case-of-a-further-field": (["c/a.jpg", "c/a.json", "c/a.JSON"], "in/c/a.JSON"),
    "image-among-class-folders": (["c/a.jpg", "a.jpg"], "in/a.jpg"),
    "label-in-a-class-folder": (["c/a.jpg", "c/a.cls"], "in/c/a.cls"),
    "class-skipped-by-webdataset": (["c/a.jpg", "__x__/a.jpg"], "in/__x__/a.jpg"),
    "class-without-images": (["c/a.jpg", "d/notes.txt"], "in/d"),
}


@pytest.mark.parametrize(("names", "path"), UNPACKABLE.values(), ids=UNPACKABLE.keys())
def test_files_that_cannot_become_samples_are_refused(tmp_path: Path, names: list[str], path: str) -> None:
    write(tmp_path / "in", *names)
    assert_refused(tmp_path, names=path)


@pytest.mark.parametrize("name", ["b\nc.jpg", "b\x01.jpg", "b\x7f.jpg", os.fsdecode(b"gr\xfc\xdfe.jpg")], ids=ascii)
def test_a_name_with_unprintable_characters_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "in", "c/a.jpg", f"c/{name}")
    with pytest.raises(PackError) as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out")
    assert repr(str(tmp_path / "in" / "c" / name)) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_empty_class_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.jpg")
    (tmp_path / "in" / "d").mkdir()
    assert_refused(tmp_path, names="in/d")


def test_dots_are_refused_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.b.jpg")
    with pytest.raises(PackError, match=r"--rename-dots \(rename_dots=True\)"):
        shardio.pack(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("other", ["a_b", "a_b.x", "a.b_x"])
def test_files_with_the_same_key_after_renaming_dots_are_refused(tmp_path: Path, other: str) -> None:
    first = "a.b" if other == "a_b" else "a.b.x"
    write(tmp_path / "in", f"c/{first}.jpg", f"c/{other}.jpg")
    assert_refused(tmp_path, names=f"in/c/{other}.jpg", rename_dots=True)


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.jpg")
    (tmp_path / "in" / "c" / "b.jpg").symlink_to(tmp_path / "nothing")
    assert_refused(tmp_path, names="in/c/b.jpg")


def test_a_link_cycle_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.jpg")
    (tmp_path / "in" / "c" / "loop").symlink_to(tmp_path / "in")
    assert_refused(tmp_path, names="in/c/loop")


def test_an_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in", "c/a.jpg", "d/a.jpg")
    scandir = os.scandir

    def scandir_unless_locked(path: Path) -> object:
        if Path(path).name == "d":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_unless_locked)
    assert_refused(tmp_path, names="in/d")


def test_a_read_error_during_the_pack_leaves_only_whole_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = write_images(tmp_path / "in", classes=2, per_class=10)

    locked = re.compile(r"in/class-\d/name-006\.jpg$")

    def read_unless_locked(path: str, num_bytes: int) -> tuple[bytes, os.stat_result]:
        if locked.search(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return read_and_stat(path, num_bytes)

    monkeypatch.setattr("shardio.packing.sources.files.read_and_stat", read_unless_locked)
    with pytest.raises(PackError, match=r"in/class-\d/name-006\.jpg cannot be read: Permission denied") as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out", max_shard_samples=3)
    assert isinstance(list_causes(caught.value)[-1], PermissionError)
    monkeypatch.undo()
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert "shardio.json" not in left
    assert all(name.startswith(".") or name.endswith((".tar", ".tar.idx")) for name in left)
    shardio.pack(tmp_path / "in", tmp_path / "other", max_shard_samples=3)
    for name in left:
        if name.endswith(".tar"):
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    manifest = shardio.pack(tmp_path / "in", tmp_path / "out", max_shard_samples=3)
    assert manifest.num_samples == len(contents)


@pytest.mark.parametrize("content", [encode(1, suffix="png"), b"no image"], ids=["png", "text"])
def test_strict_refuses_a_file_that_does_not_match_its_suffix(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "in", "c/a.jpg", "c/b.jpg")
    (tmp_path / "in" / "c" / "b.jpg").write_bytes(content)
    assert_refused(tmp_path, names="in/c/b.jpg", strict=True)


def test_strict_packs_a_flawless_directory(tmp_path: Path) -> None:
    write(tmp_path / "in", "c/a.jpg", "c/notes.txt")
    assert shardio.pack(tmp_path / "in", tmp_path / "out", strict=True).num_samples == 1


def test_a_file_that_is_too_large_for_a_sample_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The file is sparse; reading it could need more memory than the test's machine has."""
    write(tmp_path / "in", "c/a.jpg", "c/a.npy")
    with (tmp_path / "in/c/a.npy").open("r+b") as file:
        file.truncate(2**31 + 1)
    assert_refused(tmp_path, names=f"in/c/a.npy has {2**31 + 1} bytes, more than {2**31}")
