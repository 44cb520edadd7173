from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardio.train import Callback, EpochResult, StepRecord, TrainConfig, evaluate, train
from tests.device.loaders import CountingLoader
from tests.train.small_data import (
    PLAIN,
    join,
    make_batches,
    make_linear,
    make_network,
    make_separable_batches,
    weights_of,
)


def _config(**options: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": 1, "precision": "fp32", "device": "cpu", "lr": 0.05, **PLAIN, **options})


def _assert_close(a: list[torch.Tensor], b: list[torch.Tensor], atol: float = 1e-6) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("num_micro", "accumulate"), [(8, 1), (8, 2), (8, 4), (8, 8), (5, 2), (7, 3), (3, 8)])
def test_accumulated_microbatches_train_as_one_big_batch(num_micro: int, accumulate: int, optimizer: str) -> None:
    """An incomplete last group counts as a smaller batch."""
    micro = make_batches([4] * num_micro)
    big = [join(micro[start : start + accumulate]) for start in range(0, num_micro, accumulate)]
    model = make_network()
    other = copy.deepcopy(model)
    start = weights_of(model)
    # Adam divides by the gradient's size, which magnifies rounding errors, so its steps are smaller here.
    lr = 0.05 if optimizer == "sgd" else 1e-4
    train(model, micro, _config(epochs=2, optimizer=optimizer, lr=lr, accumulate=accumulate))
    train(other, big, _config(epochs=2, optimizer=optimizer, lr=lr))
    _assert_close(weights_of(model), weights_of(other))
    assert max(float((a - b).abs().max()) for a, b in zip(start, weights_of(model), strict=True)) > 1e-5


def test_sgd_is_the_published_rule() -> None:
    """v = 0.9 v + gradient + decay w; w = w - lr v, at the rates of torch's OneCycleLR."""
    batches, epochs, lr, decay = make_batches([4] * 5), 2, 0.05, 0.01
    model = make_network()
    by_hand = copy.deepcopy(model)
    train(model, batches, _config(epochs=epochs, optimizer="sgd", lr=lr, weight_decay=decay))

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
    _assert_close(weights_of(model), weights_of(by_hand))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adamw", 0.02)])
def test_linearly_separable_classes_are_learned(optimizer: str, lr: float, precision: str) -> None:
    model, config = make_linear(), _config(epochs=6, optimizer=optimizer, lr=lr, precision=precision)
    results = train(model, make_separable_batches(15), config, val_loader=make_separable_batches(10, seed=1))
    assert results[-1].val_accuracy is not None
    assert results[-1].val_accuracy > 0.95
    assert results[-1].loss < results[0].loss


def test_the_figures_of_an_epoch_are_means_over_its_samples() -> None:
    """The learning rate is almost 0, so the model stays as it is. Larger batches weigh more."""
    batches, val_batches = make_batches([4, 4, 3]), make_batches([5, 2], seed=1)
    model = make_linear()
    expected = []
    for images, labels in (join(batches), join(val_batches)):
        outputs = model(images.float() / 255)
        expected.append(nn.functional.cross_entropy(outputs, labels).item())
        expected.append(float((outputs.argmax(1) == labels).double().mean()))
    config = _config(epochs=3, lr=1e-12, weight_decay=0.0)
    results = train(model, batches, config, val_loader=val_batches)
    assert [result.epoch for result in results] == [0, 1, 2]
    for result in results:
        assert [result.loss, result.accuracy, result.val_loss, result.val_accuracy] == pytest.approx(expected, abs=1e-6)
        assert result.num_images == 11
        assert 0 <= result.data_wait_s <= result.train_s
        assert 0 <= result.data_wait_share <= 1
        assert result.data_wait_share == pytest.approx(result.data_wait_s / result.train_s)
        assert result.images_per_s == pytest.approx(11 / result.train_s)


def test_without_a_validation_loader_there_are_no_validation_figures() -> None:
    (result,) = train(make_linear(), make_batches([4]), _config())
    assert result.val_loss is None
    assert result.val_accuracy is None


