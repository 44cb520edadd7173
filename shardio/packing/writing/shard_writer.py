"""ShardWriter: write shards from a program that makes samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from shardio.classes import Classes, check_classes
from shardio.errors import PackError
from shardio.packing.destination import UnfinishedDataset, finish
from shardio.packing.folders.choosing import choose_folder
from shardio.packing.jpegs import DEFAULT_QUALITY
from shardio.packing.key_hashes import KeyHashes
from shardio.packing.writing.encoding import ValueEncoder, encode_sample
from shardio.packing.writing.output_folder import new_dataset
from shardio.packing.writing.shard_sequence import ShardLimits, ShardSequence, name_shard
from shardio.packing.writing.worker_parts import WorkerRecord, name_worker_shard, worker_part, write_record
from shardio.shards import Manifest, hash_key, index_location, read_keys
from shardio.storage import StorageOptions, make_direct_access, parse_location
from shardio.values import check_flag, check_integer, check_optional_integer, parse_size
from shardio.whole_writes import naming


class ShardWriter:
    """Writes samples to tar shards with indexes, and the manifest at the end of the ``with`` block.

    >>> with shardio.ShardWriter("out", classes=["cat", "dog"]) as writer:  # doctest: +SKIP
    ...     writer.write({"__key__": "a/1", "jpg": jpeg_bytes, "cls": "dog", "json": {"width": 640}})

    If the block raises, finished shards stay, and readers refuse the directory as unfinished.

    To write from several processes, give each one ``worker=`` and ``num_workers=``. Each writes shards of its own, and
    when all have ended, :func:`shardio.finalize` writes the manifest.

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
        """Write a sample. If it raises TypeError or ValueError, nothing was written, and the writer can go on.

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
        """Return the settings, for the manifest."""
        return {"max_shard_size": self._limits.max_size, "max_shard_samples": self._limits.max_samples}

    def _refuse_second(self, key: str) -> None:
        """Raise PackError if a sample with the same key was written."""
        if not self._hashes.add(hash_key(key)) and (place := self._find(key)) is not None:
            raise PackError(
                f"the key {key!r} of sample {self.num_samples} is also the key of {place}: give each sample a key of "
                "its own"
            )

    def _find(self, key: str) -> str | None:
        """Return where a key was written; None if only the hashes of two keys are equal."""
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
