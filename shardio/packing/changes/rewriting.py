"""Merge, split and reshard: new datasets with the samples of others, copied byte for byte."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.order import make_rng_key, permute
from shardio.packing.copying import CopySource
from shardio.packing.destination import finish
from shardio.packing.folders.choosing import choose_folder
from shardio.packing.parts import make_parts
from shardio.packing.progress import PackProgress
from shardio.packing.uniting import Settings, describe, refuse_duplicates, unite_classes, unite_settings
from shardio.packing.writing.output_folder import new_dataset
from shardio.packing.writing.shard_sequence import ShardLimits, ShardSequence
from shardio.sample import Sample
from shardio.shards import DatasetSource, Manifest, ShardTable, hash_key, open_table, read_keys
from shardio.storage import Location, StorageOptions, make_direct_access, parse_location
from shardio.values import check_flag, check_optional_integer, parse_size

DEFAULT_SIZE = "256MiB"


def merge(
    out: str | os.PathLike[str],
    sources: Sequence[DatasetSource],
    *,
    max_shard_size: str | int = DEFAULT_SIZE,
    max_shard_samples: int | None = None,
    overwrite: bool = False,
    progress: PackProgress | None = None,
    storage_options: StorageOptions | None = None,
) -> Manifest:
    """Write the samples of several datasets, one after another, to a new dataset.

    Samples are copied byte for byte, and compared with their indexes. Equal arguments give equal bytes.

    Args:
        out: A new or empty directory, or a URL such as ``s3://bucket/train``.
        sources: Packed directories, or tars of any tool, each as for :class:`shardio.ShardDataset`.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``.
        max_shard_samples: The maximum number of samples in a shard.
        overwrite: Whether to replace a dataset in ``out``.
        progress: Receives progress reports.
        storage_options: Settings of the stores of all URLs, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of the new dataset.

    Raises:
        FileNotFoundError: If a source does not exist or holds no tars.
        FormatError: If a source is damaged.
        PackError: If two samples have the same key, labels have different names, or ``out`` cannot be used.
        SampleError: If a sample is damaged.
    """
    if isinstance(sources, str | os.PathLike) or not sources:
        raise ValueError("sources must be a list of at least one dataset")
    access = make_direct_access(storage_options)
    tables = [open_table(source, access) for source in sources]
    limits = _check_limits(max_shard_size, max_shard_samples)
    return _rewrite(tables, parse_location(out, access), limits, None, overwrite, progress)


def reshard(
    src: DatasetSource,
    out: str | os.PathLike[str],
    *,
    max_shard_size: str | int = DEFAULT_SIZE,
    max_shard_samples: int | None = None,
    shuffle_seed: int | None = None,
    overwrite: bool = False,
    progress: PackProgress | None = None,
    storage_options: StorageOptions | None = None,
) -> Manifest:
    """Write the samples of a dataset to a new dataset with shards of another size, or in another order.

    Samples are copied byte for byte, and compared with their indexes. Equal arguments give equal bytes.

    Args:
        src: A packed directory, or tars of any tool.
        out: A new or empty directory, or a URL such as ``s3://bucket/train``.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``.
        max_shard_samples: The maximum number of samples in a shard.
        shuffle_seed: The seed of a new order of all samples; None keeps the order.
        overwrite: Whether to replace a dataset in ``out``.
        progress: Receives progress reports.
        storage_options: Settings of the stores of all URLs, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of the new dataset.

    Raises:
        The same errors as :func:`merge`.
    """
    limits = _check_limits(max_shard_size, max_shard_samples)
    shuffle_seed = check_optional_integer("shuffle_seed", shuffle_seed, at_least=0, below=2**63)
    access = make_direct_access(storage_options)
    return _rewrite([open_table(src, access)], parse_location(out, access), limits, shuffle_seed, overwrite, progress)


def split(
    src: DatasetSource,
    out: str | os.PathLike[str],
    *,
    by: Sequence[float | str],
    names: Sequence[str],
    max_shard_size: str | int = DEFAULT_SIZE,
    max_shard_samples: int | None = None,
    overwrite: bool = False,
    progress: PackProgress | None = None,
    storage_options: StorageOptions | None = None,
) -> dict[str, Manifest]:
    """Split a dataset into new datasets, by a hash of each sample's key.

    A sample's part depends only on its key and on ``by``: see :class:`~shardio.packing.parts.Parts`. Samples are copied
    byte for byte, in their order, and compared with their indexes.

    Args:
        src: A packed directory, or tars of any tool.
        out: The directory of the new datasets, or a URL.
        by: The fraction of each part. They sum to 1.
        names: The name of each part: its directory in ``out``.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``.
        max_shard_samples: The maximum number of samples in a shard.
        overwrite: Whether to replace datasets in the parts' directories.
        progress: Receives progress reports.
        storage_options: Settings of the stores of all URLs, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of each part, by name.

    Raises:
        ValueError: If the fractions or the names are invalid.
        The same errors as :func:`merge`.
    """
    parts = make_parts(by, names)
    limits, overwrite = _check_limits(max_shard_size, max_shard_samples), check_flag("overwrite", overwrite)
    access = make_direct_access(storage_options)
    table = open_table(src, access)
    num_samples = np.zeros(len(names), np.int64)
    for index in table.indexes:
        num_samples += np.bincount(parts.assign(read_keys(index).hash_all()), minlength=len(names))
    parts.refuse_empty(num_samples.tolist(), describe(table))
    refuse_duplicates([table])
    folders = [parse_location(out, access) / name for name in names]
    _refuse_sources([table], folders)
    with ExitStack() as stack, CopySource([table]) as source:
        unfinished = [
            stack.enter_context(new_dataset(choose_folder(folder), overwrite=overwrite)) for folder in folders
        ]
        sequences = [ShardSequence(folder, limits) for folder in folders]
        copied = _report(source.read(), [table], progress)
        _write(((bisect_right(parts.thresholds, hash_key(sample.key)), sample) for sample in copied), sequences)
        settings = {name: value for name, value in unite_settings([table.manifest]).items() if name != "num_tiled"}
        manifests = [_make_manifest(each, table.manifest.classes, settings | _describe(limits)) for each in sequences]
        finish(dict(zip(unfinished, manifests, strict=True)))
    return dict(zip(names, manifests, strict=True))


def _rewrite(
    tables: Sequence[ShardTable],
    out: Location,
    limits: ShardLimits,
    shuffle_seed: int | None,
    overwrite: bool,
    progress: PackProgress | None,
) -> Manifest:
    overwrite = check_flag("overwrite", overwrite)
    classes = unite_classes(tables)
    refuse_duplicates(tables)
    _refuse_sources(tables, [out])
    with new_dataset(choose_folder(out), overwrite=overwrite) as unfinished, CopySource(tables) as source:
        order: NDArray[np.int64] | None = None
        if shuffle_seed is not None:
            order = permute(np.arange(len(source)), np.array([len(source)]), make_rng_key(shuffle_seed, "pack"))
        sequence = ShardSequence(out, limits)
        _write(((0, sample) for sample in _report(source.read(order), tables, progress)), [sequence])
        settings = unite_settings([table.manifest for table in tables])
        settings |= {**_describe(limits), "shuffle_seed": shuffle_seed}
        manifest = _make_manifest(sequence, classes, settings)
        finish({unfinished: manifest})
    return manifest


def _write(samples: Iterable[tuple[int, Sample]], parts: Sequence[ShardSequence]) -> None:
    """Write each sample to one of several sequences of shards, and end their last shards."""
    try:
        for part, sample in samples:
            parts[part].add(sample)
        for sequence in parts:
            sequence.end_shard()
    except BaseException as error:
        for sequence in parts:
            sequence.discard(error)
        raise


def _report(samples: Iterable[Sample], tables: Sequence[ShardTable], progress: PackProgress | None) -> Iterable[Sample]:
    """Yield samples, and report each one."""
    progress = progress or PackProgress()
    manifests = [table.manifest for table in tables]
    progress.planned(sum(each.num_samples for each in manifests), sum(each.num_bytes for each in manifests))
    for sample in samples:
        yield sample
        progress.packed(1, sum(map(len, sample.fields.values())))


def _make_manifest(sequence: ShardSequence, classes: tuple[str, ...], settings: Settings) -> Manifest:
    return Manifest(
        shards=tuple(sequence.entries), fields=tuple(sorted(sequence.fields)), classes=classes, pack=settings
    )


def _check_limits(max_shard_size: str | int, max_shard_samples: int | None) -> ShardLimits:
    return ShardLimits(max_size=parse_size("max_shard_size", max_shard_size), max_samples=max_shard_samples)


def _describe(limits: ShardLimits) -> Settings:
    return {"max_shard_size": limits.max_size, "max_shard_samples": limits.max_samples}


def _refuse_sources(tables: Sequence[ShardTable], folders: Sequence[Location]) -> None:
    """Raise PackError if a new dataset would be written where the tars of a source are."""
    homes = {tar.folder.resolve() for table in tables for tar in table.tars}
    for folder in folders:
        if folder.resolve() in homes:
            raise PackError(f"{folder} holds tars that would be read: choose another directory for the new dataset")
