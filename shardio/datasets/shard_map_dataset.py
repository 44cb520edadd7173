"""ShardMapDataset: the samples of packed shards by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardio.classes import Classes
from shardio.datasets.labels import follow_classes
from shardio.datasets.map_dataset import MapDataset
from shardio.decoding import Decode, FieldDecoder, Fields
from shardio.images import DEFAULT_MAX_PIXELS, Orientation
from shardio.reading import SampleReader, Verify
from shardio.shards import DatasetSource, open_table


class ShardMapDataset(MapDataset):
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
        classes: Likewise.
        verify: Likewise.

    Raises:
        FileNotFoundError: If there is nothing at ``source``.
        FormatError: If it is not a dataset.
        ValueError: If its samples do not have a field that is asked for, or it has classes that are not in
            ``classes``, or none.
        TypeError: If the transform cannot be called, or takes arrays and is given Pillow images.
    """

    def __init__(
        self,
        source: DatasetSource,
        *,
        fields: Fields = ("image", "label"),
        transform: Callable[[Any], Any] | None = None,
        decode: Decode = "array",
        orientation: Orientation = "ignore",
        max_pixels: int = DEFAULT_MAX_PIXELS,
        trusted: bool = False,
        classes: Classes | None = None,
        verify: Verify = "first",
    ) -> None:
        decoder = FieldDecoder(
            fields=fields,
            transform=transform,
            decode=decode,
            orientation=orientation,
            max_pixels=max_pixels,
            trusted=trusted,
        )
        self.table = open_table(source)
        decoder.check_fields(self.table.manifest.fields, str(source))
        self._classes, decoder = follow_classes(self.table.manifest.classes, classes, decoder, str(source))
        self.shard_sizes = self.table.manifest.shard_sizes
        self.digest = self.table.manifest.digest
        super().__init__(decoder, SampleReader(self.table, verify))

    @property
    def classes(self) -> list[str]:
        """The class names, by label."""
        return list(self._classes)

    def __len__(self) -> int:
        return int(self.shard_sizes.sum())
