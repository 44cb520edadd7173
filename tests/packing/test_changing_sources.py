"""Files that change during a pack: an error names them, or they are left out. Their new contents are never packed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import shardio
from shardio.packing import OnChanged, PackResult, PackSettings, RunOptions, pack_source
from shardio.progress import WorkProgress
from tests.files import read_files
from tests.sources import encode, write_images
from tests.tars import read_with_webdataset

Change = Callable[[Path], None]

SKIP = RunOptions(on_changed="skip", num_workers=1)


def write_text(path: Path) -> None:
    path.write_text("no longer an image.")


def overwrite_with_the_same_size(path: Path) -> None:
    """Change the content and, by a nanosecond, the modification time."""
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content[:-9] + bytes(9))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def append(path: Path) -> None:
    """Append a byte, but keep the modification time."""
    status = path.stat()
    with path.open("ab") as file:
        file.write(b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def remove(path: Path) -> None:
    path.unlink()


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[Callable[[Path], None], str] = {
    write_text: "changed from {} to 19 bytes",
    overwrite_with_the_same_size: "changed: its modification time differs by",
    append: "changed from {} to ",
    truncate: "changed from {} to 100 bytes",
    remove: "is missing",
    make_directory: "",  # Reading the first one fails; the others have a different size.
}


class ChangeFiles(WorkProgress):
    """Changes files once the first sample is packed: after the scan, but before they are read."""

    def __init__(self, change: Callable[[Path], None], paths: list[Path]) -> None:
        self._change, self._paths = change, paths

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        while self._paths:
            self._change(self._paths.pop())


def pack(
    root: Path, change: Callable[[Path], None], names: list[str], *, on_changed: OnChanged = "raise"
) -> PackResult:
    """Pack ``root/in`` into shards of two samples, in the order of the keys, and change some files meanwhile."""
    settings = PackSettings(max_shard_size=1 << 30, max_shard_samples=2, shuffle_seed=None)
    progress = ChangeFiles(change, [root / "in" / "class-0" / name for name in names])
    run = RunOptions(num_workers=1, on_changed=on_changed)
    return pack_source(root / "in", root / "out", settings, run=run, progress=progress)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_images(tmp_path / "in", classes=1, per_class=6)
    (tmp_path / "in" / "class-0" / "name-002.json").write_text('{"a": 1}'.ljust(200))
    return tmp_path


@pytest.mark.parametrize("change", CHANGES)
def test_the_error_names_all_changed_files_and_the_pack_stays_unfinished(
    root: Path, change: Callable[[Path], None]
) -> None:
    names = ["name-005.jpg", "name-001.jpg", "name-002.json"]
    sizes = {name: (root / "in" / "class-0" / name).stat().st_size for name in names}
    with pytest.raises(shardio.PackError) as caught:
        pack(root, change, list(names))
    for name in names:
        assert f"{root}/in/class-0/{name} {CHANGES[change].format(sizes[name])}" in str(caught.value)
    assert "name-003.jpg" not in str(caught.value)
    assert "--on-changed skip (on_changed='skip')" in str(caught.value)
    assert not (root / "out" / "shardio.json").exists()


@pytest.mark.parametrize("change", CHANGES)
def test_skip_leaves_out_the_samples_of_changed_files(root: Path, change: Callable[[Path], None]) -> None:
    before = {path.name: path.read_bytes() for path in (root / "in" / "class-0").glob("*.jpg")}
    result = pack(root, change, ["name-001.jpg", "name-002.json"], on_changed="skip")
    found = [
        (key, fields["jpg"])
        for shard in result.manifest.shards
        for key, fields in read_with_webdataset(root / "out" / shard.name)
    ]
    kept = [f"name-{i:03d}" for i in (0, 3, 4, 5)]
    assert found == [(f"class-0/{name}", before[f"{name}.jpg"]) for name in kept]
    assert sorted(problem.path.name for problem in result.changed) == ["name-001.jpg", "name-002.json"]
    assert len(shardio.ShardDataset(root / "out")) == 4


def test_a_shard_without_samples_is_not_written(root: Path) -> None:
    names = ["name-002.jpg", "name-003.jpg"]
    result = pack(root, remove, names, on_changed="skip")
    assert [shard.name for shard in result.manifest.shards] == ["shard-000000.tar", "shard-000002.tar"]
    expected = {f"{shard.name}{suffix}" for shard in result.manifest.shards for suffix in ("", ".idx")}
    assert set(read_files(root / "out")) == {*expected, "shardio.json"}


def test_a_source_of_which_every_file_changed_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=2)

    class RemoveFiles(WorkProgress):
        def start(self, total: int, num_bytes: int | None = None) -> None:
            for path in (tmp_path / "in" / "class-0").iterdir():
                path.unlink()

    settings = PackSettings(max_shard_size=1 << 30)
    with pytest.raises(shardio.PackError, match=r"all samples of .*in changed"):
        pack_source(tmp_path / "in", tmp_path / "out", settings, run=SKIP, progress=RemoveFiles())


def test_changed_files_are_sorted_by_name_whatever_the_packing_order(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=9)
    removed = [tmp_path / "in" / "class-0" / f"name-{i:03d}.jpg" for i in range(8)]

    class RemoveFiles(WorkProgress):
        def start(self, total: int, num_bytes: int | None = None) -> None:
            for path in removed:
                path.unlink()

    settings = PackSettings(max_shard_size=1 << 30)
    result = pack_source(tmp_path / "in", tmp_path / "out", settings, run=SKIP, progress=RemoveFiles())
    assert [problem.path for problem in result.changed] == removed


def test_a_resumed_pack_includes_samples_whose_files_are_back(root: Path) -> None:
    """A resumed pack keeps only shards from which no sample was left out."""
    moved = root / "in" / "class-0" / "name-001.jpg"

    def move_away(path: Path) -> None:
        path.rename(root / path.name)

    class MoveFilesAndInterrupt(ChangeFiles):
        def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
            super().advance(num_done, num_bytes)
            if (root / "out" / "shard-000000.tar").exists():
                raise KeyboardInterrupt

    settings = PackSettings(max_shard_size=1 << 30, max_shard_samples=2, shuffle_seed=None)
    with pytest.raises(KeyboardInterrupt):
        pack_source(
            root / "in",
            root / "out",
            settings,
            run=SKIP,
            progress=MoveFilesAndInterrupt(move_away, [moved]),
        )
    (root / "name-001.jpg").rename(moved)
    manifest = shardio.pack(root / "in", root / "out", max_shard_size=1 << 30, max_shard_samples=2, shuffle_seed=None)
    assert manifest.num_samples == 6
    shardio.pack(root / "in", root / "uninterrupted", max_shard_size=1 << 30, max_shard_samples=2, shuffle_seed=None)
    assert read_files(root / "out") == read_files(root / "uninterrupted")


def test_an_error_names_twenty_files_and_counts_the_rest(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=30, width=8, height=8)
    with pytest.raises(shardio.PackError, match=re.escape("and 9 more")) as caught:
        pack(tmp_path, write_text, [f"name-{i:03d}.jpg" for i in range(1, 30)])
    assert str(caught.value).count(" to 19 bytes") == 20


def test_a_file_that_changes_while_it_is_read_is_detected(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program overwrites the file between reading and the check after it."""
    fstat = os.fstat

    def write_before_the_check(descriptor: int) -> os.stat_result:
        path = Path(f"/dev/fd/{descriptor}").resolve()
        if path.name == "name-003.jpg":
            path.write_bytes(encode(77))
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", write_before_the_check)
    with pytest.raises(shardio.PackError, match=r"name-003\.jpg changed"):
        shardio.pack(root / "in", root / "out")
