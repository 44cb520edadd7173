"""Write shards from a program that makes samples, with :class:`ShardWriter`."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from shardio.errors import PackError
from shardio.files import naming
from shardio.packing.folders import choose_folder
from shardio.packing.names import KeyHashes, check_key, check_name
from shardio.packing.output_folder import WorkerRecord, name_worker_shard, new_dataset, worker_part, write_record
from shardio.packing.packer import UnfinishedDataset, finish
from shardio.packing.plan import name_shard
from shardio.packing.preparing import DEFAULT_QUALITY
from shardio.sample import Classes, Sample, check_classes
from shardio.shards import (
    END,
    MAX_MEMBER,
    TOO_LARGE,
    Manifest,
    ShardEntry,
    hash_key,
    index_location,
    join_name,
    read_keys,
    size_in_tar,
)
from shardio.shards.shard import write_index_of
from shardio.shards.tar import TarWriter
from shardio.storage import Location, StorageOptions, make_direct_access, parse_location
from shardio.values import check_flag, check_integer, check_optional_integer, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEncoder:
    """Encodes values by the last suffix of the field's name. Bytes are stored as they are.

    Attributes:
        classes: The class names by label; empty if labels have no names.
        quality: The quality of JPEG and WebP images, 1 to 100.
    """

    classes: tuple[str, ...] = ()
    quality: int = DEFAULT_QUALITY

    def encode(self, key: str, field: str, value: Any) -> bytes:
        """Return the content of a field.

        Args:
            key: The sample's key, for messages.
            field: The field's name.
            value: Bytes, or a value that the field's last suffix allows.

        Raises:
            TypeError: If the field cannot hold the value.
            ValueError: If the value is out of range, or the content is too large.
        """
        content = self._encode(key, field, value)
        if len(content) > MAX_MEMBER:
            raise ValueError(f"field {field!r} of sample {key!r} has {len(content)} bytes, {TOO_LARGE}")
        return content

    def _encode(self, key: str, field: str, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        suffix = field.rpartition(".")[2]
        if suffix in _PICKLES:
            raise TypeError(
                f"field {field!r} of sample {key!r} would be pickled, and a pickle can run any code when it is read: "
                "store the value as json, npy or txt, or pass bytes that you have pickled"
            )
        if suffix not in _ENCODERS:
            _refuse(key, field, value, f"pass bytes, or use one of the suffixes {', '.join(_ENCODERS)}")
        encode, takes = _ENCODERS[suffix]
        try:
            return encode(self, suffix, value)
        except TypeError as error:
            _refuse(key, field, value, f"pass {takes}, or bytes", error)
        except ValueError as error:
            raise ValueError(f"field {field!r} of sample {key!r}: {error}") from error


def encode_sample(encoder: ValueEncoder, sample: Mapping[str, Any]) -> Sample:
    """Return a sample with the contents of its fields.

    Args:
        encoder: Encodes the values.
        sample: The key, as ``__key__``, and the values by field. Other names that start with ``__`` are ignored.

    Raises:
        TypeError: If a field cannot hold its value.
        ValueError: If the key or the name of a field would be read differently, or a value is out of range.
    """
    if "__key__" not in sample:
        raise ValueError(f"a sample needs '__key__', a name such as 'cats/0001', got {', '.join(sample)}")
    key = check_key(sample["__key__"])
    names = [name for name in sample if not str(name).startswith("__")]
    if not names:
        raise ValueError(f"sample {key!r} has no fields: add one, such as 'jpg'")
    fields = {name: encoder.encode(*check_name(key, name), sample[name]) for name in names}
    return Sample(key=key, fields=dict(sorted(fields.items())), origin=key)


def _refuse(key: str, field: str, value: Any, remedy: str, cause: Exception | None = None) -> NoReturn:
    of_array = f" of {value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else ""
    why = f" ({cause})" if cause is not None and str(cause) else ""
    raise TypeError(
        f"field {field!r} of sample {key!r} cannot hold a value of type {type(value).__name__}{of_array}{why}: {remedy}"
    ) from cause


def _encode_image(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    """Encode uint8 [height, width, 3], or for PNG also uint16 and [height, width]."""
    if not isinstance(value, np.ndarray) or value.dtype not in (np.uint8, np.uint16):
        raise TypeError
    if not (value.ndim == 3 and value.shape[2] == 3) and not (value.ndim == 2 and suffix == "png"):
        raise TypeError
    if value.dtype == np.uint16:
        if suffix != "png":
            raise TypeError
        from shardio.images import encode_png

        return encode_png(value)
    from PIL import Image

    file = io.BytesIO()
    options: dict[str, Any] = {} if suffix == "png" else {"quality": encoder.quality}
    Image.fromarray(np.ascontiguousarray(value)).save(file, _PILLOW_FORMATS[suffix], **options)
    return file.getvalue()


def _encode_label(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    classes = encoder.classes
    if isinstance(value, str):
        if not classes:
            raise TypeError("class names need classes=")
        if value not in classes:
            raise ValueError(f"{value!r} is not one of the {len(classes)} classes: add it to classes=")
        return b"%d" % classes.index(value)
    return b"%d" % check_integer("the label", value, at_least=0, below=len(classes) or None)


def _encode_json(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    return json.dumps(value).encode()


def _encode_text(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    return value.encode()


def _encode_array(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()


_PILLOW_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}

_PICKLES = {"pkl", "pickle", "pyd", "pth", "pt"}
"""Suffixes under which other tools pickle values."""

_IMAGE = "an array, uint8 [height, width, 3]"

_ENCODERS: Mapping[str, tuple[Callable[[ValueEncoder, str, Any], bytes], str]] = {
    "jpg": (_encode_image, _IMAGE),
    "jpeg": (_encode_image, _IMAGE),
    "png": (_encode_image, "an array, uint8 or uint16, [height, width, 3] or [height, width]"),
    "webp": (_encode_image, _IMAGE),
    "cls": (_encode_label, "an integer, or a class name if you pass classes="),
    "json": (_encode_json, "a value that json.dumps accepts"),
    "txt": (_encode_text, "a string"),
    "npy": (_encode_array, "a numpy array without Python objects"),
}
"""For each suffix, a function that encodes a value, and a description of the values that it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """The limits of a shard.

    Attributes:
        max_size: The maximum size in bytes. Only a shard with a single sample may exceed it.
        max_samples: The maximum number of samples; None for no limit.
    """

    max_size: int
    max_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_size", check_integer("max_shard_size", self.max_size, at_least=1))
        max_samples = check_optional_integer("max_shard_samples", self.max_samples, at_least=1)
        object.__setattr__(self, "max_samples", max_samples)


