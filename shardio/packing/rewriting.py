"""Merge, split and reshard packed datasets, and append to them."""

from __future__ import annotations

import json
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, PackError
from shardio.files import remove_unfinished, sync_directory
from shardio.order import make_rng_key, permute
from shardio.packing.folders import choose_folder, finish, new_dataset
from shardio.packing.pack_call import (
    DEFAULT_SHARD_SIZE,
    OPTIONS_OF_SHARDS,
    Layout,
    PackOptions,
    deciding_options,
)
from shardio.packing.packer import pack_source
from shardio.packing.shard_writer import ShardLimits, ShardSequence, name_shard
from shardio.packing.sources.source import SourceKind, make_parts
from shardio.packing.sources.tars import CopySource, describe, refuse_duplicates
from shardio.process import WorkProgress
from shardio.sample import Sample
from shardio.shards import (
    LABEL_FIELD,
    MANIFEST_NAME,
    UNFINISHED_NAME,
    DatasetSource,
    Manifest,
    PackSettings,
    Shard,
    ShardEntry,
    ShardTable,
    hash_key,
    index_location,
    open_table,
    read_keys,
    write_manifest,
)
from shardio.storage import (
    Location,
    RemoteAccess,
    StorageOptions,
    find_path,
    find_url,
    link_or_copy,
    make_direct_access,
    make_path,
    parse_location,
)
from shardio.values import check_flag, check_optional_integer, count, parse_json, parse_size

DEFAULT_SIZE = "256MiB"

RECORD_NAME = ".shardio-append.json"
"""The file that lists the shards of an unfinished append."""

_PACKED_PREFIX = ".shardio-append-"
"""The prefix of the names of directories that hold packed images until they are appended."""


def merge(
    out: str | os.PathLike[str],
    sources: Sequence[DatasetSource],
    *,
    max_shard_size: str | int = DEFAULT_SIZE,
    max_shard_samples: int | None = None,
    overwrite: bool = False,
    progress: WorkProgress | None = None,
    storage_options: StorageOptions | None = None,
) -> Manifest:
    """Write the samples of several datasets, one after another, to a new dataset.

    Samples are copied byte for byte, and checked against their indexes. The same arguments give the same bytes.

    Args:
        out: A new or empty directory, or a URL such as ``s3://bucket/train``.
        sources: Packed directories, or tars from any tool, each as for :class:`shardio.ShardDataset`.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``.
        max_shard_samples: The maximum number of samples in a shard.
        overwrite: Whether to replace a dataset in ``out``.
        progress: Receives progress reports.
        storage_options: Settings for the stores of all URLs, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of the new dataset.

    Raises:
        FileNotFoundError: If a source does not exist or holds no tars.
        FormatError: If a source is damaged.
        PackError: If two samples have the same key, a label has different class names, or ``out`` cannot be used.
        SampleError: If a sample is damaged.
    """
    if isinstance(sources, str | os.PathLike) or not sources:
        raise ValueError("sources must be a list of at least one dataset")
    access = make_direct_access(storage_options)
    tables = [open_table(source, access) for source in sources]
    limits = _check_limits(max_shard_size, max_shard_samples)
    (manifest,) = _copy(tables, [parse_location(out, access)], limits, overwrite, progress)
    return manifest


def reshard(
    src: DatasetSource,
    out: str | os.PathLike[str],
    *,
    max_shard_size: str | int = DEFAULT_SIZE,
    max_shard_samples: int | None = None,
    shuffle_seed: int | None = None,
    overwrite: bool = False,
    progress: WorkProgress | None = None,
    storage_options: StorageOptions | None = None,
) -> Manifest:
    """Copy a dataset to a new one with shards of a different size, or with its samples in a different order.

    Samples are copied byte for byte, and checked against their indexes. The same arguments give the same bytes.

    Args:
        src: A packed directory, or tars from any tool.
        out: A new or empty directory, or a URL such as ``s3://bucket/train``.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``.
        max_shard_samples: The maximum number of samples in a shard.
        shuffle_seed: The seed of a new order of all samples; None keeps the current order.
        overwrite: Whether to replace a dataset in ``out``.
        progress: Receives progress reports.
        storage_options: Settings for the stores of all URLs, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of the new dataset.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
        FormatError: If the source is damaged.
        PackError: If two samples have the same key, or ``out`` cannot be used.
        SampleError: If a sample is damaged.
    """
    limits = _check_limits(max_shard_size, max_shard_samples)
    shuffle_seed = check_optional_integer("shuffle_seed", shuffle_seed, at_least=0, below=2**63)
    access = make_direct_access(storage_options)
    (manifest,) = _copy(
        [open_table(src, access)], [parse_location(out, access)], limits, overwrite, progress, shuffle_seed
    )
    return manifest