@pytest.mark.parametrize(("epochs", "num_batches"), [(1, 10), (3, 7)])
def test_the_learning_rate_ends_low(epochs: int, num_batches: int) -> None:
    results = train(make_linear(), make_batches([2] * num_batches), _config(epochs=epochs, lr=0.1))
    assert 0 < results[-1].lr < 0.1 / 1000


def test_the_learning_rate_rises_before_it_falls() -> None:
    results = train(make_linear(), make_batches([2] * 10), _config(epochs=10, lr=0.1))
    rates = [result.lr for result in results]
    peak = rates.index(max(rates))
    assert 0 < peak < 5
    assert rates == sorted(rates[: peak + 1]) + sorted(rates[peak + 1 :], reverse=True)
    assert max(rates) <= 0.1


class _Calls(Callback):
    """Record all calls."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []
        self.results: list[EpochResult] = []

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        self.made.append(("start", num_steps))

    def on_batch(self, batch: Any) -> None:
        self.made.append(("batch", len(batch[1])))

    def on_log(self, record: StepRecord) -> None:
        self.made.append(("log", record.step))

    def on_epoch(self, result: EpochResult) -> None:
        self.results.append(result)
        self.made.append(("epoch", result.epoch))

    def on_end(self, results: list[EpochResult]) -> None:
        self.made.append(("end", len(results)))


def test_callbacks_are_called_for_every_microbatch_line_of_the_log_and_epoch_in_order() -> None:
    """A line of the log comes every ``log_every`` steps, and at the end of an epoch for the remaining steps."""
    calls = _Calls()
    config = _config(epochs=2, accumulate=2, log_every=2)
    results = train(make_linear(), make_batches([4, 4, 4, 4, 3]), config, callbacks=[calls])
    first = [("batch", 4), ("batch", 4), ("batch", 4), ("batch", 4), ("log", 2), ("batch", 3), ("log", 3), ("epoch", 0)]
    second = [
        ("batch", 4),
        ("batch", 4),
        ("log", 4),
        ("batch", 4),
        ("batch", 4),
        ("batch", 3),
        ("log", 6),
        ("epoch", 1),
    ]
    assert calls.made == [("start", 0), *first, *second, ("end", 2)]
    assert calls.results == results


def test_a_line_of_the_log_has_the_mean_of_its_samples() -> None:
    records: list[StepRecord] = []

    class Records(Callback):
        def on_log(self, record: StepRecord) -> None:
            records.append(record)

    batches, model = make_batches([4, 4, 3]), make_linear()
    expected = [
        nn.functional.cross_entropy(model(images.float() / 255), labels).item()
        for images, labels in (join(batches[:2]), batches[2])
    ]
    train(model, batches, _config(log_every=2, lr=1e-12, weight_decay=0.0), callbacks=[Records()])
    assert [record.loss for record in records] == pytest.approx(expected, abs=1e-6)
    assert [record.step for record in records] == [2, 3]
    for record in records:
        assert record.epoch == 0
        assert record.images_per_s > 0
        assert record.step_s > 0
        assert 0 <= record.data_wait_share <= 1
        assert record.scale == 1
        assert record.memory_allocated is not None
        assert record.memory_allocated > 2**20


def test_the_loader_gets_each_epoch() -> None:
    loader, epochs = CountingLoader(make_batches([4, 4])), []

    class Epochs(Callback):
        def on_epoch(self, result: EpochResult) -> None:
            epochs.append(loader.epoch)

    train(make_linear(), loader, _config(epochs=3), callbacks=[Epochs()])
    assert epochs == [0, 1, 2]


def test_torchs_distributed_sampler_gets_each_epoch() -> None:
    """torch's loader has no set_epoch, so its sampler would repeat the same order."""
    dataset = torch.utils.data.TensorDataset(torch.rand(12, 3, 6, 6), torch.arange(12) % 3, torch.arange(12))
    sampler: Any = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=12, sampler=sampler)
    orders: list[list[int]] = []

    class Orders(Callback):
        def on_batch(self, batch: Any) -> None:
            orders.append(batch[2].tolist())

    train(make_linear(), loader, _config(epochs=3), callbacks=[Orders()])
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": torch.zeros(2, 3, 6, 6), "label": torch.zeros(2)}, "got dict$"),
        ([torch.zeros(2, 3, 6, 6)], "got list of Tensor"),
        ((torch.zeros(2, 3, 6, 6), ["cat", "dog"]), "got tuple of Tensor, list"),
    ],
)
def test_batches_that_do_not_start_with_images_and_labels_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"batches must start with a tensor of images and one of labels, {message}"):
        train(make_linear(), [batch], _config())


