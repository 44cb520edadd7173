"""ShardMapDataset: the samples of packed shards by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from shardio.datasets.fields import Decode, FieldDecoder, Fields
from shardio.datasets.indices import check_indices
from shardio.datasets.map_epoch import MapEpoch
from shardio.images import DEFAULT_MAX_PIXELS, Orientation
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
        max_pixels: int = DEFAULT_MAX_PIXELS,
        trusted: bool = False,
    ) -> None:
        self._decoder = FieldDecoder(
            fields=fields,
            transform=transform,
            decode=decode,
            orientation=orientation,
            max_pixels=max_pixels,
            trusted=trusted,
        )
        self.table = open_table(source)
        self._decoder.check_fields(self.table.manifest.fields, str(source))
        self.shard_sizes = self.table.manifest.shard_sizes
        self.digest = self.table.manifest.digest
        self._reader = SampleReader(self.table)
        self._epoch = MapEpoch()

    @property
    def classes(self) -> list[str]:
        """The class names, by label."""
        return list(self.table.manifest.classes)

    def set_epoch(self, epoch: int, seed: int = 0) -> None:
        """Make random transforms a function of (seed, epoch, sample) from here on.

        With an EpochSampler in shardio.DataLoader they are that without it.
        """
        self._epoch.set(epoch, seed)

    def __len__(self) -> int:
        return int(self.shard_sizes.sum())

    def __getitem__(self, index: int) -> Any:
        """Return one sample; negative numbers count from the end."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch of samples (torch's DataLoader calls this)."""
        samples = check_indices(indices, len(self))
        stored = self._reader.read(samples, self._decoder.stored_fields)
        return self._decoder.decode_batch(stored, self._epoch.keys(samples))
