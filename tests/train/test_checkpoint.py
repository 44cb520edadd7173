"""Checkpoints are written whole and hold only finite weights, and loading them executes no code.

Only one run at a time can use a directory.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from shardio.errors import BusyError, FormatError, NonFiniteLossError, StateError
from shardio.train import Callback, TrainConfig, TrainStep, checkpoint as checkpoint_module, load_checkpoint, train
from shardio.train.checkpoint import (
    LOCK,
    PARTS,
    are_equal,
    check_loadable,
    check_parts,
    claimed,
    prepare_directory,
    save_checkpoint,
)
from tests.files import files_of_at_most, flip, read_files
from tests.loader.programs import Point
from tests.processes import TIMEOUT_S, forkserver_context
from tests.train.runs import (
    EPOCHS,
    STEPS_PER_EPOCH,
    Poison,
    StopError,
    make_batches,
    make_config,
    make_linear,
    make_loader,
    make_model,
)

FULL = r"File too large\. Any previous checkpoint is kept.*last\.pt'"

LARGE = {"weight": torch.zeros(40_000)}


@pytest.mark.parametrize(
    ("num_bytes", "model", "error"),
    [(500, LARGE, FULL), (200_000, LARGE, FULL), (10**6, lambda: None, r"pickle|local object")],
)
def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path: Path, num_bytes: int, model: Any, error: str) -> None:
    """The disk may become full at any point. torch's own error would only say "unexpected pos"."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"model": {}})
    with files_of_at_most(num_bytes), pytest.raises(Exception, match=error):
        save_checkpoint(path, {"model": model, "step": {"moment": torch.zeros(40_000)}})
    assert load_checkpoint(path)["model"] == {}
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_checkpoints_are_freed_after_loading(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    tensors: list[weakref.ref[torch.Tensor]] = []

    def load_and_watch(*args: Any, **options: Any) -> dict[str, Any]:
        state = load_checkpoint(*args, **options)
        tensors.extend(weakref.ref(tensor) for tensor in state["model"].values())
        return state

    class Look(Callback):
        num_alive = -1

        def on_log(self, record: Any) -> None:
            gc.collect()
            self.num_alive = sum(tensor() is not None for tensor in tensors)

    monkeypatch.setattr("shardio.train.loop.load_checkpoint", load_and_watch)
    look = Look()
    config = make_config(tmp_path, epochs=2, schedule="onecycle", log_every=STEPS_PER_EPOCH)
    train(make_model(), make_loader(packed), config, callbacks=[look])
    assert len(tensors) == len(make_model().state_dict())
    assert look.num_alive == 0


def test_a_run_killed_before_last_pt_keeps_its_best(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: Path, state: dict[str, Any]) -> None:
        if path.name == "last.pt":
            raise StopError
        checkpoint_module.save_checkpoint(path, state)

    with monkeypatch.context() as patch:
        patch.setattr("shardio.train.loop.save_checkpoint", save)
        with pytest.raises(StopError):
            train(make_model(), make_loader(packed), make_config(tmp_path))
    results = train(make_model(), make_loader(packed), make_config(tmp_path))
    assert load_checkpoint(tmp_path / "best.pt")["results"][-1]["loss"] == min(result.loss for result in results)


LOADABLE: dict[str, Any] = {
    "none": None,
    "numbers": [True, 2**100, -0.5, 1j],
    "text": ["a", b"b", bytearray(b"c")],
    "containers": (OrderedDict(a={1}), {3: ()}, Counter("a")),
    "tensors": [torch.ones(2), torch.nn.Parameter(torch.ones(1)), torch.Size([1]), torch.float16, torch.device("cpu")],
    "arrays": [np.ones((2, 3), np.float32), np.array(["a"]), np.zeros(2, [("a", "<i4")]), np.array("2020", "M8[D]")],
    "scalars": [np.float64(0.5), np.int8(3), np.bool_(True), np.str_("a")],
    "the state of numpy": np.random.get_state(),
    "the state of python": random.getstate(),
}


@pytest.mark.parametrize("name", LOADABLE)
def test_what_is_saved_is_loaded_without_executing_code(tmp_path: Path, name: str) -> None:
    check_loadable(LOADABLE[name], "it")
    save_checkpoint(tmp_path / "last.pt", {"value": LOADABLE[name]})
    assert are_equal(load_checkpoint(tmp_path / "last.pt")["value"], LOADABLE[name])


class Trap:
    def __reduce__(self) -> Any:
        return (Path("sprung").touch, ())


UNLOADABLE = [defaultdict(int), Point(1, 2), Path("a"), np.array([Path("a")], object), range(3), len, Trap()]


@pytest.mark.parametrize("value", UNLOADABLE, ids=lambda value: type(value).__name__)
def test_what_could_not_be_loaded_is_refused_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"it\[0\]\['a'\] is of type \w+, which checkpoints cannot hold"):
        check_loadable([{"a": value}], "it")
    save_checkpoint(tmp_path / "last.pt", {"value": value})
    with pytest.raises(FormatError, match="cannot be read as a checkpoint"):
        load_checkpoint(tmp_path / "last.pt")
    assert not Path("sprung").exists()