def test_a_loader_without_a_length_needs_steps_per_epoch() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return iter(make_batches([4, 4, 4]))

    with pytest.raises(ValueError, match="Endless has no length, which the schedule needs: set steps_per_epoch"):
        train(make_linear(), Endless(), _config())
    (result,) = train(make_linear(), Endless(), _config(steps_per_epoch=3))
    (expected,) = train(make_linear(), make_batches([4, 4, 4]), _config())
    assert (result.loss, result.lr) == (expected.loss, expected.lr)


def test_fields_after_images_and_labels_are_ignored() -> None:
    batches = [[images, labels, ["key"] * 4] for images, labels in make_batches([4, 4])]
    (result,) = train(make_linear(), batches, _config(), val_loader=batches)
    assert result.num_images == 8


def test_the_same_seed_trains_the_same_model() -> None:
    models = [make_network(seed=5), make_network(seed=5)]
    for model in models:
        train(model, make_batches([4] * 6), _config(epochs=2, optimizer="adamw", lr=0.01))
    for one, other in zip(weights_of(models[0]), weights_of(models[1]), strict=True):
        assert torch.equal(one, other)


def test_the_model_trains_in_training_mode_and_is_validated_in_evaluation_mode() -> None:
    modes: list[tuple[bool, bool]] = []

    class Spy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return x

    model = nn.Sequential(Spy(), make_linear()).eval()
    train(model, make_batches([4, 4]), _config(epochs=2), val_loader=make_batches([4]))
    assert modes == [(True, True), (True, True), (False, False)] * 2


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_training_stops_after_patience_epochs_without_improvement(patience: int) -> None:
    """The validation labels are permuted: the better the model gets, the worse its validation."""
    batches = make_separable_batches(5)
    wrong = [(images, (labels + 1) % 3) for images, labels in batches]
    config = _config(epochs=12, patience=patience, optimizer="sgd", schedule="constant")
    results = train(make_linear(), batches, config, val_loader=wrong)
    losses = [result.val_loss for result in results if result.val_loss is not None]
    assert len(losses) == 1 + patience
    assert losses == sorted(losses)
    assert [result.is_best for result in results] == [True] + [False] * patience


def test_a_loader_without_batches_is_an_error() -> None:
    """Such as a generator, which is exhausted after an epoch."""
    with pytest.raises(ValueError, match="epoch 1 had no batches: pass a loader that yields"):
        train(make_linear(), iter(make_batches([4, 4])), _config(epochs=2, steps_per_epoch=2))
    with pytest.raises(ValueError, match="there is nothing to evaluate"):
        evaluate(make_linear(), [], _config())
    images, labels = make_batches([3])[0]
    with pytest.raises(ValueError, match="there is nothing to evaluate"):
        evaluate(make_linear(), [(images, labels, torch.zeros(3, dtype=torch.bool))], _config())


def test_an_epoch_with_a_nan_validation_is_never_the_best() -> None:
    class NanAtFirst(nn.Module):
        num_epochs = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if not self.training:
                self.num_epochs += 1
            return images * float("nan") if not self.training and self.num_epochs == 1 else images

    batches = make_separable_batches(5)
    config = _config(epochs=3, optimizer="sgd", schedule="constant")
    results = train(nn.Sequential(NanAtFirst(), make_linear()), batches, config, val_loader=[join(batches)])
    assert [result.is_best for result in results] == [False, True, True]
