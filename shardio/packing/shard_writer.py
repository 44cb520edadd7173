"""Write a program's samples to shards, from one process or several: :class:`ShardWriter`, :func:`finalize`.

:func:`shardio.pack` uses a ShardWriter only for iterables. :mod:`shardio.packing.executors` writes the shards of
folders, tables and other tools' datasets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from shardio.errors import FormatError, PackError
from shardio.files import find_target, naming
from shardio.packing.folders import DatasetFolder, UnfinishedDataset, choose_folder, finish, new_dataset, whole_names
from shardio.packing.samples import DEFAULT_QUALITY, KeyHashes, ValueEncoder, encode_sample, find_duplicate
from shardio.sample import Classes, Sample, check_classes
from shardio.shards import (
    END,
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    PackSettings,
    Shard,
    ShardEntry,
    ShardTable,
    TarWriter,
    hash_key,
    index_location,
    join_name,
    read_keys,
    read_manifest,
    size_in_tar,
    write_index_of,
    write_manifest,
)
from shardio.storage import Location, StorageOptions, make_direct_access, map_locations, parse_location
from shardio.values import check_flag, check_integer, check_optional_integer, count, parse_json, parse_size

_RECORD = re.compile(r"\.shardio-worker-([0-9]{5})\.json")
"""The name pattern of the record that a worker writes when it finishes."""


def name_shard(number: int) -> str:
    """Return the file name of a shard, given its number."""
    return f"shard-{number:06d}.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """The limits of a shard.

    Attributes:
        max_size: The maximum size in bytes. Only a shard with a single sample may exceed it.
        max_samples: The maximum number of samples, or None for no limit.
    """

    max_size: int
    max_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_size", check_integer("max_shard_size", self.max_size, at_least=1))
        max_samples = check_optional_integer("max_shard_samples", self.max_samples, at_least=1)
        object.__setattr__(self, "max_samples", max_samples)


class ShardSequence:
    """Writes samples to shards, and starts a new shard when the current one is full. Only one is open at a time.

    The same samples with the same limits give the same bytes, as in a pack. A shard and its index appear only when they
    are complete, and the index appears last.

    Attributes:
        entries: The finished shards.
        fields: The names of the samples' fields.

    Args:
        folder: The folder to write the shards to.
        limits: The limits of each shard.
        make_name: Returns the name of a shard, given its number.
    """

    def __init__(self, folder: Location, limits: ShardLimits, make_name: Callable[[int], str] = name_shard) -> None:
        self._folder, self._limits, self._make_name = folder, limits, make_name
        self.entries = list[ShardEntry]()
        self.fields = set[str]()
        self._writer: TarWriter | None = None
        self._open = ExitStack()

    @property
    def current(self) -> Location:
        """The location of the open shard, or of the next shard if none is open."""
        return self._folder / self._make_name(len(self.entries))

    def add(self, sample: Sample) -> None:
        """Write a sample.

        Raises:
            OSError: If the sample cannot be written.
        """
        if self._writer is not None and not self._has_room(self._writer, sample):
            self.end_shard()
        if self._writer is None:
            self._writer = TarWriter(self._open.enter_context(self.current.write_whole()))
        self._writer.add(sample)

    def end_shard(self) -> None:
        """Finish the current shard, if it has samples.

        Raises:
            OSError: If the shard cannot be written.
        """
        if self._writer is None:
            return
        tar, writer = self.current, self._writer
        writer.end()
        self._open.close()
        entry, fields = write_index_of(tar, writer)
        self.entries.append(entry)
        self.fields.update(fields)
        self._writer = None

    def discard(self, error: BaseException) -> None:
        """Remove the unfinished shard after an error."""
        self._writer = None
        with suppress(OSError):  # Closing the file may fail for the same reason as the write.
            self._open.__exit__(type(error), error, error.__traceback__)

    def keys_of_current(self) -> Iterator[str]:
        """Yield the keys of the samples in the current shard."""
        return (stored.key for stored in self._writer.stored) if self._writer is not None else iter(())

    def _has_room(self, writer: TarWriter, sample: Sample) -> bool:
        size = sum(size_in_tar(join_name(sample.key, name), len(content)) for name, content in sample.fields.items())
        fits = writer.num_bytes + size + len(END) <= self._limits.max_size
        return fits and len(writer.stored) < (self._limits.max_samples or len(writer.stored) + 1)


class ShardWriter:
    """Writes samples to tar shards with indexes, and writes the manifest at the end of the ``with`` block.

    >>> with shardio.ShardWriter("out", classes=["cat", "dog"]) as writer:  # doctest: +SKIP
    ...     writer.write({"__key__": "a/1", "jpg": jpeg_bytes, "cls": "dog", "json": {"width": 640}})

    If the block raises an exception, finished shards remain, and readers refuse the directory as unfinished.

    To write from several processes, pass ``worker=`` and ``num_workers=`` in each process. Each process writes its own
    shards. When all processes have ended, call :func:`shardio.finalize` to write the manifest.

    Args:
        out: A new or empty directory, or a URL in an object store, such as ``s3://bucket/train``.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``. Only a shard with a
            single sample may exceed it.
        max_shard_samples: The maximum number of samples in a shard.
        classes: The class names that define the labels, or a dataset that has class names.
        quality: The quality of JPEG and WebP images encoded from arrays, 1 to 100.
        overwrite: Whether to replace the dataset, or this worker's shards, in ``out``.
        worker: The number of this worker, from 0.
        num_workers: The number of workers.
        storage_options: Settings of the object store, as for :class:`shardio.ShardDataset`.
        maxcount: WebDataset's name for ``max_shard_samples``.
        maxsize: WebDataset's name for ``max_shard_size``.

    Raises:
        LocationError: If ``out`` is a URL that names no store.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        max_shard_size: str | int | None = None,
        max_shard_samples: int | None = None,
        classes: Classes | None = None,
        quality: int = DEFAULT_QUALITY,
        overwrite: bool = False,
        worker: int | None = None,
        num_workers: int | None = None,
        storage_options: StorageOptions | None = None,
        maxcount: int | None = None,
        maxsize: float | None = None,
    ) -> None:
        self._out = parse_location(out, make_direct_access(storage_options))
        if self._out.name.endswith(".tar"):
            raise ValueError(f"out must be a directory, not a pattern of tars: pass {str(self._out.folder)!r}")
        self._folder = choose_folder(self._out)
        size = _choose("max_shard_size", max_shard_size, "maxsize", maxsize)
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        self._limits = ShardLimits(
            max_size=parse_size("max_shard_size", "256MiB" if size is None else size),
            max_samples=_choose("max_shard_samples", max_shard_samples, "maxcount", maxcount),
        )
        self._classes = () if classes is None else check_classes(classes)
        self._encoder = ValueEncoder(
            classes=self._classes, quality=check_integer("quality", quality, at_least=1, below=101)
        )
        self._overwrite = check_flag("overwrite", overwrite)
        if (worker is None) != (num_workers is None):
            raise ValueError("worker and num_workers belong together: pass both or neither")
        self._num_workers = check_optional_integer("num_workers", num_workers, at_least=1, below=10**5)
        self._worker = check_optional_integer("worker", worker, at_least=0, below=self._num_workers)
        self._resources = ExitStack()
        self._unfinished: UnfinishedDataset | None = None
        self._sequence: ShardSequence | None = None
        self._failure: OSError | None = None
        self.num_samples = 0
        """The number of samples written so far."""
        self.manifest: Manifest | None = None
        """The manifest, once the ``with`` block has ended, or None for one of several workers."""

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample. If a TypeError or ValueError is raised, nothing is written, and the writer remains usable.

        Args:
            sample: The key, as ``__key__``, and the fields. Other names that start with ``__`` are ignored. Bytes are
                stored unchanged. The field's last suffix determines how other types are encoded. ``jpg``, ``png`` and
                ``webp`` accept uint8 arrays, [height, width, 3]; ``png`` also accepts uint16 and [height, width].
                ``cls`` accepts a label: an integer or one of ``classes``. ``json`` accepts any value that
                ``json.dumps`` accepts, ``txt`` accepts a string, and ``npy`` accepts an array.

        Raises:
            PackError: If an earlier sample has the same key, or an earlier write has failed.
            TypeError: If a field cannot hold its value.
            ValueError: If readers would read the key or a field name differently, or a value is out of range.
            OSError: If the sample cannot be written.
        """
        if self._sequence is None:
            raise RuntimeError("ShardWriter is a context manager: use `with shardio.ShardWriter(out) as writer:`")
        if self._failure is not None:
            raise PackError(f"an earlier write to {self._out} has failed: {self._failure}") from self._failure
        encoded = encode_sample(self._encoder, sample)
        self._refuse_second(encoded.key)
        try:
            with naming(self._sequence.current):
                self._sequence.add(encoded)
        except OSError as error:
            self._failure = error
            raise
        self.num_samples += 1

    def __enter__(self) -> ShardWriter:
        if self._sequence is not None or self.manifest is not None:
            raise RuntimeError("this ShardWriter has been used: create a new one")
        if self._worker is None or self._num_workers is None:
            dataset = new_dataset(self._folder, overwrite=self._overwrite)
            self._unfinished = self._resources.enter_context(dataset)
            make_name = name_shard
        else:
            part = _worker_part(self._folder, self._worker, self._num_workers, overwrite=self._overwrite)
            self._resources.enter_context(part)
            make_name = partial(_name_worker_shard, self._worker)
        self._hashes = KeyHashes()
        self._sequence = ShardSequence(self._out, self._limits, make_name)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sequence, self._sequence = self._sequence, None
        assert sequence is not None, "__enter__ creates it"
        with self._resources:
            try:
                if error is not None:
                    raise error
                self._finish(sequence)
            except BaseException as failure:
                sequence.discard(failure)
                raise

    def _describe(self) -> PackSettings:
        return {"max_shard_size": self._limits.max_size, "max_shard_samples": self._limits.max_samples}

    def _refuse_second(self, key: str) -> None:
        if not self._hashes.add(hash_key(key)) and (place := self._find(key)) is not None:
            raise PackError(
                f"the key {key!r} of sample {self.num_samples} is also the key of {place}: give each sample its own key"
            )

    def _find(self, key: str) -> str | None:
        """Return the place of an earlier sample with the same key, or None if only the hashes of the keys are equal."""
        assert self._sequence is not None, "called by write"
        raw = key.encode()
        for entry in self._sequence.entries:
            tar = self._out / entry.name
            keys = read_keys(index_location(tar))
            for sample in range(len(keys)):
                if keys[sample] == raw:
                    return f"sample {sample} in {tar}"
        for sample, other in enumerate(self._sequence.keys_of_current()):
            if other == key:
                return f"sample {sample} in {self._sequence.current}"
        return None

    def _finish(self, sequence: ShardSequence) -> None:
        if self._failure is not None:
            raise PackError(f"an earlier write to {self._out} has failed: {self._failure}") from self._failure
        sequence.end_shard()
        entries, fields = tuple(sequence.entries), tuple(sorted(sequence.fields))
        pack = self._describe()
        if self._unfinished is None:
            assert self._worker is not None, "only a worker has no unfinished dataset"
            assert self._num_workers is not None, "passed together with worker"
            record = _WorkerRecord(
                worker=self._worker,
                num_workers=self._num_workers,
                shards=entries,
                fields=fields,
                classes=self._classes,
                pack=pack,
            )
            with (self._out / _record_name(self._worker)).write_whole() as file:
                file.write(json.dumps(asdict(record), sort_keys=True).encode())
            return
        if not entries:
            raise PackError(f"no samples were written to {self._out}: write at least one")
        manifest = Manifest(shards=entries, fields=fields, classes=self._classes, pack=pack)
        finish({self._unfinished: manifest})
        self.manifest = manifest


def _choose(name: str, value: Any, alias: str, of_alias: Any) -> Any:
    if value is not None and of_alias is not None:
        raise ValueError(f"{alias} is WebDataset's name for {name}: pass only one of them")
    return of_alias if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerRecord:
    worker: int
    num_workers: int
    shards: tuple[ShardEntry, ...]
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    pack: PackSettings


def _name_worker_shard(worker: int, number: int) -> str:
    return f"{_prefix(worker)}{number:06d}.tar"


@contextmanager
def _worker_part(folder: DatasetFolder, worker: int, num_workers: int, *, overwrite: bool) -> Iterator[None]:
    out = folder.location
    with folder.locked(f".shardio-worker-{worker:05d}.lock"):
        _check_folder(folder, num_workers)
        names = folder.list_names()
        own = [name for name in names if name.startswith(_prefix(worker)) or name == _record_name(worker)]
        if own and not overwrite:
            raise PackError(
                f"{out} already holds files of worker {worker}, such as {own[-1]}: pass overwrite=True to write "
                "this worker's part again, or choose another directory"
            )
        partial = [name for name in names if (find_target(name) or "").startswith(_prefix(worker))]
        (out / _record_name(worker)).remove()  # Remove the record first: without it, the part counts as unfinished.
        folder.remove([*own, *partial])
        folder.mark(_mark(num_workers))
        yield


def finalize(out: str | os.PathLike[str], *, storage_options: StorageOptions | None = None) -> Manifest:
    """Join the parts that several ShardWriters with ``worker=`` have written, and write the manifest.

    Shards are listed by worker, then by number. Call this function once, after all workers have ended. If the call is
    interrupted, repeat it.

    Args:
        out: The directory, or its URL.
        storage_options: Settings of the object store, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of the dataset.

    Raises:
        PackError: If a worker has not ended, a shard is missing or damaged, two samples have the same key, or there
            are no samples.
    """
    location = parse_location(out, make_direct_access(storage_options))
    if not location.is_folder():
        raise PackError(f"the directory {location} does not exist: pass the directory that the workers wrote to")
    folder = choose_folder(location)
    with folder.locked():
        names = whole_names(folder)
        if MANIFEST_NAME in names and UNFINISHED_NAME not in names:
            _remove_records(folder)  # An earlier call was interrupted after it had written the manifest.
            return read_manifest(location / MANIFEST_NAME)
        records = _read_records(folder)
        manifest = _join(folder, records)
        write_manifest(location / MANIFEST_NAME, manifest)
        (location / UNFINISHED_NAME).remove()
        _remove_records(folder)
    return manifest


def _read_entry(tar: Location) -> ShardEntry:
    try:
        with Shard(tar, index_location(tar)) as shard:
            return shard.entry
    except (FormatError, OSError) as error:
        raise PackError(f"{tar} cannot be read: {error}. Write its worker's part again") from error


def _join(folder: DatasetFolder, records: Sequence[_WorkerRecord]) -> Manifest:
    location = folder.location
    entries = [entry for record in records for entry in record.shards]
    if not entries:
        raise PackError(f"no worker wrote a sample to {location}: there is no dataset to finish")
    names = {entry.name for entry in entries}
    if unlisted := [name for name in folder.list_names() if name.endswith(".tar") and name not in names]:
        raise PackError(f"{location / unlisted[0]} belongs to no worker that has ended: move it elsewhere or delete it")
    tars = tuple(location / entry.name for entry in entries)
    indexes = tuple(map(index_location, tars))
    for tar, found, entry in zip(tars, map_locations(_read_entry, tars), entries, strict=True):
        if found != entry:
            raise PackError(f"{tar} is not the shard that its worker wrote: write its worker's part again")
    manifest = Manifest(
        shards=tuple(entries),
        fields=tuple(sorted({field for record in records for field in record.fields})),
        classes=records[0].classes,
        pack=records[0].pack,
    )
    if found_twice := find_duplicate([ShardTable(manifest=manifest, tars=tars, indexes=indexes)]):
        key, first, second = found_twice
        raise PackError(
            f"two samples have the key {key!r}, one in {first} and one in {second}: give each sample its own key, "
            "and write the parts of these workers again"
        )
    return manifest


def _check_folder(folder: DatasetFolder, num_workers: int) -> None:
    out, names = folder.location, whole_names(folder)
    mark = out / UNFINISHED_NAME
    if MANIFEST_NAME in names:
        raise PackError(f"{out} already holds a packed dataset: choose another directory or delete it first")
    if UNFINISHED_NAME in names and mark.read_whole() != _mark(num_workers):
        raise PackError(
            f"{out} holds an unfinished dataset that was not written by {count(num_workers, 'worker')}: delete {out} "
            "or choose another directory"
        )
    foreign = [name for name in names if not _is_of_workers(name)]
    if foreign:
        raise PackError(f"the directory {out} holds {foreign[0]}, which no worker wrote: choose an empty directory")


def _read_records(folder: DatasetFolder) -> list[_WorkerRecord]:
    where = folder.location
    names = [name for name in whole_names(folder) if _RECORD.fullmatch(name)]
    records = [_read_record(where / name) for name in names]
    if not records:
        raise PackError(
            f"{where} holds no finished part of a ShardWriter with worker=: wait until the workers have ended"
        )
    num_workers = records[0].num_workers
    if missing := sorted(set(range(num_workers)) - {record.worker for record in records}):
        listed = ", ".join(map(str, missing[:20]))
        raise PackError(
            f"{where} lacks the parts of {len(missing)} of {count(num_workers, 'worker')} ({listed}): wait until they "
            "have ended, or run them again with overwrite=True"
        )
    for record in records:
        if (record.num_workers, record.classes) != (num_workers, records[0].classes):
            raise PackError(
                f"workers 0 and {record.worker} of {where} had different num_workers or classes: write all parts "
                "with the same values"
            )
    return records


def _read_record(location: Location) -> _WorkerRecord:
    try:
        values = parse_json(location.read_whole())
        values["shards"] = tuple(ShardEntry(**entry) for entry in values["shards"])
        for name in "fields", "classes":
            values[name] = tuple(values[name])
        return _WorkerRecord(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise PackError(f"{location} is damaged ({error!r}): write this worker's part again") from error


def _remove_records(folder: DatasetFolder) -> None:
    folder.remove([name for name in whole_names(folder) if _RECORD.fullmatch(name)])


def _is_of_workers(name: str) -> bool:
    is_shard = re.fullmatch(r"shard-[0-9]{5}-[0-9]{6,}\.tar(\.idx)?", name)
    return name == UNFINISHED_NAME or bool(is_shard) or bool(_RECORD.fullmatch(name))


def _prefix(worker: int) -> str:
    return f"shard-{worker:05d}-"


def _record_name(worker: int) -> str:
    return f".shardio-worker-{worker:05d}.json"


def _mark(num_workers: int) -> bytes:
    return b"written by %d workers" % num_workers
