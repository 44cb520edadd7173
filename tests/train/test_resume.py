"""A run that is stopped and gone on with equals one that never stopped."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardio
from shardio import ShardMapDataset
from shardio.errors import FormatError, NonFiniteLossError, StateError
from shardio.train import Callback, TrainConfig, TrainStep, load_checkpoint, train
from shardio.train import checkpoint as checkpoint_module
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.train.runs import read_figures
from tests.train.toys import Poison, make_batches, make_linear, weights_of

SAMPLES, BATCH_SIZE, EPOCHS = 21, 4, 3
STEPS_PER_EPOCH = 3
"""Of six batches, two at a time."""


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: these are many runs, and pictures take longer than they do."""
    monkeypatch.setattr("shardio.train.report.write_report", lambda directory, config: None)


class StopError(Exception):
    """What stops a run."""


class StopAfter(Callback):
    """Stops a run behind a microbatch, before or after which a checkpoint may have been written."""

    def __init__(self, num_batches: int) -> None:
        self.num_left = num_batches

    def on_batch(self, batch: Any) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise StopError


def _model() -> nn.Sequential:
    """Return a network with all that has a state: BatchNorm, and Dropout, which draws random numbers."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 7 * 7, 3)
    )


def _loader(packed: Path, *, torchs: bool = False, num_workers: int = 0, remainder: Any = "pad") -> Any:
    transform = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])
    dataset = ShardMapDataset(packed, fields=("image", "label", "key"), transform=transform)
    if torchs:
        torch.manual_seed(0)
        return torch.utils.data.DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers)
    sampler = shardio.EpochSampler(dataset, seed=1, remainder=remainder)
    return shardio.DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers)


def _config(directory: Path, **options: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "epochs": EPOCHS,
            "precision": "fp32",
            "device": "cpu",
            "lr": 0.02,
            "accumulate": 2,
            "log_every": 1,
            "deterministic": True,
            "directory": directory,
            **options,
        }
    )


def _assert_equal(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("checkpoint_every", "schedule"), [(1, "onecycle"), (2, "plateau"), (None, "onecycle")])
def test_stopped_anywhere_and_resumed_equals_undisturbed(
    packed: Path, tmp_path: Path, checkpoint_every: int | None, schedule: str
) -> None:
    """Losses, rates, weights and validation are the same to the last bit, whatever was lost since the checkpoint."""
    options = {"checkpoint_every": checkpoint_every, "schedule": schedule, "optimizer": "adamw"}
    whole, val_loader = _model(), make_batches([5, 2], side=16)
    expected = train(whole, _loader(packed), _config(tmp_path / "whole", **options), val_loader=val_loader)
    for num_batches in range(EPOCHS * 6):
        config = _config(tmp_path / str(num_batches), **options)
        with pytest.raises(StopError):
            train(_model(), _loader(packed), config, val_loader=val_loader, callbacks=[StopAfter(num_batches)])
        resumed = _model()
        results = train(resumed, _loader(packed), config, val_loader=val_loader)
        assert read_figures(tmp_path / str(num_batches)) == read_figures(tmp_path / "whole")
        assert [result.loss for result in results] == [result.loss for result in expected]
        _assert_equal(resumed, whole)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_goes_on_at_the_beginning_of_an_epoch(packed: Path, tmp_path: Path, num_workers: int) -> None:
    """It cannot say where it is, but its order is a matter of torch's random numbers, and those are the same."""
    whole = _model()
    train(whole, _loader(packed, torchs=True, num_workers=num_workers), _config(tmp_path / "whole"))
    config = _config(tmp_path / "stopped")
    loader = _loader(packed, torchs=True, num_workers=num_workers)
    with pytest.raises(StopError):
        train(_model(), loader, config, callbacks=[StopAfter(9)])
    resumed = _model()
    train(resumed, _loader(packed, torchs=True, num_workers=num_workers), config)
    assert read_figures(tmp_path / "stopped") == read_figures(tmp_path / "whole")
    _assert_equal(resumed, whole)


