"""Support for Accelerate: the end of an epoch, the repeats in its last batch, and the device.

``Accelerator.prepare`` does not wrap a loader that already splits over ranks. So this module does what Accelerate's
wrappers do: it reports the last batch to ``accumulate``, and the repeats in that batch to ``gather_for_metrics``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from shardio.handover import hand_over
from shardio.loader.epoch_iterator import EpochIterator, LoaderIterator
from shardio.order import Progress, Split


def is_preparing() -> bool:
    """Return whether the caller's caller is one of Accelerate's ``prepare`` methods."""
    return sys._getframe(2).f_globals.get("__name__") == "accelerate.accelerator"


class PreparedEpoch(LoaderIterator):
    """An iterator that moves an epoch's batches to Accelerate's device and keeps ``GradientState`` up to date.

    It has the attributes of the iterator that makes the batches.

    Args:
        batches: The epoch's batches.
    """

    def __init__(self, batches: EpochIterator) -> None:
        from accelerate.state import AcceleratorState

        self._batches = batches
        self._device = AcceleratorState().device
        self._gradients = _gradients_class()()
        self._is_begun = self._is_listed = False

    def __next__(self) -> Any:
        from accelerate.utils import send_to_device

        if not self._is_begun:
            self._is_begun = self._is_listed = True
            self._gradients.begin()
            self._gradients.remainder = find_remainder(self._find_progress().split)
        try:
            batch = next(self._batches)
        except StopIteration:
            hand_over([self._leave])
            raise
        hand_over([self._note_end])
        return send_to_device(batch, self._device)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # Not set yet.
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._batches._reset(loader, first_iter)
        self._is_begun = False

    def _note_end(self) -> None:
        self._gradients.end_of_dataloader = self._find_progress().is_over

    def _find_progress(self) -> Progress:
        progress = self._batches.progress
        assert progress is not None, "Accelerate prepares only loaders with shardio's order"
        return progress

    def _leave(self) -> None:
        """Remove the epoch from Accelerate's list of loaders in flight."""
        if self._is_listed:
            self._is_listed = False
            self._gradients.end()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_is_listed"):
            self._leave()


def find_remainder(split: Split) -> int:
    """Return how many samples of the last batches of all ranks ``gather_for_metrics`` must keep; 0 for all.

    It concatenates the batches by rank and truncates the result. If the repeats that pad the epoch are not at the end,
    as in a shuffled epoch of three ranks, truncating would lose samples, so the repeats are kept.
    """
    ranks = [replace(split, rank=rank) for rank in range(split.world_size)]
    last = [rank.batch(rank.num_batches - 1) for rank in ranks if rank.num_batches]
    valid = np.concatenate(last) < split.num_samples if last else np.empty(0, np.bool_)
    num_valid = int(valid.sum())
    return num_valid if num_valid < len(valid) and valid[:num_valid].all() else 0


def check_parallelism(split: Split) -> None:
    """Check that a loader that Accelerate has prepared gives each data-parallel rank a share of its own.

    Raises:
        ValueError: If ranks that must share their data, as in tensor parallelism, would get different samples.
    """
    from accelerate.state import AcceleratorState

    config: Any = getattr(AcceleratorState(), "parallelism_config", None)
    if config is None or config.non_data_parallel_size == 1 or split.world_size <= config.data_parallel_size:
        return
    raise ValueError(
        f"each of {split.world_size} ranks would get different samples, but with this tensor, context or sequence "
        f"parallelism, the number of different shares must be {config.data_parallel_size}. On the dataset or sampler, "
        f"set world_size={config.data_parallel_size}, and rank to the index of this process's share (0 for the first)"
    )


@cache
def _gradients_class() -> type[Any]:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class Gradients(DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types.
        """The bookkeeping that Accelerate provides for other libraries' loaders."""

        def __init__(self) -> None:
            self.gradient_state = GradientState()

    return Gradients
