"""Training on mixed images, soft labels and smoothed labels; validation stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardio import BatchRandomErasing, CutMix, MixUp, OneOf
from shardio.train import Callback, Score, TrainConfig, evaluate, train
from shardio.train.step import make_transforms
from tests.train.runs import make_loader, make_model
from tests.train.small_data import Batch, make_batches, make_linear

OPTIONS: dict[str, Any] = {"epochs": 1, "precision": "fp32", "device": "cpu", "deterministic": True, "lr": 0.01}
MIXED: dict[str, Any] = {"mixup": 0.2, "cutmix": 1.0, "random_erasing": 0.3, "label_smoothing": 0.1, "num_classes": 3}


class Collect(Callback):
    """Keeps the batches that the model was trained on."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def on_batch(self, batch: Any) -> None:
        self.batches.append(batch)


def soften(batches: list[Batch]) -> list[Batch]:
    return [(images, nn.functional.one_hot(labels, 3).float()) for images, labels in batches]


def test_soft_labels_of_one_class_train_as_its_number() -> None:
    batches, config = make_batches([8, 8, 3]), TrainConfig(**OPTIONS)
    (hard,) = train(make_linear(), batches, config, val_loader=batches)
    (soft,) = train(make_linear(), soften(batches), config, val_loader=soften(batches))
    assert soft.loss == pytest.approx(hard.loss, rel=1e-5)
    assert soft.val_loss == pytest.approx(hard.val_loss, rel=1e-5)
    assert (soft.accuracy, soft.val_accuracy) == (hard.accuracy, hard.val_accuracy)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_learns_from_mixed_batches(packed: Path, precision: str) -> None:
    """The labels of each sample are shares of at most two classes. The dataset tells how many there are."""
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


def test_images_are_erased_with_the_given_probability() -> None:
    collect, config = Collect(), TrainConfig(**OPTIONS, random_erasing=0.25, mean=(0.1,) * 3)
    train(make_linear(side=12), make_batches([400], side=12), config, callbacks=[collect])
    erased = (collect.batches[0][0] == 0).all(1).flatten(1).any(1)
    assert float(erased.float().mean()) == pytest.approx(0.25, abs=0.07)


def test_erasing_comes_before_mixing_as_in_torchvisions_recipe() -> None:
    erasing, mixing = make_transforms([], TrainConfig(**OPTIONS, **MIXED))
    assert isinstance(erasing, BatchRandomErasing)
    assert erasing.p == 0.3
    assert isinstance(mixing, OneOf)
    assert [(type(each), getattr(each, "alpha", None)) for each in mixing.transforms] == [(MixUp, 0.2), (CutMix, 1.0)]
    assert make_transforms([], TrainConfig(**OPTIONS)) == []


def test_without_class_names_mixing_needs_their_number() -> None:
    with pytest.raises(ValueError, match="the dataset of this list does not have: set num_classes"):
        train(make_linear(), make_batches([8]), TrainConfig(**OPTIONS, mixup=0.2))


def test_soft_labels_must_fit_the_models_outputs() -> None:
    with pytest.raises(ValueError, match=r"soft labels \[8, 3\] must have the shape .* outputs, \[8, 5\]"):
        train(make_linear(num_classes=5), make_batches([8]), TrainConfig(**OPTIONS, mixup=0.2, num_classes=3))
