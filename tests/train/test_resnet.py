from __future__ import annotations

import pytest
import torch
from torch import nn

from shardio.train import TrainConfig, evaluate, small_resnet, train
from tests.train.toys import make_batches, weights_of


def _config() -> TrainConfig:
    return TrainConfig(epochs=1, precision="fp32", device="cpu", lr=0.01)


@pytest.mark.parametrize("image_size", [16, 17, 24, 31, 32, 48, 64, 65, 96, 128, 160, 224])
@pytest.mark.parametrize("num_classes", [2, 10])
def test_there_is_one_output_a_class_for_every_image_size(image_size: int, num_classes: int) -> None:
    model = small_resnet(num_classes, image_size, width=4)
    outputs = model(torch.rand(2, 3, image_size, image_size))
    assert outputs.shape == (2, num_classes)
    assert outputs.isfinite().all()


@pytest.mark.parametrize("image_size", [16, 32, 64])
def test_every_weight_is_reached_by_a_gradient(image_size: int) -> None:
    model = small_resnet(3, image_size, width=4)
    model(torch.rand(4, 3, image_size, image_size)).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


@pytest.mark.parametrize("image_size", [8, 16, 32, 64])
def test_a_last_batch_of_one_image_can_be_trained_on(image_size: int) -> None:
    model = small_resnet(3, image_size, width=4)
    (result,) = train(model, make_batches([4, 1], side=image_size), _config())
    assert result.num_images == 5


@pytest.mark.parametrize("mode", [True, False])
def test_evaluating_changes_nothing_of_the_model(mode: bool) -> None:
    """Neither weights nor the statistics of BatchNorm, nor whether it is training."""
    model = small_resnet(3, 16, width=4).train(mode)
    before = weights_of(model)
    evaluate(model, make_batches([6, 5], side=16), _config())
    for one, other in zip(before, weights_of(model), strict=True):
        assert torch.equal(one, other)
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert all(module.training == mode for module in model.modules())


def test_evaluating_twice_gives_the_same_figures_and_leaves_the_model_trainable() -> None:
    model = small_resnet(3, 16, width=4)
    batches = make_batches([6, 5], side=16)
    first, second = evaluate(model, batches, _config()), evaluate(model, batches, _config())
    assert (first.loss, first.accuracy) == (second.loss, second.accuracy)
    before = weights_of(model)
    train(model, batches, _config())
    assert any(not torch.equal(one, other) for one, other in zip(before, weights_of(model), strict=True))


def test_training_updates_the_statistics_of_batch_norm() -> None:
    model = small_resnet(3, 16, width=4)
    train(model, make_batches([6, 6], side=16), _config())
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        assert norm.num_batches_tracked is not None
        assert int(norm.num_batches_tracked) == 2
