"""DataLoader: torch's, with shardio's order, exact batches and a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data
from torch.utils.data import ConcatDataset, Subset

from shardio.datasets import EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.loader.collate import collate_channels_last
from shardio.loader.feeds import SamplerFeed, ShardFeed
from shardio.loader.workers import WorkerInit
from shardio.order import Cursor, Progress, Remainder, Split, dump_state, read_state


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Torch's DataLoader with the same arguments, and more where it is given shardio's order.

    With a :class:`shardio.ShardDataset`, or an :class:`shardio.EpochSampler` as ``sampler``, every ``iter``
    is the next epoch unless ``set_epoch`` names one, ``drop_last=True`` means ``remainder="drop"``, and
    ``state_dict`` counts the batches that the user received. Images of shardio's datasets come as uint8
    [N, 3, H, W] tensors in channels_last memory. With anything else it is torch's loader.

    >>> loader = DataLoader(ShardDataset("out", shuffle=True), batch_size=128)  # doctest: +SKIP
    >>> for images, labels in loader: ...  # doctest: +SKIP

    Args: Those of ``torch.utils.data.DataLoader``.

    Raises:
        ValueError: If arguments contradict each other or the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        if isinstance(dataset, ShardDataset) and shuffle:
            raise ValueError("a ShardDataset shuffles by itself: give shuffle=True to ShardDataset, not to the loader")
        if collate_fn is None and batch_size is not None and _yields_images(dataset):
            collate_fn = collate_channels_last
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.shuffle = shuffle  # Frameworks make loaders again from attributes named like the arguments.
        self._started: Progress | None = None
        self._feed = self._make_feed()
        if self._feed is not None:
            self._check_arguments(self._feed)

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next ``iter`` is. The loaded epoch keeps its position, another one drops it.

        Without shardio's order it goes on to the sampler or batch sampler, if that has a ``set_epoch``.
        """
        if self._feed is not None:
            self._feed.get_counter().set_epoch(epoch)
            return
        samplers = (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        for sampler in samplers:
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the user is: a small JSON-able dict that fits any number of ranks and workers.

        Raises:
            TypeError: If neither the dataset nor the sampler is shardio's.
        """
        feed = self._need_feed()
        source = feed.source
        return dump_state(feed.get_counter().now, source.settings, source.digest, source.num_all_samples)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state at the next ``iter``.

        Raises:
            StateError: If the state belongs to another dataset or order; the message names what differs.
            TypeError: If neither the dataset nor the sampler is shardio's.
        """
        feed = self._need_feed()
        source = feed.source
        feed.get_counter().load(read_state(state, source.settings, source.digest, source.num_all_samples))

    def __len__(self) -> int:
        """Return the number of batches of this rank in a full epoch."""
        return super().__len__() if self._feed is None else self._split(self._feed, Cursor(epoch=0)).num_batches

    def __iter__(self) -> Any:
        """Start the next epoch; iterate over its batches."""
        feed = self._feed
        if feed is None:
            return super().__iter__()
        counter = feed.get_counter()
        cursor = counter.start(feed.source.num_all_samples)
        progress = Progress(cursor=cursor, split=self._split(feed, cursor))
        batches = feed.start(cursor, progress.split, self._torch_options())
        counter.progress = self._started = progress
        return self._deliver(batches, progress)

    def _deliver(self, batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
        while True:
            if self.persistent_workers and progress is not self._started:
                raise RuntimeError(
                    "this iterator ended when the loader was iterated again: with persistent_workers=True there is one "
                    "at a time. Use persistent_workers=False, or a second loader"
                )
            try:
                batch = next(batches)
            except StopIteration:
                break
            progress.num_batches += 1
            yield batch
        progress.is_finished = True
        if progress.num_batches != progress.split.num_batches:
            raise RuntimeError(
                f"the epoch had {progress.num_batches} batches instead of {progress.split.num_batches}: "
                f"{type(self.dataset).__name__} yields other samples than its order has, so that no state could "
                "be right. Filter in collate_fn, or use torch's own DataLoader"
            )

    def _split(self, feed: ShardFeed | SamplerFeed, cursor: Cursor) -> Split:
        remainder: Remainder = "drop" if self.drop_last else feed.source.remainder
        return feed.source.split(cursor, batch_size=self.batch_size or 1, remainder=remainder)

    def _torch_options(self) -> dict[str, Any]:
        """Return the arguments for the plain loader of torch's that runs the workers."""
        return {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "collate_fn": self.collate_fn,
            "pin_memory": self.pin_memory,
            "timeout": self.timeout,
            "worker_init_fn": WorkerInit(self.worker_init_fn),
            "multiprocessing_context": self.multiprocessing_context,
            "generator": self.generator,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
            "pin_memory_device": self.pin_memory_device,
        }

    def _make_feed(self) -> ShardFeed | SamplerFeed | None:
        if isinstance(self.dataset, ShardDataset):
            return ShardFeed(self.dataset)
        if isinstance(self.sampler, EpochSampler):
            return SamplerFeed(self.dataset, self.sampler)
        return None

    def _need_feed(self) -> ShardFeed | SamplerFeed:
        if self._feed is None:
            raise TypeError(
                "a state needs shardio's order: a ShardDataset, or sampler=EpochSampler(dataset); "
                f"got {type(self.dataset).__name__} with {type(self.sampler).__name__}"
            )
        return self._feed

    def _check_arguments(self, feed: ShardFeed | SamplerFeed) -> None:
        if not self.in_order:
            raise ValueError("in_order=False would deliver other batches than the state counts: leave it at True")
        if self.drop_last and feed.source.remainder in ("mask", "keep"):
            raise ValueError(f"drop_last=True and remainder={feed.source.remainder!r} contradict each other")
        said = feed.source.batch_size
        if said is not None and said != (self.batch_size or 1):
            raise ValueError(
                f"the order was told batch_size={said} and the loader batch_size={self.batch_size}: "
                "leave it to shardio.DataLoader, which says it by itself"
            )


def _yields_images(dataset: Any) -> bool:
    """Say whether a dataset is shardio's, or torch's Subset or ConcatDataset of such."""
    if isinstance(dataset, Subset):
        return _yields_images(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(_yields_images, dataset.datasets))
    return isinstance(dataset, ShardDataset | ShardMapDataset | ImageFolder)
