"""The code of each rank in a test of Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader as TorchLoader

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.check import CoverageRecorder
from tests.frameworks.launch import error_of

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "dispatch": {"dispatch_batches": True},
    "no-dispatch": {"dispatch_batches": False},
    "split": {"split_batches": True},
    "uneven": {"even_batches": False},
    "stateful": {"use_stateful_dataloader": True},
}


def make_shards(packed: str, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, fields=("image", "key"), shuffle=True)
    return DataLoader(dataset, batch_size=4, **options)


def make_sampled(packed: str, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields=("image", "key"))
    return DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset), **options)


MAKERS: dict[str, Callable[..., DataLoader]] = {"shards": make_shards, "sampled": make_sampled}


def prepare(loader: Any, **options: Any) -> Any:
    return Accelerator(dataloader_config=DataLoaderConfiguration(**options)).prepare(loader)


def run(folder: Path, packed: str) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": refusals(packed), "batches": {}}
    resume_by_save_state(folder, packed)
    for kind, make in MAKERS.items():
        for name, options in CONFIGURATIONS.items():
            found["batches"][f"{kind}-{name}"] = deliver(folder / f"{kind}-{name}", make, packed, options)
        found[f"sync-{kind}"] = synchronized(make(packed, num_workers=1))
        found[f"metrics-{kind}"] = gathered(make(packed))
    return found


def deliver(folder: Path, make: Callable[..., DataLoader], packed: str, options: dict[str, Any]) -> int:
    """Record two epochs, with an interruption in the second one. Return the prepared loader's length in batches."""
    loader = prepare(make(packed), **options)
    assert loader.stats().num_batches == 0
    with CoverageRecorder(folder, key=1) as recorder:
        for _ in recorder.watch(loader):
            pass
        loader.set_epoch(1)
        for _ in recorder.watch(interrupt(loader, lambda: prepare(make(packed), **options))):
            pass
    return len(loader)


def interrupt(loader: DataLoader, make: Callable[[], DataLoader]) -> Iterator[Any]:
    yield from islice(loader, 2)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(1)
    yield from resumed


def resume_by_save_state(folder: Path, packed: str) -> None:
    with CoverageRecorder(folder / "saved", key=1) as recorder:
        for _ in recorder.watch(saved_and_loaded(folder, packed)):
            pass


def saved_and_loaded(folder: Path, packed: str) -> Iterator[Any]:
    accelerator = Accelerator()
    loader = accelerator.prepare(make_shards(packed))
    yield from islice(loader, 2)
    accelerator.save_state(str(folder / "checkpoint"))
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    resumed = accelerator.prepare(make_shards(packed))
    accelerator.load_state(str(folder / "checkpoint"))
    yield from resumed


def synchronized(loader: DataLoader) -> list[list[bool]]:
    """Accumulate gradients over two batches. Return whether each batch of each epoch synchronizes gradients."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
    epochs = list[list[bool]]()
    for _ in range(2):
        epochs.append([])
        for _ in loader:
            with accelerator.accumulate(model):
                epochs[-1].append(accelerator.sync_gradients)
    assert not accelerator.gradient_state.in_dataloader
    return epochs


def gathered(loader: DataLoader) -> list[str]:
    accelerator = Accelerator()
    loader = accelerator.prepare(loader)
    return [key for _, keys in loader for key in accelerator.gather_for_metrics(keys)]


def refusals(packed: str) -> dict[str, str]:
    mapped = ShardMapDataset(packed, fields="label")
    shards = ShardDataset(packed, fields="label", shuffle=True)
    sampler = EpochSampler(mapped)
    return {
        "torch-shards-dispatch": error_of(lambda: list(prepare(TorchLoader(shards, 4)))),
        "torch-shards-dispatch-workers": error_of(lambda: list(prepare(TorchLoader(shards, 4, num_workers=1)))),
        "torch-shards": error_of(lambda: list(prepare(TorchLoader(shards, 4), dispatch_batches=False))),
        "torch-shards-workers": error_of(
            lambda: list(prepare(TorchLoader(shards, 4, num_workers=1), dispatch_batches=False))
        ),
        "torch-sampler": error_of(lambda: list(prepare(TorchLoader(mapped, 4, sampler=sampler)))),
        "torch-sampler-dispatch": error_of(
            lambda: list(prepare(TorchLoader(mapped, 4, sampler=sampler), dispatch_batches=True))
        ),
        "skip-shards": error_of(lambda: list(skip_first_batches(prepare(make_shards(packed)), 1))),
        "skip-sampled": error_of(lambda: list(skip_first_batches(prepare(make_sampled(packed)), 1))),
    }
