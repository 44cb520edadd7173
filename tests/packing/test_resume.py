"""Resuming a pack: intact shards of an earlier run are kept, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardio
from shardio.cli.main import app
from shardio.errors import PackError
from shardio.packing import shard_job
from shardio.packing.folders import JOURNAL_NAME
from shardio.sample import Sample
from shardio.shards import write_shard
from shardio.storage import Location
from tests.files import files_of_at_most, read_files
from tests.sources import write_images


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_images(tmp_path / "in", classes=2, per_class=3, width=8, height=8)
    return tmp_path / "in"


@pytest.fixture
def unfinished(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack into three shards of two samples that failed before the third."""

    def fail_at_the_third(path: Location, samples: Iterable[Sample]) -> object:
        if path.name == "shard-000002.tar":
            raise OSError(5, "Input/output error")
        return write_shard(path, samples)

    with monkeypatch.context() as patch:
        patch.setattr(shard_job, "write_shard", fail_at_the_third)
        with pytest.raises(PackError, match="Input/output error"):
            shardio.pack(source, tmp_path / "out", max_shard_samples=2, num_workers=1)
    return tmp_path / "out"


def resume(source: Path, out: Path) -> str:
    """Resume the pack on the command line; return the output and errors."""
    done = CliRunner().invoke(app, ["pack", str(source), str(out), "--max-shard-samples", "2"])
    assert done.exit_code == 0, done.output
    return done.output


def assert_same_as_uninterrupted(source: Path, out: Path) -> None:
    """Assert that a directory holds the files that an uninterrupted run writes."""
    shardio.pack(source, source.parent / "whole", max_shard_samples=2)
    assert read_files(out) == read_files(source.parent / "whole")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("shard-000001.tar", flip_a_bit),
    ("shard-000001.tar", Path.unlink),
    ("shard-000001.tar.idx", flip_a_bit),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_shard_is_packed_again(
    source: Path, unfinished: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(unfinished / name)
    output = resume(source, unfinished)
    assert output.count("packed again: ") == 1
    assert f"packed again: {unfinished / 'shard-000001.tar'} was damaged after it was written" in output
    assert "kept 2 samples from an earlier run" in output
    assert_same_as_uninterrupted(source, unfinished)


@pytest.mark.parametrize("ending", [b"", b"}", b'{"entry": 1}\n', b"\x00\xff\n"], ids=repr)
def test_a_damaged_line_of_the_journal_makes_its_shard_again(source: Path, unfinished: Path, ending: bytes) -> None:
    """A run that is killed while it writes a line leaves a part of it."""
    journal = unfinished / JOURNAL_NAME
    first, second = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first + (ending or second[:-9]))
    output = resume(source, unfinished)
    assert "packed again" not in output
    assert "kept 2 samples from an earlier run" in output
    assert_same_as_uninterrupted(source, unfinished)


def test_intact_shards_are_kept(source: Path, unfinished: Path) -> None:
    output = resume(source, unfinished)
    assert "packed again" not in output
    assert "kept 4 samples from an earlier run" in output
    assert_same_as_uninterrupted(source, unfinished)


@pytest.mark.parametrize(
    ("name", "is_tar"),
    [("shard-000000.tar", True), ("shard-000002.tar", True), ("shard-000002.tar", False), ("other.tar", True)],
)
def test_a_tar_that_is_not_part_of_the_pack_is_refused(source: Path, unfinished: Path, name: str, is_tar: bool) -> None:
    """It may have the name of a finished shard, of an unfinished shard, or another name."""
    foreign = unfinished / name
    write_images(source.parent / "others", classes=1, per_class=2, width=8, height=8)
    (source.parent / "others" / "class-0").rename(source.parent / "others" / "class-7")
    shardio.pack(source.parent / "others", source.parent / "packed")
    if is_tar:
        shutil.copy(source.parent / "packed" / "shard-000000.tar", foreign)
    else:
        foreign.write_bytes(b"precious")
    before = read_files(unfinished)
    with pytest.raises(PackError, match=f"{name} is not a shard of the unfinished pack in .*Move it away"):
        shardio.pack(source, unfinished, max_shard_samples=2, num_workers=1)
    assert read_files(unfinished) == before
    foreign.unlink()
    resume(source, unfinished)
    assert_same_as_uninterrupted(source, unfinished)


def test_a_pack_that_cannot_write_names_the_file_and_can_be_resumed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        files_of_at_most(3000),
        pytest.raises(
            PackError,
            match=r"shard-00000\d\.tar'\. 0 of 3 shards are finished and kept\. Fix the .*rerun the same",
        ),
    ):
        shardio.pack(source, out, max_shard_samples=2)
    assert not list(out.glob("shard-*"))
    resume(source, out)
    assert_same_as_uninterrupted(source, out)
