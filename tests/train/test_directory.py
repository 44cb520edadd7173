"""One run at a time writes into a directory, and no run replaces another one by mistake."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardio.errors import BusyError, StateError
from shardio.train import Callback, load_checkpoint, train
from shardio.train.checkpoint import LOCK, claimed, prepare_directory
from tests.files import read_files
from tests.processes import TIMEOUT_S, forkserver_context
from tests.train.runs import EPOCHS, STEPS_PER_EPOCH, make_config, make_loader, make_model

pytestmark = pytest.mark.usefixtures("no_report")


class Wait(Callback):
    """Report the workers in the second epoch, when there is a checkpoint, and wait."""

    def __init__(self, reports: Connection) -> None:
        self.reports = reports
        self.num_epochs = 0

    def on_epoch(self, result: Any) -> None:
        self.num_epochs = result.epoch + 1

    def on_batch(self, batch: Any) -> None:
        if self.num_epochs == 1:
            self.reports.send([worker.pid for worker in multiprocessing.active_children()])
            time.sleep(TIMEOUT_S)


def _train_and_wait(packed: Path, directory: Path, reports: Connection) -> None:
    torch.set_num_threads(1)
    loader = make_loader(packed, torchs=True, num_workers=1)
    loader.multiprocessing_context = "fork"
    train(make_model(), loader, make_config(directory), callbacks=[Wait(reports)])


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_one_can_be_resumed_at_once(packed: Path, tmp_path: Path) -> None:
    """Even while a worker process that the killed run forked still exists."""
    context = forkserver_context()
    receive, send = context.Pipe(duplex=False)
    first = context.Process(target=_train_and_wait, args=(packed, tmp_path, send))
    first.start()
    send.close()
    (worker,) = receive.recv()
    try:
        os.kill(worker, signal.SIGSTOP)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        holder = f"process {first.pid} on {socket.gethostname()}"
        for options in ({}, {"resume": False}, {"epochs": 1}):
            message = f"{re.escape(str(tmp_path))} is in use by {holder}, which is training there"
            with pytest.raises(BusyError, match=message):
                train(make_model(), make_loader(packed, torchs=True), make_config(tmp_path, **options))
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        first.kill()
        first.join()
        train(make_model(), make_loader(packed, torchs=True), make_config(tmp_path))
        os.kill(worker, 0)  # It still exists.
    finally:
        first.kill()
        os.kill(worker, signal.SIGKILL)
    state = load_checkpoint(tmp_path / "last.pt")
    assert [result["epoch"] for result in state["results"]] == list(range(EPOCHS))
    assert state["step"]["num_taken"] == EPOCHS * STEPS_PER_EPOCH


def test_a_copy_of_the_directory_does_not_release_the_lock(tmp_path: Path) -> None:
    with claimed(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "backup")
        with pytest.raises(BusyError), claimed(tmp_path / "run"):
            pass
    with claimed(tmp_path / "run"):
        pass


def test_all_ranks_raise_the_error_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a directory that cannot be created, because a file is in its place."""
    (tmp_path / "file").write_bytes(b"")
    outcomes = list[Any]()

    def gather(outcome: Any) -> list[Any]:
        outcomes.append(outcome)
        return outcomes

    monkeypatch.setattr("shardio.train.step.gather", gather)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(NotADirectoryError), claimed(tmp_path / "file" / "run"):
            pass
    assert [type(outcome) for outcome in outcomes] == [NotADirectoryError, list]


def test_the_lock_is_released_if_another_rank_fails_to_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with monkeypatch.context() as patch:
        patch.setattr("shardio.train.step.gather", mock.Mock(side_effect=ConnectionError("the other rank is gone")))
        with pytest.raises(ConnectionError), claimed(tmp_path):
            pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with claimed(tmp_path):
        pass


def test_unfinished_files_of_other_programs_stay(packed: Path, tmp_path: Path) -> None:
    others = [".shardio-pack.partial", ".rank-00001.cov.0123abcd.partial", ".notes.partial"]
    for name in (*others, ".last.pt.0123abcd.partial"):
        (tmp_path / name).touch()
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    assert {path.name for path in tmp_path.glob("*.partial")} == set(others)


def test_the_lock_holds_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even though the holder's name cannot be written."""
    busy = pytest.raises(BusyError, match="is in use by another process, which is training there")
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with claimed(tmp_path), busy, claimed(tmp_path):
            pass
    with claimed(tmp_path):
        pass


def test_without_locks_a_warning_is_logged_and_training_works(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with caplog.at_level(logging.WARNING, "shardio"):
        assert len(train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))) == 1
    assert f"{tmp_path} is on a file system without locks" in caplog.text


@pytest.mark.parametrize("kept", [["best.pt", "log.jsonl"], ["best.pt"], ["log.jsonl"]])
def test_a_run_without_its_last_checkpoint_is_not_replaced_silently(
    packed: Path, tmp_path: Path, kept: list[str]
) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=2))
    for name in read_files(tmp_path).keys() - kept:
        (tmp_path / name).unlink()
    before = read_files(tmp_path)
    with pytest.raises(StateError, match=r"of an earlier run, but no last\.pt to resume from: restore last\.pt"):
        train(make_model(), make_loader(packed), make_config(tmp_path, epochs=2))
    (tmp_path / LOCK).unlink()
    assert read_files(tmp_path) == before
    assert len(train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1, resume=False))) == 1


def test_a_best_checkpoint_of_other_settings_is_not_replaced(packed: Path, tmp_path: Path) -> None:
    """One of the first epoch and the same settings is: a run that is killed before its first last.pt leaves it."""
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    (tmp_path / "last.pt").unlink()
    with pytest.raises(StateError, match=r"contains the best\.pt of an earlier run"):
        train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1, lr=0.123))
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))


def test_ranks_that_see_different_directories_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.train.checkpoint.gather", lambda found: [found, not found])
    with pytest.raises(StateError, match=r"only some ranks see .*last\.pt: use a directory that all ranks share"):
        prepare_directory(tmp_path, make_config(tmp_path))
