"""Pack WebDataset's tars and packed datasets, to check, tile, re-encode, label or join their samples.

:mod:`shardio.packing.rewriting` also uses :class:`CopySource`.
"""

from __future__ import annotations

import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, PackError, SampleError
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import check_key, find_duplicate
from shardio.packing.sources.files import header_sizes
from shardio.packing.sources.labels import find_labels, select_files
from shardio.packing.sources.records import FileSeries, RecordTable
from shardio.packing.sources.source import Evidence, PackSource, SourceFile, SourceScan, check_unchanged, stat_file
from shardio.sample import Sample, number_classes
from shardio.shards import (
    BLOCK,
    LABEL_FIELD,
    MANIFEST_NAME,
    Manifest,
    Shard,
    ShardEntry,
    ShardTable,
    is_compressed,
    open_table,
    read_columns,
    read_shards,
)
from shardio.storage import parse_location, read_as_utf8

MAX_OPEN = 256
"""The maximum number of open shards."""

MAX_SAMPLES = 256
"""The maximum number of samples that are read together."""

MAX_BYTES = 32 * 2**20
"""The maximum number of bytes that are read together, unless one sample has more."""

_TAR = re.compile(r".+\.(tar(\.\w+)?|tgz)", re.IGNORECASE)
"""Matches the names of tars and compressed tars, for which the error message suggests a remedy."""


def refuse_duplicates(tables: Sequence[ShardTable]) -> None:
    """Raise PackError if two samples of the datasets have the same key."""
    if found := find_duplicate(tables):
        key, first, second = found
        prefix = "" if first == second else ", or put the tar's name before each key: shardio pack --prefix-keys"
        raise PackError(
            f"two samples have the key {key!r}: one in {first}, one in {second}. Keys must differ, because readers "
            f"combine adjacent members with the same key into one sample: rename or remove one of them{prefix}"
        )


def describe(table: ShardTable) -> str:
    """Return a dataset's name for messages."""
    return str(table.tars[0].folder) if len(table.tars) > 1 else str(table.tars[0])


