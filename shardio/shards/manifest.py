"""Read and write manifests, interpret file names, and export indexes for other tools."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.files import PARTIAL_SUFFIX
from shardio.shards.index import INDEX_SUFFIX, IndexHeader, read_columns, read_hashes, read_header
from shardio.shards.tar import BLOCK, LABEL_FIELD, join_name
from shardio.storage import Location, link_or_copy, map_locations
from shardio.values import check_choice, check_flag, count, format_bytes, parse_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter


MANIFEST_FORMAT = 1

MANIFEST_NAME = "shardio.json"

UNFINISHED_NAME = f".shardio-pack{PARTIAL_SUFFIX}"
"""The name of the file, in an unfinished pack's directory, that holds the digest of the plan."""

NUM_EXAMINED = 8
"""The number of shards whose labels are compared to find out whether a dataset is sorted by class."""

_NAME = r"[^\0\ud800-\udc7f\udd00-\udfff]*"
"""Matches names without NUL and without surrogates that do not represent a byte: file names contain neither."""

_OF = re.compile(r"(.*?)([0-9]+)([-_]of[-_])([0-9]{1,6})(.*)")
"""Matches a file name that contains the number of files, such as ``train-00000-of-00041.parquet``."""

_SPLITS = frozenset(
    ("train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval", "evaluation", "holdout")
)
"""The usual names of splits, in lowercase."""

_WITH_SPLITS = {"set", "data", "image", "images", "img", "split", "a", "b"}
"""Words that may accompany one of ``_SPLITS`` in the name of a split."""

_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(sorted(_SPLITS))})(?![a-z])", re.IGNORECASE)

ENERGON_FOLDER = ".nv-meta"
"""The name of the folder with Megatron-Energon's files."""

