"""A run that is stopped and resumed equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from torch.utils.data import DistributedSampler, TensorDataset

import shardio
from shardio import ShardMapDataset
from shardio.errors import StateError
from shardio.train import Callback, EpochResult, load_checkpoint, train
from shardio.transforms import RandomResizedCrop
from tests.train.runs import (
    BATCH_SIZE,
    EPOCHS,
    STEPS_PER_EPOCH,
    StopAfter,
    StopError,
    assert_same_weights,
    make_config,
    make_loader,
    make_model,
    read_figures,
)
from tests.train.small_data import make_batches, make_linear

pytestmark = pytest.mark.usefixtures("no_report")


MIXED = {"mixup": 0.4, "cutmix": 1.0, "random_erasing": 0.5, "label_smoothing": 0.1}


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({"checkpoint_every": 1}, range(0, EPOCHS * 6, 4)),
        ({"checkpoint_every": 2, "schedule": "plateau"}, range(1, EPOCHS * 6, 5)),
        ({"checkpoint_every": 1, **MIXED}, range(3, EPOCHS * 6, 7)),
        ({}, [0, 5, 6, 17]),
    ],
)
def test_stopped_anywhere_and_resumed_equals_uninterrupted(
    packed: Path, tmp_path: Path, options: dict[str, Any], stops: Sequence[int]
) -> None:
    """Losses, rates, weights and validation are bit-identical, no matter how many steps were lost.

    ``tools/train_campaign.py`` kills runs at random moments.
    """
    whole, val_loader = make_model(), make_batches([5, 2], side=16)
    expected = train(whole, make_loader(packed), make_config(tmp_path / "whole", **options), val_loader=val_loader)
    for num_batches in stops:
        config = make_config(tmp_path / str(num_batches), **options)
        with pytest.raises(StopError):
            train(make_model(), make_loader(packed), config, val_loader=val_loader, callbacks=[StopAfter(num_batches)])
        resumed = make_model()
        results = train(resumed, make_loader(packed), config, val_loader=val_loader)
        assert read_figures(tmp_path / str(num_batches)) == read_figures(tmp_path / "whole")
        assert [result.loss for result in results] == [result.loss for result in expected]
        assert_same_weights(resumed, whole)


@pytest.mark.parametrize(("num_workers", "options"), [(0, {}), (2, {}), (0, MIXED)])
def test_torchs_loader_resumes_at_the_start_of_an_epoch(
    packed: Path, tmp_path: Path, num_workers: int, options: dict[str, Any]
) -> None:
    """It has no state, but its order depends only on torch's random numbers, which are restored."""
    whole = make_model()
    train(whole, make_loader(packed, torchs=True, num_workers=num_workers), make_config(tmp_path / "whole", **options))
    config = make_config(tmp_path / "stopped", **options)
    loader = make_loader(packed, torchs=True, num_workers=num_workers)
    with pytest.raises(StopError):
        train(make_model(), loader, config, callbacks=[StopAfter(9)])
    resumed = make_model()
    train(resumed, make_loader(packed, torchs=True, num_workers=num_workers), config)
    assert read_figures(tmp_path / "stopped") == read_figures(tmp_path / "whole")
    assert_same_weights(resumed, whole)


class StopAtEpoch(Callback):
    """Stop a run at the end of an epoch: before its checkpoint, or after it, when the next epoch begins."""

    def __init__(self, epoch: int, *, is_saved: bool) -> None:
        self.epoch, self.is_saved, self.num_ended = epoch, is_saved, 0

    def on_batch(self, batch: Any) -> None:
        if self.is_saved and self.num_ended > self.epoch:
            raise StopError

    def on_epoch(self, result: EpochResult) -> None:
        self.num_ended = result.epoch + 1
        if not self.is_saved and result.epoch == self.epoch:
            raise StopError


KINDS: dict[str, Any] = {
    "user's": lambda _: (TensorDataset(*make_batches([21], side=16)[0]), None),
    "shards": lambda packed: (ShardMapDataset(packed, transform=RandomResizedCrop(16)), None),
    "distributed": lambda _: (data := TensorDataset(*make_batches([21], side=16)[0]), DistributedSampler(data, 1, 0)),
}
"""Datasets and samplers of torch's order. Without a sampler, the order is drawn from torch's global generator."""


@pytest.mark.parametrize(("kind", "num_workers"), [("user's", 0), ("user's", 1), ("shards", 0), ("distributed", 0)])
def test_torchs_order_resumes_from_any_checkpoint(packed: Path, tmp_path: Path, kind: str, num_workers: int) -> None:
    """Six batches in steps of four: the last step of an epoch is short. Its checkpoint has no batch left."""

    def run(name: str, *callbacks: Callback, loader: Any = shardio.DataLoader) -> Any:
        dataset, sampler = KINDS[kind](packed)
        options = {"shuffle": True} if sampler is None else {"sampler": sampler}
        every = 1 if loader is shardio.DataLoader else None
        config = make_config(tmp_path / name, checkpoint_every=every, accumulate=4)
        batches = loader(dataset, BATCH_SIZE, num_workers=num_workers, **options)
        train(model := make_model(), batches, config, callbacks=callbacks)
        return model

    whole = run("whole")
    if kind != "shards":  # torch's loader draws other crops.
        assert_same_weights(run("torchs", loader=torch.utils.data.DataLoader), whole)
    stops = [StopAfter(5), StopAfter(11), StopAtEpoch(0, is_saved=False), StopAtEpoch(1, is_saved=True)]
    for name, stop in enumerate(stops):
        with pytest.raises(StopError):
            run(str(name), stop)
        assert_same_weights(run(str(name)), whole)
        assert read_figures(tmp_path / str(name)) == read_figures(tmp_path / "whole")


