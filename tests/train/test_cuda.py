"""Training on a real GPU: precisions, the scaler, exact resumption, compilation, ranks, and evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardio
from shardio import ShardDataset
from shardio.train import Callback, Compile, TrainConfig, TrainStep, evaluate, train
from shardio.transforms import CenterCrop
from tests.train.runs import (
    StopAfter,
    make_batches,
    make_loader,
    make_model,
    make_network,
    make_separable_batches,
    weights_of,
)
from tests.train.test_resume import assert_resumes

DEVICE = "cuda"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
    pytest.mark.filterwarnings("ignore:half precision is slower"),  # The layers and batches are small.
]


def make_settings(**options: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": 4, "lr": 0.05, "device": DEVICE, "log_every": 5, **options})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop"])
def test_every_precision_and_optimizer_learns(precision: Any, optimizer: Any) -> None:
    model = make_network()
    results = train(model, make_separable_batches(20), make_settings(precision=precision, optimizer=optimizer, lr=0.02))
    assert results[-1].accuracy > 0.9
    assert results[-1].loss < results[0].loss
    assert all(weight.is_cuda and weight.dtype == torch.float32 for weight in model.parameters())


def test_the_scaler_skips_steps_that_overflow_and_counts_them() -> None:
    model = make_network().to(DEVICE)
    images, labels = (tensor.to(DEVICE) for tensor in make_batches([8])[0])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = TrainStep(model, optimizer, precision="fp16")
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**40})
    before = weights_of(model)
    step(images.float() / 255, labels)
    assert (step.num_taken, step.num_skipped, step.scale) == (0, 1, 2.0**39)
    assert all(torch.equal(one, other) for one, other in zip(before, weights_of(model), strict=True))
    while not step.num_taken:
        step(images.float() / 255, labels)
    assert not any(torch.equal(one, other) for one, other in zip(before, weights_of(model), strict=True))


def test_gradients_of_accumulated_batches_are_those_of_one_large_batch() -> None:
    images, labels = (tensor.to(DEVICE) for tensor in make_batches([8])[0])
    inputs = images.float() / 255
    whole, parts = make_network().to(DEVICE), make_network().to(DEVICE)
    TrainStep(whole, torch.optim.SGD(whole.parameters(), 0.1))(inputs, labels)
    step = TrainStep(parts, torch.optim.SGD(parts.parameters(), 0.1), accumulate=2)
    step(inputs[:5], labels[:5], ends_step=False)
    step(inputs[5:], labels[5:], ends_step=True)
    for one, other in zip(weights_of(whole), weights_of(parts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_deterministic_run_equals_an_uninterrupted_one(packed: Path, tmp_path: Path, precision: Any) -> None:
    options = {"checkpoint_every": 1, "device": DEVICE, "precision": precision}
    assert_resumes(lambda: make_loader(packed), tmp_path, [StopAfter(3), StopAfter(8)], **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # The compiler's own.
def test_a_compiled_model_learns() -> None:
    results = train(make_network(), make_separable_batches(10), make_settings(), callbacks=[Compile()])
    assert results[-1].loss < results[0].loss


class NoteWrapper(Callback):
    def __init__(self) -> None:
        self.kinds = set[type]()

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        self.kinds.add(type(step.model))
        return loss


def test_one_rank_of_a_group_trains_through_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    try:
        note = NoteWrapper()
        results = train(make_network(), make_separable_batches(10), make_settings(accumulate=2), callbacks=[note])
        assert note.kinds == {nn.parallel.DistributedDataParallel}
        assert results[-1].loss < results[0].loss
    finally:
        dist.destroy_process_group()


def test_evaluation_on_several_ranks_counts_each_sample_once(packed: Path) -> None:
    model, config = make_model().to(DEVICE), make_settings(precision="fp32")
    whole = evaluate(model, shardio.DataLoader(ShardDataset(packed, transform=CenterCrop(16)), 4), config)
    correct = num_images = 0.0
    for rank in range(2):
        dataset = ShardDataset(packed, transform=CenterCrop(16), remainder="mask", rank=rank, world_size=2)
        score = evaluate(model, shardio.DataLoader(dataset, 4), config)
        correct, num_images = correct + score.accuracy * score.num_images, num_images + score.num_images
    assert num_images == whole.num_images == 21
    assert correct == pytest.approx(whole.accuracy * 21)


def test_a_device_that_always_has_data_reports_no_stall() -> None:
    """The program spends most of its time waiting for the device, and little of it waiting for data."""
    layers = [nn.Linear(8192, 8192) for _ in range(8)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 8192), *layers, nn.Linear(8192, 3))
    results = train(model, make_batches([1024] * 50), make_settings(epochs=2, precision="fp32", lr=1e-5))
    assert results[-1].data_wait_share < 0.3