class CopySource:
    """A reader that numbers the samples of all datasets consecutively. The context manager closes the shards.

    Args:
        tables: The datasets.
    """

    def __init__(self, tables: Sequence[ShardTable]) -> None:
        self._files = [pair for table in tables for pair in zip(table.tars, table.indexes, strict=True)]
        self._stops = np.cumsum([entry.num_samples for table in tables for entry in table.manifest.shards])
        self._open = OrderedDict[int, Shard]()

    def __len__(self) -> int:
        return int(self._stops[-1])

    def read(self, order: NDArray[np.int64] | None = None) -> Iterator[Sample]:
        """Yield samples with all their fields, sorted by name. Memory use is bounded.

        Args:
            order: int64 [n], the numbers of the samples to read; by default, all samples in order.

        Raises:
            SampleError: If a sample is damaged or cannot be read.
            StaleIndexError: If a tar has changed since it was indexed.
        """
        num_samples = len(self) if order is None else len(order)
        for first in range(0, num_samples, MAX_SAMPLES):
            stop = min(first + MAX_SAMPLES, num_samples)
            numbers = np.arange(first, stop) if order is None else order[first:stop]
            shards = np.searchsorted(self._stops, numbers, side="right")
            sizes = self._measure(shards, numbers)
            start = 0
            while start < len(numbers):
                within = np.cumsum(sizes[start:]) <= MAX_BYTES
                stop = start + max(1, int(np.count_nonzero(within)))
                yield from self._read_together(shards[start:stop], numbers[start:stop])
                start = stop

    def _measure(self, shards: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the total size of each sample's contents in bytes, int64 [n]."""
        sizes = np.zeros(len(numbers), np.int64)
        for shard_id in np.unique(shards).tolist():
            rows = shards == shard_id
            index = self._shard(shard_id).index
            starts, stops, _ = index.locate(self._within(shard_id, numbers[rows]), index.header.fields)
            sizes[rows] = (stops - starts).sum(axis=1)
        return sizes

    def _read_together(self, shards: NDArray[np.int64], numbers: NDArray[np.int64]) -> list[Sample]:
        found = dict[int, Sample]()
        for shard_id in np.unique(shards).tolist():
            shard, rows = self._shard(shard_id), np.flatnonzero(shards == shard_id)
            samples = self._within(shard_id, numbers[rows])
            fields, keys = shard.index.header.fields, shard.index.keys(samples)
            columns = read_shards([(shard, samples)], fields, np.ones(len(samples), np.bool_))
            for i, row in enumerate(rows.tolist()):
                contents = {field: column[i] for field, column in zip(fields, columns, strict=True)}
                there = {field: content for field, content in contents.items() if content is not None}
                found[row] = Sample(key=keys[i], fields=there, origin=str(shard.tar.location))
        return [found[row] for row in range(len(numbers))]

    def _within(self, shard_id: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        first = int(self._stops[shard_id - 1]) if shard_id else 0
        return numbers - first

    def _shard(self, shard_id: int) -> Shard:
        if shard_id not in self._open:
            while len(self._open) >= MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[shard_id] = Shard(*self._files[shard_id])
        self._open.move_to_end(shard_id)
        return self._open[shard_id]

    def __enter__(self) -> CopySource:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self._open.values():
            shard.close()
        self._open.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tars:
    """The samples of tars: see :class:`~shardio.packing.sources.records.Records`."""

    path: Path
    digest: str  # A hash of the fields below, compared in their place, because comparing thousands of tars is slow.
    files: tuple[SourceFile, ...] = field(compare=False)
    indexes: tuple[str, ...] = field(compare=False)
    series: FileSeries = field(compare=False)
    new_labels: tuple[int, ...] | None = field(compare=False)

    def open(self) -> _Reader:
        return _Reader(self)

    def describe(self, row: int) -> str:
        return self.series.describe(row)


class _Reader:
    """Reads samples: see :class:`~shardio.packing.sources.records.RecordReader`."""

    def __init__(self, source: _Tars) -> None:
        tars = tuple(parse_location(file.path) for file in source.files)
        entries = tuple(
            ShardEntry(name=tar.name, num_bytes=file.size, num_samples=num_samples, digest="")
            for tar, file, num_samples in zip(
                tars, source.files, np.diff(source.series.ends, prepend=0).tolist(), strict=True
            )
        )
        indexes = tuple(map(parse_location, source.indexes))
        self._source = source
        self._copies = CopySource([ShardTable(manifest=Manifest(shards=entries), tars=tars, indexes=indexes)])

    def read(self, row: int) -> Mapping[str, bytes]:
        try:
            (sample,) = self._copies.read(np.array([row]))
        except (FormatError, SampleError) as error:
            shard_id, _ = self._source.series.find(row)
            check_unchanged(self._source.files[shard_id])
            raise ValueError(str(error)) from error
        if self._source.new_labels is None or LABEL_FIELD not in sample.fields:
            return sample.fields
        label = _renumber(sample.fields[LABEL_FIELD], self._source.new_labels)
        return {**sample.fields, LABEL_FIELD: b"%d" % label}


class Tars(PackSource):
    """WebDataset's tars, or a packed dataset."""

    what = "tars"
    takes = ("prefix_keys", "source_split")

    def find(self, src: Path) -> Evidence | None:
        """Find a tar or a manifest: the source itself, a pattern of tars, or a file in a directory.

        A compressed tar does not prove that there are samples: it probably contains the directory's other files.
        """
        if not src.is_dir():
            return Evidence(src) if src.name == MANIFEST_NAME or _TAR.fullmatch(src.name) is not None else None
        if (src / MANIFEST_NAME).is_file():
            return Evidence(src / MANIFEST_NAME)
        all_names = os.listdir(src)  # noqa: PTH208  # Paths are slower.
        names = [
            name for name in all_names if ".t" in name.lower() and _TAR.fullmatch(name) and not name.startswith(".")
        ]
        names.sort(key=lambda name: (not name.lower().endswith(".tar"), name))
        return Evidence(src / names[0], names[0].lower().endswith(".tar")) if names else None

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Find the samples of tars, in tar order. Tars without an index are indexed first.

        Labels and class names stay unchanged unless the options specify a label file or different class names. The
        label file must contain the packed keys, including prefixes.

        Raises:
            PackError: If a tar is compressed, damaged or missing, if samples share a key, or if labels are invalid.
        """
        if options.rename_dots:
            raise PackError(f"--rename-dots (rename_dots) does not apply to {src}: omit it")
        if src.is_file() and is_compressed(parse_location(src)):
            raise PackError(
                f"{src} is a compressed tar, in which samples cannot be found quickly: decompress it (gunzip)"
            )
        tars = _select_tars(src, options.source_split)
        try:
            table = open_table(tars or src)
            if not options.prefix_keys:
                refuse_duplicates([table])
            files = tuple(stat_file(tar.key) for tar in table.tars)
            prefixes = _make_prefixes(files) if options.prefix_keys else None
            keys, sizes, tar_sizes = _measure(table, prefixes, with_label=options.labels is None)
            if prefixes is not None and len(set(keys)) < len(keys):
                key, _ = Counter(keys).most_common(1)[0]
                raise ValueError(
                    f"several samples have the key {key!r}, even with prefixes: rename or remove all but one"
                )
        except (FormatError, OSError, ValueError) as error:
            raise PackError(f"{src} cannot be packed: {error}") from error
        classes, new_labels = table.manifest.classes, None
        labels: NDArray[np.int64] | None = None
        if (file := options.label_file) is not None:
            labels, classes = find_labels(file, keys, options.classes)
            tar_sizes += BLOCK + header_sizes(keys, LABEL_FIELD, np.ones(len(keys), np.int64))
        elif options.classes is not None:
            new_labels = _choose_labels(src, table.manifest, options.classes)
            classes = tuple(options.classes)
        records = _Tars(
            path=src,
            digest=xxhash.xxh3_128_hexdigest(
                repr((files, table.manifest.digest, new_labels)).encode(errors="surrogateescape")
            ),
            files=files,
            indexes=tuple(index.key for index in table.indexes),
            series=FileSeries.of(
                [tar.name for tar in table.tars], [entry.num_samples for entry in table.manifest.shards]
            ),
            new_labels=new_labels,
        )
        samples = RecordTable(records=records, keys=keys, sizes=sizes, tar_sizes=tar_sizes, labels=labels)
        return SourceScan(samples=samples, classes=classes)


def _select_tars(src: Path, split: str | None) -> Sequence[Path]:
    """Return the tars of a directory or a pattern that belong to the chosen split, or () to read the whole source."""
    is_folder = src.is_dir() and not (src / MANIFEST_NAME).is_file()
    tars = sorted(src.glob("*.tar") if is_folder else src.parent.glob(src.name) if "*" in src.name else ())
    selected = select_files(src, tars, split)
    return () if is_folder and split is None else selected


def _make_prefixes(tars: Sequence[SourceFile]) -> list[str]:
    root = os.path.commonpath([Path(tar.path).parent for tar in tars])
    names = [read_as_utf8(os.path.relpath(tar.path, root)) for tar in tars]
    prefixes = [f"{name[:-4] if name.lower().endswith('.tar') else name}/" for name in names]
    for prefix in prefixes:
        check_key(f"{prefix}0")
    return prefixes


def _measure(
    table: ShardTable, prefixes: Sequence[str] | None, *, with_label: bool
) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Return the keys of all samples, the sizes of their contents, int64 [n], and their sizes in a tar, int64 [n]."""
    keys, sizes, tar_sizes = list[str](), list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for number, index in enumerate(table.indexes):
        columns = read_columns(index)
        texts = [columns.keys.text(sample) for sample in range(len(columns.keys))]
        if prefixes is not None:
            texts = [prefixes[number] + text.removeprefix("./") for text in texts]
        size, tar_size = np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64)
        for name, starts, field_sizes in zip(columns.header.fields, columns.starts, columns.sizes, strict=True):
            if name == LABEL_FIELD and not with_label:
                continue
            rows = np.flatnonzero(starts >= 0)
            there = field_sizes[rows]
            size[rows] += there
            tar_size[rows] += -(-there // BLOCK) * BLOCK
            tar_size[rows] += header_sizes([texts[row] for row in rows.tolist()], name, there)
        keys += texts
        sizes.append(size)
        tar_sizes.append(tar_size)
    return keys, np.concatenate(sizes), np.concatenate(tar_sizes)


def _choose_labels(src: Path, manifest: Manifest, classes: Sequence[str]) -> tuple[int, ...]:
    if LABEL_FIELD not in manifest.fields:
        raise PackError(f"classes are given, but {src} has no labels: omit --classes (classes=…)")
    if not manifest.classes:
        return tuple(range(len(classes)))
    try:
        numbers = number_classes(manifest.classes, classes, str(src))
    except ValueError as error:
        raise PackError(str(error)) from error
    return tuple(numbers[name] for name in manifest.classes)


def _renumber(label: bytes, new_labels: Sequence[int]) -> int:
    digits = label.strip()
    if not digits.isdigit() or int(digits) >= len(new_labels):
        raise ValueError(
            f"its label is {label[:40]!r}, but it must be an integer below {len(new_labels)}, the number of classes: "
            "pass --classes (classes=…) with all class names, or --labels (labels=…)"
        )
    return new_labels[int(digits)]