def split(
    src: DatasetSource,
    out: str | os.PathLike[str],
    *,
    by: Sequence[float | str],
    names: Sequence[str],
    max_shard_size: str | int = DEFAULT_SIZE,
    max_shard_samples: int | None = None,
    overwrite: bool = False,
    progress: WorkProgress | None = None,
    storage_options: StorageOptions | None = None,
) -> dict[str, Manifest]:
    """Split a dataset into new datasets, by a hash of each sample's key.

    A sample's part depends only on its key and on ``by``: see :class:`~shardio.packing.Parts`. Samples are copied byte
    for byte, in their order, and checked against their indexes.

    Args:
        src: A packed directory, or tars from any tool.
        out: The directory of the new datasets, or a URL.
        by: The fraction of each part. The fractions must sum to 1.
        names: The name of each part, which is also its directory in ``out``.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``.
        max_shard_samples: The maximum number of samples in a shard.
        overwrite: Whether to replace datasets in the parts' directories.
        progress: Receives progress reports.
        storage_options: Settings for the stores of all URLs, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of each part, by name.

    Raises:
        ValueError: If the fractions or the names are invalid.
        FileNotFoundError: If the source does not exist or holds no tars.
        FormatError: If the source is damaged.
        PackError: If two samples have the same key, or ``out`` cannot be used.
        SampleError: If a sample is damaged.
    """
    parts = make_parts(by, names)
    limits, access = _check_limits(max_shard_size, max_shard_samples), make_direct_access(storage_options)
    table = open_table(src, access)
    num_samples = np.zeros(len(names), np.int64)
    for index in table.indexes:
        num_samples += np.bincount(parts.assign(read_keys(index).hash_all()), minlength=len(names))
    parts.refuse_empty(num_samples.tolist(), describe(table))
    folders = [parse_location(out, access) / name for name in names]
    choose = partial(bisect_right, parts.thresholds)
    manifests = _copy([table], folders, limits, overwrite, progress, choose=lambda sample: choose(hash_key(sample.key)))
    return dict(zip(names, manifests, strict=True))


def _copy(
    tables: Sequence[ShardTable],
    folders: Sequence[Location],
    limits: ShardLimits,
    overwrite: bool,
    progress: WorkProgress | None,
    shuffle_seed: int | None = None,
    choose: Callable[[Sample], int] | None = None,
) -> list[Manifest]:
    """Copy the samples of datasets to a new dataset, or each sample to the dataset whose number ``choose`` returns."""
    overwrite = check_flag("overwrite", overwrite)
    classes = _unite_classes(tables)
    refuse_duplicates(tables)
    _refuse_sources(tables, folders)
    with ExitStack() as stack, CopySource(tables) as source:
        unfinished = [stack.enter_context(new_dataset(choose_folder(each), overwrite=overwrite)) for each in folders]
        order: NDArray[np.int64] | None = None
        if shuffle_seed is not None:
            order = permute(np.arange(len(source)), np.array([len(source)]), make_rng_key(shuffle_seed, "pack"))
        sequences = [ShardSequence(folder, limits) for folder in folders]
        try:
            for sample in _report(source.read(order), tables, progress):
                sequences[0 if choose is None else choose(sample)].add(sample)
            for sequence in sequences:
                sequence.end_shard()
        except BaseException as error:
            for sequence in sequences:
                sequence.discard(error)
            raise
        settings = _unite_settings([table.manifest for table in tables])
        settings |= {"max_shard_size": limits.max_size, "max_shard_samples": limits.max_samples}
        if choose is None:
            settings["shuffle_seed"] = shuffle_seed
        else:
            settings.pop("num_tiled", None)  # Only the total over all parts is known.
        manifests = [
            Manifest(shards=tuple(each.entries), fields=tuple(sorted(each.fields)), classes=classes, pack=settings)
            for each in sequences
        ]
        finish(dict(zip(unfinished, manifests, strict=True)))
    return manifests


