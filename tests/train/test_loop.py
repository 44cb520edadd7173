"""The loop: its computations, its calls of callbacks, mixed and smoothed labels, and exact evaluation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.utils.data as torchs
from torch import nn

import shardio
from shardio import BatchRandomErasing, CutMix, MixUp, OneOf
from shardio.train import Callback, Score, StepRecord, TrainConfig, evaluate, small_resnet, train
from shardio.train.step import make_transforms, warn_of_repeats
from shardio.transforms import CenterCrop
from shardio.world import World
from tests.train.runs import (
    PLAIN,
    Batch,
    join,
    make_batches,
    make_linear,
    make_loader,
    make_model,
    make_network,
    make_separable_batches,
    weights_of,
)

STILL: dict[str, Any] = {"lr": 1e-12, "weight_decay": 0.0}
"""The learning rate is almost 0, so the model stays as it is."""


def make_config(**options: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": 1, "precision": "fp32", "device": "cpu", "lr": 0.05, **PLAIN, **options})


def assert_close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def loss_and_accuracy(model: nn.Module, batch: Batch) -> list[float]:
    outputs = model(batch[0].float() / 255)
    loss = nn.functional.cross_entropy(outputs, batch[1]).item()
    return [loss, float((outputs.argmax(1) == batch[1]).double().mean())]


class Collect(Callback):
    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.records: list[StepRecord] = []

    def on_batch(self, batch: Any) -> None:
        self.batches.append(batch)

    def on_log(self, record: StepRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("num_micro", "accumulate"), [(8, 1), (8, 2), (8, 8), (5, 2), (7, 3), (3, 8)])
def test_accumulated_microbatches_train_as_one_big_batch(num_micro: int, accumulate: int, optimizer: str) -> None:
    """All samples have the same weight. An incomplete last group counts as a smaller batch."""
    micro = make_batches([4, 2, 7, 1, 4, 5, 3, 4][:num_micro])
    big = [join(micro[start : start + accumulate]) for start in range(0, num_micro, accumulate)]
    model = make_network()
    other, start = copy.deepcopy(model), weights_of(model)
    # Adam divides by the gradient's size, which magnifies rounding errors, so Adam gets a lower learning rate.
    lr = 0.05 if optimizer == "sgd" else 1e-4
    train(model, micro, make_config(epochs=2, optimizer=optimizer, lr=lr, accumulate=accumulate))
    train(other, big, make_config(epochs=2, optimizer=optimizer, lr=lr))
    assert_close(weights_of(model), weights_of(other))
    assert max(float((a - b).abs().max()) for a, b in zip(start, weights_of(model), strict=True)) > 1e-5


def test_sgd_is_the_published_rule() -> None:
    """The rule is v = 0.9 v + gradient + decay w and w = w - lr v, with torch's OneCycleLR."""
    batches, epochs, lr, decay = make_batches([4] * 5), 2, 0.05, 0.01
    model = make_network()
    by_hand = copy.deepcopy(model)
    train(model, batches, make_config(epochs=epochs, optimizer="sgd", lr=lr, weight_decay=decay))

    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(probe, lr, total_steps=epochs * len(batches), cycle_momentum=False)
    velocity = [torch.zeros_like(weight) for weight in by_hand.parameters()]
    for images, labels in batches * epochs:
        by_hand.zero_grad()
        nn.functional.cross_entropy(by_hand(images.float() / 255), labels).backward()
        with torch.no_grad():
            for weight, speed in zip(by_hand.parameters(), velocity, strict=True):
                assert weight.grad is not None
                speed.mul_(0.9).add_(weight.grad + decay * weight)
                weight.sub_(schedule.get_last_lr()[0] * speed)
        probe.step()
        schedule.step()
    assert_close(weights_of(model), weights_of(by_hand))


