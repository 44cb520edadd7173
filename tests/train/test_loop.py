from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardio.train import EpochResult, TrainConfig, evaluate, train
from shardio.train.meters import Score
from tests.device.loaders import CountingLoader
from tests.train.toys import PLAIN, join, make_batches, make_linear, make_network, make_separable_batches, weights_of


def _config(**options: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": 1, "precision": "fp32", "device": "cpu", "lr": 0.05, **PLAIN, **options})


def _assert_close(a: list[torch.Tensor], b: list[torch.Tensor], atol: float = 1e-6) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("num_micro", "accumulate"), [(8, 1), (8, 2), (8, 4), (8, 8), (5, 2), (7, 3), (3, 8)])
def test_accumulated_microbatches_train_as_one_big_batch(num_micro: int, accumulate: int, optimizer: str) -> None:
    """A short last group counts as the smaller batch that it is."""
    micro = make_batches([4] * num_micro)
    big = [join(micro[start : start + accumulate]) for start in range(0, num_micro, accumulate)]
    model = make_network()
    other = copy.deepcopy(model)
    start = weights_of(model)
    # Adam divides by the gradient's size, which magnifies its rounding: hence the smaller steps.
    lr = 0.05 if optimizer == "sgd" else 1e-4
    train(model, micro, _config(epochs=2, optimizer=optimizer, lr=lr, accumulate=accumulate))
    train(other, big, _config(epochs=2, optimizer=optimizer, lr=lr))
    _assert_close(weights_of(model), weights_of(other))
    assert max(float((a - b).abs().max()) for a, b in zip(start, weights_of(model), strict=True)) > 1e-5


def test_sgd_is_the_published_rule_with_momentum_of_nine_tenths() -> None:
    """v = 0.9 v + gradient + decay w; w = w - lr v, at OneCycle's rates as torch computes them."""
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
def test_it_learns_what_is_linearly_separable(optimizer: str, lr: float, precision: str) -> None:
    model, config = make_linear(), _config(epochs=6, optimizer=optimizer, lr=lr, precision=precision)
    results = train(model, make_separable_batches(15), config, val_loader=make_separable_batches(10, seed=1))
    assert results[-1].val_accuracy is not None
    assert results[-1].val_accuracy > 0.95
    assert results[-1].loss < results[0].loss


def test_the_figures_of_an_epoch_are_those_of_its_samples() -> None:
    """With next to no learning rate the model stays what it was; batches of unequal sizes weigh by their samples."""
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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_see_every_microbatch_and_every_epoch(accumulate: int) -> None:
    calls: list[tuple[str, int, int]] = []
    given: list[EpochResult] = []

    def on_batch(number: int, score: Score) -> None:
        calls.append(("batch", number, score.num_images))

    def on_epoch(result: EpochResult) -> None:
        given.append(result)
        calls.append(("epoch", result.epoch, result.num_images))

    config = _config(epochs=2, accumulate=accumulate)
    results = train(make_linear(), make_batches([4, 4, 3]), config, on_batch=on_batch, on_epoch=on_epoch)
    batches = [("batch", 0, 4), ("batch", 1, 8), ("batch", 2, 11)]
    assert calls == [*batches, ("epoch", 0, 11), *batches, ("epoch", 1, 11)]
    assert given == results


def test_the_loader_is_told_each_epoch() -> None:
    loader, epochs = CountingLoader(make_batches([4, 4])), []
    train(make_linear(), loader, _config(epochs=3), on_epoch=lambda _: epochs.append(loader.epoch))
    assert epochs == [0, 1, 2]


def test_fields_after_images_and_labels_are_left_aside() -> None:
    batches = [[images, labels, ["key"] * 4] for images, labels in make_batches([4, 4])]
    (result,) = train(make_linear(), batches, _config(), val_loader=batches)
    assert result.num_images == 8


def test_half_precision_on_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="fp16' needs CUDA"):
        train(make_linear(), make_batches([4]), _config(precision="fp16"))


def test_the_same_seed_trains_the_same_model() -> None:
    models = [make_network(seed=5), make_network(seed=5)]
    for model in models:
        train(model, make_batches([4] * 6), _config(epochs=2, optimizer="adamw", lr=0.01))
    for one, other in zip(weights_of(models[0]), weights_of(models[1]), strict=True):
        assert torch.equal(one, other)


def test_the_model_trains_in_training_mode_and_is_validated_in_the_other() -> None:
    modes: list[tuple[bool, bool]] = []

    class Spy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return x

    model = nn.Sequential(Spy(), make_linear()).eval()
    train(model, make_batches([4, 4]), _config(epochs=2), val_loader=make_batches([4]))
    assert modes == [(True, True), (True, True), (False, False)] * 2


def test_evaluating_measures_by_samples() -> None:
    model, batches = make_linear(), make_batches([5, 5, 1])
    images, labels = join(batches)
    outputs = model(images.float() / 255)
    score = evaluate(model, batches, _config())
    assert score.num_images == 11
    assert score.loss == pytest.approx(nn.functional.cross_entropy(outputs, labels).item(), abs=1e-6)
    assert score.accuracy == pytest.approx(float((outputs.argmax(1) == labels).double().mean()))