def _unite_classes(tables: Sequence[ShardTable]) -> tuple[str, ...]:
    """Return the longest list of class names, by label. The other datasets' lists must be prefixes of this list."""
    longest = max(tables, key=lambda table: len(table.manifest.classes))
    names = longest.manifest.classes
    for table in tables:
        others = table.manifest.classes
        for label, (name, other) in enumerate(zip(names, others, strict=False)):
            if name != other:
                raise PackError(
                    f"label {label} is {name!r} in {describe(longest)} and {other!r} in {describe(table)}: pack the "
                    "second dataset again with the class names of the first (--classes)"
                )
        if names and not others and LABEL_FIELD in table.manifest.fields:
            raise PackError(
                f"{describe(table)} has labels without class names, and {describe(longest)} has "
                f"{count(len(names), 'class name')}, so shardio cannot tell whether the labels agree: write the former "
                "again with class names (shardio pack --classes, or ShardWriter(classes=…))"
            )
    return names


def _unite_settings(manifests: Sequence[Manifest]) -> PackSettings:
    """Return the sample settings that all datasets share or, if these are invalid without the rest, only ``jpeg``."""
    first = manifests[0].pack
    settings: PackSettings = {
        name: first[name]
        for name in deciding_options()
        if name not in OPTIONS_OF_SHARDS
        and name in first
        and all(name in each.pack and each.pack[name] == first[name] for each in manifests)
    }
    try:
        PackOptions(**settings)  # type: ignore[arg-type]  # PackOptions checks the types.
    except (TypeError, ValueError):  # For example, the datasets share ``quality`` but not ``convert_to``.
        settings = {name: value for name, value in settings.items() if name == "jpeg"}
    return settings | _count_tiled(manifests)


def _count_tiled(manifests: Sequence[Manifest]) -> PackSettings:
    counts = [manifest.pack.get("num_tiled") for manifest in manifests]
    known = [count for count in counts if isinstance(count, int)]
    return {"num_tiled": sum(known)} if len(known) == len(counts) else {}


def _report(samples: Iterable[Sample], tables: Sequence[ShardTable], progress: WorkProgress | None) -> Iterable[Sample]:
    progress = progress or WorkProgress()
    manifests = [table.manifest for table in tables]
    progress.start(sum(each.num_samples for each in manifests), sum(each.num_bytes for each in manifests))
    for sample in samples:
        yield sample
        progress.advance(1, sum(map(len, sample.fields.values())))


def _check_limits(max_shard_size: str | int, max_shard_samples: int | None) -> ShardLimits:
    return ShardLimits(max_size=parse_size("max_shard_size", max_shard_size), max_samples=max_shard_samples)


def _refuse_sources(tables: Sequence[ShardTable], folders: Sequence[Location]) -> None:
    homes = {tar.folder.resolve() for table in tables for tar in table.tars}
    for folder in folders:
        if folder.resolve() in homes:
            raise PackError(f"{folder} holds tars of a source: choose another directory for the new dataset")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """An unfinished append: its sources, the names of its shards, and the digest of the new manifest."""

    sources: list[str]
    names: list[str]
    digest: str


