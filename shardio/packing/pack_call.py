"""Define ``shardio.pack`` and its options, for Python and for the command line.

Each option appears in the signature and the docstring of :func:`pack`, and in :class:`PackOptions` with its text for
``--help``. The code that implements an option receives a PackOptions. The command's options are derived from
PackOptions. If an option affects the output, the manifest records the option's value, and
:func:`~shardio.packing.append` packs more images with the recorded value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from shardio.images import CONVERTIBLE, DEFAULT_MAX_PIXELS, IMAGE_FIELDS, IMAGE_FORMATS, ConvertedFormat
from shardio.packing.samples import DEFAULT_QUALITY
from shardio.packing.sources.labels import ALL_SPLITS, LabelFile
from shardio.packing.sources.source import COLUMNS, SourceKind, describe_option
from shardio.sample import Classes, check_classes
from shardio.shards import Manifest, PackSettings
from shardio.storage import RemoteAccess, StorageOptions, make_direct_access, make_path
from shardio.values import check_choice, check_flag, check_integer, check_text, parse_size

DEFAULT_SHARD_SIZE = 256 * 2**20
"""The default maximum size of a shard in bytes."""

REJECTED_NAME = "rejected.jsonl"
"""The file in a packed dataset that lists the samples that were left out."""

JpegMode = Literal["copy", "tile", "reencode"]
Layout = Literal["auto", "classes", "flat", "pairs"]
OnIncomplete = Literal["raise", "skip", "keep"]
OnChanged = Literal["raise", "skip"]
Engine = Literal["processes", "ray"]
TokenDtype = Literal["uint16", "int32"]
Tokenizer = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Option:
    """The checks of an option, and its form on the command line.

    Attributes:
        help: The option's text in ``--help``.
        panel: The option's panel in ``--help``.
        names: The option's names on the command line, if they differ from its name in Python.
        metavar: The placeholder for the option's value in ``--help``.
        shown_default: The default to show in ``--help``, if the value itself is not informative.
        at_least: The minimum of an integer.
        below: The exclusive upper bound of an integer.
        decides_output: Whether the value affects the packed bytes. An interrupted pack cannot be resumed with a
            different value. The manifest records values other than the default: strings, integers, booleans or None. A
            new option at its default must give the same bytes as before.
        of_iterables: Whether the option applies to iterables of samples. Options that affect the output, except those
            for documents, always apply to iterables.
    """

    help: str
    panel: str = "Options"
    names: tuple[str, ...] = ()
    metavar: str | None = None
    shown_default: str | None = None
    at_least: int | None = None
    below: int | None = None
    decides_output: bool = False
    of_iterables: bool = False


_of_source, _of_labels, _of_run = (partial(Option, panel=panel) for panel in ("Source", "Labels", "Running"))
_of_images, _of_documents, _of_shards = (
    partial(Option, panel=panel, decides_output=True) for panel in ("Images", "Documents", "Shards")
)

_ALWAYS_IDENTIFY = (
    *("max_shard_size", "max_shard_samples", "shuffle_seed", "check", "jpeg", "convert_to", "max_side", "quality"),
    *("to_srgb", "max_pixels"),
)
"""The options that identify an unfinished pack even if they have their default values. Other options that affect the
output identify a pack only if they differ from their defaults. A version of shardio with a new option can therefore
resume the packs of earlier versions."""

OPTIONS_OF_SHARDS = ("max_shard_size", "max_shard_samples", "shuffle_seed")
"""The options that control how samples are distributed among shards. Other options control what each sample holds."""

_ALWAYS_RECORDED = (*OPTIONS_OF_SHARDS, "jpeg")
"""The options that manifests record even if they have their default values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """The checked options of a pack: see :func:`pack`. Integers are Python ints, and sizes are in bytes."""

    max_shard_size: Annotated[int, _of_shards("Maximum size of a shard, such as 256MiB or 1GB.")] = DEFAULT_SHARD_SIZE
    max_shard_samples: Annotated[int | None, _of_shards("Maximum number of samples in a shard.", at_least=1)] = None
    shuffle_seed: Annotated[
        int | None,
        _of_shards("Seed of the packing order, which mixes classes.", at_least=0, below=2**63),
    ] = 0
    rename_dots: Annotated[bool, _of_source("Replace each dot in a file's stem with an underscore.")] = False
    prefix_keys: Annotated[
        bool,
        _of_source(
            "Prefix each key with the name of its tar, for tars whose samples have the same keys: 0001 in "
            "train-3.tar becomes train-3/0001."
        ),
    ] = False
    strict: Annotated[
        bool,
        _of_images(
            "Fail if an image cannot be decoded or its content does not match its suffix.",
            decides_output=False,
            of_iterables=True,
        ),
    ] = False
    check: Annotated[
        bool,
        _of_images(
            "Pack all files as they are, at full speed. By default, each image is decoded first. Images that "
            f"cannot be decoded are left out and listed in OUT/{REJECTED_NAME}.",
            names=("--no-check",),
        ),
    ] = True
    jpeg: Annotated[
        JpegMode,
        _of_images(
            "How to store JPEGs: copy stores them unchanged, tile rewrites them losslessly to make crops decode "
            "faster (progressive JPEGs become baseline JPEGs), and reencode decodes them and stores them upright, "
            "tiled and, with --max-side, smaller."
        ),
    ] = "copy"
    convert_to: Annotated[
        ConvertedFormat | None,
        _of_images(
            "Convert images in other formats to this format. Images in formats such as GIF and AVIF, which are "
            "otherwise not packed, are also converted. Masks stay unchanged."
        ),
    ] = None
    max_side: Annotated[
        int | None,
        _of_images(
            "Maximum length of the longer side, in pixels, for images that are re-encoded or converted.", at_least=1
        ),
    ] = None
    min_side: Annotated[
        int | None,
        _of_images(
            "Maximum length of the shorter side, in pixels, for images that are re-encoded or converted.", at_least=1
        ),
    ] = None
    quality: Annotated[
        int | None,
        _of_images(
            "Quality of JPEGs and WebPs that are re-encoded or converted.",
            shown_default=str(DEFAULT_QUALITY),
            at_least=1,
            below=101,
        ),
    ] = None
    to_srgb: Annotated[
        bool,
        _of_images("Convert the colors of re-encoded or converted images from their ICC profiles to sRGB."),
    ] = False
    max_pixels: Annotated[
        int | None,
        _of_images(
            "Maximum number of pixels of an image. Larger images are left out.",
            shown_default=str(DEFAULT_MAX_PIXELS),
            at_least=1,
        ),
    ] = None
    num_workers: Annotated[
        int | None,
        _of_run(
            "Number of worker processes. Each process writes one shard at a time. The number does not affect the "
            "output. Leave unset to let shardio choose.",
            names=("--num-workers", "--workers"),
            at_least=1,
        ),
    ] = None
    source_kind: Annotated[
        SourceKind,
        _of_source(
            "Kind of SOURCE, if it holds samples of several kinds, such as images and tars. auto recognizes the kind; "
            "documents are texts or tokens; files is a directory of images; saved is a dataset saved by Hugging "
            "Face's datasets; table is a table of paths."
        ),
    ] = "auto"
    layout: Annotated[
        Layout,
        _of_source(
            "Layout of the files. auto recognizes class folders and flat directories; classes treats each folder as "
            "a class; flat creates no classes; pairs combines images/a.jpg and masks/a.png, or a.jpg and a.mask.png, "
            "into one sample."
        ),
    ] = "auto"
    source_split: Annotated[
        str | None,
        _of_source(
            "Split to pack, if SOURCE holds several: train selects the folders images/train and masks/train, the "
            "file train-0.tar, or the rows of a table that have train in the split column. Pass all to pack every "
            "split as one dataset.",
            metavar="NAME|all",
        ),
    ] = None
    on_incomplete: Annotated[
        OnIncomplete,
        _of_source(
            "With --layout pairs, what to do with an image that lacks a file that other images have, such as a "
            "mask: raise an error, skip the image, or keep it with the files that it has."
        ),
    ] = "raise"
    fields: Annotated[
        tuple[str, ...] | None,
        _of_source(
            "Fields to pack from a directory, such as wav,json: each sample must have the first field, and other "
            "files are ignored. By default, a sample is an image and all files that have the same stem.",
            metavar="SUFFIXES",
        ),
    ] = None
    classes: Annotated[
        tuple[str, ...] | None,
        _of_labels(
            "Where to read the class names that define the labels: a text file with one name per line, a packed "
            "directory, or class folders.",
            metavar="FILE|DATASET",
            of_iterables=True,
        ),
    ] = None
    labels: Annotated[
        Path | None,
        _of_labels(
            "CSV, JSON Lines or Parquet file that labels the images, instead of class folders. Labels are class "
            "names or integers. Each image needs a label; rows for other images are allowed.",
            metavar="FILE",
        ),
    ] = None
    image_column: Annotated[
        str | None,
        _of_source("Column with the images, if the source has columns. Optional if only one column has images."),
    ] = None
    label_column: Annotated[
        str | None,
        _of_labels(
            "Column with the labels, in the --labels file or in the source. Optional if the file has exactly two "
            "columns, or the source has only one label column or a column named label."
        ),
    ] = None
    key_column: Annotated[
        str | None,
        _of_labels(
            "Column with keys (cats/0001) or paths (cats/0001.jpg), in the --labels file or in the source. "
            "Optional if the file has exactly two columns. Samples of a source without a key column are numbered."
        ),
    ] = None
    tokenizer: Annotated[
        Tokenizer | str | None,
        _of_documents(
            "Function that returns the tokens of a text. Needed to pack texts as documents for PackedTokens.",
            metavar="FILE.py:FUNCTION",
        ),
    ] = None
    token_column: Annotated[
        str | None,
        _of_documents(
            "Column with the tokens or, with --tokenizer, the texts of documents. Optional if there is only one such "
            "column, or one is named input_ids, tokens, text or content."
        ),
    ] = None
    token_dtype: Annotated[TokenDtype, _of_documents("Type of the tokens of documents.")] = "int32"
    on_changed: Annotated[
        OnChanged,
        _of_run(
            "What to do with a sample whose files change or become unreadable during the pack: raise an error or "
            "skip it."
        ),
    ] = "raise"
    engine: Annotated[
        Engine,
        _of_run(
            "Where to pack: in processes on this machine, or on a Ray cluster, one task for each shard. All "
            "machines of the cluster must see SOURCE and OUT under the same paths."
        ),
    ] = "processes"
    ray_address: Annotated[
        str | None,
        _of_run(
            "With --engine ray: address of the cluster, such as auto. Leave unset to start Ray on this machine.",
            names=("--address",),
        ),
    ] = None
    storage_options: Annotated[
        StorageOptions | None,
        Option("A setting of the object store.", names=("--storage-option",), of_iterables=True),
    ] = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.fields, str):
            raise TypeError(f"fields must be a list of suffixes such as ['wav', 'txt'], got {self.fields!r}")
        for name, (kind, option) in kinds_of_options().items():
            object.__setattr__(self, name, _check(name, getattr(self, name), kind, option))
        for name in () if self.does_encode else ("max_side", "min_side", "quality", "to_srgb"):
            if getattr(self, name) not in (None, False):
                raise ValueError(
                    f"{describe_option(name)} applies only with --jpeg reencode (jpeg='reencode') or "
                    "--convert-to (convert_to)"
                )
        if self.max_pixels is not None and not self.check and not self.does_encode:
            raise ValueError("--max-pixels (max_pixels) does not apply with --no-check (check=False)")
        if self.on_incomplete != "raise" and self.layout != "pairs":
            raise ValueError("--on-incomplete (on_incomplete) applies only to --layout pairs (layout='pairs'): omit it")
        if self.source_split == "":
            raise ValueError("--source-split (source_split) is empty: pass the name of a folder, or 'all'")
        if self.fields is not None and not (self.fields and all(self.fields)):
            raise ValueError(f"--fields (fields) must be suffixes such as wav and txt, got {self.fields!r}")

    @property
    def does_encode(self) -> bool:
        """Whether images are re-encoded or converted."""
        return self.jpeg == "reencode" or self.convert_to is not None

    @property
    def access(self) -> RemoteAccess:
        """The settings for access to the destination's object store."""
        return make_direct_access(self.storage_options)

    @property
    def label_file(self) -> LabelFile | None:
        """The file that labels the samples, or None if the source has the labels."""
        if self.labels is None:
            return None
        return LabelFile(
            path=self.labels,
            key_column=self.key_column,
            label_column=self.label_column,
            may_mix_splits=self.source_split == ALL_SPLITS,
        )

    def column_of_source(self, name: str) -> str | None:
        """Return the value of an option that names a column, or None if the column is in the label file."""
        return getattr(self, name) if self.labels is None or name == "image_column" else None

    @property
    def main_fields(self) -> frozenset[str]:
        """The fields whose files each define a sample. Other files with the same stem belong to that sample."""
        if self.fields is not None:
            return frozenset(self.fields[:1])
        return CONVERTIBLE.union(IMAGE_FORMATS) if self.convert_to is not None else frozenset(IMAGE_FORMATS)

    @property
    def description(self) -> str:
        """The main fields in words, for messages about their absence."""
        if self.fields is not None:
            return f".{self.fields[0]} files, which --fields (fields) names first"
        converts = self.convert_to is not None
        others = "" if converts else f"; --convert-to (convert_to) also accepts {', '.join(sorted(CONVERTIBLE))}"
        return f"images that can be packed (supported: {', '.join(IMAGE_FIELDS)}{others})"

    def find_given(self, names: Iterable[str]) -> str | None:
        """Return the first of the named options that differs from its default, or None if none differs."""
        defaults = {each.name: each.default for each in fields(self)}
        values = ((name, self.column_of_source(name) if name in COLUMNS else getattr(self, name)) for name in names)
        return next((name for name, value in values if value != defaults[name]), None)

    def identify(self, classes: Sequence[str]) -> bytes:
        """Return an identifier that differs whenever the options or the class names would give different output."""
        values = self._find_deciding(_ALWAYS_IDENTIFY)
        text = ", ".join(f"{name}={value!r}" for name, value in values.items())
        # Earlier versions wrote the same text, so their packs can be resumed.
        return f"(PackSettings({text}), {tuple(classes)!r})".encode()

    def describe(self, num_tiled: int) -> PackSettings:
        """Return the settings for the manifest, with the number of tiled JPEGs."""
        encoding: PackSettings = {"max_side": self.max_side, "quality": self.quality or DEFAULT_QUALITY}
        settings = self._find_deciding(_ALWAYS_RECORDED) | (encoding if self.does_encode else {})
        return {**settings, "num_tiled": num_tiled}

    def _find_deciding(self, always: Collection[str]) -> dict[str, Any]:
        names = [name for name in deciding_options() if name in always or self.find_given([name])]
        return {name: _record(getattr(self, name)) for name in names}


