"""``shardio.pack``: check the arguments, pack directories or iterables, and log findings that need attention."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardio.errors import PackError
from shardio.images import ConvertedFormat, describe_other_images
from shardio.packing.executors import Engine
from shardio.packing.folders import choose_folder
from shardio.packing.output_folder import holds_unfinished
from shardio.packing.packer import RunOptions, pack_source
from shardio.packing.plan import JpegMode, PackSettings
from shardio.packing.preparing import DEFAULT_QUALITY, Preparation, describe_jpegs
from shardio.packing.shard_job import OnChanged, PackResult, write_rejected
from shardio.packing.shard_writer import ShardWriter, ValueEncoder, encode_sample
from shardio.packing.sources.files import FileProblem
from shardio.packing.sources.layouts import Layout, OnIncomplete
from shardio.packing.sources.source import SourceKind, make_options
from shardio.sample import Classes, Sample, check_classes
from shardio.shards import Manifest
from shardio.storage import StorageOptions, make_direct_access, make_path, parse_location
from shardio.values import check_choice, check_optional_integer, parse_size

DEFAULT_SHARD_SIZE = 256 * 2**20
"""The default maximum size of a shard in bytes."""

logger = logging.getLogger(__name__)


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

    An interrupted call cannot be resumed. A repeated call starts again.

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


def pack(
    src: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    dst: str | os.PathLike[str],
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    max_shard_samples: int | None = None,
    shuffle_seed: int | None = 0,
    rename_dots: bool = False,
    prefix_keys: bool = False,
    strict: bool = False,
    check: bool = True,
    jpeg: JpegMode = "copy",
    convert_to: ConvertedFormat | None = None,
    max_side: int | None = None,
    quality: int | None = None,
    to_srgb: bool = False,
    max_pixels: int | None = None,
    num_workers: int | None = None,
    source_kind: SourceKind = "auto",
    layout: Layout = "auto",
    source_split: str | None = None,
    on_incomplete: OnIncomplete = "raise",
    fields: Sequence[str] | None = None,
    classes: Classes | None = None,
    labels: str | os.PathLike[str] | None = None,
    image_column: str | None = None,
    key_column: str | None = None,
    label_column: str | None = None,
    on_changed: OnChanged = "raise",
    engine: Engine = "processes",
    ray_address: str | None = None,
    storage_options: StorageOptions | None = None,
) -> Manifest:
    """Pack images, or the dataset of another tool, into tar shards.

    ``src/class/…/name.jpg`` becomes the members ``class/…/name.jpg`` and ``class/…/name.cls`` of a shard. Files
    with the same stem become further fields of the sample. If two images have the same stem, each is a sample, whose
    key ends in its suffix (``class/…/name_png``). Image bytes are copied unchanged unless ``jpeg`` or ``convert_to``
    says otherwise. The same input and settings give the same bytes. Repeat the same call to resume an interrupted pack:
    it keeps finished shards that are unchanged, and packs damaged ones again.

    Args:
        src: A directory: class folders with images, or a flat directory of images. Or the dataset of another tool: a
            Parquet file or a directory of them, a dataset that Hugging Face's ``datasets`` saved, tars, MDS shards,
            LitData chunks, an LMDB environment, or a CSV or JSON Lines file of paths. Or an iterable of samples, or a
            sequence, which are mappings as for :meth:`ShardWriter.write`; without ``__key__``, they are numbered. An
            iterable is packed in its order and in this process, and an interrupted call starts again.
        dst: A new or empty directory, or that of an interrupted pack to resume. Or a URL such as
            ``s3://bucket/train``: then shards are uploaded when they are complete, without a local copy of the dataset.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``. Only a shard with a
            single sample may exceed it. If JPEGs are rewritten, the limit applies to the sizes of the original files.
        max_shard_samples: The maximum number of samples in a shard.
        shuffle_seed: The seed of the packing order, which mixes the classes; None packs in the order of the keys.
        rename_dots: Whether to replace each dot in a file's stem with an underscore.
        prefix_keys: Whether to put the name of its tar before each key of a source of tars, if samples of several tars
            have the same key: ``0001`` of ``train-3.tar`` becomes ``train-3/0001``.
        strict: Whether to raise an error for an image that would be rejected, or whose format does not match its
            suffix.
        check: Whether to decode each image first. Samples with an image that cannot be decoded are then left out, and
            listed in ``dst/rejected.jsonl``. Without the check, all files are packed as they are, at full speed.
        jpeg: ``copy`` stores JPEGs unchanged. ``tile`` rewrites them losslessly so that crops decode faster; JPEGs
            that cannot be tiled are stored unchanged. ``reencode`` decodes each JPEG and stores it upright, tiled and,
            with ``max_side``, smaller.
        convert_to: The format that images in other formats are converted to: ``jpeg``, ``png`` or ``webp``. This
            includes images in formats such as GIF and AVIF, which are not packed otherwise. Masks and other fields such
            as ``mask.png`` stay as they are.
        max_side: With ``reencode`` or ``convert_to``, the maximum length of the longer side of an image that is
            encoded, in pixels.
        quality: With ``reencode`` or ``convert_to``, the quality of JPEGs and WebPs that are encoded, 1 to 100; by
            default, 90.
        to_srgb: With ``reencode`` or ``convert_to``, whether the colours of an image that is encoded are converted from
            its ICC profile to sRGB. Otherwise, the profile is kept.
        max_pixels: Images with more pixels are rejected; by default, Pillow's limit for decompression bombs.
        num_workers: The number of worker processes; 1 for none. Each writes one shard at a time. The number does not
            affect the output.
        source_kind: The kind of ``src``, if it holds samples of several kinds: ``files`` for a directory of images, or
            ``lmdb``, ``litdata``, ``mds``, ``parquet``, ``saved`` (by Hugging Face's ``datasets``), ``table`` (of
            paths) or ``tars``. ``auto`` recognises it. A table that only names or labels images is not a source.
        layout: ``auto`` accepts class folders or a flat directory, and refuses a source that looks different: one
            with splits, or with images and masks. ``classes`` makes each folder a class, whatever its name. ``flat``
            makes no classes. ``pairs`` turns matching files into fields of one sample: ``images/a.jpg`` and
            ``masks/a.png`` become its fields ``jpg`` and ``masks.png``; in one folder, ``a.jpg`` and ``a.mask.png``
            become ``jpg`` and ``mask.png``.
        source_split: The split to pack, if the source holds several: with ``train``, the folders ``images/train`` and
            ``masks/train``, the files ``train-0.tar`` or ``train-0.parquet``, or the rows of a table that have
            ``train`` in the column of splits. ``all`` packs all splits as one dataset, which is refused otherwise.
        on_incomplete: With the layout ``pairs``, the treatment of an image that lacks a file, such as a mask, which
            others have. ``raise`` stops with an error; ``skip`` leaves the image out; ``keep`` packs it with the files
            that it has (read such datasets with ``missing=None``).
        fields: The fields to pack from a directory, such as ``["wav", "json"]``: the suffixes of the files of a sample.
            Each sample must have the first. Other files are ignored. By default, samples are images, with all files
            that have the same stem.
        classes: The class names that define the labels, or a dataset or manifest that has class names. For validation
            data, pass those of the training data. By default, the sorted names of the class folders.
        labels: A CSV, JSON Lines or Parquet file that labels the images, instead of class folders. Labels are class
            names, or integers, which may be written as ``3.0``. Each image needs a label. Rows for other images are
            allowed.
        image_column: The column of the source with the images; by default, the only one, or ``image``.
        key_column: The column of ``labels`` with keys (``cats/0001``) or paths (``cats/0001.jpg``) below ``src``; by
            default, the first of two columns. Without ``labels``, the column of the source with keys; by default, the
            samples are numbered.
        label_column: The column of ``labels`` with the labels; by default, the second of two columns. Without
            ``labels``, the column of the source with the labels; by default, the only one, or ``label``.
        on_changed: The treatment of a sample whose files change or become unreadable during the pack. ``raise`` stops
            with an error that names the files; ``skip`` leaves the sample out.
        engine: ``processes`` packs on this machine. ``ray`` packs on a Ray cluster, one task for each shard. All
            machines of the cluster must see ``src`` and ``dst`` under these paths.
        ray_address: The address of the cluster; by default, Ray is started on this machine.
        storage_options: Settings of the object store of ``dst``, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of the packed dataset.

    Raises:
        PackError: If the source cannot be packed or changes during the pack, or the destination
            holds anything but an interrupted run of this pack.
        OSError: If an object store denies access, or cannot be reached.
        TypeError: If ``classes`` is neither a list of names nor something that has class names, or if an argument that
            must be an integer is not one.
        ValueError: If a setting is out of range.
    """
    check_choice("source_kind", source_kind, SourceKind)
    check_choice("layout", layout, Layout)
    check_choice("on_incomplete", on_incomplete, OnIncomplete)
    check_choice("on_changed", on_changed, OnChanged)
    check_choice("engine", engine, Engine)
    num_workers = check_optional_integer("num_workers", num_workers, at_least=1)
    settings = PackSettings(
        max_shard_size=parse_size("max_shard_size", max_shard_size),
        max_shard_samples=max_shard_samples,
        shuffle_seed=shuffle_seed,
        jpeg=jpeg,
        convert_to=convert_to,
        max_side=max_side,
        quality=quality,
        to_srgb=to_srgb,
        max_pixels=max_pixels,
        check=check,
    )
    names = None if classes is None else check_classes(classes)
    if not isinstance(src, str | os.PathLike):
        _refuse_options_of_files(
            source_kind=source_kind != "auto",
            layout=layout != "auto",
            source_split=source_split is not None,
            on_incomplete=on_incomplete != "raise",
            fields=fields is not None,
            rename_dots=rename_dots,
            prefix_keys=prefix_keys,
            labels=labels is not None,
            image_column=image_column is not None,
            label_column=label_column is not None,
            key_column=key_column is not None,
            on_changed=on_changed != "raise",
            num_workers=num_workers not in (None, 1),
            engine=engine != "processes",
            ray_address=ray_address is not None,
        )
        result = pack_iterable(src, dst, settings, classes=names or (), strict=strict, storage_options=storage_options)
        return _finish(result, "the iterable")
    source = make_options(
        source_kind=source_kind,
        layout=layout,
        source_split=source_split,
        on_incomplete=on_incomplete,
        fields=fields,
        converts=convert_to is not None,
        rename_dots=rename_dots,
        prefix_keys=prefix_keys,
        classes=names,
        labels=labels,
        image_column=image_column,
        label_column=label_column,
        key_column=key_column,
    )
    run = RunOptions(
        strict=strict,
        on_changed=on_changed,
        num_workers=num_workers,
        engine=engine,
        ray_address=ray_address,
        access=make_direct_access(storage_options),
    )
    return _finish(pack_source(make_path(src), make_path(dst), settings, source, run), src)


def _refuse_options_of_files(**are_given: bool) -> None:
    for name, is_given in are_given.items():
        if is_given:
            raise ValueError(f"{name} does not apply to an iterable of samples: omit it")


def _finish(result: PackResult, src: str | os.PathLike[str]) -> Manifest:
    """Log findings that need attention, and return the manifest."""
    if result.clipped:
        logger.warning("%s: %s", src, result.describe_clipped())
    for problem in result.mislabelled:
        logger.warning("%s %s: packed anyway", problem.path, problem.what)
    for sample in result.rejected:
        logger.warning("%s: %s %s: left out", src, sample.file, sample.reason)
    if left_out := describe_other_images(result.ignored):
        logger.warning("%s: %s", src, left_out)
    if result.suffixed:
        logger.warning("%s: %s", src, result.describe_suffixed())
    for problem in result.changed:
        logger.warning("%s %s: its sample was left out", problem.path, problem.what)
    for problem in result.damaged_shards:
        logger.warning("%s %s: packed again", problem.path, problem.what)
    for problem in result.jpegs.damaged:
        logger.warning("%s %s: packed unchanged", problem.path, problem.what)
    return result.manifest
