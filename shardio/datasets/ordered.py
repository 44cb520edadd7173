"""ShardDataset and EpochSampler: the samples of packed shards, or of any map-style dataset, in shardio's order."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Generator, Iterator, Sized
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, StackDataset, Subset

from shardio.bad_samples import BadSamples, Broken, Skipped, read_around
from shardio.datasets.map_datasets import ShardMapDataset, ShardSettings
from shardio.datasets.ranked import EpochSettings, Iterated, Ordered, SampleIterator, find_callers
from shardio.datasets.samples import EpochCell, Transformed, check_integers, decode_samples, mark_valid, takes
from shardio.epochs import hand_over
from shardio.libraries import own_tensors
from shardio.order import Cursor, EpochCounter, Progress, Split, Words, augment_rng_keys
from shardio.reading import (
    RemoteSamples,
    SampleReader,
    Verify,
    find_remote_shards,
    read_epoch_ahead,
    read_nothing_ahead,
)
from shardio.values import count
from shardio.world import World, find_worker

SMALL_CHUNK, MAX_CHUNK = 2**19, 256
"""The limits of a group of small samples that are read together: its size in bytes, and its number of samples."""


@dataclass(frozen=True, kw_only=True)
class ShardDatasetSettings(EpochSettings, ShardSettings):
    """The arguments of ShardDataset."""


class ShardDataset(Ordered, Iterated, Transformed):
    """An iterable-style dataset over the samples of packed shards.

    In an epoch, all ranks and workers together deliver each sample exactly once, apart from those that ``remainder``
    repeats or leaves out. This holds for any number of shards, in torch's DataLoader and in shardio's. A subclass that
    overrides ``__iter__`` must yield one value for each sample of ``super().__iter__()``, in the same order.

    >>> dataset = ShardDataset("out", shuffle=True, transform=RandomResizedCrop(224))  # doctest: +SKIP
    >>> loader = DataLoader(dataset, batch_size=128, num_workers=2)  # doctest: +SKIP

    Raises:
        FileNotFoundError: If ``source`` does not exist.
        FormatError: If ``source`` is not a dataset.
        ValueError: If an argument is out of range, if no sample has a requested field, or if ``classes`` is given and
            the dataset has no classes or has a class that is not listed.
        TypeError: If the transform is not callable, or requires arrays but ``decode`` is ``pil``.
    """

    @takes(ShardDatasetSettings)
    def __init__(self, options: ShardDatasetSettings) -> None:
        Ordered.__init__(self, options)
        self.table, self._classes, decoder = options.open()
        Iterated.__init__(self)
        Transformed.__init__(self, decoder)
        self.shard_sizes = self.table.manifest.shard_sizes
        self.num_all_samples = int(self.shard_sizes.sum())
        self.digest = self.table.manifest.digest
        self.settings = options.choose_order(self.shard_sizes, self.table)
        self._verify: Verify = options.verify
        self.reader = SampleReader(self.table, options.verify)
        self._bad_samples: BadSamples | None = None
        self._keeps_broken = False

    @property
    def classes(self) -> list[str]:
        """The class names, by label."""
        return list(self._classes)

    @property
    def verify(self) -> Verify:
        """The setting ``verify``, which controls when samples are compared with the index."""
        return self._verify

    @property
    def overrides_iteration(self) -> bool:
        """Whether a subclass overrides ``__iter__``."""
        return type(self).__iter__ is not ShardDataset.__iter__

    def as_map_dataset(self) -> ShardMapDataset:
        """Return a map-style dataset of the same samples, with the current transform."""
        dataset = ShardMapDataset.over(self.table, self._classes, self.decoder, self._verify)
        dataset.follow(self)
        return dataset

    def locate(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return samples in the form that the reader accepts: their indices."""
        return indices

    def describe(self, index: int) -> tuple[str, str]:
        """Return a sample's key and location, for messages."""
        return self.reader.describe(index, self.decoder.stored_fields)

    def __len__(self) -> int:
        """Return the number of samples that this rank yields in a full epoch.

        If torch's DataLoader calls this method but makes a different number of batches, a RuntimeWarning is issued.
        """
        split = self.own_split(Cursor(epoch=0))
        warn_of_other_length(self, split)
        return split.num_own_samples

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's samples in this rank's share of the epoch.

        Raises:
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        cursor = self._cell.start(self)  # Start the iteration now, not when the first sample is requested.
        if self._keeps_broken:
            return self._samples(cursor, self.own_split(cursor), num_left_out=0)
        return SampleIterator(self, cursor, self._samples)

    def start_at(self, cursor: Cursor) -> None:
        """Begin the next iteration at ``cursor``, in this process and in running workers."""
        self._cell.set(cursor)

    def bound(self, split: Split, bad_samples: BadSamples | None) -> ShardDataset:
        """Return a copy for one loader, with the batch size and world of ``split`` and with its own epoch.

        The copy yields a Broken for each sample that cannot be made, unless a subclass overrides ``__iter__``.

        Args:
            split: The loader's share.
            bad_samples: The policy for unreadable samples; those that it leaves out are yielded as Skipped.
        """
        dataset = copy.copy(self)
        dataset._shared_num_sets = self._shared_num_sets  # The copy must detect a transform that is set later.
        dataset.batch_size, dataset.remainder = split.batch_size, split.remainder
        dataset._world = World(rank=split.rank, world_size=split.world_size)
        dataset.reader = SampleReader(self.table, self._verify)
        dataset._cell = EpochCell()
        dataset._bad_samples, dataset._keeps_broken = bad_samples, not self.overrides_iteration
        return dataset

    def _samples(self, cursor: Cursor, split: Split, num_left_out: int) -> Iterator[Any]:
        chunk_size, manifest = self.decoder.chunk_size, self.table.manifest
        if not self.decoder.image_names:  # Decoded images need much more memory than stored ones.
            num_small = SMALL_CHUNK * manifest.num_samples // max(manifest.num_bytes, 1)
            chunk_size = min(max(chunk_size, num_small), MAX_CHUNK)
        with closing(self.reader), closing(own_chunks(self, self, cursor, split, num_left_out, chunk_size)) as chunks:
            for indices, valid in chunks:
                rng_keys = augment_rng_keys(self.settings.seed, cursor.epoch, indices)
                values = read_around(
                    self._bad_samples,
                    self._read,
                    indices,
                    rng_keys,
                    rng_keys,
                    epoch=cursor.epoch,
                    describe=self.describe,
                    keeps_broken=True,
                )
                if valid is None:
                    yield from values
                    continue
                for value, is_valid in zip(values, valid.tolist(), strict=True):
                    yield value if isinstance(value, Skipped | Broken) else mark_valid(value, is_valid)

    def remote_samples(self) -> RemoteSamples | None:
        return find_remote_shards(self.table, self.decoder.stored_fields)

    def _read(self, indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        self.check_transform()
        with own_tensors():
            stored = self.reader.read(indices, self.decoder.stored_fields, self.decoder.deferred_fields)
            return decode_samples(self.decoder, stored, rng_keys)


def warn_of_other_length(dataset: Any, split: Split) -> None:
    """Warn if torch's DataLoader requests the dataset's length but makes a different number of batches.

    torch divides the length by the batch size, but each of its workers may end with an incomplete batch. The batch size
    and the number of workers are those of the calling loader.

    Args:
        dataset: The dataset whose length is requested.
        split: The rank's share, divided into blocks of the dataset's ``batch_size``, or of one sample.
    """
    loader = next((one for one in find_callers() if isinstance(one, DataLoader) and one.dataset is dataset), None)
    if loader is None or loader.batch_size is None:
        return
    num_samples, size, num_workers = split.num_own_samples, loader.batch_size, max(loader.num_workers, 1)
    shares = [len(range(worker, split.num_batches, num_workers)) * split.batch_size for worker in range(num_workers)]
    shares[(split.num_batches - 1) % num_workers] -= sum(shares) - num_samples  # The last block may be incomplete.
    num_made = sum(share // size if loader.drop_last else -(-share // size) for share in shares)
    num_said = num_samples // size if loader.drop_last else -(-num_samples // size)
    if num_made != num_said:
        lost = (
            f", and leaves out {num_samples - num_made * size} of {count(num_samples, 'sample')}"
            if loader.drop_last
            else ""
        )
        warnings.warn(
            f"{type(loader).__name__} makes {count(num_made, 'batch', 'batches')}{lost}, but its length is {num_said}: "
            f"several of its {num_workers} workers end with an incomplete batch. Use {type(dataset).__name__}"
            f"(batch_size={size}), which gives the workers whole batches, or shardio.DataLoader",
            RuntimeWarning,
            stacklevel=4,
        )


def own_chunks(
    order: Ordered, dataset: Transformed, cursor: Cursor, split: Split, num_left_out: int, chunk_size: int
) -> Generator[tuple[NDArray[np.int64], NDArray[np.bool_] | None]]:
    """Yield this worker's samples in a rank's share of an epoch, up to ``chunk_size`` at a time, while reading ahead.

    Yields:
        The samples' indices, int64 [n], and their marks from the remainder policy, bool [n], or None.
    """
    worker = find_worker()
    num_steps, num_in_step = divmod(num_left_out, split.batch_size)  # Only the last step may have fewer samples.
    steps = range(worker.worker_id, split.num_batches, worker.num_workers)[num_steps:]
    # The first worker reads ahead for all workers of the rank.
    with read_nothing_ahead() if worker.worker_id else read_ahead(order, dataset, cursor, split) as advance:
        for positions, indices in order.steps(cursor, split, steps):
            valid = split.find_valid(np.concatenate(positions))
            for start in range(num_in_step, len(indices), chunk_size):
                chunk = slice(start, start + chunk_size)
                advance(len(indices[chunk]) * worker.num_workers)
                yield indices[chunk], None if valid is None else valid[chunk]
            num_in_step = 0


def read_ahead(
    order: Ordered,
    dataset: Transformed,
    cursor: Cursor,
    split: Split,
    inner_indices: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
) -> AbstractContextManager[Callable[[int], object]]:
    """Return a context in which a rank's samples are read ahead if they are remote.

    The context's value is a function to call with the number of samples that the rank is about to read. If the order's
    indices are not indices of ``dataset``, ``inner_indices`` maps them to indices of ``dataset``.
    """
    if (samples := dataset.remote_samples()) is None:
        return read_nothing_ahead()
    window = order.window if order.shuffle else order.num_all_samples
    upcoming = (
        (order.find_windows(np.concatenate(positions)), indices if inner_indices is None else inner_indices(indices))
        for positions, indices in order.steps(cursor, split)
    )
    return read_epoch_ahead(samples, upcoming, -(-window // split.world_size) if order.shuffle else None)


@dataclass(frozen=True, kw_only=True)
class SamplerSettings(EpochSettings):
    """The arguments of EpochSampler.

    Attributes:
        dataset: A map-style dataset. If the dataset has shards, the order follows them. Otherwise, the order has one
            window of one stratum by default.
        batch_size: The batch size of torch's DataLoader; leave it unset with shardio.DataLoader, which uses its own
            batch size. With torch's DataLoader, a batch size is required for ``remainder="drop"``, and needed to get
            the same batches as from shardio.DataLoader.
        shuffle: Whether to shuffle, differently in each epoch.
        seed: The seed of the order and, in shardio.DataLoader, of shardio's transforms.
        remainder: The treatment of the last samples if they do not fill a batch on every rank: see
            :class:`shardio.ShardDataset`. ``mask`` requires shardio.DataLoader.
    """

    dataset: Sized = field(kw_only=False)
    shuffle: bool = True


class EpochSampler(Ordered, DistributedSampler[Any]):  # type: ignore[override]  # attributes in torch
    """A sampler that gives each rank its share of a map-style dataset, in shardio's order.

    EpochSampler subclasses torch's DistributedSampler, so frameworks recognize that the data is already split. In
    shardio.DataLoader, the sampler's state counts the batches that the user received. In torch's DataLoader, the
    sampler's state counts the samples that the loader requested. If a subclass overrides ``__iter__`` or ``__len__``,
    both loaders treat the subclass like any other sampler: see :class:`shardio.DataLoader`.

    Raises:
        ValueError: If an argument is out of range, the dataset is empty, or its length differs from the number of
            samples in its shards.
    """

    @takes(SamplerSettings)
    def __init__(self, options: SamplerSettings) -> None:
        # DistributedSampler.__init__ queries torch.distributed immediately. This class queries torch.distributed only
        # when necessary, so torch's attributes are properties below.
        Ordered.__init__(self, options)
        dataset = options.dataset
        self.dataset = dataset  # type: ignore[assignment]  # torch's type requires a Dataset; a length is enough
        self.num_all_samples = len(dataset)
        if self.num_all_samples == 0:
            raise ValueError("the dataset is empty: pass a dataset with at least one sample")
        self.digest = find_digest(dataset)
        sizes = getattr(dataset, "shard_sizes", None)
        if sizes is not None and sizes.sum() != len(dataset):
            raise ValueError(
                f"the length of {type(dataset).__name__} is {len(dataset)}, but its shards, which determine the order, "
                f"hold {count(int(sizes.sum()), 'sample')}: do not override __len__; use torch's "
                "Subset(dataset, indices) for a part"
            )
        self.shard_sizes = np.array([len(dataset)]) if sizes is None else sizes
        if sizes is None and options.shuffle:
            window = len(dataset) if options.window is None else options.window
            strata = 1 if options.strata is None else options.strata
            options = replace(options, window=window, strata=strata)
        self.settings = options.choose_order(self.shard_sizes, getattr(dataset, "table", None))
        self.counter = EpochCounter()

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self.world_size

    @property
    def epoch(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self.counter.next.epoch

    @property
    def drop_last(self) -> bool:  # type: ignore[override]  # an attribute in torch
        return self.remainder_policy.leaves_out

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # an attribute in torch
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # an attribute in torch
        return len(self) * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        If a state has been loaded, setting the state's epoch resumes at the saved position; any other epoch starts from
        its beginning.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If ``epoch`` is negative or not below 2**62.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        self.check_split_once()
        self.counter.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position: that of the running epoch, even if ``set_epoch`` has already set the next one."""
        return self.dump_cursor(self.counter.now)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            StateError: If the state belongs to a different dataset or order.
        """
        self.counter.load(self.read_cursor(state))

    def __len__(self) -> int:
        """Return the number of samples that this rank gets in a full epoch."""
        return self.own_split(Cursor(epoch=0)).num_own_samples

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's sample indices. Without ``set_epoch``, every iteration repeats the same epoch.

        Raises:
            ValueError: If the remainder policy marks repeats.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        if self.remainder_policy.marks_repeats:
            raise ValueError(
                f"remainder={self.remainder!r} requires shardio.DataLoader, which adds the field 'valid' to batches"
            )
        iteration = SampleIterator(self, self.counter.find_start(self.num_all_samples), self._start)
        self.counter.start(self.num_all_samples, repeats=True)  # An iteration that fails to start must not be counted.
        return iteration

    def _start(self, cursor: Cursor, split: Split, num_left_out: int) -> Iterator[int]:
        num_batches, start = divmod(num_left_out, split.batch_size)  # Only the last batch may have fewer samples.
        self.counter.progress = progress = Progress(cursor=cursor, split=split, num_batches=num_batches)
        return self._yield_indices(progress, start)

    def _yield_indices(self, progress: Progress, start: int) -> Iterator[int]:
        first_batch = progress.num_batches
        batches = self.batches(progress.cursor, progress.split, first_batch)
        for num_batches, (_, indices) in enumerate(batches, first_batch + 1):
            if start == len(indices):
                continue
            *first, last = indices.tolist()
            yield from first[start:]
            start = 0
            # Count the batch before yielding its last sample: the state must be correct once the user has the sample.
            hand_over([partial(setattr, progress, "num_batches", num_batches)])
            yield last
        hand_over([partial(setattr, progress, "is_finished", True)])


def find_digest(dataset: Any) -> str:
    """Return a dataset's identity: its ``digest`` or, for torch's wrappers, a hash of their parts.

    For a Subset, the hash covers the inner identity and the indices; for a ConcatDataset or a StackDataset, the parts'
    identities and lengths.
    """
    if isinstance(dataset, Subset):
        indices = check_integers(dataset.indices).astype(np.int64).tobytes()
        return xxhash.xxh3_128_hexdigest(find_digest(dataset.dataset).encode() + indices)
    if isinstance(dataset, ConcatDataset | StackDataset) and not hasattr(dataset, "digest"):
        parts: Any = dataset.datasets
        named = parts.items() if isinstance(parts, dict) else [("", part) for part in parts]
        words = [[str(name), find_digest(part), len(part)] for name, part in named]
        return xxhash.xxh3_128_hexdigest(json.dumps([isinstance(dataset, StackDataset), words]).encode())
    return str(getattr(dataset, "digest", ""))
