"""Two runs do not write into one directory."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import BusyError
from shardio.train import load_checkpoint, train
from shardio.train.claims import claimed
from shardio.world import World
from tests.train.runs import EPOCHS, STEPS_PER_EPOCH, StopAfter, StopError, make_config, make_loader, make_model

ROOT = Path(shardio.__file__).parents[1]

TRAIN_AND_WAIT = """
import multiprocessing, sys
from pathlib import Path
from shardio.train import Callback, train
from tests.train.runs import make_config, make_loader, make_model

class Wait(Callback):
    num_epochs = 0

    def on_epoch(self, result):
        self.num_epochs = result.epoch + 1

    def on_batch(self, batch):
        if self.num_epochs == 1:  # There is a checkpoint.
            print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
            sys.stdin.read()

loader = make_loader(Path(sys.argv[1]), torchs=True, num_workers=1)
loader.multiprocessing_context = "fork"
train(make_model(), loader, make_config(Path(sys.argv[2])), callbacks=[Wait()])
"""


@pytest.mark.usefixtures("no_report")
def test_a_second_run_is_refused_and_a_killed_one_is_resumed_at_once(packed: Path, tmp_path: Path) -> None:
    """Also while a worker process that the killed run forked is still there."""
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN_AND_WAIT, str(packed), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    ) as first:
        assert first.stdout is not None
        worker = int(first.stdout.readline())
        try:
            os.kill(worker, signal.SIGSTOP)
            before = {path: path.read_bytes() for path in tmp_path.iterdir()}
            for options in ({}, {"resume": False}, {"epochs": 1}):
                named = f"{re.escape(str(tmp_path))} is in use: process {first.pid} on {socket.gethostname()} trains"
                with pytest.raises(BusyError, match=named):
                    train(make_model(), make_loader(packed, torchs=True), make_config(tmp_path, **options))
            assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
            first.kill()
            first.wait()
            train(make_model(), make_loader(packed, torchs=True), make_config(tmp_path))
            os.kill(worker, 0)  # It is still there.
        finally:
            os.kill(worker, signal.SIGKILL)
    state = load_checkpoint(tmp_path / "last.pt")
    assert [result["epoch"] for result in state["results"]] == list(range(EPOCHS))
    assert state["step"]["num_taken"] == EPOCHS * STEPS_PER_EPOCH


@pytest.mark.usefixtures("no_report")
def test_one_process_may_train_again_and_also_after_an_error(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(StopError):
        train(make_model(), make_loader(packed), make_config(tmp_path), callbacks=[StopAfter(3)])
    for _ in range(2):
        assert len(train(make_model(), make_loader(packed), make_config(tmp_path))) == EPOCHS


def test_a_copy_of_the_directory_leaves_it_claimed(tmp_path: Path) -> None:
    alone = World(rank=0, world_size=1)
    with claimed(tmp_path / "run", alone):
        shutil.copytree(tmp_path / "run", tmp_path / "backup")
        with pytest.raises(BusyError), claimed(tmp_path / "run", alone):
            pass
    with claimed(tmp_path / "run", alone):
        pass


def test_all_ranks_learn_that_the_directory_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    told = list[Any]()

    def gather(value: Any) -> list[Any]:
        told.append(value)
        return told

    monkeypatch.setattr("shardio.train.claims.gather", gather)
    for rank in range(2):
        with pytest.raises(NotADirectoryError), claimed(tmp_path / "file" / "run", World(rank=rank, world_size=2)):
            pass
    assert [type(value) for value in told] == [NotADirectoryError, type(None)]


def test_a_full_disk_keeps_nobody_from_claiming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder's name cannot be written, and the lock still holds and ends as ever."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    alone = World(rank=0, world_size=1)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        with (
            claimed(tmp_path, alone),
            pytest.raises(BusyError, match="another process trains into it"),
            claimed(tmp_path, alone),
        ):
            pass
    with claimed(tmp_path, alone):
        pass


@pytest.mark.usefixtures("no_report")
def test_where_there_are_no_locks_that_is_said_and_training_goes_on(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, "shardio"):
        assert len(train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))) == 1
    assert f"{tmp_path} lies on a file system without locks" in caplog.text