def append(
    out: str | os.PathLike[str],
    more: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    copy: bool = False,
    source_kind: SourceKind = "auto",
    layout: Layout = "auto",
    num_workers: int | None = None,
    progress: WorkProgress | None = None,
    storage_options: StorageOptions | None = None,
) -> Manifest:
    """Add the samples of other packed datasets, or of directories of images, to a packed dataset.

    Shards are hard-linked, or copied if linking is impossible. The names of new shards continue the numbering. Images
    are packed first, with the settings and the class names of ``out``, and rejected images are logged. At the end, one
    rename replaces the manifest; until then, readers of ``out`` find the old samples. Programs that opened ``out``
    earlier keep reading the old samples. If the call is interrupted, repeat it.

    Args:
        out: A packed directory.
        more: A packed directory or a directory of images, or a list of such directories.
        copy: Whether to copy shards even if they can be linked.
        source_kind: The kind of each source that is not a packed directory, as for :func:`shardio.pack`.
        layout: The layout of directories of images, as for :func:`shardio.pack`.
        num_workers: The number of worker processes that pack images.
        progress: Receives the progress of packing images.
        storage_options: Settings for the stores of URLs in ``more``, as for :class:`shardio.ShardDataset`.

    Returns:
        The new manifest.

    Raises:
        FileNotFoundError: If a directory does not exist.
        FormatError: If a manifest or an index is damaged.
        PackError: If two samples have the same key, a label has different class names, or a directory cannot be used.
    """
    options = PackOptions(source_kind=source_kind, layout=layout, num_workers=num_workers)
    copy, access = check_flag("copy", copy), make_direct_access(storage_options)
    if (url := find_url(out)) is not None and not make_path(out).exists():
        raise PackError(
            f"cannot append to {url}: append to a local copy and upload it, or write a new dataset with shardio merge"
        )
    folder = make_path(out)
    sources = [more] if isinstance(more, str | os.PathLike) else more
    if not sources:
        raise ValueError("more is empty: pass at least one packed directory or directory of images")
    if not (folder / MANIFEST_NAME).exists() or (folder / UNFINISHED_NAME).exists():
        raise PackError(
            f"{folder} is not a packed directory with {MANIFEST_NAME}: pack the first images with shardio pack"
        )
    requested = [str(parse_location(source)) for source in sources]
    with choose_folder(parse_location(folder)).locked():
        table = open_table(folder)
        if _end_earlier(folder, table.manifest, requested):
            return table.manifest
        try:
            tables = [_open_source(source, folder, table.manifest, options, progress, access) for source in sources]
            manifest = _plan(table, tables)
            shards = [pair for each in tables for pair in zip(each.tars, each.indexes, strict=True)]
            new = manifest.shards[len(table.manifest.shards) :]
            _link_all(folder, shards, new, manifest, requested, copy=copy)
        except Exception:  # Images that were packed only for this call are no longer needed.
            _remove_packed(folder)
            raise
    return manifest


def _plan(table: ShardTable, tables: Sequence[ShardTable]) -> Manifest:
    for each in tables:
        _check_shards(each)
    classes = _unite_classes([table, *tables])
    refuse_duplicates([table, *tables])
    manifests = [table.manifest, *(each.manifest for each in tables)]
    numbers = [
        int(found[1]) for entry in table.manifest.shards if (found := re.fullmatch(r"shard-([0-9]+)\.tar", entry.name))
    ]
    first = max(numbers, default=-1) + 1
    added = [entry for each in tables for entry in each.manifest.shards]
    renamed = [replace(entry, name=name_shard(first + number)) for number, entry in enumerate(added)]
    settings = {name: value for name, value in table.manifest.pack.items() if name != "num_tiled"}
    return Manifest(
        shards=(*table.manifest.shards, *renamed),
        fields=tuple(sorted({field for each in manifests for field in each.fields})),
        classes=classes,
        pack=settings | _count_tiled(manifests),
    )


def _check_shards(table: ShardTable) -> None:
    for tar, index, entry in zip(table.tars, table.indexes, table.manifest.shards, strict=True):
        with Shard(tar, index) as shard:
            if shard.entry != entry:
                raise PackError(f"{tar} is not the shard that its manifest lists: run shardio verify {tar.folder}")


