"""A pack that goes on keeps what an earlier run finished, if it is still that, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardio
from shardio.cli.main import app
from shardio.errors import PackError
from shardio.packing import shard_writer
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
    """A pack into three shards of two samples, stopped before the third."""

    def write_two(path: Location, samples: Iterable[Sample]) -> object:
        if path.name == "shard-000002.tar":
            raise OSError(5, "Input/output error")
        return write_shard(path, samples)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "write_shard", write_two)
        with pytest.raises(PackError, match="Input/output error"):
            shardio.pack(source, tmp_path / "out", max_shard_samples=2, num_workers=1)
    return tmp_path / "out"


def go_on(source: Path, out: Path) -> str:
    """Run the same pack by the command; return what it wrote to standard output and error."""
    done = CliRunner().invoke(app, ["pack", str(source), str(out), "--max-shard-samples", "2"])
    assert done.exit_code == 0, done.output
    return done.output


def assert_undisturbed(source: Path, out: Path) -> None:
    """Assert that a directory holds what one run without a break packs."""
    shardio.pack(source, source.parent / "whole", max_shard_samples=2)
    assert read_files(out) == read_files(source.parent / "whole")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("shard-000001.tar", flip_a_bit),
    ("shard-000001.tar", Path.unlink),
    ("shard-000001.tar.idx", flip_a_bit),
    (".shard-000001.tar.jpegs", cut),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_finished_shard_that_was_damaged_is_packed_again(
    source: Path, unfinished: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(unfinished / name)
    output = go_on(source, unfinished)
    assert output.count("packed again: ") == 1
    assert f"packed again: {unfinished / 'shard-000001.tar'} was damaged after it was written" in output
    assert "of which 2 were there already" in output
    assert_undisturbed(source, unfinished)


def test_undamaged_shards_are_kept_without_a_word(source: Path, unfinished: Path) -> None:
    output = go_on(source, unfinished)
    assert "packed again" not in output
    assert "of which 4 were there already" in output
    assert_undisturbed(source, unfinished)


@pytest.mark.parametrize(
    ("name", "is_tar"),
    [("shard-000000.tar", True), ("shard-000002.tar", True), ("shard-000002.tar", False), ("other.tar", True)],
)
def test_a_tar_that_is_not_of_this_pack_is_refused(source: Path, unfinished: Path, name: str, is_tar: bool) -> None:
    """In the place of a shard or beside them, whether a run had finished that one or not."""
    foreign = unfinished / name
    write_images(source.parent / "others", classes=1, per_class=2, width=8, height=8)
    (source.parent / "others" / "class-0").rename(source.parent / "others" / "class-7")
    shardio.pack(source.parent / "others", source.parent / "packed")
    if is_tar:
        shutil.copy(source.parent / "packed" / "shard-000000.tar", foreign)
    else:
        foreign.write_bytes(b"precious")
    before = read_files(unfinished)
    with pytest.raises(PackError, match=f"{name} is not a shard of the pack that is unfinished there.*Move it away"):
        shardio.pack(source, unfinished, max_shard_samples=2, num_workers=1)
    assert read_files(unfinished) == before
    foreign.unlink()
    go_on(source, unfinished)
    assert_undisturbed(source, unfinished)


def test_a_pack_that_cannot_write_names_the_file_and_is_gone_on_with(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        files_of_at_most(3000),
        pytest.raises(PackError, match=r"shard-00000\d\.tar'\. Remove the cause \(make room.*run the same command"),
    ):
        shardio.pack(source, out, max_shard_samples=2)
    assert not list(out.glob("shard-*"))
    go_on(source, out)
    assert_undisturbed(source, out)
