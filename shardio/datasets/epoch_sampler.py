"""EpochSampler: shardio's order, split and state for map-style datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from torch.utils.data import ConcatDataset, DistributedSampler, StackDataset, Subset

from shardio.datasets.ordered import Ordered, SampleIterator
from shardio.datasets.samples import check_integers
from shardio.epochs import hand_over
from shardio.order import (
    Cursor,
    EpochCounter,
    Progress,
    Remainder,
    Split,
    choose_settings,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class EpochSampler(Ordered, DistributedSampler[Any]):  # type: ignore[override]  # attributes in torch
    """A sampler that gives each rank its share of a map-style dataset, in shardio's order.

    It subclasses torch's DistributedSampler, so frameworks see that the data is already split. In shardio.DataLoader,
    its state counts the batches that the user received. In torch's DataLoader, it counts the samples that the loader
    requested. If a subclass overrides ``__iter__`` or ``__len__``, both loaders treat it like any other sampler: see
    :class:`shardio.DataLoader`.

    Args:
        dataset: A map-style dataset. If it has shards, the order follows them. Otherwise, the order has one lane and
            one window by default.
        batch_size: The batch size of torch's DataLoader; leave it unset with shardio.DataLoader, which uses its own.
            With torch's DataLoader, ``remainder="drop"`` requires it, and an unshuffled order needs it to make the
            same batches as shardio.DataLoader.
        shuffle: Whether to shuffle, differently in each epoch.
        seed: The seed of the order and, in shardio.DataLoader, of shardio's transforms.
        remainder: The treatment of the last samples if they do not fill a batch on every rank: see
            :class:`shardio.ShardDataset`. ``mask`` requires shardio.DataLoader.
        rank: The rank of this process; by default, that of torch.distributed or torchrun.
        world_size: The number of ranks; by default, that of torch.distributed or torchrun.
        mesh: An alternative to ``rank`` and ``world_size``: a DeviceMesh with one dimension, such as ``mesh["dp"]``,
            whose ranks read different samples. If a mesh with several dimensions exists, as with tensor parallelism,
            ``mesh`` or ``group`` is required.
        group: Another alternative: a process group whose ranks read different samples.
        lanes: With ``shuffle``, the number of lanes: the shuffled shards, laid end to end, are cut into this many
            equal parts, and consecutive samples come from each part in turn.
        window: With ``shuffle``, the number of neighbouring samples that are shuffled together.

    Raises:
        ValueError: If an argument is out of range, the dataset is empty, or its length differs from the number of
            samples in its shards.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "pad",
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        lanes: int | None = None,
        window: int | None = None,
    ) -> None:
        # DistributedSampler.__init__ queries torch.distributed at once. This class reads the world when it is needed,
        # so torch's attributes are properties below.
        Ordered.__init__(
            self, remainder=remainder, batch_size=batch_size, rank=rank, world_size=world_size, mesh=mesh, group=group
        )
        self.dataset = dataset  # type: ignore[assignment]  # torch's type requires a Dataset; a length is enough
        self.num_all_samples = len(dataset)
        if self.num_all_samples == 0:
            raise ValueError("the dataset is empty: pass a dataset with at least one sample")
        self.digest, old_digest = find_digest(dataset), find_digest(dataset, looks_at_parts=False)
        self.old_digest = old_digest if old_digest != self.digest else None
        sizes = getattr(dataset, "shard_sizes", None)
        if sizes is not None and sizes.sum() != len(dataset):
            raise ValueError(
                f"the length of {type(dataset).__name__} is {len(dataset)}, but its shards hold {sizes.sum()} samples, "
                "which determine the order: do not override __len__; use torch's Subset(dataset, indices) for a part"
            )
        self.shard_sizes = np.array([len(dataset)]) if sizes is None else sizes
        if sizes is None and shuffle:
            lanes, window = 1 if lanes is None else lanes, len(dataset) if window is None else window
        self.settings = choose_settings(self.shard_sizes, shuffle=shuffle, seed=seed, lanes=lanes, window=window)
        self.counter = EpochCounter()

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self.world_size

    @property
    def epoch(self) -> int:  # type: ignore[override]  # an attribute in torch
        return self.counter.next.epoch

    @property
    def drop_last(self) -> bool:  # type: ignore[override]  # an attribute in torch
        return self.remainder == "drop"

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # an attribute in torch
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # an attribute in torch
        return len(self) * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        If a state was loaded, setting its epoch resumes at its position. Any other epoch begins at its start.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If it is negative, or not below 2**62.
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
            StateError: If it belongs to another dataset or order.
        """
        self.counter.load(self.read_cursor(state))

    def __len__(self) -> int:
        """Return the number of samples that this rank gets in a full epoch."""
        return self.own_split(Cursor(epoch=0)).num_own_samples

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices of this rank's samples. Without ``set_epoch``, every iteration repeats one epoch.

        Raises:
            ValueError: If ``remainder`` is ``mask``.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        if self.remainder == "mask":
            raise ValueError("remainder='mask' requires shardio.DataLoader, which adds the field 'valid' to batches")
        iteration = SampleIterator(self, self.counter.find_start(self.num_all_samples), self._start)
        self.counter.start(self.num_all_samples, repeats=True)  # Not before: an iteration that raises does not count.
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
            # Before the last sample is yielded: the state must be right as soon as the sample is received.
            hand_over([partial(setattr, progress, "num_batches", num_batches)])
            yield last
        hand_over([partial(setattr, progress, "is_finished", True)])


def find_digest(dataset: Any, *, looks_at_parts: bool = True) -> str:
    """Return a dataset's identity: its ``digest`` or, for a Subset, a hash of the inner identity and the indices.

    Args:
        dataset: The dataset.
        looks_at_parts: Whether the identity of a ConcatDataset or StackDataset is a hash of its parts' identities and
            lengths. If not, it is empty, as in earlier versions.
    """
    if isinstance(dataset, Subset):
        indices = check_integers(dataset.indices).astype(np.int64).tobytes()
        inner = find_digest(dataset.dataset, looks_at_parts=looks_at_parts)
        return xxhash.xxh3_128_hexdigest(inner.encode() + indices)
    if looks_at_parts and isinstance(dataset, ConcatDataset | StackDataset) and not hasattr(dataset, "digest"):
        parts: Any = dataset.datasets
        named = parts.items() if isinstance(parts, dict) else [("", part) for part in parts]
        words = [[str(name), find_digest(part), len(part)] for name, part in named]
        return xxhash.xxh3_128_hexdigest(json.dumps([isinstance(dataset, StackDataset), words]).encode())
    return str(getattr(dataset, "digest", ""))
