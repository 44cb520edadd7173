"""The code that each rank runs in a test of Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader as TorchLoader

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.check import CoverageRecorder
from tests.frameworks.launch import error_of
from tests.frameworks.samples import make_mixed

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


def make_mixture(packed: str, **options: Any) -> DataLoader:
    return DataLoader(make_mixed(packed), batch_size=4, **options)


MAKERS: dict[str, Callable[..., DataLoader]] = {"shards": make_shards, "sampled": make_sampled, "mixed": make_mixture}


def prepare(loader: Any, **options: Any) -> Any:
    return Accelerator(dataloader_config=DataLoaderConfiguration(**options)).prepare(loader)


def run(folder: Path, packed: str) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": refusals(packed), "batches": {}}
    record(folder / "saved", saved_and_loaded(folder, packed))
    for kind, make in MAKERS.items():
        for name, options in CONFIGURATIONS.items():
            found["batches"][f"{kind}-{name}"] = deliver(folder / f"{kind}-{name}", make, packed, options)
        found[f"sync-{kind}"] = synchronized(make(packed, num_workers=1))
        found[f"metrics-{kind}"] = gathered(make(packed))
    return found


def record(folder: Path, *epochs: Iterable[Any]) -> None:
    with CoverageRecorder(folder, key=1) as recorder:
        for batches in epochs:
            for _ in recorder.watch(batches):
                pass


def deliver(folder: Path, make: Callable[..., DataLoader], packed: str, options: dict[str, Any]) -> int:
    """Record two epochs, with an interruption in the second one. Return the prepared loader's length in batches."""
    loader = prepare(make(packed), **options)
    assert loader.stats().num_batches == 0
    record(folder, loader, interrupt(loader, lambda: prepare(make(packed), **options)))
    return len(loader)


def interrupt(loader: DataLoader, make: Callable[[], DataLoader]) -> Iterator[Any]:
    loader.set_epoch(1)
    yield from islice(loader, 2)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(1)
    yield from resumed


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

    def refusal(dataset: Any, *, sampler: Any = None, num_workers: int = 0, **options: Any) -> str:
        loader: Any = TorchLoader(dataset, 4, sampler=sampler, num_workers=num_workers)
        return error_of(lambda: list(prepare(loader, **options)))

    return {
        "torch-shards-dispatch": refusal(shards),
        "torch-shards-dispatch-workers": refusal(shards, num_workers=1),
        "torch-shards": refusal(shards, dispatch_batches=False),
        "torch-shards-workers": refusal(shards, num_workers=1, dispatch_batches=False),
        "torch-sampler": refusal(mapped, sampler=EpochSampler(mapped)),
        "torch-sampler-dispatch": refusal(mapped, sampler=EpochSampler(mapped), dispatch_batches=True),
        "skip-shards": error_of(lambda: list(skip_first_batches(prepare(make_shards(packed)), 1))),
        "skip-sampled": error_of(lambda: list(skip_first_batches(prepare(make_sampled(packed)), 1))),
    }