def test_a_loader_that_cannot_say_where_it_is_gets_no_checkpoints_within_an_epoch(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint_every=2 needs a loader that can say where it is"):
        train(_model(), _loader(packed, torchs=True), _config(tmp_path, checkpoint_every=2))


def test_the_number_of_workers_may_change(packed: Path, tmp_path: Path) -> None:
    whole = _model()
    train(whole, _loader(packed), _config(tmp_path / "whole", checkpoint_every=1))
    config = _config(tmp_path / "stopped", checkpoint_every=1)
    with pytest.raises(StopError):
        train(_model(), _loader(packed, num_workers=2), config, callbacks=[StopAfter(8)])
    resumed = _model()
    train(resumed, _loader(packed, num_workers=1), config)
    assert read_figures(tmp_path / "stopped") == read_figures(tmp_path / "whole")
    _assert_equal(resumed, whole)


def test_a_finished_run_does_nothing_more_and_goes_on_for_more_epochs(packed: Path, tmp_path: Path) -> None:
    config = _config(tmp_path, schedule="constant")
    first = train(_model(), _loader(packed), config)
    before = (tmp_path / "last.pt").read_bytes()
    assert train(_model(), _loader(packed), config) == first
    assert (tmp_path / "last.pt").read_bytes() == before
    longer = train(_model(), _loader(packed), _config(tmp_path, epochs=EPOCHS + 1, schedule="constant"))
    assert longer[:EPOCHS] == first
    assert [result.epoch for result in longer] == [0, 1, 2, 3]


def test_without_resume_a_run_begins_anew(packed: Path, tmp_path: Path) -> None:
    train(_model(), _loader(packed), _config(tmp_path))
    figures = read_figures(tmp_path)
    train(_model(), _loader(packed), _config(tmp_path, resume=False))
    assert read_figures(tmp_path) == figures
    with pytest.raises(StopError):
        train(_model(), _loader(packed), _config(tmp_path, resume=False), callbacks=[StopAfter(0)])
    assert not (tmp_path / "last.pt").exists()
    assert not (tmp_path / "best.pt").exists()
    assert read_figures(tmp_path) == []


def test_the_best_checkpoint_is_that_of_the_lowest_validation_loss(packed: Path, tmp_path: Path) -> None:
    """Labels of no meaning: the model soon does worse on them, and best.pt stays behind."""
    results = train(
        _model(), _loader(packed), _config(tmp_path, epochs=6, lr=0.1), val_loader=make_batches([20], side=16)
    )
    best = min(results, key=lambda result: result.judged_by)
    assert load_checkpoint(tmp_path / "best.pt")["step"]["num_taken"] == best.step
    assert load_checkpoint(tmp_path / "last.pt")["step"]["num_taken"] == 6 * STEPS_PER_EPOCH
    assert max(result.epoch for result in results if result.is_best) == best.epoch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.03}, r"lr was 0\.02, is 0\.03"),
        ({"optimizer": "sgd", "seed": 4}, r"optimizer was 'adamw', is 'sgd'; seed was 0, is 4"),
        ({"accumulate": 1}, "accumulate was 2, is 1"),
    ],
)
def test_other_settings_are_refused_and_named(
    packed: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    train(_model(), _loader(packed), _config(tmp_path, epochs=1))
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(StateError, match=message):
        train(_model(), _loader(packed), _config(tmp_path, **options))
    assert (tmp_path / "last.pt").read_bytes() == before


def test_another_model_or_another_order_is_refused(packed: Path, tmp_path: Path) -> None:
    train(_model(), _loader(packed), _config(tmp_path, epochs=1))
    with pytest.raises(StateError, match=r"last\.pt is of another model"):
        train(make_linear(side=16), _loader(packed), _config(tmp_path))
    other = ShardMapDataset(packed, fields=("image", "label", "key"), transform=RandomResizedCrop(16))
    loader = shardio.DataLoader(other, BATCH_SIZE, sampler=shardio.EpochSampler(other, seed=2))
    with pytest.raises(StateError, match="seed"):
        train(_model(), loader, _config(tmp_path))


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_damaged_checkpoint_is_refused(packed: Path, tmp_path: Path, size: int) -> None:
    train(_model(), _loader(packed), _config(tmp_path, epochs=1))
    last = tmp_path / "last.pt"
    last.write_bytes(last.read_bytes()[:size])
    with pytest.raises(FormatError, match=r"last\.pt is no checkpoint, or was cut off"):
        train(_model(), _loader(packed), _config(tmp_path))


def test_a_file_that_is_something_else_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (tmp_path / "sprung").touch, ()

    torch.save({"model": Trap()}, tmp_path / "trap.pt")
    torch.save({"model": {}}, tmp_path / "other.pt")
    for name, message in (("trap.pt", "cannot be read as a checkpoint"), ("other.pt", "has the format None")):
        with pytest.raises(FormatError, match=message):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_a_failed_save_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    checkpoint_module.save_checkpoint(tmp_path / "last.pt", {"model": {}})
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(Exception, match="pickle"):
        checkpoint_module.save_checkpoint(tmp_path / "last.pt", {"model": lambda: None})
    assert (tmp_path / "last.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_checkpoints_memory_is_freed_after_it_was_loaded(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(_model(), _loader(packed), _config(tmp_path, epochs=1))
    tensors: list[weakref.ref[torch.Tensor]] = []

    def load_and_watch(*args: Any, **options: Any) -> dict[str, Any]:
        state = load_checkpoint(*args, **options)
        tensors.extend(weakref.ref(tensor) for tensor in state["model"].values())
        return state

    class Look(Callback):
        num_alive = -1

        def on_batch(self, batch: Any) -> None:
            gc.collect()
            self.num_alive = sum(tensor() is not None for tensor in tensors)

    monkeypatch.setattr("shardio.train.run.load_checkpoint", load_and_watch)
    look = Look()
    train(_model(), _loader(packed), _config(tmp_path, epochs=2, schedule="onecycle"), callbacks=[look])
    assert len(tensors) == len(_model().state_dict())
    assert look.num_alive == 0


def test_the_weights_of_a_checkpoint_are_the_models_own(packed: Path, tmp_path: Path) -> None:
    model, other = _model(), _model()
    train(model, _loader(packed), _config(tmp_path, epochs=1))
    other.load_state_dict(load_checkpoint(tmp_path / "last.pt", map_location="cpu")["model"])
    _assert_equal(model, other)


@pytest.mark.parametrize("log_every", [1, 2, 10])
def test_a_loss_that_is_nan_stops_with_its_step_its_keys_and_the_way_back(
    packed: Path, tmp_path: Path, log_every: int
) -> None:
    """In batch 9, which is the first half of step 5 (or 2 of epoch 1); the checkpoint before it is sound."""
    keys: list[list[str]] = []

    class Keys(Callback):
        def on_batch(self, batch: Any) -> None:
            keys.append(list(batch[2]))

    model = nn.Sequential(Poison(9), *_model())
    with pytest.raises(
        NonFiniteLossError, match=r"the loss of step 5 is nan, of a batch of the samples class-"
    ) as caught:
        train(model, _loader(packed), _config(tmp_path, checkpoint_every=2, log_every=log_every), callbacks=[Keys()])
    assert caught.value.step == 5
    assert caught.value.keys == keys[8]
    assert f"the last checkpoint before it is {tmp_path}/last.pt, of step 4" in str(caught.value)
    state = load_checkpoint(tmp_path / "last.pt")
    assert state["step"]["num_taken"] == 4
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_loss_that_is_infinite_stops_without_a_directory_too() -> None:
    batches = [(images.float() * float("inf"), labels) for images, labels in make_batches([4, 4])]
    config = TrainConfig(epochs=1, precision="fp32", device="cpu")
    with pytest.raises(
        NonFiniteLossError, match=r"of samples unknown, .* there is no checkpoint to go back to"
    ) as caught:
        train(make_linear(), batches, config)
    assert caught.value.keys is None


class _BadGradient(Callback):
    """Spoils the gradients of a step, and not its loss."""

    def __init__(self, step: int) -> None:
        self.step = step

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        return loss * float("nan") if step.num_steps == self.step else loss


@pytest.mark.parametrize("step", [3, 5])
def test_weights_that_are_nan_are_never_saved(packed: Path, tmp_path: Path, step: int) -> None:
    """After step 4, before which there is a checkpoint of step 2; and after the last one of an epoch."""
    config = _config(tmp_path, checkpoint_every=2, log_every=1)
    message = f"after step {step + 1} weights are NaN or infinite, since a gradient was; the last checkpoint"
    with pytest.raises(NonFiniteLossError, match=message):
        train(_model(), _loader(packed), config, callbacks=[_BadGradient(step)])
    for name in ("last.pt", "best.pt"):
        state = load_checkpoint(tmp_path / name)
        assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_killed_between_both_checkpoints_the_best_one_is_still_written(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: Path, state: dict[str, Any]) -> None:
        if path.name == "last.pt":
            raise StopError
        checkpoint_module.save_checkpoint(path, state)

    with monkeypatch.context() as patch:
        patch.setattr("shardio.train.run.save_checkpoint", save)
        with pytest.raises(StopError):
            train(_model(), _loader(packed), _config(tmp_path))
    results = train(_model(), _loader(packed), _config(tmp_path))
    assert load_checkpoint(tmp_path / "best.pt")["results"][-1]["loss"] == min(result.loss for result in results)


def test_settings_of_numpys_types_are_read_again(packed: Path, tmp_path: Path) -> None:
    rate = np.logspace(-4, -2, 3)[1]
    train(_model(), _loader(packed), _config(tmp_path, lr=rate, mean=tuple(np.zeros(3)), epochs=1))
    assert len(train(_model(), _loader(packed), _config(tmp_path, lr=rate, mean=tuple(np.zeros(3)), epochs=2))) == 2


def test_more_epochs_do_not_raise_a_rate_that_was_cut(packed: Path, tmp_path: Path) -> None:
    """The period, by default a third of the epochs, is that of the run's beginning."""
    train(_model(), _loader(packed), _config(tmp_path, schedule="step"))
    results = train(_model(), _loader(packed), _config(tmp_path, schedule="step", epochs=6))
    rates = [result.lr for result in results]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.02 * 0.1**5)


def test_validation_that_begins_later_is_compared_with_validation_alone(packed: Path, tmp_path: Path) -> None:
    train(_model(), _loader(packed), _config(tmp_path))
    hard = [(images, (labels + 1) % 3) for images, labels in make_batches([12], side=16)]
    results = train(
        _model(), _loader(packed), _config(tmp_path, epochs=4), val_loader=[*hard, *make_batches([9], side=16)]
    )
    assert results[-1].is_best
