"""A run that is stopped and resumed has the same weights and log as an uninterrupted run.

Checkpoints are written whole and hold only finite weights, and loading them executes no code. Only one run at a time
can use a directory.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
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
from collections.abc import Sequence
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.utils.data
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import shardio
from shardio import ShardMapDataset
from shardio.errors import BusyError, FormatError, NonFiniteLossError, StateError
from shardio.train import Callback, EpochResult, TrainConfig, TrainStep, checkpoint, load_checkpoint, train
from shardio.train.callbacks import read_log
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
from shardio.transforms import RandomResizedCrop
from tests.files import files_of_at_most, flip, read_files
from tests.loader.programs import Point
from tests.processes import TIMEOUT_S, forkserver_context
from tests.raising import assert_raises
from tests.train.runs import (
    BATCH_SIZE,
    EPOCHS,
    STEPS_PER_EPOCH,
    Collect,
    Poison,
    StopAfter,
    StopError,
    assert_same_weights,
    make_batches,
    make_config,
    make_linear,
    make_loader,
    make_model,
    read_figures,
)

MIXED = {"mixup": 0.4, "cutmix": 1.0, "random_erasing": 0.5, "label_smoothing": 0.1}


class StopAtEpoch(Callback):
    """A callback that stops a run before the checkpoint at the end of an epoch, or after it, in the next epoch."""

    def __init__(self, epoch: int, *, is_saved: bool) -> None:
        self.epoch, self.is_saved, self.num_ended = epoch, is_saved, 0

    def on_batch(self, batch: Any) -> None:
        if self.is_saved and self.num_ended > self.epoch:
            raise StopError

    def on_epoch(self, result: EpochResult) -> None:
        self.num_ended = result.epoch + 1
        if not self.is_saved and result.epoch == self.epoch:
            raise StopError


def assert_resumes(make: Any, folder: Path, stops: Sequence[Callback], val_loader: Any = None, **options: Any) -> Any:
    """For each callback, check that a run stopped by the callback and then resumed equals an uninterrupted run.
    Return the model of the uninterrupted run."""

    def run(name: str, *callbacks: Callback) -> Any:
        config = make_config(folder / name, **options)
        results = train(model := make_model(), make(), config, val_loader=val_loader, callbacks=callbacks)
        return model, [result.loss for result in results]

    whole, losses = run("whole")
    for number, stop in enumerate(stops):
        with pytest.raises(StopError):
            run(str(number), stop)
        resumed, found = run(str(number))
        assert read_figures(folder / str(number)) == read_figures(folder / "whole")
        assert found == losses
        assert_same_weights(resumed, whole)
    return whole


@pytest.mark.parametrize(
    ("options", "stops", "num_workers"),
    [
        ({"checkpoint_every": 1}, [0, 3, 8], [0]),
        ({"checkpoint_every": 2, "schedule": "plateau"}, [1, 6, 11], [0]),
        ({"checkpoint_every": 1, **MIXED}, [3, 10], [0]),
        ({}, [0, 5, 17], [0]),
        pytest.param({"checkpoint_every": 1}, range(2, EPOCHS * 6, 5), [0], marks=pytest.mark.slow),
        pytest.param({"checkpoint_every": 1}, [8], [0, 2, 1], marks=pytest.mark.slow),
    ],
)
def test_stopped_anywhere_and_resumed_equals_uninterrupted(
    packed: Path, tmp_path: Path, options: dict[str, Any], stops: Sequence[int], num_workers: list[int]
) -> None:
    """``tools/train_campaign.py`` kills runs at random moments."""
    callbacks, numbers = [StopAfter(num_batches) for num_batches in stops], cycle(num_workers)
    make = lambda: make_loader(packed, num_workers=next(numbers))  # noqa: E731  # its arguments are long
    assert_resumes(make, tmp_path, callbacks, make_batches([5, 2], side=16), **options)


@pytest.mark.parametrize(("num_workers", "options"), [(0, {}), (0, MIXED), pytest.param(2, {}, marks=pytest.mark.slow)])
def test_torchs_loader_resumes_at_an_epoch(
    packed: Path, tmp_path: Path, num_workers: int, options: dict[str, Any]
) -> None:
    """The loader has no state, but its order depends only on torch's random numbers, which are restored."""
    make = lambda: make_loader(packed, torchs=True, num_workers=num_workers)  # noqa: E731  # its arguments are long
    assert_resumes(make, tmp_path, [StopAfter(9)], **options)


