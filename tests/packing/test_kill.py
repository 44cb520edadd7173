"""A pack that is killed at any moment leaves nothing that looks finished, and the same call resumes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import shardio
from shardio.errors import PackError
from shardio.packing import executors
from tests.files import read_files
from tests.processes import forkserver_context
from tests.sources import write_images
from tests.tars import read_members

NUM_RENAMES = 8
"""Renames in a pack into three shards: the plan's digest; three tars, each with its index; the manifest."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kill") / "in"
    write_images(root, classes=3, per_class=3, width=8, height=8)
    return root


@pytest.fixture(scope="module")
def uninterrupted(source: Path) -> dict[str, bytes]:
    out = source.parent / "uninterrupted"
    shardio.pack(source, out, max_shard_samples=3)
    return read_files(out)


def pack_and_die(source: Path, out: Path, n: int, moment: str) -> None:
    """Pack, and kill this process right before or after the n-th file is renamed into place."""
    replace, num_renames = Path.replace, 0

    def replace_and_die(path: Path, target: Path) -> Path:
        nonlocal num_renames
        num_renames += 1
        if (num_renames, moment) == (n, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        target = replace(path, target)
        if (num_renames, moment) == (n, "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return target

    Path.replace = replace_and_die  # type: ignore[method-assign, assignment]  # in a process of its own
    shardio.pack(source, out, max_shard_samples=3, num_workers=1)


def exit_code_of_pack(source: Path, out: Path, n: int, moment: str) -> int | None:
    """Return the exit code of a process that packs and dies."""
    process = forkserver_context().Process(target=pack_and_die, args=(source, out, n, moment))
    process.start()
    process.join()
    return process.exitcode


def assert_only_whole_files(out: Path, uninterrupted: dict[str, bytes]) -> None:
    """Assert that each file with a final name is as an uninterrupted pack writes it, and that tars end properly."""
    for name, content in read_files(out).items():
        if not name.startswith("."):
            assert content == uninterrupted[name]
    for path in out.glob("shard-*.tar"):
        assert path.read_bytes().endswith(bytes(1024))
        assert read_members(path)


@pytest.mark.parametrize("n", range(1, NUM_RENAMES + 1))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_pack_killed_at_any_rename_can_be_resumed(
    source: Path, uninterrupted: dict[str, bytes], tmp_path: Path, n: int, moment: str
) -> None:
    out = tmp_path / "out"
    assert exit_code_of_pack(source, out, n, moment) == -signal.SIGKILL
    assert_only_whole_files(out, uninterrupted)
    is_committed = (n, moment) == (NUM_RENAMES, "after")
    assert (out / "shardio.json").exists() == is_committed
    if n > 1:
        with pytest.raises(PackError, match=r"unfinished pack of different images|already holds a packed dataset"):
            shardio.pack(source, out, max_shard_samples=4)
    shardio.pack(source, out, max_shard_samples=3)
    assert read_files(out) == uninterrupted


def test_the_test_above_covers_every_rename(source: Path, tmp_path: Path) -> None:
    assert exit_code_of_pack(source, tmp_path, NUM_RENAMES + 1, "before") == 0


def test_resuming_does_not_rewrite_finished_shards(source: Path, tmp_path: Path) -> None:
    """They remain the same files, not equal ones."""
    assert exit_code_of_pack(source, tmp_path, 6, "before") == -signal.SIGKILL
    finished = {path.name: path.stat().st_ino for path in tmp_path.glob("shard-*")}
    assert len(finished) == 4
    shardio.pack(source, tmp_path, max_shard_samples=3)
    assert {name: (tmp_path / name).stat().st_ino for name in finished} == finished


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many") / "in"
    write_images(root, classes=4, per_class=100, width=8, height=8)
    return root


@pytest.fixture(scope="module")
def many_uninterrupted(many: Path) -> dict[str, bytes]:
    out = many.parent / "uninterrupted"
    shardio.pack(many, out, max_shard_samples=2)
    return read_files(out)


def start_pack(source: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardio", "pack", str(source), str(out), "--max-shard-samples", "2", "--quiet"]
    return subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("num_shards", [0, 100])
def test_a_pack_killed_from_outside_leaves_only_whole_shards(
    many: Path, many_uninterrupted: dict[str, bytes], tmp_path: Path, num_shards: int
) -> None:
    """The pack is killed as soon as so many of its 200 shards exist. The same command resumes it."""
    process = start_pack(many, tmp_path / "out", "--num-workers", "2")
    out = tmp_path / "out"
    while len(list(out.glob("shard-*.tar"))) < num_shards or not out.exists():
        assert process.poll() is None, "the pack finished before it could be killed"
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(many_uninterrupted) == 401
    assert "shardio.json" not in read_files(out)
    assert len(list(out.glob("shard-*.tar"))) >= num_shards
    assert_only_whole_files(out, many_uninterrupted)
    resumed = start_pack(many, out, "--num-workers", "2")  # The same command.
    assert resumed.communicate()[1] == ""
    assert resumed.returncode == 0
    assert read_files(out) == many_uninterrupted


def test_a_pack_interrupted_by_ctrl_c_leaves_only_whole_shards(many: Path, tmp_path: Path) -> None:
    process = start_pack(many, tmp_path)
    while len(list(tmp_path.glob("shard-*.tar"))) < 10:
        assert process.poll() is None, "the pack finished before it could be interrupted"
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    message = process.communicate()[1]
    assert process.returncode != 0
    assert "Traceback" not in message
    assert not (tmp_path / "shardio.json").exists()
    for path in tmp_path.glob("shard-*.tar"):
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) == 4
    assert shardio.pack(many, tmp_path, max_shard_samples=2).num_samples == 400


def test_a_worker_process_that_is_suspended_ends_the_pack(
    source: Path, uninterrupted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker, process_ids = executors._start_worker, list[int]()

    def start_suspended() -> executors._Worker:
        worker = start_worker()
        worker.process.send_signal(signal.SIGSTOP)
        process_ids.append(worker.process.pid)
        return worker

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(executors, "_start_worker", start_suspended)
        patch.setattr(executors, "SILENT_S", 0.2)
        patch.setattr(executors, "LAST_CHANCE_S", 0.1)
        patch.setattr(executors, "END_WITHIN_S", 0.1)
        packing = pool.submit(shardio.pack, source, tmp_path / "out", max_shard_samples=3, num_workers=2)
        try:
            with pytest.raises(PackError, match=r"the worker process \d+ has not reported.*Rerun the same") as caught:
                packing.result(60)
        finally:
            for process_id in process_ids:
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGCONT)
    assert any(f"process {process_id} " in str(caught.value) for process_id in process_ids)
    shardio.pack(source, tmp_path / "out", max_shard_samples=3, num_workers=2)
    assert read_files(tmp_path / "out") == uninterrupted
