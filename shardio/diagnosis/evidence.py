"""The doctor's measurements of a loader, and the form of its advice."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch.utils.data._utils.collate import default_collate

from shardio.datasets import ShardDataset, ShardMapDataset, unwrap
from shardio.diagnosis.profiling import SampleProfile
from shardio.diagnosis.rates import LoaderRun, run_loader
from shardio.loader import DataLoader
from shardio.loader.executor import TorchDataLoader
from shardio.loader.statistics import LoaderStats

WORTHWHILE = 1.1
"""The smallest speed-up that is worth advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change to a loader.

    Attributes:
        cause: The cause, in a few words, such as ``too few workers``.
        remedy: What to change.
        speedup: The expected rate of the loader divided by its present rate; None if the change is not about speed.
        is_measured: Whether the speed-up was measured with this change, rather than estimated.
    """

    cause: str
    remedy: str
    speedup: float | None = None
    is_measured: bool = False

    def __str__(self) -> str:
        speedup = ""
        if self.speedup is not None:
            speedup = f"{self.speedup:.1f} × ({'measured' if self.is_measured else 'estimated'}): "
        return f"{speedup}{self.cause}\n{self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderEvidence:
    """The measurements of a loader.

    Attributes:
        loader: The loader.
        run: Its speed.
        profile: Where the time of a sample goes; None if the loader's dataset is unknown.
        stats: The statistics of shardio's own workers; None if others made the batches.
        num_processors: The number of processors that this process may use.
        trial_s: The time to measure each change, in seconds.
        shm_free: The free shared memory of the machine in bytes; None if unknown.
    """

    loader: Any
    run: LoaderRun
    profile: SampleProfile | None
    stats: LoaderStats | None
    num_processors: int
    trial_s: float
    shm_free: int | None

    @property
    def is_torchs(self) -> bool:
        """Whether the loader is a DataLoader of torch or shardio, so that it can be rebuilt with other arguments."""
        return type(self.loader) in (TorchDataLoader, DataLoader)

    @property
    def dataset(self) -> Any:
        """The innermost dataset: Subsets and shardio's wrappers are removed."""
        return unwrap(getattr(self.loader, "dataset", None)).dataset

    @property
    def source(self) -> str:
        """The directory of the dataset, for commands; a placeholder if it is unknown."""
        if isinstance(self.dataset, ShardDataset | ShardMapDataset):
            folders = {str(tar).rpartition("/")[0] for tar in self.dataset.table.tars}
            return folders.pop() if len(folders) == 1 else "SOURCE"
        root = getattr(self.dataset, "root", None)
        return str(root) if isinstance(root, str | Path) else "SOURCE"

    def try_change(self, kind: type[Any] | None = None, **changes: Any) -> float:
        """Return the speed-up of the loader with other arguments."""
        return self.try_loader(rebuild(self.loader, kind, **changes))

    def try_loader(self, loader: Any) -> float:
        """Return the speed-up of another loader."""
        return self.compare(self.measure(loader))

    def compare(self, run: LoaderRun) -> float:
        """Return the rate of a run, divided by the mean of the loader's rates before and after it."""
        return 2 * run.samples_per_s / (self.run.samples_per_s + self.measure(self.loader).samples_per_s)

    def measure(self, loader: Any) -> LoaderRun:
        """Return the speed of a loader."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The user has seen the warnings of the loader.
            return run_loader(loader, self.trial_s, self.num_processors)


def rebuild(loader: Any, kind: type[Any] | None = None, **changes: Any) -> Any:
    """Return a DataLoader like the given one, with other arguments.

    Args:
        loader: A loader.
        kind: The class of the new loader; by default, the same one.
        changes: The arguments that differ.
    """
    names = ("dataset", "num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    given = {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers", "in_order")}
    if loader.collate_fn is not default_collate and "channels_last" not in getattr(loader.collate_fn, "__name__", ""):
        given["collate_fn"] = loader.collate_fn
    is_iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if loader.batch_size is None and not is_iterable and loader.batch_sampler is not None:
        given["batch_sampler"] = loader.batch_sampler
    else:
        given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not is_iterable:
            given["sampler"] = loader.sampler
    given |= changes
    if not given["num_workers"]:
        given |= {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
    return (kind or type(loader))(**given)


def without(share: float) -> float:
    """Return the speed-up if a share of a sample's time is saved."""
    return 1 / max(1 - share, 0.01)


def share_of_stage(stats: LoaderStats, stage: str) -> float:
    """Return the share of a stage in the time in which workers are not idle."""
    seconds = stats.seconds_by_stage()
    return seconds[stage] / (sum(seconds.values()) - seconds.get("idle", 0.0) or 1.0)
