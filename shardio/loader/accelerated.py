"""Support for Accelerate: the end of an epoch, the repeats in its last batch, and the device.

``Accelerator.prepare`` does not wrap a loader that already splits over ranks. So this module does what Accelerate's
wrappers do: it reports the last batch to ``accumulate``, and the repeats in that batch to ``gather_for_metrics``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from shardio.handover import hand_over
from shardio.loader.state import LoaderOrder
from shardio.order import Progress, Split


class Preparable:
    """A loader that ``Accelerator.prepare`` returns unchanged if it has shardio's order."""

    _order: LoaderOrder | None
    _is_in_accelerate = False

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether the loader needs no wrapper. Accelerate's ``prepare`` methods read this attribute."""
        has_order = self._order is not None
        if has_order and sys._getframe(1).f_globals.get("__name__") == "accelerate.accelerator":
            self._is_in_accelerate = True  # Accelerate sets the attribute only in ``prepare``.
        return has_order

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, is_prepared: bool) -> None:
        pass  # A prepared loader stays prepared.

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether ``save_state`` and ``load_state`` include the loader's state, for Accelerate."""
        return self._order is not None

    def _follow(self, batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """Return an epoch's batches. If the loader was prepared, they keep Accelerate's state up to date."""
        return PreparedEpoch(batches, progress) if self._is_in_accelerate else batches


class PreparedEpoch(Iterator[Any]):
    """An iterator that moves an epoch's batches to Accelerate's device and keeps ``GradientState`` up to date.

    Args:
        batches: The epoch's batches.
        progress: The epoch's progress.

    Raises:
        ValueError: If ranks that must share their data, as in tensor parallelism, would get different samples.
    """

    def __init__(self, batches: Iterator[Any], progress: Progress) -> None:
        from accelerate.state import AcceleratorState

        state = AcceleratorState()
        _check_parallelism(getattr(state, "parallelism_config", None), progress.split)
        self._batches, self._progress, self._device = batches, progress, state.device
        self._gradients = _gradients_class()()
        self._is_begun = self._is_listed = False

    def __next__(self) -> Any:
        from accelerate.utils import send_to_device

        if not self._is_begun:
            self._is_begun = self._is_listed = True
            self._gradients.begin()
            self._gradients.remainder = find_remainder(self._progress.split)
        try:
            batch = next(self._batches)
        except StopIteration:
            hand_over([self.close])
            raise
        hand_over([self._note_end])
        return send_to_device(batch, self._device)

    def is_ready(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the next batch; return whether it is there."""
        is_ready = getattr(self._batches, "is_ready", None)
        return is_ready is None or bool(is_ready(timeout_s))

    def _note_end(self) -> None:
        self._gradients.end_of_dataloader = self._progress.is_over

    def close(self) -> None:
        """Remove the epoch from Accelerate's list of loaders in flight."""
        if self._is_listed:
            self._is_listed = False
            self._gradients.end()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_is_listed"):
            self.close()


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


def _check_parallelism(config: Any, split: Split) -> None:
    """Raise ValueError if the split has more ranks than Accelerate has data-parallel ranks."""
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
