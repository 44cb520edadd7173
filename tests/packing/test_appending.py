"""Appending adds samples by one rename, and leaves the old or the new dataset wherever it is killed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import PackError
from tests.files import read_files
from tests.processes import forkserver_context
from tests.sources import write_images
from tests.tars import read_with_webdataset, write_tar


@pytest.fixture
def out(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "out"))


def write_more(folder: Path, keys: list[str], classes: Any = None, **fields: Any) -> Path:
    with shardio.ShardWriter(folder, max_shard_samples=2, classes=classes) as writer:
        for key in keys:
            writer.write({"__key__": key, "txt": key, **fields})
    return folder


def test_shards_are_linked_under_the_next_names(out: Path, tmp_path: Path) -> None:
    before = shardio.open(out).manifest
    more = write_more(tmp_path / "more", ["x/1", "x/2", "x/3"])
    manifest = shardio.append(out, more)
    first = len(before.shards)
    assert manifest.shards[:first] == before.shards
    assert [entry.name for entry in manifest.shards[first:]] == [f"shard-{first + i:06d}.tar" for i in range(2)]
    assert (out / f"shard-{first:06d}.tar").samefile(more / "shard-000000.tar")
    assert (manifest.fields, manifest.classes) == (("cls", "jpg", "txt"), before.classes)
    assert manifest.pack == {name: value for name, value in before.pack.items() if name != "num_tiled"}
    assert shardio.open(out).manifest == manifest
    assert shardio.verify(out) == []
    found = read_with_webdataset(*sorted(out.glob("*.tar")))
    assert found[before.num_samples :] == [(key, {"txt": key.encode()}) for key in ("x/1", "x/2", "x/3")]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_copies_equal_links(out: Path, tmp_path: Path) -> None:
    more = write_more(tmp_path / "more", ["x/1", "x/2", "x/3"])
    other = Path(shutil.copytree(out, tmp_path / "other"))
    shardio.append(out, more)
    shardio.append(other, [more], copy=True)
    assert read_files(out) == read_files(other)
    assert not (other / "shard-000005.tar").samefile(more / "shard-000000.tar")


def test_an_open_reader_goes_on_with_the_old_dataset(out: Path, tmp_path: Path) -> None:
    with shardio.open(out) as before:
        keys = list(before)
        shardio.append(out, write_more(tmp_path / "more", ["x/1"]))
        assert list(before) == keys
        assert {key: len(before[key]) for key in keys} == dict.fromkeys(keys, 3)
    with shardio.open(out) as after:
        assert list(after) == [*keys, "x/1"]


def test_images_are_packed_with_the_same_settings_and_classes(images: Path, out: Path, tmp_path: Path) -> None:
    contents = write_images(tmp_path / "new", classes=2, per_class=4, width=8, height=8)
    for key in list(contents):
        path = tmp_path / "new" / f"{key}.jpg"
        path.rename(path.with_name(f"new-{path.name}"))
    (tmp_path / "new" / "class-0").rename(tmp_path / "new" / "class-2")
    manifest = shardio.append(out, tmp_path / "new", num_workers=1)
    assert [entry.num_samples for entry in manifest.shards[5:]] == [5, 3]
    with shardio.open(out) as opened:
        assert opened["class-2/new-name-001"]["cls"] == b"2"
        assert opened["class-1/new-name-001"]["jpg"] == contents["class-1/name-001"]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    (tmp_path / "new" / "class-1").rename(tmp_path / "new" / "class-9")
    with pytest.raises(PackError, match="class-9"):
        shardio.append(out, tmp_path / "new")
    with pytest.raises(PackError, match="two samples have the key 'class-"):
        shardio.append(out, images, num_workers=1)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (["class-0", "class-1"], 3),
        (["class-0", "class-1", "class-2", "new"], 4),
        (["class-1"], "label 0 is 'class-0'"),
        (["class-0", "class-2"], "label 1 is 'class-1'"),
        (None, "labels without class names"),
    ],
)
def test_class_names_must_be_equal_as_far_as_both_go(
    out: Path, tmp_path: Path, classes: list[str] | None, expected: int | str
) -> None:
    before, more = read_files(out), write_more(tmp_path / "more", ["x"], classes, cls=0)
    if isinstance(expected, int):
        assert len(shardio.append(out, more).classes) == expected
        return
    with pytest.raises(PackError, match=expected):
        shardio.append(out, more)
    assert read_files(out) == before


def test_repeated_keys_are_refused(out: Path, tmp_path: Path) -> None:
    before = read_files(out)
    more = write_more(tmp_path / "more", ["x", "y", "class-1/name-003"])
    with pytest.raises(PackError, match=rf"'class-1/name-003': one in {out}/.* one in {more}/shard-000001"):
        shardio.append(out, more)
    other = write_more(tmp_path / "other", ["x"])
    with pytest.raises(PackError, match="'x'"):
        shardio.append(out, [other, write_more(tmp_path / "third", ["x"])])
    assert read_files(out) == before


def test_what_cannot_be_appended_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    write_tar(tmp_path / "foreign" / "a.tar", [("a.txt", b"")])
    more = write_more(tmp_path / "more", ["x"])
    with pytest.raises(PackError, match="shardio reshard"):
        shardio.append(out, tmp_path / "foreign")
    with pytest.raises(PackError, match="not a packed directory"):
        shardio.append(tmp_path / "foreign", more)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        shardio.append(out, tmp_path / "nothing")
    with pytest.raises(ValueError, match="is empty"):
        shardio.append(out, [])
    (out / "shard-000005.tar").write_bytes(b"mine")
    with pytest.raises(PackError, match="exists but is not in the manifest"):
        shardio.append(out, more)
    assert (out / "shard-000005.tar").read_bytes() == b"mine"
    (out / "shard-000005.tar").unlink()
    for suffix in "", ".idx":
        shutil.copy(write_more(tmp_path / f"z{suffix}", ["z"]) / f"shard-000000.tar{suffix}", more)
    with pytest.raises(PackError, match="not the shard that its manifest lists"):
        shardio.append(out, more)


def append_and_die(out: Path, more: Path, n: int) -> None:
    """Append, and kill this process right after the n-th change of a name in a directory."""
    num_changes = 0

    def dying(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal num_changes
            found = function(*arguments, **options)
            num_changes += 1
            if num_changes == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call

    Path.replace = dying(Path.replace)  # type: ignore[method-assign]  # in a process of its own
    os.link = dying(os.link)
    shardio.append(out, more)


def exit_code_of_append(out: Path, more: Path, n: int) -> int | None:
    process = forkserver_context().Process(target=append_and_die, args=(out, more, n))
    process.start()
    process.join()
    return process.exitcode


def test_wherever_it_is_killed_the_dataset_is_the_old_or_the_new_one(packed: Path, tmp_path: Path) -> None:
    more = write_more(tmp_path / "more", ["x/1", "x/2", "x/3"])
    old = shardio.open(packed).manifest
    expected = Path(shutil.copytree(packed, tmp_path / "expected"))
    new = shardio.append(expected, more)
    for n in range(1, 7):  # The record; two tars, each with its index; the manifest.
        out = Path(shutil.copytree(packed, tmp_path / f"out-{n}"))
        assert exit_code_of_append(out, more, n) == -signal.SIGKILL
        assert shardio.open(out).manifest == (new if n == 6 else old)
        assert all(problem.kind == "unlisted" for problem in shardio.verify(out))
        assert shardio.append(out, more) == new
        assert read_files(out) == read_files(expected)
    assert exit_code_of_append(Path(shutil.copytree(packed, tmp_path / "out-7")), more, 7) == 0


def test_another_append_after_a_kill_starts_from_the_old_dataset(packed: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    assert exit_code_of_append(out, write_more(tmp_path / "more", ["x/1", "x/2", "x/3"]), 4) == -signal.SIGKILL
    shardio.append(out, write_more(tmp_path / "other", ["y"]))
    assert [entry.num_samples for entry in shardio.open(out).manifest.shards] == [5, 5, 5, 5, 1, 1]
    assert shardio.verify(out) == []