def test_checkpoints_within_an_epoch_need_a_loader_with_a_state(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint_every=2 needs a loader with a state, which this DataLoader"):
        train(make_model(), make_loader(packed, torchs=True), make_config(tmp_path, checkpoint_every=2))


class Asking(TensorDataset):
    """A dataset whose state cannot be asked for: it has arguments, as in MosaicML's streaming."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError("nobody has these arguments")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is no state")


def test_a_dataset_whose_state_cannot_be_asked_for_makes_a_loader_without_a_state(tmp_path: Path) -> None:
    loader = shardio.DataLoader(Asking(*make_batches([21], side=16)[0]), BATCH_SIZE, shuffle=True)
    assert not loader.has_state
    train(make_model(), loader, make_config(tmp_path, epochs=1))
    assert [rank["loader"] for rank in load_checkpoint(tmp_path / "last.pt")["ranks"]] == [None]
    with pytest.raises(ValueError, match="checkpoint_every=2 needs a loader with a state, which this DataLoader"):
        train(make_model(), loader, make_config(tmp_path / "other", checkpoint_every=2))


def test_the_number_of_workers_may_change(packed: Path, tmp_path: Path) -> None:
    whole = make_model()
    train(whole, make_loader(packed), make_config(tmp_path / "whole", checkpoint_every=1))
    config = make_config(tmp_path / "stopped", checkpoint_every=1)
    with pytest.raises(StopError):
        train(make_model(), make_loader(packed, num_workers=2), config, callbacks=[StopAfter(8)])
    resumed = make_model()
    train(resumed, make_loader(packed, num_workers=1), config)
    assert read_figures(tmp_path / "stopped") == read_figures(tmp_path / "whole")
    assert_same_weights(resumed, whole)


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
    figures = read_figures(tmp_path)
    train(make_model(), make_loader(packed), make_config(tmp_path, resume=False))
    assert read_figures(tmp_path) == figures
    with pytest.raises(StopError):
        train(make_model(), make_loader(packed), make_config(tmp_path, resume=False), callbacks=[StopAfter(0)])
    assert not (tmp_path / "last.pt").exists()
    assert not (tmp_path / "best.pt").exists()
    assert read_figures(tmp_path) == []


def test_the_best_checkpoint_has_the_lowest_validation_loss(packed: Path, tmp_path: Path) -> None:
    """The labels are random: the model soon gets worse on them, and best.pt stays."""
    results = train(
        make_model(),
        make_loader(packed),
        make_config(tmp_path, epochs=6, lr=0.1),
        val_loader=make_batches([20], side=16),
    )
    best = min(results, key=lambda result: result.judged_by)
    assert load_checkpoint(tmp_path / "best.pt")["step"]["num_taken"] == best.step
    assert load_checkpoint(tmp_path / "last.pt")["step"]["num_taken"] == 6 * STEPS_PER_EPOCH
    assert max(result.epoch for result in results if result.is_best) == best.epoch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.03}, r"lr was 0\.02 and is now 0\.03"),
        ({"optimizer": "sgd", "seed": 4}, r"optimizer was 'adamw' and is now 'sgd'; seed was 0 and is now 4"),
        ({"accumulate": 1}, "accumulate was 2 and is now 1"),
        ({"mixup": 0.2}, r"mixup was 0\.0 and is now 0\.2"),
    ],
)
def test_other_settings_are_refused_and_named(
    packed: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(StateError, match=message):
        train(make_model(), make_loader(packed), make_config(tmp_path, **options))
    assert (tmp_path / "last.pt").read_bytes() == before


def test_another_model_or_another_order_is_refused(packed: Path, tmp_path: Path) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    with pytest.raises(StateError, match=r"last\.pt is from a run with another model"):
        train(make_linear(side=16), make_loader(packed), make_config(tmp_path))
    other = ShardMapDataset(packed, fields=("image", "label", "key"), transform=RandomResizedCrop(16))
    loader = shardio.DataLoader(other, BATCH_SIZE, sampler=shardio.EpochSampler(other, seed=2))
    with pytest.raises(StateError, match="seed"):
        train(make_model(), loader, make_config(tmp_path))


def test_settings_of_numpys_types_can_be_loaded(packed: Path, tmp_path: Path) -> None:
    rate = np.logspace(-4, -2, 3)[1]
    train(make_model(), make_loader(packed), make_config(tmp_path, lr=rate, mean=tuple(np.zeros(3)), epochs=1))
    assert (
        len(train(make_model(), make_loader(packed), make_config(tmp_path, lr=rate, mean=tuple(np.zeros(3)), epochs=2)))
        == 2
    )


def test_more_epochs_do_not_raise_a_rate_that_was_cut(packed: Path, tmp_path: Path) -> None:
    """The period, by default a third of the epochs, stays as it was at the start."""
    train(make_model(), make_loader(packed), make_config(tmp_path, schedule="step"))
    results = train(make_model(), make_loader(packed), make_config(tmp_path, schedule="step", epochs=6))
    rates = [result.lr for result in results]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.02 * 0.1**5)


def test_validation_that_starts_later_is_compared_only_with_validation(packed: Path, tmp_path: Path) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path))
    hard = [(images, (labels + 1) % 3) for images, labels in make_batches([12], side=16)]
    results = train(
        make_model(),
        make_loader(packed),
        make_config(tmp_path, epochs=4),
        val_loader=[*hard, *make_batches([9], side=16)],
    )
    assert results[-1].is_best