_IMAGES = ("jpg", "jpeg", "png", "webp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A shard: its file name, size in bytes, number of samples, and xxh3-128 in hexadecimal."""

    name: str
    num_bytes: int
    num_samples: int
    digest: str

    def __post_init__(self) -> None:
        is_path = os.path.basename(self.name) != self.name  # noqa: PTH119  # A Path for each of many shards takes long.
        if self.name in ("", ".", "..") or is_path or not re.fullmatch(_NAME, self.name):
            raise ValueError(f"a shard's name must be a file name without a folder, got {self.name!r}")
        if self.num_bytes < 0 or self.num_samples < 0:
            raise ValueError(f"{self.name} has a negative size or number of samples")


def make_entry(name: str, header: IndexHeader) -> ShardEntry:
    """Return the entry of a shard, given the header of its index."""
    return ShardEntry(name=name, num_bytes=header.num_bytes, num_samples=header.num_samples, digest=header.digest)


PackSettings = dict[str, str | int | bool | None]
"""The settings in a manifest, by name."""


def describe_pack(settings: PackSettings) -> str:
    """Return the settings in a manifest as text.

    >>> describe_pack({"jpeg": "tile", "max_side": None, "max_shard_size": 2**28, "num_tiled": 7})
    'jpeg tile, max_shard_size 256 MiB'
    """
    texts = {name: str(value) for name, value in settings.items() if value is not None and name != "num_tiled"}
    if isinstance(size := settings.get("max_shard_size"), int):
        texts["max_shard_size"] = format_bytes(size)
    return ", ".join(f"{name} {text}" for name, text in texts.items()) or "unknown: there is no manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a dataset.

    Attributes:
        shards: The dataset's shards, in manifest order.
        fields: The names of the samples' fields, sorted.
        classes: The class names by label, or () if the samples have no classes.
        pack: The settings with which the dataset was packed, or {} for tars that shardio did not pack.
        format: The version of the manifest format.
    """

    shards: tuple[ShardEntry, ...]
    fields: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    pack: PackSettings = field(default_factory=dict)
    format: int = MANIFEST_FORMAT

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """The size of all shards in bytes."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The number of samples in each shard, int64 [shards]."""
        return np.array([shard.num_samples for shard in self.shards], dtype=np.int64)

    @property
    def digest(self) -> str:
        """The dataset's identity: xxh3-128 over the contents of its shards in manifest order, in hexadecimal."""
        contents = "".join(f"{shard.digest} {shard.num_samples}\n" for shard in self.shards)
        return xxhash.xxh3_128_hexdigest(contents.encode())


def write_manifest(location: Location, manifest: Manifest) -> None:
    """Write a manifest atomically."""
    with location.write_whole() as file:
        file.write(json.dumps(asdict(manifest), indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n")


def read_manifest(location: Location) -> Manifest:
    """Read and check a manifest.

    Raises:
        FormatError: If the file is not a manifest of this format. The message says what is wrong and where.
    """
    from pydantic import ValidationError

    content = location.read_whole()
    try:
        values: Any = parse_json(content)
    except ValueError as error:
        raise FormatError(f"the manifest {location} cannot be read: {_explain(content, error)}") from error
    if not isinstance(values, dict) or "format" not in values:
        raise FormatError(
            f"{location} is not a shardio manifest (it has no 'format'): pass a packed directory, its {MANIFEST_NAME}, "
            "or tars"
        )
    version = values["format"]
    if version != MANIFEST_FORMAT:
        raise FormatError(
            f"{location} has manifest format {version!r}, but this version of shardio reads {MANIFEST_FORMAT}: use the "
            "version that wrote it, or pack the dataset again"
        )
    try:
        return _manifest_type().validate_python(values)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise FormatError(
            f"the manifest {location} is damaged: {problems}. Download it or pack the dataset again"
        ) from error


def _explain(content: bytes, error: ValueError) -> str:
    if content.startswith(b"\x1f\x8b"):
        return "it is compressed with gzip: decompress it, or configure the server to send it unchanged"
    if content.lstrip().startswith(b"<"):
        return "it is a web page. Check the URL, and whether you must log in first"
    return str(error)


@cache
def _manifest_type() -> TypeAdapter[Manifest]:
    """Return the validator of manifests. Building the validator takes 1 ms, and importing pydantic takes 0.1 s."""
    from pydantic import TypeAdapter

    return TypeAdapter(Manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """A dataset's manifest and the locations of its files: everything that a reader needs.

    Attributes:
        manifest: The contents of the dataset.
        tars: The location of each shard, in manifest order.
        indexes: The location of each shard's index, in manifest order.
    """

    manifest: Manifest
    tars: tuple[Location, ...]
    indexes: tuple[Location, ...]

    @property
    def is_local(self) -> bool:
        """Whether every shard is a local file."""
        return all(tar.store.is_local for tar in self.tars)


def join_tables(tables: Sequence[ShardTable]) -> ShardTable:
    """Return one table with the shards of several datasets, one dataset after another, for reading."""
    manifests = [table.manifest for table in tables]
    return ShardTable(
        manifest=Manifest(
            shards=tuple(shard for manifest in manifests for shard in manifest.shards),
            fields=tuple(sorted({field for manifest in manifests for field in manifest.fields})),
        ),
        tars=tuple(tar for table in tables for tar in table.tars),
        indexes=tuple(index for table in tables for index in table.indexes),
    )


def is_sorted_by_class(table: ShardTable) -> bool:
    """Return whether neighboring samples have the same class much more often than two random samples would.

    The labels of some shards are compared by their hashes in the indexes, unless the manifest says that the dataset was
    packed in random order.
    """
    if table.manifest.pack.get("shuffle_seed") is not None or LABEL_FIELD not in table.manifest.fields:
        return False
    chosen = np.unique(np.linspace(0, len(table.indexes) - 1, NUM_EXAMINED).astype(np.int64)).tolist()
    columns = map_locations(partial(read_hashes, field=LABEL_FIELD), [table.indexes[shard] for shard in chosen])
    hashes = np.concatenate(columns)
    num_pairs = sum(max(len(column) - 1, 0) for column in columns)
    num_equal = sum(np.count_nonzero(column[1:] == column[:-1]) for column in columns)
    counts = np.unique(hashes, return_counts=True)[1]
    chance = float((counts / max(len(hashes), 1)) @ (counts / max(len(hashes), 1)))
    # Compare with the probability that two random labels are equal, which is high if a dataset has few classes.
    return num_pairs > 0 and num_equal / num_pairs - chance >= max((1 - chance) / 2, 1e-6)


def find_gaps(names: Iterable[str]) -> list[str]:
    """Return the names that are missing from a series of numbered files, whose names differ in one number.

    If at least half of the names are missing, the gaps are assumed to be intentional, and the list is empty. If names
    contain the number of files (``x-0-of-3.tar``), all files are expected.

    >>> find_gaps(["x-000.tar", "x-001.tar", "x-003.tar"])
    ['x-002.tar']
    >>> find_gaps(["x-0-of-3.tar"])
    ['x-1-of-3.tar', 'x-2-of-3.tar']
    """
    groups = defaultdict[tuple[object, ...], list[list[str]]](list)
    counted = defaultdict[tuple[str, ...], set[str]](set)
    for name in names:
        if (found := _OF.fullmatch(name)) is not None:
            start, number, *rest = found.groups()
            counted[(start, *rest)].add(number)
            continue
        parts = re.split(r"([0-9]+)", name)
        groups[(len(parts), *parts[::2])].append(parts)
    missing = list[str]()
    for (start, of, total, end), numbers in counted.items():
        width, present = len(min(numbers, key=len)), set(map(int, numbers))
        first = int(int(total) in present and 0 not in present)  # Some tools count from 1.
        wanted = (str(number).zfill(width) for number in range(first, first + int(total)))
        missing += [f"{start}{number}{of}{total}{end}" for number in wanted if number not in numbers]
    for group in groups.values():
        varying = [i for i in range(1, len(group[0]), 2) if len({parts[i] for parts in group}) > 1]
        if len(varying) == 1:
            missing += _find_gaps_at(varying[0], group)
    return missing


def _find_gaps_at(i: int, names: list[list[str]]) -> list[str]:
    present = {int(parts[i]) for parts in names}
    first, last = min(present), max(present)
    if last - first + 1 - len(present) >= len(present):
        return []
    example, width = names[0], min(len(parts[i]) for parts in names)
    return [
        "".join([*example[:i], str(number).zfill(width), *example[i + 1 :]])
        for number in range(first, last)
        if number not in present
    ]


def make_pattern(names: Sequence[str]) -> str:
    """Return a pattern in brace notation for sorted, numbered files, or the first name if no pattern fits.

    >>> make_pattern(["x-00.tar", "x-01.tar"])
    'x-{00..01}.tar'
    """
    first, last = (re.split(r"([0-9]+)", name) for name in (names[0], names[-1]))
    varying = [i for i, (before, after) in enumerate(zip(first, last, strict=False)) if before != after]
    if len(first) != len(last) or len(varying) != 1 or varying[0] % 2 == 0:
        return names[0]
    (i,) = varying
    if int(last[i]) - int(first[i]) + 1 != len(names):
        return names[0]
    return "".join([*first[:i], f"{{{first[i]}..{last[i]}}}", *first[i + 1 :]])


def group_by_split(names: Iterable[str]) -> dict[str, list[str]]:
    """Group sorted file names by the split that each name contains. Names without a split are left out.

    >>> group_by_split(["train-0.tar", "train-1.tar", "x-val-0.tar", "other.tar"])
    {'train': ['train-0.tar', 'train-1.tar'], 'val': ['x-val-0.tar']}
    """
    splits = defaultdict[str, list[str]](list)
    for name in sorted(names):
        if (found := _SPLIT.search(name)) is not None:
            splits[found[0].lower()].append(name)
    return dict(splits)


def words_of(name: str) -> list[str]:
    """Return the words of a name, in lowercase.

    >>> words_of("leftImg8bit_train")
    ['left', 'img', 'bit', 'train']
    """
    return [word.lower() for word in re.findall(r"[A-Z]*[a-z]+|[A-Z]+", name)]


def is_split(name: str) -> bool:
    """Return whether a name is the name of a split, such as ``val2017`` or ``trainA``."""
    words = set(words_of(name))
    return bool(words & _SPLITS) and words <= _SPLITS | _WITH_SPLITS


Files = list[tuple[str, Callable[[], bytes]]]
"""The path of each file to write, relative to the folder, and a function that creates its content."""


def _list_wids(table: ShardTable, split: str, prefix: str) -> Files:
    """List the JSON shard index for WebDataset's ``wids.ShardListDataset``.

    The format is that of ``wids-index create`` in https://github.com/webdataset/webdataset (``wids/wids_index.py`` and
    ``wids_specs.py``), without the optional MD5 sums. Names are relative to the index.
    """
    shards = [
        {"url": prefix + entry.name, "nsamples": entry.num_samples, "filesize": entry.num_bytes}
        for entry in table.manifest.shards
    ]
    index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}
    return [("wids.json", partial(_to_json, index))]


def _list_timm(table: ShardTable, split: str, prefix: str) -> Files:
    """Return the name and content of ``_info.json``, which timm's reader of WebDatasets needs.

    The format is that of ``timm/data/readers/reader_wds.py`` in https://github.com/huggingface/pytorch-image-models.
    """
    info = {
        "name": split,
        "num_samples": table.manifest.num_samples,
        "filenames": [prefix + entry.name for entry in table.manifest.shards],
        "shard_lengths": [entry.num_samples for entry in table.manifest.shards],
    }
    return [("_info.json", partial(_to_json, {"splits": {split: info}}))]


def _list_sizes(table: ShardTable, split: str, prefix: str) -> Files:
    """Return the name and content of ``sizes.json``, which maps each shard's file name to its number of samples.

    open_clip reads this file (``get_dataset_size`` in ``src/open_clip_train/data.py`` of
    https://github.com/mlfoundations/open_clip).
    """
    return [("sizes.json", partial(_to_json, {entry.name: entry.num_samples for entry in table.manifest.shards}))]


def _list_dali(table: ShardTable, split: str, prefix: str) -> Files:
    """List the indexes for DALI's ``fn.readers.webdataset``, one for each tar.

    The format is version 1.2 of ``tools/wds2idx.py`` in https://github.com/NVIDIA/DALI: a line with the version and the
    number of samples, followed by a line for each sample with the extension, offset, size and name of each member.
    """
    names = [tar.name.partition(".")[0] + INDEX_SUFFIX for tar in table.tars]
    if len(set(names)) < len(names):
        raise FormatError(
            "DALI's indexes of some tars would have the same name: rename tars whose names differ only after the first "
            "dot"
        )
    return [(name, partial(_make_dali, index)) for name, index in zip(names, table.indexes, strict=True)]


def _make_dali(index: Location) -> bytes:
    columns = read_columns(index)
    lines = [f"v1.2 {len(columns.keys)}"]
    for sample in range(len(columns.keys)):
        key = columns.keys.text(sample)
        if any(letter.isspace() for letter in key):  # DALI separates values with white space.
            raise FormatError(
                f"the key {key!r} contains white space, which DALI's index cannot hold: write the dataset again with "
                "different keys"
            )
        parts = sorted(columns.fields_of(sample), key=lambda part: part[1])
        lines.append(" ".join(f"{field} {start} {size} {join_name(key, field)}" for field, start, size in parts))
    return _join_lines(lines)


def _list_energon(table: ShardTable, split: str, prefix: str) -> Files:
    """List the indexes for Megatron-Energon, and the files in ``.nv-meta`` that describe the dataset.

    An index, ``NAME.tar.idx``, contains the offset of each sample and the end of the last sample. Its format is that of
    ``TarIndexWriter`` in ``src/megatron/energon/flavors/webdataset/itar.py`` of
    https://github.com/NVIDIA/Megatron-Energon: little-endian uint64 [n + 1]. The format of the other files is
    documented at https://nvidia.github.io/Megatron-Energon/data_on_disk.html. Names are relative to the folder that
    holds ``.nv-meta``. Strings are quoted as in JSON, which is valid YAML.
    """
    names = [json.dumps(entry.name) for entry in table.manifest.shards]
    counts = [f"  {name}: {entry.num_samples}" for name, entry in zip(names, table.manifest.shards, strict=True)]
    parts = [f"  - {name}" for name in names]
    meta = {
        ".info.yaml": ["shard_counts:", *counts],
        "split.yaml": ["exclude: []", "split_parts:", f"  {json.dumps(split)}:", *parts],
        "dataset.yaml": _describe_samples(table.manifest.fields),
    }
    indexes = zip(table.tars, table.indexes, strict=True)
    files: Files = [(tar.name + INDEX_SUFFIX, partial(_make_energon_index, index)) for tar, index in indexes]
    return files + [(f"{ENERGON_FOLDER}/{name}", partial(_join_lines, lines)) for name, lines in meta.items()]


def _make_energon_index(index: Location) -> bytes:
    columns = read_columns(index)
    stops = np.where(columns.starts >= 0, columns.starts + columns.sizes, 0).max(axis=0, initial=0)
    ends: NDArray[np.int64] = -(-stops // BLOCK) * BLOCK  # The next sample's header starts here.
    return np.concatenate([[0], ends]).astype("<u8").tobytes()


def _describe_samples(fields: Sequence[str]) -> list[str]:
    image = next((field for field in _IMAGES if field in fields), None)
    if image is None:  # Energon calls this a crude dataset: the user's program converts the samples.
        return ["__module__: megatron.energon", "__class__: CrudeWebdataset"]
    members = {"image": image}
    if LABEL_FIELD in fields:
        kind, members["label"] = "ImageClassificationSample", LABEL_FIELD
    elif "txt" in fields:
        kind, members["caption"] = "CaptioningSample", "txt"
    else:
        kind = "ImageSample"
    return [
        "sample_type:",
        "  __module__: megatron.energon",
        f"  __class__: {kind}",
        "field_map:",
        *(f"  {member}: {name}" for member, name in members.items()),
    ]


def _to_json(values: Any) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"


def _join_lines(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode(errors="surrogateescape")


ExportFormat = Literal["wids", "dali", "timm", "energon", "webdataset-sizes"]
"""The formats of other tools' indexes."""

EXPORTS: dict[ExportFormat, Callable[[ShardTable, str, str], Files]] = {
    "wids": _list_wids,
    "dali": _list_dali,
    "timm": _list_timm,
    "energon": _list_energon,
    "webdataset-sizes": _list_sizes,
}
"""For each format, a function that lists the files. Its arguments are the shards, the name of the split that contains
all shards, and the path from the files to the shards, which is empty or ends in a slash."""


def export_index(
    table: ShardTable,
    format: ExportFormat,  # noqa: A002  # Named after the option --format.
    out: Location | None = None,
    *,
    split: str = "train",
    overwrite: bool = False,
) -> list[Location]:
    """Write another tool's index of a dataset. The shards and their own indexes are unchanged.

    ``wids`` writes ``wids.json``, ``timm`` writes ``_info.json``, ``webdataset-sizes`` writes ``sizes.json``, and
    ``dali`` writes a ``NAME.idx`` for each ``NAME.tar``. ``energon`` writes ``.nv-meta`` and a ``NAME.tar.idx`` for
    each tar. shardio's own index has the same name, so ``energon`` needs a different folder, ``out``. The tars are
    hard-linked into this folder, or copied if links are impossible.

    Args:
        table: The shards of a packed directory, or tars of any tool.
        format: The format.
        out: The folder to write to; by default, the folder of the shards.
        split: The name of the split, for ``timm`` and ``energon``.
        overwrite: Whether to replace existing files.

    Returns:
        The files that were written.

    Raises:
        FileExistsError: If a file exists and ``overwrite`` is False.
        FormatError: If an index is damaged, or the format cannot describe the dataset.
        ValueError: If an argument is invalid.
    """
    chosen: ExportFormat = check_choice("format", format, ExportFormat)
    overwrite = check_flag("overwrite", overwrite)
    if not split or split != split.strip() or "tar" in split or ".." in split:  # timm reads such names as patterns.
        raise ValueError(f"split must be a name such as 'train', without 'tar' or '..', got {split!r}")
    homes = {tar.folder for tar in table.tars}
    if len(homes) > 1:
        raise ValueError("the tars are in several directories: merge them first (shardio merge)")
    home = homes.pop()
    folder = home if out is None else out
    if chosen == "energon" and folder.resolve() == home.resolve():
        raise ValueError(
            "Megatron-Energon's index of NAME.tar is NAME.tar.idx, which is also the name of shardio's index: pass "
            "another directory as --out (out=…). The tars are linked into it"
        )
    if chosen != "dali":  # DALI's index has an offset for each member.
        _refuse_scattered(table, chosen)
    files = EXPORTS[chosen](table, split, _find_prefix(folder, home))
    if chosen == "energon" and (folder / MANIFEST_NAME).exists():
        raise FileExistsError(f"{folder} holds a packed dataset, whose indexes would be replaced: choose another --out")
    links = [(tar, folder / tar.name) for tar in table.tars] if chosen == "energon" else []
    links = [(tar, target) for tar, target in links if not _is_link(tar, target)]
    for location in (folder / name for name, _ in files):
        if location.exists() and not overwrite:
            raise FileExistsError(f"{location} exists: pass --overwrite (overwrite=True) to replace it")
    for tar, target in links:
        link_or_copy(tar, target)
    for name, make in files:
        content = make()
        with (folder / name).write_whole() as file:
            file.write(content)
    return [folder / name for name, _ in files]


def _refuse_scattered(table: ShardTable, chosen: ExportFormat) -> None:
    for tar, header in zip(table.tars, map_locations(read_header, table.indexes), strict=True):
        if header.num_scattered:
            raise FormatError(
                f"the members of {count(header.num_scattered, 'sample')} in {tar} are not adjacent, but readers of the "
                f"format {chosen} expect them to be: pack the tars first (shardio pack), then export the index of the "
                "new tars"
            )


def _is_link(tar: Location, target: Location) -> bool:
    if not target.exists():
        return False
    if target.stat().identity != tar.stat().identity:
        raise FileExistsError(f"{target} exists, and is not a link to {tar}: choose another directory (--out)")
    return True


def _find_prefix(folder: Location, home: Location) -> str:
    if folder.store != home.store:
        return f"{home}/"
    path = os.path.relpath(home.resolve(), folder.resolve())
    return "" if path == "." else f"{path}/"
