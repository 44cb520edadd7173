"""The loaders inside of a loader with shardio's order, whose workers call the user's dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils.data

from shardio.images import use_one_thread
from shardio.loader.collate import CollateKept
from shardio.loader.executors.fetching import starts_threads
from shardio.loader.executors.settings import ExecutorSettings


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """A ``worker_init_fn`` that makes each worker resize images in one thread, because workers run in parallel.

    Attributes:
        init_fn: The user's ``worker_init_fn``.
    """

    init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        use_one_thread()
        if self.init_fn is not None:
            self.init_fn(worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What inner loaders are made from, except for their datasets and samplers.

    Attributes:
        settings: The settings of the user's loader.
    """

    settings: ExecutorSettings

    @property
    def is_batched(self) -> bool:
        """Whether the loader makes batches, instead of single samples."""
        return self.settings.batch_size is not None

    def make_loader(self, dataset: Any, **options: Any) -> torch.utils.data.DataLoader[Any]:
        """Return an inner loader.

        Args:
            dataset: Its dataset.
            options: Further arguments of torch's DataLoader.
        """
        settings = self.settings
        given: dict[str, Any] = {
            "batch_size": settings.batch_size,
            "num_workers": settings.num_workers,
            "collate_fn": CollateKept(settings.collate_fn, is_batched=self.is_batched),
            "pin_memory": settings.pin_memory,
            "timeout": settings.timeout_s,
            "worker_init_fn": WorkerInit(settings.worker_init_fn),
            "multiprocessing_context": settings.multiprocessing_context,
            "generator": settings.generator,
            "prefetch_factor": settings.prefetch_factor,
            "persistent_workers": settings.persistent_workers,
            "pin_memory_device": settings.pin_memory_device,
        }
        loader: Any = torch.utils.data.DataLoader(dataset, **{**given, **options})
        loader.worker_method = "thread" if starts_threads(settings.multiprocessing_context) else settings.worker_method
        loader.snapshot_every_n_steps = 0  # The order has the state.
        return loader  # type: ignore[no-any-return]  # attributes were added