def test_a_flipped_bit_never_changes_the_loaded_state_silently(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"model": {"weight": torch.arange(50.0)}, "times": {"train_s": 1.5}})
    content, expected, errors = path.read_bytes(), repr(load_checkpoint(path)), list[str]()
    for offset in range(0, len(content), 11):
        path.write_bytes(content)
        flip(path, offset, 1 << offset % 8)
        try:
            assert repr(load_checkpoint(path)) == expected, offset
        except FormatError as error:
            errors.append(str(error))
    for size in (0, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(FormatError, match=r"last\.pt is not a checkpoint, or is truncated: use another one or"):
            load_checkpoint(path)
    assert errors
    assert all(str(path) in error for error in errors)


def test_checksums_are_written_even_if_the_user_turned_them_off(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "last.pt", {"model": {"weight": torch.ones(3)}})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(before)
    assert load_checkpoint(tmp_path / "last.pt")["model"]["weight"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "state",
    [[1], 3, None, torch.zeros(3), {}, {"format": True}, {"format": [1]}, {"format": torch.zeros(3)}],
    ids=lambda state: repr(state).replace("\n", ""),
)
def test_the_file_of_another_program_is_refused(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "last.pt")
    with pytest.raises(FormatError, match=r"last\.pt"):
        load_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("name", PARTS)
def test_a_state_without_one_of_its_parts_is_refused(name: str) -> None:
    state: dict[str, Any] = {part: kind() for part, kind in PARTS.items()}
    check_parts(state, "last.pt")
    for damaged in ({**state, name: 7.5}, {part: value for part, value in state.items() if part != name}):
        with pytest.raises(FormatError, match=rf"last\.pt is not a checkpoint .* \('{name}' must be a"):
            check_parts(damaged, "last.pt")


@pytest.mark.parametrize("log_every", [1, 10])
def test_the_error_of_a_nan_loss_names_step_keys_and_remedy(packed: Path, tmp_path: Path, log_every: int) -> None:
    """The loss is NaN in batch 9, which is the first half of step 5 (step 2 of epoch 1), after a finite checkpoint."""
    keys = list[list[str]]()

    class Keys(Callback):
        def on_batch(self, batch: Any) -> None:
            keys.append(list(batch[2]))

    config = make_config(tmp_path, checkpoint_every=2, log_every=log_every)
    model = nn.Sequential(Poison(9), *make_model())
    with pytest.raises(NonFiniteLossError, match=r"the loss of step 5 is nan \(samples: class-") as caught:
        train(model, make_loader(packed), config, callbacks=[Keys()])
    assert caught.value.step == 5
    assert list(caught.value.keys or ()) == list(keys[8])
    assert f"{tmp_path}/last.pt holds the weights of step 4" in str(caught.value)
    state = load_checkpoint(tmp_path / "last.pt")
    assert state["step"]["num_taken"] == 4
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_an_infinite_loss_stops_a_run_without_a_directory() -> None:
    batches = [(images.float() * float("inf"), labels) for images, labels in make_batches([4, 4])]
    message = r"samples unknown, .* Start a new run with a lower learning rate"
    with pytest.raises(NonFiniteLossError, match=message) as caught:
        train(make_linear(), batches, TrainConfig(epochs=1, precision="fp32", device="cpu"))
    assert caught.value.keys is None


@pytest.mark.parametrize("bad_step", [3, 5])
def test_nan_weights_are_never_saved(packed: Path, tmp_path: Path, bad_step: int) -> None:
    """NaN is saved neither after step 4, when the last checkpoint is from step 2, nor at the end of an epoch."""

    class BadGradient(Callback):
        def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
            return loss * float("nan") if step.num_steps == bad_step else loss  # The reported loss stays finite.

    config = make_config(tmp_path, checkpoint_every=2, log_every=1)
    message = f"weights are NaN or infinite after step {bad_step + 1}, because a gradient was not finite. Start a new"
    with pytest.raises(NonFiniteLossError, match=message):
        train(make_model(), make_loader(packed), config, callbacks=[BadGradient()])
    for name in ("last.pt", "best.pt"):
        state = load_checkpoint(tmp_path / name)
        assert all(tensor.isfinite().all() for tensor in state["model"].values())


def _train_and_wait(packed: Path, directory: Path, reports: Connection) -> None:
    """Train. In the second epoch, when there is a checkpoint, report the workers and wait."""

    class Wait(Callback):
        num_epochs = 0

        def on_epoch(self, result: Any) -> None:
            self.num_epochs = result.epoch + 1

        def on_batch(self, batch: Any) -> None:
            if self.num_epochs == 1:
                reports.send([worker.pid for worker in multiprocessing.active_children()])
                time.sleep(TIMEOUT_S)

    torch.set_num_threads(1)
    loader = make_loader(packed, torchs=True, num_workers=1)
    loader.multiprocessing_context = "fork"
    train(make_model(), loader, make_config(directory), callbacks=[Wait()])


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_one_can_be_resumed_at_once(packed: Path, tmp_path: Path) -> None:
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


def test_all_ranks_raise_the_error_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    outcomes = list[Any]()
    monkeypatch.setattr("shardio.train.step.gather", lambda outcome: (outcomes.append(outcome), outcomes)[1])  # type: ignore[func-returns-value]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(NotADirectoryError), claimed(tmp_path / "file" / "run"):
            pass
    assert [type(outcome) for outcome in outcomes] == [NotADirectoryError, list]


def test_the_lock_survives_a_copy_and_is_released_if_another_rank_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with claimed(run):
        shutil.copytree(run, tmp_path / "backup")
        with pytest.raises(BusyError), claimed(run):
            pass
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", "0")
        patch.setattr("shardio.train.step.gather", mock.Mock(side_effect=ConnectionError("the other rank is gone")))
        with pytest.raises(ConnectionError), claimed(run):
            pass
    with claimed(run):
        pass


def test_unfinished_files_of_other_programs_stay(packed: Path, tmp_path: Path) -> None:
    others = [".shardio-pack.partial", ".rank-00001.cov.0123abcd.partial", ".notes.partial"]
    for name in (*others, ".last.pt.0123abcd.partial"):
        (tmp_path / name).touch()
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    assert {path.name for path in tmp_path.glob("*.partial")} == set(others)


def test_the_lock_holds_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_run_without_last_pt_is_not_replaced_silently(packed: Path, tmp_path: Path, kept: list[str]) -> None:
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
    """With the same settings, best.pt is replaced, because a run that is killed early may leave only best.pt."""
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    (tmp_path / "last.pt").unlink()
    with pytest.raises(StateError, match=r"contains the best\.pt of an earlier run"):
        train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1, lr=0.123))
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))


def test_ranks_that_see_different_directories_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.train.checkpoint.gather", lambda found: [found, not found])
    with pytest.raises(StateError, match=r"only some ranks see .*last\.pt: use a directory that all ranks share"):
        prepare_directory(tmp_path, make_config(tmp_path))
