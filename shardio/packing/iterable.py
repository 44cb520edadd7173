"""Pack the samples of an iterable, in its order and in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardio.errors import PackError
from shardio.packing.folders.choosing import choose_folder
from shardio.packing.jpegs import DEFAULT_QUALITY, describe_jpegs
from shardio.packing.plan import PackSettings
from shardio.packing.preparing import Preparation
from shardio.packing.results import PackResult, write_rejected
from shardio.packing.sources.files import FileProblem
from shardio.packing.writing.encoding import ValueEncoder, encode_sample
from shardio.packing.writing.output_folder import holds_unfinished
from shardio.packing.writing.shard_writer import ShardWriter
from shardio.sample import Sample
from shardio.storage import StorageOptions, make_direct_access, parse_location


class _Given:
    """A sample of an iterable: see :class:`~shardio.packing.sources.source.SourceSample`."""

    def __init__(self, sample: Sample) -> None:
        self.key = sample.key
        self._sample = sample

    def read(self) -> Sample:
        return self._sample

    def problem(self, field: str, what: str) -> FileProblem:
        return FileProblem(Path(f"{self.key}.{field}"), what)


class _Writer(ShardWriter):
    """A ShardWriter whose manifest says how the images were prepared."""

    def __init__(
        self, out: str | os.PathLike[str], settings: PackSettings, preparation: Preparation, **options: Any
    ) -> None:
        super().__init__(out, **options)
        self._settings, self._preparation = settings, preparation

    def _describe(self) -> dict[str, Any]:
        jpegs = describe_jpegs(self._settings, self._preparation.findings.jpegs)
        return {**super()._describe(), "shuffle_seed": None, **jpegs}


def pack_iterable(
    samples: Iterable[Mapping[str, Any]],
    dst: str | os.PathLike[str],
    settings: PackSettings,
    *,
    classes: tuple[str, ...] = (),
    strict: bool = False,
    storage_options: StorageOptions | None = None,
) -> PackResult:
    """Pack the samples of an iterable, or of a sequence, in its order.

    An interrupted call cannot be resumed: repeat it, and it starts again.

    Args:
        samples: Mappings as for :meth:`shardio.ShardWriter.write`. Without ``__key__``, samples are numbered.
        dst: A new or empty directory, or that of an interrupted call.
        settings: The settings of the pack.
        classes: The class names that define the labels.
        strict: Whether an image that would be rejected, or whose format does not match its field, is an error.
        storage_options: Settings of the object store that the dataset is written to.

    Raises:
        PackError: If the directory cannot be used, two samples have the same key, or nothing is packed.
        TypeError: If a sample is not a mapping, or a field cannot hold its value.
        ValueError: If a key, the name of a field or a value is invalid.
    """
    preparation = Preparation(settings, "", strict=strict)
    encoder = ValueEncoder(classes=classes, quality=settings.quality or DEFAULT_QUALITY)
    out = parse_location(dst, make_direct_access(storage_options))
    writer = _Writer(
        dst,
        settings,
        preparation,
        max_shard_size=settings.max_shard_size,
        max_shard_samples=settings.max_shard_samples,
        classes=classes or None,
        overwrite=holds_unfinished(choose_folder(out)),
        storage_options=storage_options,
    )
    with writer:
        for number, sample in enumerate(_iterate(samples)):
            if not isinstance(sample, Mapping):
                raise TypeError(
                    f"sample {number} is a {type(sample).__name__}: an iterable must yield mappings such as "
                    "{'__key__': 'cats/1', 'jpg': …, 'cls': 0}"
                )
            encoded = encode_sample(encoder, {"__key__": f"{number:08d}", **sample})
            stored = preparation.prepare(_Given(encoded), encoded)
            if stored is not None:
                writer.write({"__key__": stored.key, **stored.fields})
        found = preparation.findings
        if not writer.num_samples and found.rejected:
            raise PackError(f"no sample can be packed: {found.rejected[0].file} {found.rejected[0].reason}")
        write_rejected(out, found.rejected)
    assert writer.manifest is not None, "the block has ended"
    return PackResult(
        manifest=writer.manifest,
        jpegs=found.jpegs,
        converted=found.converted,
        clipped=found.clipped,
        mislabelled=sorted(found.mislabelled),
        rejected=sorted(found.rejected),
    )


def _iterate(samples: Any) -> Iterator[Any]:
    """Yield the samples of an iterable, or of a dataset that has only a length and an index."""
    if hasattr(type(samples), "__iter__") or not hasattr(type(samples), "__len__"):
        return iter(samples)
    return (samples[number] for number in range(len(samples)))
