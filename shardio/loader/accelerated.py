"""What Accelerate keeps of a loader that it prepared: where its end is, which samples are padding, and its device.

A loader that splits over ranks by itself is returned by ``Accelerator.prepare`` as it is, so it does here what
Accelerate's own loaders do: ``accumulate`` must see the last batch, and ``gather_for_metrics`` the repeats in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from shardio.handover import hand_over
from shardio.loader.feeds import SamplerFeed, ShardFeed
from shardio.order import Progress, Split


class Preparable:
    """A loader that ``Accelerator.prepare`` returns as it is, where it holds an order of shardio's."""

    _feed: ShardFeed | SamplerFeed | None
    _is_in_accelerate = False

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether the loader needs no wrapper: ``prepare_data_loader`` asks by this name, also for ``prepare``."""
        has_order = self._feed is not None
        if has_order and sys._getframe(1).f_globals.get("__name__") == "accelerate.accelerator":
            self._is_in_accelerate = True  # It sets the attribute only in ``prepare``.
        return has_order

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, is_prepared: bool) -> None:
        pass  # What is prepared stays so.

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether Accelerate saves the loader's state in ``save_state``, and loads it: it asks by this name."""
        return self._feed is not None

    def _follow(self, batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """Return an epoch's batches, which keep Accelerate's state up to date where the loader was prepared."""
        return PreparedEpoch(batches, progress) if self._is_in_accelerate else batches


class PreparedEpoch(Iterator[Any]):
    """Yield an epoch's batches on Accelerate's device, and keep its ``GradientState`` up to date.

    Args:
        batches: The epoch's batches.
        progress: How far it is.

    Raises:
        ValueError: If ranks that must have the same data, as in tensor parallelism, would get different samples.
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

    def _note_end(self) -> None:
        self._gradients.end_of_dataloader = self._progress.is_over

    def close(self) -> None:
        """Take the epoch off Accelerate's list of those that are under way."""
        if self._is_listed:
            self._is_listed = False
            self._gradients.end()

    def __del__(self) -> None:
        if hasattr(self, "_is_listed"):
            self.close()


def find_remainder(split: Split) -> int:
    """Return how many samples ``gather_for_metrics`` must keep of the last batches of all ranks; 0 for all.

    It cuts off the end of what it gathers, rank after rank. Where the repeats that pad the epoch lie elsewhere, as in a
    shuffled epoch of three ranks, cutting would lose samples, so the repeats are left in.
    """
    ranks = [replace(split, rank=rank) for rank in range(split.world_size)]
    last = [rank.batch(rank.num_batches - 1) for rank in ranks if rank.num_batches]
    valid = np.concatenate(last) < split.num_samples if last else np.empty(0, np.bool_)
    num_valid = int(valid.sum())
    return num_valid if num_valid < len(valid) and valid[:num_valid].all() else 0


def _check_parallelism(config: Any, split: Split) -> None:
    """Raise ValueError if there are more ranks in the split than ranks that need different data."""
    if config is None or config.non_data_parallel_size == 1 or split.world_size <= config.data_parallel_size:
        return
    raise ValueError(
        f"{split.world_size} ranks would each get other samples, but only {config.data_parallel_size} of Accelerate's "
        "ranks may: the others share their data by tensor, context or sequence parallelism. Give the dataset or "
        f"sampler world_size={config.data_parallel_size} and this process's rank among them"
    )


@cache
def _gradients_class() -> type[Any]:
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class Gradients(DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types.
        """The bookkeeping that Accelerate offers to loaders of others."""

        def __init__(self) -> None:
            self.gradient_state = GradientState()

    return Gradients