KINDS: dict[str, Any] = {
    "user's": lambda _: (TensorDataset(*make_batches([21], side=16)[0]), None),
    "shards": lambda packed: (ShardMapDataset(packed, transform=RandomResizedCrop(16)), None),
    "distributed": lambda _: (data := TensorDataset(*make_batches([21], side=16)[0]), DistributedSampler(data, 1, 0)),
}
"""Datasets and samplers in torch's order. Without a sampler, torch's global generator determines the order."""


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [("user's", 0), ("shards", 0), ("distributed", 0), pytest.param("user's", 1, marks=pytest.mark.slow)],
)
def test_torchs_order_resumes_from_any_checkpoint(packed: Path, tmp_path: Path, kind: str, num_workers: int) -> None:
    """With six batches in steps of four, an epoch's last step is short, and no batch is left after its checkpoint."""

    def make(loader: Any = shardio.DataLoader) -> Any:
        dataset, sampler = KINDS[kind](packed)
        options = {"shuffle": True} if sampler is None else {"sampler": sampler}
        return loader(dataset, BATCH_SIZE, num_workers=num_workers, **options)

    stops = [StopAfter(5), StopAfter(11), StopAtEpoch(0, is_saved=False), StopAtEpoch(1, is_saved=True)]
    whole = assert_resumes(make, tmp_path, stops, checkpoint_every=1, accumulate=4)
    if kind != "shards":  # Torch's loader draws different crops.
        train(model := make_model(), make(torch.utils.data.DataLoader), make_config(tmp_path / "torchs", accumulate=4))
        assert_same_weights(model, whole)


