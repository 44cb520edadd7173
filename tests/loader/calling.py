"""The option by which a loader calls the dataset itself, and the batches that a loader delivers."""

from __future__ import annotations

from typing import Any

from shardio import DataLoader
from tests.faults.worker_processes import batches_of


def do_nothing(worker_id: int) -> None:
    """Do nothing: as ``worker_init_fn``, this makes workers call the dataset, and changes nothing else."""


CALLING: dict[str, Any] = {"worker_init_fn": do_nothing}


def keys_of(loader: Any) -> list[list[str]]:
    return [list(keys) for _, _, keys in loader]


def two_epochs_of(loader: DataLoader) -> tuple[Any, ...]:
    """Return the batches of two epochs, the state after them, and the loader's length."""
    first = batches_of(loader)
    loader.set_epoch(4)
    return first, batches_of(loader), loader.state_dict(), len(loader)