@pytest.mark.parametrize(("optimizer", "lr", "precision"), [("sgd", 0.1, "bf16"), ("adamw", 0.02, "fp32")])
def test_linearly_separable_classes_are_learned(optimizer: str, lr: float, precision: str) -> None:
    model, config = make_linear(), make_config(epochs=6, optimizer=optimizer, lr=lr, precision=precision)
    results = train(model, make_separable_batches(15), config, val_loader=make_separable_batches(10, seed=1))
    assert results[-1].val_accuracy is not None
    assert results[-1].val_accuracy > 0.95
    assert results[-1].loss < results[0].loss


def test_the_figures_of_an_epoch_are_means_over_its_samples() -> None:
    batches, val_batches = make_batches([4, 4, 3]), make_batches([5, 2], seed=1)
    model = make_linear()
    expected = [*loss_and_accuracy(model, join(batches)), *loss_and_accuracy(model, join(val_batches))]
    results = train(model, batches, make_config(epochs=3, **STILL), val_loader=val_batches)
    assert [result.epoch for result in results] == [0, 1, 2]
    for result in results:
        assert [result.loss, result.accuracy, result.val_loss, result.val_accuracy] == pytest.approx(expected, abs=1e-6)
        assert result.num_images == 11
        assert 0 <= result.data_wait_s <= result.train_s
        assert result.data_wait_share == pytest.approx(result.data_wait_s / result.train_s)
        assert result.images_per_s == pytest.approx(11 / result.train_s)
    (result,) = train(model, batches, make_config())
    assert (result.val_loss, result.val_accuracy) == (None, None)


def test_a_line_of_the_log_has_the_mean_of_its_samples() -> None:
    collect, batches, model = Collect(), make_batches([4, 4, 3]), make_linear()
    expected = [loss_and_accuracy(model, batch)[0] for batch in (join(batches[:2]), batches[2])]
    train(model, batches, make_config(log_every=2, **STILL), callbacks=[collect])
    assert [record.loss for record in collect.records] == pytest.approx(expected, abs=1e-6)
    assert [(record.epoch, record.step) for record in collect.records] == [(0, 2), (0, 3)]
    for record in collect.records:
        assert min(record.images_per_s, record.step_s) > 0
        assert 0 <= record.data_wait_share <= 1
        assert record.scale == 1
        assert (record.memory_allocated or 0) > 2**20


