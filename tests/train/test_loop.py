"""The loop: its computations, callbacks, mixed and smoothed labels, and exact evaluation."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.data as torchs
from torch import nn

import shardio
from shardio import BatchRandomErasing, CutMix, MixUp, OneOf
from shardio.train import (
    Callback,
    Compile,
    GradientPenalty,
    Score,
    TrainConfig,
    TrainStep,
    evaluate,
    load_checkpoint,
    small_resnet,
    train,
)
from shardio.train.callbacks import SizeHints
from shardio.train.step import make_transforms, warn_of_repeats
from shardio.transforms import CenterCrop
from shardio.world import World
from tests.raising import assert_raises
from tests.train.runs import (
    PLAIN,
    Batch,
    Collect,
    StopAfter,
    StopError,
    join,
    make_batches,
    make_floats,
    make_linear,
    make_loader,
    make_model,
    make_network,
    make_separable_batches,
    read_figures,
    weights_of,
)

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


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("num_micro", "accumulate"), [(8, 1), (8, 2), (8, 8), (5, 2), (7, 3), (3, 8)])
def test_accumulated_microbatches_train_as_one_big_batch(num_micro: int, accumulate: int, optimizer: str) -> None:
    """All samples have the same weight. An incomplete last group is treated like a smaller batch."""
    micro = make_batches([4, 2, 7, 1, 4, 5, 3, 4][:num_micro])
    big = [join(micro[start : start + accumulate]) for start in range(0, num_micro, accumulate)]
    model = make_network()
    other, start = copy.deepcopy(model), weights_of(model)
    # Adam divides by the gradient's size and thus magnifies rounding errors, so Adam gets a lower learning rate.
    lr = 0.05 if optimizer == "sgd" else 1e-4
    train(model, micro, make_config(epochs=2, optimizer=optimizer, lr=lr, accumulate=accumulate))
    train(other, big, make_config(epochs=2, optimizer=optimizer, lr=lr))
    assert_close(weights_of(model), weights_of(other))
    assert max(float((a - b).abs().max()) for a, b in zip(start, weights_of(model), strict=True)) > 1e-5


def test_training_is_torchs_own_loop() -> None:
    batches, epochs, lr, decay = make_batches([4] * 5), 2, 0.05, 0.01
    model = make_network()
    other = copy.deepcopy(model)
    train(model, batches, make_config(epochs=epochs, optimizer="sgd", lr=lr, weight_decay=decay))
    optimizer = torch.optim.SGD(other.parameters(), lr, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * 5, cycle_momentum=False)
    for images, labels in batches * epochs:
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(images.float() / 255), labels).backward()
        optimizer.step()
        schedule.step()
    assert_close(weights_of(model), weights_of(other))


def test_the_figures_of_an_epoch_and_of_a_line_of_the_log_are_means_over_their_samples() -> None:
    batches, val_batches = make_batches([4, 4, 3]), make_batches([5, 2], seed=1)
    model, collect = make_linear(), Collect()
    expected = [*loss_and_accuracy(model, join(batches)), *loss_and_accuracy(model, join(val_batches))]
    parts = [loss_and_accuracy(model, batch)[0] for batch in (join(batches[:2]), batches[2])]
    config = make_config(epochs=3, log_every=2, lr=1e-12, weight_decay=0.0)  # The model stays as it is.
    results = train(model, batches, config, val_loader=val_batches, callbacks=[collect])
    assert [result.epoch for result in results] == [0, 1, 2]
    for result in results:
        assert [result.loss, result.accuracy, result.val_loss, result.val_accuracy] == pytest.approx(expected, abs=1e-6)
        assert result.num_images == 11
        assert 0 <= result.data_wait_s <= result.train_s
        assert result.data_wait_share == pytest.approx(result.data_wait_s / result.train_s)
        assert result.images_per_s == pytest.approx(11 / result.train_s)
    first = collect.records[:2]
    assert [record.loss for record in first] == pytest.approx(parts, abs=1e-6)
    assert [(record.epoch, record.step) for record in first] == [(0, 2), (0, 3)]
    for record in collect.records:
        assert min(record.images_per_s, record.step_s) > 0
        assert 0 <= record.data_wait_share <= 1
        assert record.scale == 1
        assert (record.memory_allocated or 0) > 2**20
    (result,) = train(model, batches, make_config())
    assert (result.val_loss, result.val_accuracy) == (None, None)


class Calls(Callback):
    """A callback that records each call and a value that identifies the call."""

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

    def run(loader: Any, **options: Any) -> Any:
        return train(make_linear(), loader, make_config(**options))

    message = "Endless has no length, which the schedule needs: set steps_per_epoch"
    assert_raises(ValueError, message, run, Endless())
    (result,), (expected,) = run(Endless(), steps_per_epoch=3), run(make_batches([4, 4, 4]))
    assert (result.loss, result.lr) == (expected.loss, expected.lr)
    message = "epoch 1 had no batches: pass a loader that yields"
    assert_raises(ValueError, message, run, iter(make_batches([4, 4])), epochs=2, steps_per_epoch=2)
    images, labels = make_batches([3])[0]
    for batches in ([], [(images, labels, torch.zeros(3, dtype=torch.bool))]):
        assert_raises(ValueError, "there is nothing to evaluate", evaluate, make_linear(), batches, make_config())


def test_the_model_trains_in_training_mode_and_is_validated_in_evaluation_mode() -> None:
    modes, model = list[tuple[bool, bool]](), make_linear().eval()
    model.register_forward_hook(lambda *_: modes.append((model.training, torch.is_grad_enabled())))
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

MIXED: dict[str, Any] = {"mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.3, "label_smoothing": 0.1, "num_classes": 3}


def soften(batches: list[Batch]) -> list[Batch]:
    return [(images, nn.functional.one_hot(labels, 3).float()) for images, labels in batches]


def test_soft_labels_of_one_class_train_as_its_number() -> None:
    batches = make_batches([8, 8, 3])
    (hard,) = train(make_linear(), batches, make_config(), val_loader=batches)
    (soft,) = train(make_linear(), soften(batches), make_config(), val_loader=soften(batches))
    assert [soft.loss, soft.val_loss] == pytest.approx([hard.loss, hard.val_loss], rel=1e-5)
    assert (soft.accuracy, soft.val_accuracy) == (hard.accuracy, hard.val_accuracy)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_learns_from_mixed_batches(packed: Path, precision: str) -> None:
    collect, config = Collect(), make_config(precision=precision, mixup=0.2, cutmix=1.0)
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
    (result,) = train(model, make_batches([8, 8], seed=1), make_config(**MIXED), val_loader=batches)
    plain, mixed = (evaluate(model, batches, make_config(**options)) for options in ({}, MIXED))
    assert result.val_loss == plain.loss == mixed.loss
    assert result.val_accuracy == plain.accuracy == mixed.accuracy


@pytest.mark.parametrize("is_soft", [False, True])
def test_labels_are_smoothed_as_torch_smooths_them(is_soft: bool) -> None:
    model, batches, collect, outputs = make_linear(), make_batches([8]), Collect(), list[torch.Tensor]()
    model.register_forward_hook(lambda module, given, result: outputs.append(result.detach()))
    given = soften(batches) if is_soft else batches
    (result,) = train(model, given, make_config(label_smoothing=0.3), callbacks=[collect])
    expected = nn.CrossEntropyLoss(label_smoothing=0.3)(outputs[0], collect.batches[0][1])
    assert result.loss == pytest.approx(float(expected), rel=1e-6)


def test_images_are_erased_before_they_are_mixed_as_in_torchvisions_recipe() -> None:
    collect, config = Collect(), make_config(random_erasing=0.25, mean=(0.1,) * 3)
    train(make_linear(side=12), make_batches([400], side=12), config, callbacks=[collect])
    erased = (collect.batches[0][0] == 0).all(1).flatten(1).any(1)
    assert float(erased.float().mean()) == pytest.approx(0.25, abs=0.07)
    erasing, mixing = make_transforms([], make_config(**MIXED))
    assert isinstance(erasing, BatchRandomErasing)
    assert erasing.p == 0.3
    assert isinstance(mixing, OneOf)
    assert [(type(each), getattr(each, "alpha", None)) for each in mixing.transforms] == [(MixUp, 0.2), (CutMix, 1.0)]
    assert make_transforms([], make_config()) == []


def test_mixing_needs_the_number_of_classes_that_the_model_has() -> None:
    with pytest.raises(ValueError, match="the dataset of this list does not have: set num_classes"):
        train(make_linear(), make_batches([8]), make_config(mixup=0.2))
    with pytest.raises(ValueError, match=r"soft labels \[8, 3\] must have the shape .* outputs, \[8, 5\]"):
        train(make_linear(num_classes=5), make_batches([8]), make_config(mixup=0.2, num_classes=3))


# Evaluation over several ranks: exact, or with a warning that samples are counted twice

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


def test_loaders_that_repeat_samples_cause_a_warning_and_others_none(packed: Path) -> None:
    shards, data = make_shards(packed, "pad"), range(22)
    of_two: Any = {"rank": 0, "world_size": 2}
    numbers, ours, theirs = data[:21], shardio.DataLoader, cast(Any, torchs.DataLoader)

    def share(of: Any = numbers, **options: Any) -> Any:
        return torchs.DistributedSampler(of, 2, 0, **options)

    def sampled(remainder: Any) -> Any:
        return ours(numbers, 4, sampler=shardio.EpochSampler(numbers, remainder=remainder, **of_two))

    for loader in (
        *(ours(shards, 4), theirs(shards, 4), sampled("pad"), theirs(numbers, 4, sampler=share())),
        theirs(numbers, batch_sampler=torchs.BatchSampler(share(), 4, drop_last=False)),
        shardio.DevicePrefetcher(ours(shards, 4), "cpu"),
    ):
        with pytest.warns(RuntimeWarning, match=REPEATS):
            warn_of_repeats(loader, RANK, stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loader in (
            *(ours(make_shards(packed, remainder), 4) for remainder in ("mask", "keep", "drop")),
            *map(sampled, ("mask", "keep", "drop")),
            *(ours(shards, 4, drop_last=True), ours(shardio.ShardDataset(packed), 4), ours(numbers, 4)),
            *(theirs(data, 4, sampler=share(data)), theirs(numbers, 4, sampler=share(drop_last=True)), []),
        ):
            warn_of_repeats(loader, RANK, stacklevel=1)
        warn_of_repeats(ours(shards, 4), World(rank=1, world_size=2), stacklevel=1)  # Rank 0 warns.


def test_training_and_evaluation_warn_at_the_users_line(packed: Path) -> None:
    model, config = make_model(), make_config(epochs=2)
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


# Callbacks.


def gradient_norm(model: nn.Module, loss: torch.Tensor) -> float:
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


def test_a_gradient_penalty_is_the_norm_of_the_gradient_of_the_loss() -> None:
    model, (batch,) = make_network(), make_floats([6])
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1))
    for weight in (0.5, 0.0):
        total = GradientPenalty(weight).add_to_loss(loss, step)
        assert total.item() == pytest.approx(loss.item() + weight * gradient_norm(model, loss), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_penalty_keeps_gradients_small(precision: Any) -> None:

    def norm_after(weight: float) -> float:
        model, (batch,) = make_network(), make_floats([12])
        hooks = [GradientPenalty(weight).add_to_loss] if weight else []
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision, hooks=hooks)
        for _ in range(20):
            step(*batch)
        assert step.num_skipped == 0
        return gradient_norm(model, nn.functional.cross_entropy(model(batch[0]), batch[1]))

    assert norm_after(0.5) < 0.8 * norm_after(0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # torch.jit still works.
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile causes it.
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch has no TorchScript on Python 3.14")
def test_compiled_and_scripted_models_train_save_and_resume_like_any_other(tmp_path: Path, is_compiled: bool) -> None:
    """TorchScript rewrites a model after its first passes, and the model then rounds differently."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 7 * 7, 3))
    batches, val_loader = make_batches([4] * 4, side=16), make_batches([5], side=16)
    options: dict[str, Any] = {"epochs": 2, "lr": 0.02, "log_every": 1}
    # This backend needs no C++ compiler, which not every machine has.
    own = [Compile(backend="aot_eager")] if is_compiled else []

    def run(name: str, *callbacks: Callback) -> Any:
        model: Any = copy.deepcopy(plain)
        model = model if is_compiled else torch.jit.script(model)
        config = make_config(directory=tmp_path / name, **options)
        return model, train(model, batches, config, val_loader=val_loader, callbacks=[*own, *callbacks])

    whole, results = run("whole")
    with pytest.raises(StopError):
        run("run", StopAfter(6))
    resumed, _ = run("run")
    losses, expected_losses = ([line["loss"] for line in read_figures(tmp_path / name)] for name in ("run", "whole"))
    assert losses == pytest.approx(expected_losses, rel=0 if is_compiled else 1e-4, abs=0)
    for one, other in zip(weights_of(resumed), weights_of(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if is_compiled else 1e-4)
    fresh = copy.deepcopy(plain)
    fresh.load_state_dict(load_checkpoint(tmp_path / "run" / "best.pt")["model"])
    expected = train(plain, batches, make_config(**options), val_loader=val_loader)
    assert [result.loss for result in results] == pytest.approx([result.loss for result in expected], rel=1e-3)


def test_a_compiled_model_is_compiled() -> None:
    backend = mock.Mock(side_effect=lambda graph, inputs: graph.forward)
    train(make_network(), make_batches([4, 4]), make_config(), callbacks=[Compile(backend=backend)])
    assert backend.called


def test_sizes_that_are_not_multiples_of_8_are_named_once() -> None:
    """Sizes of the data, such as 108 inputs and 3 classes, are not named, because they cannot be changed."""
    expected = "sizes that are not multiples of 8: a batch has 6 samples, 1 has 13 outputs"
    for hidden, batch_size in ((13, 6), (16, 8)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = make_config(epochs=2, precision="bf16")
            train(model, make_batches([batch_size] * 2), config, callbacks=[SizeHints()])
        assert [str(warning.message).endswith(expected) for warning in caught] == [True] * (hidden == 13)


class Averaged(Callback):
    """A moving average of a model's weights. Its state also holds values of many types."""

    def __init__(self) -> None:
        self.weights = dict[str, torch.Tensor]()
        self.others: Any = {"decay": np.float64(0.5), "seen": np.arange(3, dtype=np.uint16), "steps": (0, [None, 1j])}

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        return model

    def on_batch(self, batch: Any) -> None:
        for name, weight in self.model.named_parameters():
            self.weights[name].lerp_(weight.detach(), 1 - float(self.others["decay"]))
        self.others["seen"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "others": self.others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.others = state["weights"], state["others"]


@pytest.mark.parametrize("num_batches", [3, 8])
def test_the_states_of_callbacks_resume(tmp_path: Path, num_batches: int) -> None:

    def run(name: str, *others: Callback) -> list[Averaged]:
        averaged = [Averaged(), Averaged()]
        averaged[1].others["decay"] = np.float64(0.25)
        loader = shardio.DataLoader(torchs.TensorDataset(*make_batches([24])[0]), 4, shuffle=True)
        every = 1 if num_batches < 6 else None
        config = make_config(directory=tmp_path / name, epochs=2, checkpoint_every=every)
        train(make_network(), loader, config, callbacks=[averaged[0], *others, averaged[1]])
        return averaged

    whole = run("whole")
    with pytest.raises(StopError):
        run("stopped", StopAfter(num_batches))
    for one, expected in zip(run("stopped"), whole, strict=True):
        assert all(torch.equal(one.weights[name], weight) for name, weight in expected.weights.items())
        assert (one.others["decay"], one.others["seen"].tolist()) == (expected.others["decay"], [12, 13, 14])
        assert one.others["seen"].dtype == np.uint16
    assert sorted(load_checkpoint(tmp_path / "whole" / "best.pt")["callbacks"]) == ["Averaged", "Averaged 2"]


def test_states_without_a_callback_or_that_cannot_be_loaded_again_are_reported(tmp_path: Path) -> None:
    class Saving(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"steps": 1}

    def run(name: str, *callbacks: Callback, epochs: int = 2) -> None:
        config = make_config(directory=tmp_path / name, schedule="constant", epochs=epochs)
        train(make_network(), make_batches([4]), config, callbacks=callbacks)

    averaged = Averaged()
    averaged.others["path"] = [tmp_path]
    with pytest.raises(TypeError, match=r"the state of the callback Averaged\['others'\]\['path'\]\[0\] is "):
        run("refused", averaged)
    run("averaged", Averaged())
    with pytest.warns(RuntimeWarning, match="holds the state of a callback Averaged, which this run does not have"):
        run("averaged", epochs=3)
    run("saving", Saving())
    with pytest.raises(NotImplementedError, match="Saving has a state_dict, so it needs a load_state_dict"):
        run("saving", Saving(), epochs=3)