class ShardSequence:
    """Writes samples to shards, and begins a new shard when one is full. One shard is open at a time.

    Shards are cut as a pack cuts them: the same samples with the same limits give the same bytes. A shard and its
    index appear whole, the index last.

    Attributes:
        entries: The finished shards.
        fields: The names of their fields.

    Args:
        folder: The folder to write the shards to.
        limits: The limits of each shard.
        make_name: Returns the name of the shard with a number.
    """

    def __init__(self, folder: Location, limits: ShardLimits, make_name: Callable[[int], str] = name_shard) -> None:
        self._folder, self._limits, self._make_name = folder, limits, make_name
        self.entries = list[ShardEntry]()
        self.fields = set[str]()
        self._writer: TarWriter | None = None
        self._open = ExitStack()

    @property
    def current(self) -> Location:
        """The location of the shard that has the last sample, or of the first shard."""
        return self._folder / self._make_name(len(self.entries))

    def add(self, sample: Sample) -> None:
        """Write a sample.

        Raises:
            OSError: If it cannot be written.
        """
        if self._writer is not None and not self._has_room(self._writer, sample):
            self.end_shard()
        if self._writer is None:
            self._writer = TarWriter(self._open.enter_context(self.current.write_whole()))
        self._writer.add(sample)

    def end_shard(self) -> None:
        """Finish the current shard, if it has samples.

        Raises:
            OSError: If it cannot be written.
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
        """Remove the written part of the current shard, because of an error."""
        self._writer = None
        with suppress(OSError):  # Closing the file may fail as the write did.
            self._open.__exit__(type(error), error, error.__traceback__)

    def keys_of_current(self) -> Iterator[str]:
        """Yield the keys of the samples in the current shard."""
        return (stored.key for stored in self._writer.stored) if self._writer is not None else iter(())

    def _has_room(self, writer: TarWriter, sample: Sample) -> bool:
        size = sum(size_in_tar(join_name(sample.key, name), len(content)) for name, content in sample.fields.items())
        fits = writer.num_bytes + size + len(END) <= self._limits.max_size
        return fits and len(writer.stored) < (self._limits.max_samples or len(writer.stored) + 1)


class ShardWriter:
    """Writes samples to tar shards with indexes, and the manifest at the end of the ``with`` block.

    >>> with shardio.ShardWriter("out", classes=["cat", "dog"]) as writer:  # doctest: +SKIP
    ...     writer.write({"__key__": "a/1", "jpg": jpeg_bytes, "cls": "dog", "json": {"width": 640}})

    If the block raises, finished shards stay, and readers refuse the directory as unfinished.

    To write from several processes, give each one ``worker=`` and ``num_workers=``. Each process writes its own shards.
    When all have ended, :func:`shardio.finalize` writes the manifest.

    Args:
        out: A new or empty directory, or the URL of one in an object store, such as ``s3://bucket/train``.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``. Only a shard with a
            single sample may exceed it.
        max_shard_samples: The maximum number of samples in a shard.
        classes: The class names that define the labels, or a dataset that has class names.
        quality: The quality of arrays that are stored as JPEG or WebP, 1 to 100.
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
        """The number of samples that have been written."""
        self.manifest: Manifest | None = None
        """The manifest, after the ``with`` block; None for one of several workers."""

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample. After a TypeError or a ValueError, nothing was written, and the writer can be used further.

        Args:
            sample: The key, as ``__key__``, and the fields. Bytes are stored as they are. Other values are encoded by
                the field's last suffix: arrays, uint8 [height, width, 3], as ``jpg``, ``png`` or ``webp``, and also
                uint16 and [height, width] as ``png``; a label as ``cls``, an integer or the name of one of
                ``classes``; anything that ``json.dumps`` accepts as ``json``; a string as ``txt``; an array as ``npy``.
                Other names that start with ``__`` are ignored.

        Raises:
            PackError: If an earlier sample has the same key, or an earlier write has failed.
            TypeError: If a field cannot hold its value.
            ValueError: If the key or the name of a field would be read differently, or a value is out of range.
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
            raise RuntimeError("this ShardWriter has been used: create another one")
        if self._worker is None or self._num_workers is None:
            dataset = new_dataset(self._folder, overwrite=self._overwrite)
            self._unfinished = self._resources.enter_context(dataset)
            make_name = name_shard
        else:
            part = worker_part(self._folder, self._worker, self._num_workers, overwrite=self._overwrite)
            self._resources.enter_context(part)
            make_name = partial(name_worker_shard, self._worker)
        self._hashes = KeyHashes()
        self._sequence = ShardSequence(self._out, self._limits, make_name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sequence, self._sequence = self._sequence, None
        assert sequence is not None, "__enter__ has made it"
        with self._resources:
            try:
                if error is not None:
                    raise error
                self._finish(sequence)
            except BaseException as failure:
                sequence.discard(failure)
                raise

    def _describe(self) -> dict[str, Any]:
        return {"max_shard_size": self._limits.max_size, "max_shard_samples": self._limits.max_samples}

    def _refuse_second(self, key: str) -> None:
        """Raise PackError if a sample with the same key was written."""
        if not self._hashes.add(hash_key(key)) and (place := self._find(key)) is not None:
            raise PackError(
                f"the key {key!r} of sample {self.num_samples} is also the key of {place}: give each sample a key of "
                "its own"
            )

    def _find(self, key: str) -> str | None:
        """Return the place of an earlier sample with a key; None if only the hashes of two keys are equal."""
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
            assert self._worker is not None, "one of several"
            assert self._num_workers is not None, "as worker"
            record = WorkerRecord(
                worker=self._worker,
                num_workers=self._num_workers,
                shards=entries,
                fields=fields,
                classes=self._classes,
                pack=pack,
            )
            write_record(self._out, record)
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