class Calls(Callback):
    """A callback that records each call with a value that identifies it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []
        notes: dict[str, Callable[..., Any]] = {
            "on_start": lambda num_epochs, num_steps: num_steps,
            "on_batch": lambda batch: len(batch[1]),
            "on_log": lambda record: record.step,
            "on_epoch": lambda result: result,
            "on_end": lambda results: results,
        }
        for name, note in notes.items():
            setattr(self, name, lambda *given, name=name, note=note: self.made.append((name, note(*given))))


def test_callbacks_are_called_for_every_microbatch_line_of_the_log_and_epoch_in_order() -> None:
    calls, two = Calls(), [("on_batch", 4)] * 2
    config = make_config(epochs=2, accumulate=2, log_every=2)
    results = train(make_linear(), make_batches([4, 4, 4, 4, 3]), config, callbacks=[calls])
    first = [*two, *two, ("on_log", 2), ("on_batch", 3), ("on_log", 3), ("on_epoch", results[0])]
    second = [*two, ("on_log", 4), *two, ("on_batch", 3), ("on_log", 6), ("on_epoch", results[1])]
    assert calls.made == [("on_start", 0), *first, *second, ("on_end", results)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": torch.zeros(2, 3, 6, 6), "label": torch.zeros(2)}, "got dict$"),
        ([torch.zeros(2, 3, 6, 6)], "got list of Tensor"),
        ((torch.zeros(2, 3, 6, 6), ["cat", "dog"]), "got tuple of Tensor, list"),
    ],
)
def test_batches_that_do_not_start_with_images_and_labels_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"start with a tensor of images and a tensor of labels, {message}"):
        train(make_linear(), [batch], make_config())


def test_a_loader_needs_batches_and_a_length_or_steps_per_epoch() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return iter(make_batches([4, 4, 4]))

    with pytest.raises(ValueError, match="Endless has no length, which the schedule needs: set steps_per_epoch"):
        train(make_linear(), Endless(), make_config())
    (result,) = train(make_linear(), Endless(), make_config(steps_per_epoch=3))
    (expected,) = train(make_linear(), make_batches([4, 4, 4]), make_config())
    assert (result.loss, result.lr) == (expected.loss, expected.lr)
    with pytest.raises(ValueError, match="epoch 1 had no batches: pass a loader that yields"):
        train(make_linear(), iter(make_batches([4, 4])), make_config(epochs=2, steps_per_epoch=2))
    images, labels = make_batches([3])[0]
    for batches in ([], [(images, labels, torch.zeros(3, dtype=torch.bool))]):
        with pytest.raises(ValueError, match="there is nothing to evaluate"):
            evaluate(make_linear(), batches, make_config())


def test_the_model_trains_in_training_mode_and_is_validated_in_evaluation_mode() -> None:
    modes: list[tuple[bool, bool]] = []

    class Spy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return x

    model = nn.Sequential(Spy(), make_linear()).eval()
    train(model, make_batches([4, 4]), make_config(epochs=2), val_loader=make_batches([4]))
    assert modes == [(True, True), (True, True), (False, False)] * 2


@pytest.mark.parametrize("patience", [1, 3])
def test_training_stops_after_patience_epochs_without_improvement(patience: int) -> None:
    """The validation labels are permuted: the better the model gets, the worse its validation results."""
    batches = make_separable_batches(5)
    wrong = [(images, (labels + 1) % 3) for images, labels in batches]
    config = make_config(epochs=12, patience=patience, optimizer="sgd", schedule="constant")
    results = train(make_linear(), batches, config, val_loader=wrong)
    losses = [result.val_loss for result in results if result.val_loss is not None]
    assert len(losses) == 1 + patience
    assert losses == sorted(losses)
    assert [result.is_best for result in results] == [True] + [False] * patience


def test_an_epoch_with_a_nan_validation_is_never_the_best() -> None:
    class NanAtFirst(nn.Module):
        num_epochs = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.num_epochs += 1
            return images * float("nan") if not self.training and self.num_epochs == 1 else images

    batches = make_separable_batches(5)
    config = make_config(epochs=3, optimizer="sgd", schedule="constant")
    results = train(nn.Sequential(NanAtFirst(), make_linear()), batches, config, val_loader=[join(batches)])
    assert [result.is_best for result in results] == [False, True, True]


# Mixed images, soft labels and smoothed labels.

OPTIONS: dict[str, Any] = {"epochs": 1, "precision": "fp32", "device": "cpu", "deterministic": True, "lr": 0.01}
MIXED: dict[str, Any] = {"mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.3, "label_smoothing": 0.1, "num_classes": 3}


def soften(batches: list[Batch]) -> list[Batch]:
    return [(images, nn.functional.one_hot(labels, 3).float()) for images, labels in batches]


def test_soft_labels_of_one_class_train_as_its_number() -> None:
    batches, config = make_batches([8, 8, 3]), TrainConfig(**OPTIONS)
    (hard,) = train(make_linear(), batches, config, val_loader=batches)
    (soft,) = train(make_linear(), soften(batches), config, val_loader=soften(batches))
    assert [soft.loss, soft.val_loss] == pytest.approx([hard.loss, hard.val_loss], rel=1e-5)
    assert (soft.accuracy, soft.val_accuracy) == (hard.accuracy, hard.val_accuracy)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_learns_from_mixed_batches(packed: Path, precision: str) -> None:
    collect, config = Collect(), TrainConfig(**{**OPTIONS, "precision": precision}, mixup=0.2, cutmix=1.0)
    (result,) = train(make_model(), make_loader(packed), config, callbacks=[collect])
    assert 0 <= result.accuracy <= 1
    labels = torch.cat([batch[1] for batch in collect.batches])
    assert labels.shape == (21, 3)
    torch.testing.assert_close(labels.sum(1), torch.ones(21))
    assert int((labels > 0).sum(1).max()) == 2


def test_training_accuracy_counts_the_largest_share() -> None:
    score, labels = Score(torch.device("cpu")), torch.tensor([[0.6, 0.4, 0.0], [0.3, 0.2, 0.5]])
    score.add(torch.zeros(2), torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]), labels)
    assert (score.accuracy, score.num_images) == (0.5, 2)


def test_validation_is_neither_mixed_nor_smoothed() -> None:
    model, batches = make_linear(), make_batches([8, 5])
    (result,) = train(model, make_batches([8, 8], seed=1), TrainConfig(**OPTIONS, **MIXED), val_loader=batches)
    plain, mixed = (evaluate(model, batches, TrainConfig(**OPTIONS, **options)) for options in ({}, MIXED))
    assert result.val_loss == plain.loss == mixed.loss
    assert result.val_accuracy == plain.accuracy == mixed.accuracy


@pytest.mark.parametrize("is_soft", [False, True])
def test_labels_are_smoothed_as_torch_smooths_them(is_soft: bool) -> None:
    model, batches = make_linear(), make_batches([8])
    collect, config = Collect(), TrainConfig(**OPTIONS, label_smoothing=0.3)
    outputs = list[torch.Tensor]()
    model.register_forward_hook(lambda module, given, result: outputs.append(result.detach()))
    (result,) = train(model, soften(batches) if is_soft else batches, config, callbacks=[collect])
    expected = nn.CrossEntropyLoss(label_smoothing=0.3)(outputs[0], collect.batches[0][1])
    assert result.loss == pytest.approx(float(expected), rel=1e-6)


def test_images_are_erased_before_they_are_mixed_as_in_torchvisions_recipe() -> None:
    collect, config = Collect(), TrainConfig(**OPTIONS, random_erasing=0.25, mean=(0.1,) * 3)
    train(make_linear(side=12), make_batches([400], side=12), config, callbacks=[collect])
    erased = (collect.batches[0][0] == 0).all(1).flatten(1).any(1)
    assert float(erased.float().mean()) == pytest.approx(0.25, abs=0.07)
    erasing, mixing = make_transforms([], TrainConfig(**OPTIONS, **MIXED))
    assert isinstance(erasing, BatchRandomErasing)
    assert erasing.p == 0.3
    assert isinstance(mixing, OneOf)
    assert [(type(each), getattr(each, "alpha", None)) for each in mixing.transforms] == [(MixUp, 0.2), (CutMix, 1.0)]
    assert make_transforms([], TrainConfig(**OPTIONS)) == []


def test_mixing_needs_the_number_of_classes_that_the_model_has() -> None:
    with pytest.raises(ValueError, match="the dataset of this list does not have: set num_classes"):
        train(make_linear(), make_batches([8]), TrainConfig(**OPTIONS, mixup=0.2))
    with pytest.raises(ValueError, match=r"soft labels \[8, 3\] must have the shape .* outputs, \[8, 5\]"):
        train(make_linear(num_classes=5), make_batches([8]), TrainConfig(**OPTIONS, mixup=0.2, num_classes=3))


# Evaluation over several ranks, which is exact or warns that samples count twice

RANK = World(rank=0, world_size=2)
REPEATS = (
    r"on 21 validation samples is not exact, because .* repeats 1 of them so that all 2 ranks have the same number\. "
    r".*remainder='mask'"
)


def test_each_sample_counts_once_and_repeated_ones_do_not() -> None:
    model, batches = make_linear(), make_batches([5, 5, 1])
    marks = [torch.tensor([True, False, True, True, False])] * 2 + [torch.tensor([True])]
    marked = [(*batch, mark) for batch, mark in zip(batches, marks, strict=True)]
    valid = [(images[mark], labels[mark]) for images, labels, mark in marked]
    for given, counted in ((batches, batches), (marked, valid)):
        score = evaluate(model, given, make_config())
        assert score.num_images == len(join(counted)[1])
        assert [score.loss, score.accuracy] == pytest.approx(loss_and_accuracy(model, join(counted)), abs=1e-6)


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_does_not_change_the_model(mode: bool) -> None:
    """Weights, BatchNorm statistics and mode stay the same, so a second evaluation gives the same score."""
    model, batches = small_resnet(3, 16, width=8).train(mode), make_batches([6, 5], side=16)
    before = weights_of(model)
    first, second = evaluate(model, batches, make_config()), evaluate(model, batches, make_config())
    assert (first.loss, first.accuracy) == (second.loss, second.accuracy)
    assert all(map(torch.equal, before, weights_of(model)))
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert all(module.training == mode for module in model.modules())


def make_shards(packed: Path, remainder: Any) -> shardio.ShardDataset:
    return shardio.ShardDataset(packed, transform=CenterCrop(16), remainder=remainder, rank=0, world_size=2)


def share(num_samples: int = 21, **options: Any) -> Any:
    return torchs.DistributedSampler(range(num_samples), num_replicas=2, rank=0, **options)  # type: ignore[arg-type]  # a range is a dataset


def sample(remainder: Any) -> shardio.EpochSampler:
    return shardio.EpochSampler(range(21), remainder=remainder, rank=0, world_size=2)


def test_loaders_that_repeat_samples_cause_a_warning_and_others_none(packed: Path) -> None:
    shards, numbers = make_shards(packed, "pad"), (data := range(22))[:21]
    ours, theirs = shardio.DataLoader, cast(Any, torchs.DataLoader)
    for loader in (
        ours(shards, 4),
        theirs(shards, 4),
        ours(numbers, 4, sampler=sample("pad")),
        theirs(numbers, 4, sampler=share()),
        theirs(numbers, batch_sampler=torchs.BatchSampler(share(), 4, drop_last=False)),
        shardio.DevicePrefetcher(ours(shards, 4), "cpu"),
    ):
        with pytest.warns(RuntimeWarning, match=REPEATS):
            warn_of_repeats(loader, RANK, stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loader in (
            *(ours(make_shards(packed, remainder), 4) for remainder in ("mask", "keep", "drop")),
            *(ours(numbers, 4, sampler=sample(remainder)) for remainder in ("mask", "keep", "drop")),
            ours(shards, 4, drop_last=True),
            ours(shardio.ShardDataset(packed), 4),
            ours(numbers, 4),
            theirs(data, 4, sampler=share(22)),
            theirs(numbers, 4, sampler=share(drop_last=True)),
            [],
        ):
            warn_of_repeats(loader, RANK, stacklevel=1)
        warn_of_repeats(ours(shards, 4), World(rank=1, world_size=2), stacklevel=1)  # Rank 0 warns.


def test_training_and_evaluation_warn_at_the_users_line(packed: Path) -> None:
    model, config = make_model(), TrainConfig(**{**OPTIONS, "epochs": 2})
    padded = shardio.DataLoader(make_shards(packed, "pad"), 4)
    runs: list[Callable[[], Any]] = [
        lambda: train(model, make_loader(packed), config, val_loader=padded),
        lambda: evaluate(model, padded, config),
    ]
    for run in runs:
        with pytest.warns(RuntimeWarning, match=REPEATS) as caught:
            run()
        assert [warning.filename for warning in caught] == [__file__]
    assert evaluate(model, shardio.DataLoader(make_shards(packed, "mask"), 4), config).num_images == 11