class Asking(TensorDataset):
    """A dataset whose state cannot be saved, because ``state_dict`` needs arguments, as in MosaicML Streaming."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError("these arguments are unknown")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is no state")


def test_checkpoints_within_an_epoch_need_a_loader_with_a_state(packed: Path, tmp_path: Path) -> None:
    loader = shardio.DataLoader(Asking(*make_batches([21], side=16)[0]), BATCH_SIZE, shuffle=True)
    assert not loader.has_state
    train(make_model(), loader, make_config(tmp_path, epochs=1))
    assert [rank["loader"] for rank in load_checkpoint(tmp_path / "last.pt")["ranks"]] == [None]
    for other in (loader, make_loader(packed, torchs=True)):
        with pytest.raises(ValueError, match="checkpoint_every=2 needs a loader with a state, which this DataLoader"):
            train(make_model(), other, make_config(tmp_path / "other", checkpoint_every=2))


def test_a_finished_run_does_nothing_until_more_epochs_are_wanted(packed: Path, tmp_path: Path) -> None:
    """Training for more epochs does not raise a learning rate that the schedule has cut."""
    config, longer = (make_config(tmp_path, schedule="step", epochs=epochs) for epochs in (EPOCHS, 2 * EPOCHS))
    first, last = train(make_model(), make_loader(packed), config), tmp_path / "last.pt"
    before = last.read_bytes()
    assert train(make_model(), make_loader(packed), config) == first
    assert last.read_bytes() == before
    results = train(make_model(), make_loader(packed), longer)
    assert results[:EPOCHS] == first
    assert [result.epoch for result in results] == list(range(2 * EPOCHS))
    rates = [result.lr for result in results]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.02 * 0.1**5)


def test_without_resume_a_run_starts_over(packed: Path, tmp_path: Path) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path))
    figures, config = read_figures(tmp_path), make_config(tmp_path, resume=False)
    train(make_model(), make_loader(packed), config)
    assert read_figures(tmp_path) == figures
    with pytest.raises(StopError):
        train(make_model(), make_loader(packed), config, callbacks=[StopAfter(0)])
    assert {path.name for path in tmp_path.glob("*.*")} == {LOCK, "log.jsonl"}
    assert read_figures(tmp_path) == []


def test_the_best_checkpoint_has_the_lowest_validation_loss(packed: Path, tmp_path: Path) -> None:
    val_loader, config = make_batches([20], side=16), make_config(tmp_path, epochs=6, lr=0.1)
    results = train(make_model(), make_loader(packed), config, val_loader=val_loader)
    best = min(results, key=lambda result: result.judged_by)
    for name, step in (("best.pt", best.step), ("last.pt", 6 * STEPS_PER_EPOCH)):
        assert load_checkpoint(tmp_path / name)["step"]["num_taken"] == step
    assert max(result.epoch for result in results if result.is_best) == best.epoch


def test_other_settings_another_model_and_another_order_are_refused(packed: Path, tmp_path: Path) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    before = (tmp_path / "last.pt").read_bytes()
    dataset = ShardMapDataset(packed, fields=("image", "label", "key"), transform=RandomResizedCrop(16))
    other_order = shardio.DataLoader(dataset, BATCH_SIZE, sampler=shardio.EpochSampler(dataset, seed=2))
    model, loader = make_model(), make_loader(packed)
    others: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model, loader, {"lr": 0.03}, r"lr was 0\.02 and is now 0\.03"),
        (model, loader, {"optimizer": "sgd", "seed": 4}, r"was 'adamw' and is now 'sgd'; seed was 0 and is now 4"),
        (model, loader, {"accumulate": 1}, "accumulate was 2 and is now 1"),
        (model, loader, {"mixup": 0.2}, r"mixup was 0\.0 and is now 0\.2"),
        (make_linear(side=16), loader, {}, r"last\.pt is from a run with a different model"),
        (model, other_order, {}, "seed"),
    ]
    for own, batches, options, message in others:
        with pytest.raises(StateError, match=message):
            train(own, batches, make_config(tmp_path, **options))
    assert (tmp_path / "last.pt").read_bytes() == before


def test_validation_that_starts_later_is_compared_only_with_validation(packed: Path, tmp_path: Path) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path))
    hard = [(images, (labels + 1) % 3) for images, labels in make_batches([12], side=16)]
    val_loader, config = [*hard, *make_batches([9], side=16)], make_config(tmp_path, epochs=4)
    assert train(make_model(), make_loader(packed), config, val_loader=val_loader)[-1].is_best


# The log.


def train_logged(directory: Path, **options: Any) -> None:
    config = make_config(directory, **{"epochs": 2, "accumulate": 1, "log_every": 2, **options})
    train(make_linear(), make_batches([4] * 5), config, val_loader=make_batches([4]))


def test_the_log_has_a_line_every_log_every_steps_and_every_epoch(tmp_path: Path) -> None:
    train_logged(tmp_path)
    log = tmp_path / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    first = [("steps", 2, 0), ("steps", 4, 0), ("steps", 5, 0), ("epoch", 5, 0)]
    second = [("steps", 6, 1), ("steps", 8, 1), ("steps", 10, 1), ("epoch", 10, 1)]
    assert [(line["kind"], line["step"], line["epoch"]) for line in lines] == [*first, *second]
    assert all(line["loss"] > 0 and line["lr"] > 0 for line in lines)
    assert list(read_log(log)) == lines
    log.write_bytes(log.read_bytes()[:-10])
    assert list(read_log(log)) == lines[:-1], "a truncated line is skipped"
    log.write_bytes(b"")
    assert list(read_log(log)) == []
    assert list(read_log(tmp_path / "nowhere.jsonl")) == []


FOREIGN = [
    *(b'{"loss": 0.5, "step": 3}\n', b'{"kind": "validation", "epoch": 0, "step": 3}\n', b"[1, 2]\n", b"3\n"),
    *(b'{"kind": "epoch", "epoch": "1", "step": 3}\n', b'{"kind": "steps", "epoch": 1}\n'),
]
"""Lines from other tools, a line of an unknown kind, one whose epoch is not a number, and one without a step."""


@pytest.mark.parametrize("content", FOREIGN)
def test_the_log_of_another_tool_is_refused_and_nothing_is_removed(tmp_path: Path, content: bytes) -> None:
    train_logged(tmp_path, epochs=1)
    message = r"log\.jsonl is not the log .*, because line 2 .*move the file, or use another directory"
    for name in ("last.pt", "best.pt", "log.jsonl"):
        (tmp_path / "log.jsonl").write_bytes(b"\n" + content)
        (tmp_path / ".last.pt.1.partial").write_bytes(b"")
        (tmp_path / LOCK).unlink(missing_ok=True)
        before = read_files(tmp_path)
        for resume in (True, False):
            with pytest.raises(StateError, match=message):
                train_logged(tmp_path, resume=resume)
            (tmp_path / LOCK).unlink()
            assert read_files(tmp_path) == before
        (tmp_path / name).unlink()  # The log is also refused if only one checkpoint is left, or none.


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_logged(tmp_path)
    train_logged(tmp_path, epochs=3, schedule="onecycle")
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    lines = list(read_log(tmp_path / "log.jsonl"))
    for kind in ("steps", "epoch"):
        found = {event.step: event.value for event in events.Scalars(f"{kind}/loss")}
        assert found == pytest.approx({line["step"]: line["loss"] for line in lines if line["kind"] == kind})


# Checkpoints.

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
    tensors, alive = list[weakref.ref[torch.Tensor]](), list[int]()

    def load_and_watch(*args: Any, **options: Any) -> dict[str, Any]:
        state = load_checkpoint(*args, **options)
        tensors.extend(weakref.ref(tensor) for tensor in state["model"].values())
        return state

    class Look(Callback):
        def on_log(self, record: Any) -> None:
            gc.collect()
            alive.append(sum(tensor() is not None for tensor in tensors))

    monkeypatch.setattr("shardio.train.loop.load_checkpoint", load_and_watch)
    config = make_config(tmp_path, epochs=2, schedule="onecycle", log_every=STEPS_PER_EPOCH)
    train(make_model(), make_loader(packed), config, callbacks=[Look()])
    assert (len(tensors), alive) == (len(make_model().state_dict()), [0])


def test_a_run_killed_before_last_pt_keeps_its_best(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: Path, state: dict[str, Any]) -> None:
        if path.name == "last.pt":
            raise StopError
        checkpoint.save_checkpoint(path, state)

    with monkeypatch.context() as patch:
        patch.setattr("shardio.train.loop.save_checkpoint", save)
        with pytest.raises(StopError):
            train(make_model(), make_loader(packed), make_config(tmp_path))
    results = train(make_model(), make_loader(packed), make_config(tmp_path))
    assert load_checkpoint(tmp_path / "best.pt")["results"][-1]["loss"] == min(result.loss for result in results)


LOADABLE: list[Any] = [
    None,
    [True, 2**100, -0.5, 1j],
    ["a", b"b", bytearray(b"c")],
    (OrderedDict(a={1}), {3: ()}, Counter("a")),
    [torch.ones(2), torch.nn.Parameter(torch.ones(1)), torch.Size([1]), torch.float16, torch.device("cpu")],
    [np.ones((2, 3), np.float32), np.array(["a"]), np.zeros(2, [("a", "<i4")]), np.array("2020", "M8[D]")],
    [np.float64(0.5), np.int8(3), np.bool_(True), np.str_("a")],
    np.random.get_state(),
    random.getstate(),
]


def test_what_is_saved_is_loaded_without_executing_code(tmp_path: Path) -> None:
    for value in LOADABLE:
        check_loadable(value, "it")
        save_checkpoint(tmp_path / "last.pt", {"value": value})
        assert are_equal(load_checkpoint(tmp_path / "last.pt")["value"], value)


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
    assert_raises(FormatError, "cannot be read as a checkpoint", load_checkpoint, tmp_path / "last.pt")
    assert not Path("sprung").exists()


def test_a_flipped_bit_never_changes_the_loaded_state_silently(tmp_path: Path) -> None:
    """Checksums are written even if the user turned them off."""
    path, before = tmp_path / "last.pt", torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(path, {"model": {"weight": torch.arange(50.0)}, "times": {"train_s": 1.5}})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(before)
    content, expected, errors = path.read_bytes(), repr(load_checkpoint(path)), list[str]()
    for offset in range(0, len(content), 11):
        path.write_bytes(content)
        flip(path, offset, 1 << offset % 8)
        try:
            assert repr(load_checkpoint(path)) == expected, offset
        except FormatError as error:
            errors.append(str(error))
    assert errors
    assert all(str(path) in error for error in errors)
    for size in (0, 100, len(content) - 1):
        path.write_bytes(content[:size])
        message = r"last\.pt is not a checkpoint, or is truncated: use another checkpoint or"
        assert_raises(FormatError, message, load_checkpoint, path)


@pytest.mark.parametrize(
    "state", [[1], 3, None, torch.zeros(3), {}, {"format": True}, {"format": [1]}, {"format": torch.zeros(3)}]
)
def test_the_file_of_another_program_is_refused(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "last.pt")
    assert_raises(FormatError, r"last\.pt", load_checkpoint, tmp_path / "last.pt")


@pytest.mark.parametrize("name", PARTS)
def test_a_state_without_one_of_its_parts_is_refused(name: str) -> None:
    state: dict[str, Any] = {part: kind() for part, kind in PARTS.items()}
    check_parts(state, "last.pt")
    for damaged in ({**state, name: 7.5}, {part: value for part, value in state.items() if part != name}):
        message = rf"last\.pt is not a checkpoint .* \('{name}' must be a"
        assert_raises(FormatError, message, check_parts, damaged, "last.pt")


@pytest.mark.parametrize("log_every", [1, 10])
def test_the_error_of_a_nan_loss_names_step_keys_and_remedy(packed: Path, tmp_path: Path, log_every: int) -> None:
    """The loss is NaN in batch 9, which is the first half of step 5 (step 2 of epoch 1), after a finite checkpoint."""
    collect, config = Collect(), make_config(tmp_path, checkpoint_every=2, log_every=log_every)
    model = nn.Sequential(Poison(9), *make_model())
    with pytest.raises(NonFiniteLossError, match=r"the loss of step 5 is nan \(samples: class-") as caught:
        train(model, make_loader(packed), config, callbacks=[collect])
    assert (caught.value.step, list(caught.value.keys or ())) == (5, list(collect.batches[8][2]))
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
        assert all(tensor.isfinite().all() for tensor in load_checkpoint(tmp_path / name)["model"].values())


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
    epochs = [result["epoch"] for result in state["results"]]
    assert (epochs, state["step"]["num_taken"]) == (list(range(EPOCHS)), EPOCHS * STEPS_PER_EPOCH)


def test_the_lock_survives_a_copy_and_a_full_disk_and_is_released_if_another_rank_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with claimed(run):
        shutil.copytree(run, tmp_path / "backup")
        with pytest.raises(BusyError), claimed(run):
            pass
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        busy = pytest.raises(BusyError, match="is in use by another process, which is training there")
        with claimed(tmp_path), busy, claimed(tmp_path):
            pass
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", "0")
        patch.setattr("shardio.train.step.gather", mock.Mock(side_effect=ConnectionError("the other rank is gone")))
        with pytest.raises(ConnectionError), claimed(run):
            pass
    with claimed(run), claimed(tmp_path):
        pass


def test_unfinished_files_of_other_programs_stay(packed: Path, tmp_path: Path) -> None:
    others = [".shardio-pack.partial", ".rank-00001.cov.0123abcd.partial", ".notes.partial"]
    for name in (*others, ".last.pt.0123abcd.partial"):
        (tmp_path / name).touch()
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    assert {path.name for path in tmp_path.glob("*.partial")} == set(others)


def test_without_locks_a_warning_is_logged_and_training_works(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with caplog.at_level(logging.WARNING, "shardio"):
        assert len(train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))) == 1
    assert f"{tmp_path} is on a file system without locks" in caplog.text


@pytest.mark.parametrize("kept", [["best.pt", "log.jsonl"], ["best.pt"], ["log.jsonl"]])
def test_a_run_without_last_pt_is_not_replaced_silently(packed: Path, tmp_path: Path, kept: list[str]) -> None:
    """After one epoch with the same settings, best.pt is replaced: a run killed early may leave only this file."""

    def run(**options: Any) -> int:
        return len(train(make_model(), make_loader(packed), make_config(tmp_path, **options)))

    run(epochs=2)
    for name in read_files(tmp_path).keys() - kept:
        (tmp_path / name).unlink()
    before = read_files(tmp_path)
    with pytest.raises(StateError, match=r"of an earlier run, but no last\.pt to resume from: restore last\.pt"):
        run(epochs=2)
    (tmp_path / LOCK).unlink()
    assert read_files(tmp_path) == before
    assert run(epochs=1, resume=False) == 1
    (tmp_path / "last.pt").unlink()
    with pytest.raises(StateError, match=r"contains the best\.pt of an earlier run"):
        run(epochs=1, lr=0.123)
    assert run(epochs=1) == 1


def test_ranks_that_see_different_directories_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.train.checkpoint.gather", lambda found: [found, not found])
    message = r"only some ranks see .*last\.pt: use a directory that all ranks share"
    assert_raises(StateError, message, prepare_directory, tmp_path, make_config(tmp_path))
