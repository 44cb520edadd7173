"""The images of a dataset in shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SampleError, StaleIndexError
from shardio.images import IMAGE_FIELDS
from shardio.looking.images import FieldUse, ImageColumns
from shardio.looking.source import ImageSource, Place, Unreadable
from shardio.reading import SampleReader
from shardio.shards import LABEL_FIELD, Shard, open_table
from shardio.storage import RemoteAccess

SAMPLES_PER_LOOKUP = 512
"""The number of samples to look up in an index at a time: the index reads as many together."""

MAX_LABELS = 100_000
"""The maximum number of labels whose names are read. Rarer labels have one name."""

MAX_LABEL_LENGTH = 80
"""The maximum length of a label's name in characters. The field may hold anything in tars of other tools."""

OTHER_LABEL, UNREADABLE_LABEL = "other", "unreadable"


class ShardImages(ImageSource):
    """The images of a dataset in shards. The columns come from the indexes alone.

    Args:
        name: What :func:`shardio.shards.open_table` accepts.
        access: How remote shards are reached.
    """

    def __init__(self, name: str, access: RemoteAccess | None = None) -> None:
        self.name = name
        self._table = open_table(name, access)
        self._manifest = self._table.manifest
        self.num_samples = self._manifest.num_samples
        self._image_fields = tuple(field for field in IMAGE_FIELDS if field in self._manifest.fields)
        self._stops = np.cumsum(self._manifest.shard_sizes)
        self._reader = SampleReader(self._table)

    def list_images(self) -> ImageColumns:
        """Return the columns of all samples.

        Each distinct label is read once: samples whose label fields have equal hashes have equal labels.
        """
        fields = tuple(self._manifest.fields)
        sizes, offsets = (np.full(self.num_samples, -1, np.int64) for _ in range(2))
        hashes, labels = (np.zeros(self.num_samples, np.uint64) for _ in range(2))
        has_label = np.zeros(self.num_samples, np.bool_)
        counts, num_bytes = (np.zeros(len(fields), np.int64) for _ in range(2))
        image_columns = [fields.index(field) for field in self._image_fields]
        for shard, stop in enumerate(self._stops.tolist()):
            first = stop - self._manifest.shards[shard].num_samples
            with self._open(shard) as opened:
                for start in range(first, stop, SAMPLES_PER_LOOKUP):
                    indices = np.arange(start, min(start + SAMPLES_PER_LOOKUP, stop))
                    starts, stops, found = opened.index.locate(indices - first, fields)  # each [n, fields]
                    counts += np.count_nonzero(starts >= 0, axis=0)
                    num_bytes += (stops - starts).sum(axis=0)
                    for column in reversed(image_columns):  # The first image field that a sample has is its image.
                        has = starts[:, column] >= 0
                        rows = indices[has]
                        offsets[rows], hashes[rows] = starts[has, column], found[has, column]
                        sizes[rows] = (stops - starts)[has, column]
                    if LABEL_FIELD in fields:
                        column = fields.index(LABEL_FIELD)
                        labels[indices], has_label[indices] = found[:, column], starts[:, column] >= 0
        label_ids, names = self._name_labels(labels, has_label)
        uses = zip(fields, counts.tolist(), num_bytes.tolist(), strict=True)
        return ImageColumns(
            sizes=sizes,
            offsets=offsets,
            content_hashes=hashes,
            label_ids=label_ids,
            label_names=names,
            fields=tuple(FieldUse(name=name, num_samples=count, num_bytes=size) for name, count, size in uses),
        )

    def read(self, indices: NDArray[np.int64]) -> list[bytes | Unreadable]:
        return self._read(indices, self._image_fields)

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        return self._reader.keys(indices)

    def places(self, indices: NDArray[np.int64], columns: ImageColumns) -> list[Place]:
        shards = np.searchsorted(self._stops, indices, side="right").tolist()
        offsets = columns.offsets[indices].tolist()
        names = [self._manifest.shards[shard].name for shard in shards]
        return [Place(name, offset) for name, offset in zip(names, offsets, strict=True)]

    def describe(self) -> dict[str, Any]:
        manifest = self._manifest
        return {
            "samples": manifest.num_samples,
            "shards": len(manifest.shards),
            "bytes": manifest.num_bytes,
            "digest": manifest.digest,
            "pack": {name: value for name, value in manifest.pack.items() if value is not None},
        }

    def close(self) -> None:
        self._reader.close()

    def _open(self, shard: int) -> Shard:
        """Open a shard, and check that it is the one in the manifest."""
        opened = Shard(self._table.tars[shard], self._table.indexes[shard])
        if opened.entry != self._manifest.shards[shard]:
            opened.close()
            raise StaleIndexError(
                f"{self._table.tars[shard]} does not match the manifest: got {opened.entry}, expected "
                f"{self._manifest.shards[shard]}. Pack the dataset again, or download shards and manifest together"
            )
        return opened

    def _read(self, indices: NDArray[np.int64], fields: Sequence[str]) -> list[bytes | Unreadable]:
        """Return the first content that each sample has among some fields."""
        try:
            stored = self._reader.read(indices, fields)
        except SampleError as error:
            if len(indices) == 1:
                return [Unreadable(reason=str(error))]
            return [content for index in indices for content in self._read(np.array([index]), fields)]
        rows = zip(*stored.columns.values(), strict=True) if fields else [()] * len(indices)
        absent = Unreadable(reason="the sample has no image")
        return [next((content for content in row if content is not None), absent) for row in rows]

    def _name_labels(
        self, labels: NDArray[np.uint64], has_label: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Return a number for each label, most frequent first, -1 for none; and the names of these labels."""
        label_ids = np.full(len(labels), -1, np.int64)
        labelled = np.flatnonzero(has_label)
        _, firsts, ids, counts = np.unique(labels[labelled], return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        label_ids[labelled] = np.minimum(ranks[ids], MAX_LABELS)
        contents = self._read(labelled[firsts[order[:MAX_LABELS]]], (LABEL_FIELD,)) if len(labelled) else []
        names = [*map(self._name_label, contents), *[OTHER_LABEL] * (len(order) > MAX_LABELS)]
        return label_ids, tuple(names)

    def _name_label(self, content: bytes | Unreadable) -> str:
        if isinstance(content, Unreadable):
            return UNREADABLE_LABEL
        text = content.decode(errors="replace").strip()
        classes = self._manifest.classes
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < len(classes):
            return classes[int(text)]
        return text if len(text) <= MAX_LABEL_LENGTH else text[: MAX_LABEL_LENGTH - 1] + "…"
