"""The code that each rank runs in a test of user-defined datasets. torchrun's agent passes a folder to each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.utils.data
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DistributedSampler

from shardio import DataLoader
from shardio.check import CoverageRecorder
from shardio.world import find_world
from tests.frameworks.launch import record_epochs
from tests.frameworks.samples import Own

NUM_SAMPLES = len(Own())


class Shares(torch.utils.data.IterableDataset[str]):
    """A stream of the samples of :class:`Own`. Each worker of each rank yields its share of the samples."""

    def __iter__(self) -> Iterator[str]:
        world, info = find_world(), torch.utils.data.get_worker_info()
        worker_id, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        first, step = world.rank * num_workers + worker_id, world.world_size * num_workers
        return (f"number {number}" for number in range(first, NUM_SAMPLES, step))


def train_alone(folder: Path, make: Callable[[], Any]) -> None:
    with CoverageRecorder(folder) as recorder:
        loader = make()
        for _ in recorder.watch(loader):
            pass
        _set_epoch(loader, 1)
        for _ in recorder.watch(_interrupted(loader, make)):
            pass


def _interrupted(loader: Any, make: Callable[[], Any]) -> Iterator[Any]:
    yield from islice(loader, 2)
    resumed = make()
    _set_epoch(resumed, 1)
    resumed.load_state_dict(loader.state_dict())
    yield from resumed


def _set_epoch(loader: Any, epoch: int) -> None:
    if callable(set_epoch := getattr(loader.sampler, "set_epoch", None)):
        set_epoch(epoch)


def train_with_accelerate(folder: Path, **options: Any) -> None:
    """Receive a whole epoch, an epoch with skipped batches and, if Accelerate keeps a state, a resumed epoch."""
    set_seed(5)  # Accelerate's sampler needs the same seed on all ranks.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, **options))

    def make() -> Any:
        return accelerator.prepare(DataLoader(Own(), 4, shuffle=True, num_workers=1))

    loader = make()
    assert len(loader) == NUM_SAMPLES // 8
    epochs = [[list(batch) for batch in loader]]
    assert len(epochs[0]) == len(loader)
    loader.set_epoch(1)
    whole = [list(batch) for batch in loader]
    rest = skip_first_batches(loader, 1)
    rest.set_epoch(1)
    epochs.append(whole[:1] + [list(batch) for batch in rest])
    assert epochs[1] == whole
    if options.get("use_stateful_dataloader"):
        loader.set_epoch(2)
        begun, resumed = list(map(list, islice(loader, 1))), make()
        resumed.load_state_dict(loader.state_dict())
        resumed.set_epoch(2)
        epochs.append(begun + [list(batch) for batch in resumed])
    record_epochs(folder, epochs)


def be_rank(folder: str) -> None:
    warnings.simplefilter("error")
    for message in ("This DataLoader will create", ".*set_vital", ".*is deprecated", "'pin_memory' argument"):
        warnings.filterwarnings("ignore", message)
    warnings.filterwarnings("ignore", ".* has no state_dict")  # The warning does not matter here.
    torch.distributed.init_process_group("gloo")
    root = Path(folder)
    train_alone(root / "distributed", lambda: DataLoader(Own(), 4, sampler=DistributedSampler(Own()), num_workers=2))
    train_alone(root / "shares", lambda: DataLoader(Shares(), 4, num_workers=2))
    train_with_accelerate(root / "accelerate")
    train_with_accelerate(root / "accelerate-stateful", use_stateful_dataloader=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