@cache
def kinds_of_options() -> dict[str, tuple[Any, Option]]:
    """Return the type of each option, and its description."""
    hints = get_type_hints(PackOptions, include_extras=True)
    return {each.name: get_args(hints[each.name]) for each in fields(PackOptions)}


def deciding_options() -> list[str]:
    """Return the names of the options that affect the output."""
    return [name for name, (_, option) in kinds_of_options().items() if option.decides_output]


def _record(value: Any) -> Any:
    """Return an option's value as manifests record it: a function's name, or the value itself."""
    if not callable(value):
        return value
    function: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{function.__module__}:{function.__qualname__}"


def _check_tokenizer(value: object) -> object:
    if not callable(value) and not isinstance(value, str):
        raise TypeError(f"tokenizer must be a function that takes a text, or a name (file.py:function), got {value!r}")
    return value


def _check(name: str, value: Any, kind: Any, option: Option) -> Any:
    if get_origin(kind) in (Union, UnionType):  # Each union includes None.
        if value is None:
            return None
        kind = get_args(kind)[0]
    checks: dict[str, Callable[[Any], Any]] = {
        "max_shard_size": partial(parse_size, name),
        "fields": lambda suffixes: tuple(suffix.lower().removeprefix(".") for suffix in suffixes),
        "classes": check_classes,
        "labels": make_path,
        "tokenizer": _check_tokenizer,
    }
    if name in checks:
        return checks[name](value)
    if kind is bool:
        return check_flag(name, value)
    if kind is int:
        return check_integer(name, value, at_least=option.at_least, below=option.below)
    if kind is str:
        return check_text(name, value)
    return check_choice(name, value, kind) if get_origin(kind) is Literal else value


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
    min_side: int | None = None,
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
    label_column: str | None = None,
    key_column: str | None = None,
    tokenizer: Tokenizer | str | None = None,
    token_column: str | None = None,
    token_dtype: TokenDtype = "int32",
    on_changed: OnChanged = "raise",
    engine: Engine = "processes",
    ray_address: str | None = None,
    storage_options: StorageOptions | None = None,
) -> Manifest:
    """Pack images, or another tool's dataset, into tar shards.

    ``src/class/…/name.jpg`` becomes the members ``class/…/name.jpg`` and ``class/…/name.cls`` of a shard. Files
    with the same stem become additional fields of the sample. If two images have the same stem, each becomes a sample
    whose key ends in its suffix (``class/…/name_png``). Image bytes are copied unchanged unless you set ``jpeg`` or
    ``convert_to``. The same input and settings give the same bytes. Repeat the same call to resume an interrupted pack:
    it keeps finished shards that are unchanged, and packs damaged shards again.

    Args:
        src: A directory of images, another tool's dataset, or an iterable of samples. A directory contains class
            folders with images, or only images. A dataset is a Parquet file or a directory of Parquet files, a dataset
            that Hugging Face's ``datasets`` saved, tars, MDS shards, LitData chunks, an LMDB environment, a CSV or JSON
            Lines file of paths, or documents for :class:`shardio.PackedTokens`. An iterable yields mappings as for
            :meth:`ShardWriter.write`. Samples without ``__key__`` are numbered. Iterables are packed in this process,
            in the order in which they yield samples. A repeated call with an iterable starts again.
        dst: A new or empty directory, the directory of an interrupted pack to resume, or a URL such as
            ``s3://bucket/train``. With a URL, each shard is uploaded when it is complete, without a local copy of the
            dataset.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``. Only a shard with a
            single sample may exceed it. If JPEGs are rewritten, the limit applies to the sizes of the original files.
        max_shard_samples: The maximum number of samples in a shard.
        shuffle_seed: The seed of the packing order, which mixes the classes; None packs in the order of the keys.
        rename_dots: Whether to replace each dot in a file's stem with an underscore.
        prefix_keys: Whether to prefix each key with the name of its tar, for tars whose samples have the same keys:
            ``0001`` in ``train-3.tar`` becomes ``train-3/0001``.
        strict: Whether to raise an error for an image that would be rejected, or whose format does not match its
            suffix.
        check: Whether to decode each image first. Samples with an image that cannot be decoded are left out, and listed
            in ``dst/rejected.jsonl``. Without the check, all files are packed as they are, at full speed.
        jpeg: ``copy`` stores JPEGs unchanged. ``tile`` rewrites JPEGs losslessly to make crops decode faster.
            Progressive JPEGs become baseline JPEGs, and JPEGs that cannot be tiled are stored unchanged. ``reencode``
            decodes each JPEG and stores it upright, tiled and, with ``max_side``, smaller.
        convert_to: The format that images in other formats are converted to: ``jpeg``, ``png``, ``webp``, or ``ppm``
            for uncompressed pixels, which the loader crops without decoding. Images in formats such as GIF and
            AVIF, which are not packed by default, are also converted. Masks and other fields such as ``mask.png`` stay
            unchanged. A shard of converted images may exceed ``max_shard_size``.
        max_side: With ``reencode`` or ``convert_to``, the maximum length of an encoded image's longer side, in pixels.
        min_side: The same for the shorter side.
        quality: With ``reencode`` or ``convert_to``, the quality of encoded JPEGs and WebPs, 1 to 100; by default, 90.
        to_srgb: With ``reencode`` or ``convert_to``, whether to convert the colors of encoded images from their ICC
            profiles to sRGB. By default, the profiles are kept.
        max_pixels: The maximum number of pixels of an image. Larger images are rejected. Defaults to Pillow's limit for
            decompression bombs.
        num_workers: The number of worker processes; 1 starts none. Each process writes one shard at a time. The number
            does not affect the output.
        source_kind: The kind of ``src``, if it holds samples of several kinds: ``files`` for a directory of images, or
            ``lmdb``, ``litdata``, ``mds``, ``parquet``, ``saved`` (by Hugging Face's ``datasets``), ``table`` (of
            paths) or ``tars``. ``auto`` recognizes it. A table that only names or labels images is not a source.
            ``documents`` are files of tokens (``.npy``, ``.safetensors``), or of texts or tokens (``.txt``, ``.jsonl``,
            ``.parquet``), given as a file, a directory or a pattern. ``auto`` recognizes them if all files are ``.npy``
            or ``.safetensors``, or if an option for documents is set, such as ``tokenizer``.
        layout: ``auto`` accepts class folders or a flat directory, and refuses a source that looks different: one
            with splits, or with images and masks. ``classes`` treats each folder as a class, regardless of its
            name. ``flat`` creates no classes. ``pairs`` turns matching files into fields of one sample:
            ``images/a.jpg`` and ``masks/a.png`` become the fields ``jpg`` and ``masks.png``. Files in one folder,
            ``a.jpg`` and ``a.mask.png``, become ``jpg`` and ``mask.png``.
        source_split: The split to pack, if the source holds several. ``train`` selects the folders ``images/train`` and
            ``masks/train``, the files ``train-0.tar`` or ``train-0.parquet``, or the rows of a table that have
            ``train`` in the split column. ``all`` packs all splits as one dataset. Without this option, a source with
            several splits raises an error.
        on_incomplete: With the layout ``pairs``, what to do with an image that lacks a file that other images have,
            such as a mask. ``raise`` stops with an error; ``skip`` leaves the image out; ``keep`` packs the image with
            the files that it has. To read the packed dataset, set ``missing=None``.
        fields: The fields to pack from a directory, such as ``["wav", "json"]``: the suffixes of the files of a sample.
            Each sample must have the first field. Other files are ignored. By default, a sample is an image and all
            files that have the same stem.
        classes: The class names that define the labels, or a dataset or manifest that has class names. For validation
            data, pass the class names of the training data. By default, the classes are the sorted
            names of the class folders.
        labels: A CSV, JSON Lines or Parquet file that labels the images, instead of class folders. Labels are class
            names, or integers, which may be written as ``3.0``. Each image needs a label. Rows for other images are
            allowed.
        image_column: The source's column with the images; by default, the only such column, or ``image``.
        label_column: The column of ``labels`` with the labels; by default, the second of two columns. Without
            ``labels``, the source's column with the labels; by default, the only such column, or ``label``.
        key_column: The column of ``labels`` with keys (``cats/0001``) or paths (``cats/0001.jpg``) below ``src``; by
            default, the first of two columns. Without ``labels``, the source's column with keys; by default, the
            samples are numbered.
        tokenizer: The function that returns the tokens of a text, as a sequence of integers, for packing texts as
            documents. The function is called in worker processes. Pass the function, or its name as
            ``"path/to/file.py:function"`` or ``"package.module:function"``. The manifest records only the name.
        token_column: The column with the tokens of documents or, with ``tokenizer``, their texts; by default, the only
            such column, or the first of ``input_ids``, ``tokens``, ``text`` and ``content``.
        token_dtype: The type of the tokens of documents, ``uint16`` or ``int32``. A token that does not fit raises an
            error.
        on_changed: What to do with a sample whose files change or become unreadable during the pack. ``raise`` stops
            with an error that names the files; ``skip`` leaves the sample out.
        engine: ``processes`` packs on this machine. ``ray`` packs on a Ray cluster, one task for each shard. All
            machines of the cluster must see ``src`` and ``dst`` under the same paths.
        ray_address: The address of the cluster; by default, Ray is started on this machine.
        storage_options: Settings of the object store of ``dst``, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of the packed dataset.

    Raises:
        PackError: If the source cannot be packed or changes during the pack, or the destination holds anything other
            than an interrupted run of this pack.
        OSError: If an object store denies access, or cannot be reached.
        TypeError: If ``classes`` is neither a list of names nor an object with class names, or if an argument that must
            be an integer is not an integer.
        ValueError: If a setting is out of range.
    """
    options = PackOptions(**{name: value for name, value in locals().items() if name not in ("src", "dst")})
    from shardio.packing.packer import pack_iterable, pack_source  # The packer imports this module.

    if isinstance(src, str | os.PathLike):
        result = pack_source(make_path(src), dst, options)
    else:
        result = pack_iterable(src, dst, options)
    result.warn(str(src) if isinstance(src, str | os.PathLike) else "the iterable")
    return result.manifest