def _link_all(
    folder: Path,
    shards: Sequence[tuple[Location, Location]],
    entries: Sequence[ShardEntry],
    manifest: Manifest,
    requested: list[str],
    *,
    copy: bool,
) -> None:
    targets = [parse_location(folder / entry.name) for entry in entries]
    for target in targets:
        for each in target, index_location(target):
            if os.path.lexists(each.key):
                raise PackError(f"{each} exists but is not in the manifest: move it elsewhere or delete it")
    record = _Record(sources=requested, names=[entry.name for entry in entries], digest=manifest.digest)
    with parse_location(folder / RECORD_NAME).write_whole() as file:
        file.write(json.dumps(asdict(record)).encode())
    try:
        for (tar, index), target in zip(shards, targets, strict=True):
            link_or_copy(tar, target, copy=copy)
            link_or_copy(index, index_location(target), copy=copy)
            with Shard(target, index_location(target)):
                pass  # An incomplete copy, or a copy of the wrong files, raises an error here.
        sync_directory(folder)
        write_manifest(parse_location(folder / MANIFEST_NAME), manifest)
    except BaseException:  # Re-raised: even Ctrl-C must not leave shards that no manifest lists.
        if open_table(folder).manifest.digest != manifest.digest:
            _roll_back(folder, record.names)
        raise
    _remove_record(folder)


def _end_earlier(folder: Path, manifest: Manifest, requested: list[str]) -> bool:
    """Clean up after an interrupted append. Return True if the same append had already written the manifest."""
    location = parse_location(folder / RECORD_NAME)
    remove_unfinished(folder)
    if not location.exists():
        return False
    try:
        record = _Record(**parse_json(location.read_whole()))
    except (ValueError, TypeError) as error:
        raise PackError(
            f"{location} is damaged ({error!r}): delete it, and any tars that the manifest does not list"
        ) from error
    if record.digest != manifest.digest:
        listed = {entry.name for entry in manifest.shards}
        _roll_back(folder, [name for name in record.names if name not in listed])
        return False
    _remove_record(folder)
    return record.sources == requested


def _roll_back(folder: Path, names: Sequence[str]) -> None:
    """Remove the shards of an unfinished append, then its record. Keep the packed images."""
    for tar in (parse_location(folder / name) for name in names):
        index_location(tar).remove()
        tar.remove()
    (folder / RECORD_NAME).unlink(missing_ok=True)


def _remove_record(folder: Path) -> None:
    _remove_packed(folder)
    (folder / RECORD_NAME).unlink(missing_ok=True)


def _remove_packed(folder: Path) -> None:
    for manifest in folder.glob(f"{_PACKED_PREFIX}*/{MANIFEST_NAME}"):
        shutil.rmtree(manifest.parent)


def _open_source(
    name: str | os.PathLike[str],
    folder: Path,
    manifest: Manifest,
    options: PackOptions,
    progress: WorkProgress | None,
    access: RemoteAccess,
) -> ShardTable:
    if find_path(parse_location(name)) is None:
        return open_table(name, access)
    source = make_path(name)
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: pass a packed directory or a directory of images")
    if source.suffix == ".json" or (source / MANIFEST_NAME).exists():
        return open_table(source)
    if not source.is_dir() or (options.source_kind != "files" and any(source.glob("*.tar"))):
        raise PackError(
            f"{source} has no {MANIFEST_NAME}: convert tars from other tools first (shardio reshard {source} NEW), and "
            "append NEW. To append images beside tars, pass --source-kind files (source_kind='files')"
        )
    packed = folder / f"{_PACKED_PREFIX}{xxhash.xxh3_64_hexdigest(os.fsencode(source.resolve()))}"
    if (packed / MANIFEST_NAME).exists():
        shutil.rmtree(packed)  # An earlier call packed the images, but they may have changed since.
    if (tokenizer := manifest.pack.get("tokenizer")) is not None:  # Anyone may have written the manifest.
        raise PackError(
            f"{folder} was packed with --tokenizer {tokenizer}, and append runs no code that a manifest names: run "
            f"shardio pack {source} NEW --tokenizer {tokenizer}, and append NEW"
        )
    known: dict[str, Any] = {name: manifest.pack[name] for name in deciding_options() if name in manifest.pack}
    known["max_shard_size"] = known.get("max_shard_size") or DEFAULT_SHARD_SIZE
    try:
        options = replace(options, classes=manifest.classes or None, **known)
    except (TypeError, ValueError) as error:
        raise FormatError(f"the settings in the manifest cannot be used to pack more images: {error}") from error
    pack_source(source, packed, options, progress).warn(str(source))
    return open_table(packed)
