"""Several processes write one dataset, each with shards of its own."""

from __future__ import annotations

import os
import shutil
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

import shardio
from shardio.errors import FormatError, PackError
from shardio.shards import open_table
from tests.files import read_files
from tests.tars import read_with_webdataset

NUM_WORKERS = 3


def key_of(worker: int, number: int) -> str:
    return f"w{worker}/{number}"


def write_part(out: Path, worker: int, num_samples: int = 5, kill: bool = False, overwrite: bool = False) -> None:
    with shardio.ShardWriter(
        out, worker=worker, num_workers=NUM_WORKERS, max_shard_samples=2, classes=["a", "b"], overwrite=overwrite
    ) as writer:
        for number in range(num_samples):
            writer.write({"__key__": key_of(worker, number), "cls": number % 2, "txt": f"{worker} {number}"})
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that three processes have written to at the same time, before it is finalized."""
    out = tmp_path_factory.mktemp("workers") / "out"
    context = get_context("spawn")
    processes = [context.Process(target=write_part, args=(out, worker)) for worker in range(NUM_WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * NUM_WORKERS
    return out


@pytest.fixture
def out(parts: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(parts, tmp_path / "out"))


def test_finalize_joins_the_parts_in_the_order_of_the_workers(out: Path) -> None:
    with pytest.raises(FormatError, match="unfinished"):
        open_table(out)
    manifest = shardio.finalize(out)
    names = [f"shard-{worker:05d}-{number:06d}.tar" for worker in range(NUM_WORKERS) for number in range(3)]
    assert [entry.name for entry in manifest.shards] == names
    assert sorted(read_files(out)) == sorted([*names, *(f"{name}.idx" for name in names), "shardio.json"])
    found = read_with_webdataset(*(out / name for name in names))
    assert [key for key, _ in found] == [key_of(worker, i) for worker in range(NUM_WORKERS) for i in range(5)]
    assert shardio.verify(out) == []
    assert manifest.classes == ("a", "b")
    assert shardio.finalize(out) == manifest  # As after an interruption.


def test_the_order_in_which_workers_end_does_not_matter(out: Path, tmp_path: Path) -> None:
    for worker in reversed(range(NUM_WORKERS)):
        write_part(tmp_path / "other", worker)
    shardio.finalize(out)
    shardio.finalize(tmp_path / "other")
    assert read_files(tmp_path / "other") == read_files(out)


def test_a_worker_that_was_killed_is_named_and_can_run_again(out: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for worker in 0, 2:
        write_part(other, worker)
    process = get_context("spawn").Process(target=write_part, args=(other, 1, 5, True))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(PackError, match=r"1 of the 3 workers .* \(1\)"):
        shardio.finalize(other)
    with pytest.raises(PackError, match="files of worker 1"):
        write_part(other, 1)
    write_part(other, 1, overwrite=True)
    shardio.finalize(other)
    shardio.finalize(out)
    assert read_files(other) == read_files(out)


def test_keys_that_two_workers_wrote_are_refused(out: Path) -> None:
    with shardio.ShardWriter(out, worker=1, num_workers=NUM_WORKERS, classes=["a", "b"], overwrite=True) as writer:
        writer.write({"__key__": key_of(2, 4), "txt": "x"})
    with pytest.raises(PackError, match=r"'w2/4', one in .*shard-00001-000000\.tar and one in .*shard-00002-000002"):
        shardio.finalize(out)
    assert not (out / "shardio.json").exists()


def test_a_changed_or_foreign_shard_is_refused(out: Path) -> None:
    shutil.copy(out / "shard-00000-000000.tar", out / "shard-00007-000000.tar")
    with pytest.raises(PackError, match="belongs to no worker"):
        shardio.finalize(out)
    (out / "shard-00007-000000.tar").unlink()
    (out / "shard-00000-000001.tar").unlink()
    with pytest.raises(PackError, match=r"shard-00000-000001\.tar cannot be read"):
        shardio.finalize(out)


def test_parts_of_other_runs_are_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="not written by 4 workers"), shardio.ShardWriter(out, worker=3, num_workers=4):
        pass
    with pytest.raises(PackError, match="no finished part"):
        shardio.finalize(tmp_path)
    (tmp_path / "notes").write_text("")
    with pytest.raises(PackError, match="no worker wrote"), shardio.ShardWriter(tmp_path, worker=0, num_workers=1):
        pass
    shardio.finalize(out)
    with pytest.raises(PackError, match="already holds a packed dataset"):
        write_part(out, 1)
    with pytest.raises(ValueError, match="belong together"):
        shardio.ShardWriter(out, worker=3)


def test_workers_without_samples_are_fine_but_not_all_of_them(tmp_path: Path) -> None:
    for worker, num_samples in enumerate([0, 3, 0]):
        write_part(tmp_path / "some", worker, num_samples)
        write_part(tmp_path / "none", worker, 0)
    assert shardio.finalize(tmp_path / "some").num_samples == 3
    with pytest.raises(PackError, match="no worker wrote a sample"):
        shardio.finalize(tmp_path / "none")
