"""shardio's tensors are ordinary CPU tensors, regardless of the torch modes that the caller has set.

In these tests, ``meta`` replaces a GPU as the default device: tensors on ``meta`` have no values, so reading one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset
from shardio.libraries import own_tensors
from shardio.train import TrainConfig, train
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip
from tests.device.late_stream import prefetch_late

CROP = Compose([CenterCrop(32), RandomHorizontalFlip()])


def sharded(packed: Path, **options: Any) -> DataLoader:
    return DataLoader(ShardDataset(packed, shuffle=True, transform=CROP), batch_size=4, **options)


def sampled(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, transform=CROP)
    return DataLoader(dataset, sampler=EpochSampler(dataset), batch_size=4, **options)


def shuffled(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, transform=CROP)
    return DataLoader(dataset, shuffle=True, batch_size=4, **options)


WAYS: list[Any] = [
    {"num_workers": 0},
    {"num_workers": 0, "worker_init_fn": id},
    pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow),
    pytest.param({"num_workers": 1, "worker_init_fn": id}, marks=pytest.mark.slow),
]


@pytest.fixture
def on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def prefetch(loader: DataLoader, is_late: bool) -> DevicePrefetcher:
    options: dict[str, Any] = {"normalize": ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))}
    return prefetch_late(loader, **options)[0] if is_late else DevicePrefetcher(loader, "cpu", **options)


def count_labels(loader: DataLoader) -> list[int]:
    labels = [label for _, several in loader for label in several.tolist()]
    return [labels.count(number) for number in range(3)]


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize("make", [sharded, sampled, shuffled])
@pytest.mark.parametrize("options", WAYS)
def test_a_loader_is_the_same_with_another_default_device(make: Any, options: Any, packed: Path) -> None:
    loader = make(packed, **options)
    for _ in range(2):
        assert count_labels(loader) == [7, 7, 7]
    images, labels = next(iter(loader))
    assert (images.device.type, labels.device.type) == ("cpu", "cpu")
    assert torch.empty(1).device.type == "meta", "the caller's default must be restored"


@pytest.mark.usefixtures("on_meta")
def test_datasets_by_hand_and_the_order_are_the_same_with_another_default_device(packed: Path) -> None:
    dataset = ShardMapDataset(packed, transform=CROP)
    dataset.set_epoch(3, seed=5)
    assert dataset[-1][0].numpy().shape == (3, 32, 32)

    def read() -> tuple[list[float], list[int], list[float]]:
        torch.manual_seed(7)
        values = [image.float().mean().item() for image, _ in ShardDataset(packed, shuffle=True, transform=CROP)]
        drawn = [dataset[0][0].float().mean().item() for _ in range(4)]
        return values, list(EpochSampler(dataset, seed=4)), drawn

    found = read()
    torch.set_default_device(None)
    assert read() == found


@pytest.mark.skipif(torch.__version__ < "2.7", reason="AdamW of torch 2.6 keeps its steps on the default device")
@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize("is_late", [True, False])
def test_a_prefetcher_and_training_are_the_same_with_another_default_device(packed: Path, is_late: bool) -> None:
    assert all(images.isfinite().all() for images, _ in prefetch(sharded(packed), is_late))
    with torch.device("cpu"):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 3))
    results = train(model, sharded(packed), TrainConfig(epochs=1, device="cpu", precision="fp32"))
    assert results is not None


@pytest.mark.parametrize("make", [sharded, shuffled])
@pytest.mark.parametrize("options", WAYS)
def test_a_loader_first_used_in_inference_mode_works_outside(make: Any, options: Any, packed: Path) -> None:
    with torch.inference_mode():
        loader = make(packed, **options)
        batches = iter(loader)
        received = list(islice(batches, 2))
    received += [*batches, *loader]
    assert len(received) == 12
    for images, labels in received:
        assert not images.is_inference() | labels.is_inference()
        images.fill_(1)
        labels.add_(1)
    loader.dataset.set_epoch(9)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_prefetchers_batches_from_inference_mode_are_ordinary(packed: Path, is_late: bool) -> None:
    with torch.inference_mode():
        wrapped = prefetch(sharded(packed), is_late)
        batches = iter(wrapped)
        received = list(islice(batches, 2))
    received += [*batches, *wrapped]
    weight = torch.ones((), requires_grad=True)
    for images, _ in received:
        (images.mul_(2) * weight).sum().backward()
        assert not images.is_inference()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_callers_modes_are_restored(mode: Callable[[], Any], device: str) -> None:
    def modes() -> tuple[Any, ...]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.empty(0).device.type

    with mode(), torch.device(device):
        before = modes()
        with own_tensors():
            assert modes() == (False, torch.is_grad_enabled() and before[1], "cpu")
        assert modes() == before
