"""ShardMapDataset: the samples of packed shards by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shardio.datasets.fields import Decode, FieldDecoder, Fields
from shardio.datasets.map_epoch import MapEpoch
from shardio.images import Orientation
from shardio.reading import SampleReader
from shardio.shards import Source, open_table


class ShardMapDataset(Dataset[Any]):
    """The samples of packed shards by their numbers, in manifest order.

    Which samples a rank gets, and in which order, is the sampler's business, as with any map-style dataset:
    :class:`shardio.EpochSampler` gives shardio's.

    Args:
        source: As for :class:`shardio.ShardDataset`.
        fields: Likewise.
        transform: Likewise.
        decode: Likewise.
        orientation: Likewise.
        trusted: Likewise.

    Raises:
        FileNotFoundError: If there is nothing at ``source``.
        FormatError: If it is not a dataset.
        ValueError: If its samples do not have a field that is asked for.
    """

    def __init__(
        self,
        source: Source,
        *,
        fields: Fields = ("image", "label"),
        transform: Callable[[Any], Any] | None = None,
        decode: Decode = "array",
        orientation: Orientation = "ignore",
        trusted: bool = False,
    ) -> None:
        self._decoder = FieldDecoder(
            fields=fields, transform=transform, decode=decode, orientation=orientation, trusted=trusted
        )
        self.table = open_table(source)
        self._decoder.check_fields(self.table.manifest.fields, str(source))
        self._reader = SampleReader(self.table)
        self._epoch = MapEpoch()

    @property
    def classes(self) -> list[str]:
        """The class names, by label."""
        return list(self.table.manifest.classes)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The number of samples of each shard, int64 [shards]."""
        return self.table.manifest.shard_sizes

    @property
    def digest(self) -> str:
        """The dataset's identity."""
        return self.table.manifest.digest

    def set_epoch(self, epoch: int, seed: int = 0) -> None:
        """Make random transforms a function of (seed, epoch, sample) from here on. EpochSampler calls this."""
        self._epoch.set(epoch, seed)

    def __len__(self) -> int:
        return self.table.manifest.num_samples

    def __getitem__(self, index: int) -> Any:
        """Return one sample; negative numbers count from the end."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch of samples (torch's DataLoader calls this)."""
        samples = check_indices(indices, len(self))
        stored = self._reader.read(samples, self._decoder.stored_fields)
        return self._decoder.decode_batch(stored, self._epoch.keys(samples))


def check_indices(indices: Sequence[int], num_samples: int) -> NDArray[np.int64]:
    """Return indices as int64 [n] with negative ones counted from the end; raise IndexError outside of the dataset."""
    numbers = np.array(indices, dtype=np.int64)
    numbers = np.where(numbers < 0, numbers + num_samples, numbers)
    outside = (numbers < 0) | (numbers >= num_samples)
    if outside.any():
        raise IndexError(f"index {indices[int(np.argmax(outside))]} is outside of a dataset of {num_samples} samples")
    return numbers
