"""A run that is stopped and resumed equals an uninterrupted one, in its weights and in its log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import DistributedSampler, TensorDataset

import shardio
from shardio import ShardMapDataset
from shardio.errors import StateError
from shardio.train import Callback, EpochResult, TrainConfig, load_checkpoint, train
from shardio.train.callbacks import read_log
from shardio.train.checkpoint import LOCK
from shardio.transforms import RandomResizedCrop
from tests.files import read_files
from tests.train.runs import (
    BATCH_SIZE,
    EPOCHS,
    STEPS_PER_EPOCH,
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
    """A callback that stops a run before the checkpoint at the end of an epoch, or after it, when the next begins."""

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
    """Check, for each callback, that a run that the callback stops and that is then resumed equals an uninterrupted
    run. Return the model of the uninterrupted run."""

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
    """A dataset whose state cannot be saved, because ``state_dict`` needs arguments, as in MosaicML's streaming."""

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
    config = make_config(tmp_path, schedule="constant")
    first = train(make_model(), make_loader(packed), config)
    before = (tmp_path / "last.pt").read_bytes()
    assert train(make_model(), make_loader(packed), config) == first
    assert (tmp_path / "last.pt").read_bytes() == before
    longer = train(make_model(), make_loader(packed), make_config(tmp_path, epochs=EPOCHS + 1, schedule="constant"))
    assert longer[:EPOCHS] == first
    assert [result.epoch for result in longer] == [0, 1, 2, 3]


def test_without_resume_a_run_starts_over(packed: Path, tmp_path: Path) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path))
    figures, config = read_figures(tmp_path), make_config(tmp_path, resume=False)
    train(make_model(), make_loader(packed), config)
    assert read_figures(tmp_path) == figures
    with pytest.raises(StopError):
        train(make_model(), make_loader(packed), config, callbacks=[StopAfter(0)])
    assert not (tmp_path / "last.pt").exists()
    assert not (tmp_path / "best.pt").exists()
    assert read_figures(tmp_path) == []


def test_the_best_checkpoint_has_the_lowest_validation_loss(packed: Path, tmp_path: Path) -> None:
    val_loader, config = make_batches([20], side=16), make_config(tmp_path, epochs=6, lr=0.1)
    results = train(make_model(), make_loader(packed), config, val_loader=val_loader)
    best = min(results, key=lambda result: result.judged_by)
    assert load_checkpoint(tmp_path / "best.pt")["step"]["num_taken"] == best.step
    assert load_checkpoint(tmp_path / "last.pt")["step"]["num_taken"] == 6 * STEPS_PER_EPOCH
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
        (make_linear(side=16), loader, {}, r"last\.pt is from a run with another model"),
        (model, other_order, {}, "seed"),
    ]
    for own, batches, options, message in others:
        with pytest.raises(StateError, match=message):
            train(own, batches, make_config(tmp_path, **options))
    assert (tmp_path / "last.pt").read_bytes() == before


def test_more_epochs_do_not_raise_a_rate_that_was_cut(packed: Path, tmp_path: Path) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, schedule="step"))
    results = train(make_model(), make_loader(packed), make_config(tmp_path, schedule="step", epochs=6))
    rates = [result.lr for result in results]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.02 * 0.1**5)


def test_validation_that_starts_later_is_compared_only_with_validation(packed: Path, tmp_path: Path) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path))
    hard = [(images, (labels + 1) % 3) for images, labels in make_batches([12], side=16)]
    val_loader, config = [*hard, *make_batches([9], side=16)], make_config(tmp_path, epochs=4)
    assert train(make_model(), make_loader(packed), config, val_loader=val_loader)[-1].is_best


# The log.


def train_logged(directory: Path, **options: Any) -> None:
    settings = {"epochs": 2, "precision": "fp32", "device": "cpu", "directory": directory, "log_every": 2, **options}
    train(make_linear(), make_batches([4] * 5), TrainConfig(**settings), val_loader=make_batches([4]))


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


FOREIGN = {
    "another tool's": b'{"loss": 0.5, "step": 3}\n',
    "of another kind": b'{"kind": "validation", "epoch": 0, "step": 3}\n',
    "an epoch that is not a number": b'{"kind": "epoch", "epoch": "1", "step": 3}\n',
    "without a step": b'{"kind": "steps", "epoch": 1}\n',
    "a list": b"[1, 2]\n",
    "a number": b"3\n",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_the_log_of_another_tool_is_refused_and_nothing_is_removed(tmp_path: Path, content: bytes) -> None:
    train_logged(tmp_path, epochs=1)
    for name in ("last.pt", "best.pt", "log.jsonl"):
        (tmp_path / "log.jsonl").write_bytes(b"\n" + content)
        (tmp_path / ".last.pt.1.partial").write_bytes(b"")
        (tmp_path / LOCK).unlink(missing_ok=True)
        before = read_files(tmp_path)
        for resume in (True, False):
            message = r"log\.jsonl is not the log .*, because line 2 .*move the file, or use another directory"
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
