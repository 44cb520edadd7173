"""The manifest: one JSON file that makes a directory of shards a dataset, and the problems of such a dataset."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.files import PARTIAL_SUFFIX
from shardio.storage import Location
from shardio.values import parse_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter


MANIFEST_FORMAT = 1
MANIFEST_NAME = "shardio.json"

UNFINISHED_NAME = f".shardio-pack{PARTIAL_SUFFIX}"
"""The name of the file in an unfinished pack's directory that holds the digest of the plan."""

_NAME = r"[^\0\ud800-\udc7f\udd00-\udfff]*"
"""A file name contains neither NUL nor a surrogate that does not represent a byte."""

_OF = re.compile(r"(.*?)([0-9]+)([-_]of[-_])([0-9]{1,6})(.*)")
"""The name of a file that says how many there are, such as ``train-00000-of-00041.parquet``."""


def find_gaps(names: Iterable[str]) -> list[str]:
    """Return the missing names between numbered files, whose names differ in one number.

    If at least half of the names are missing, the gaps are assumed to be intentional, and the list is empty. Names that
    say how many files there are (``x-0-of-3.tar``) are complete only with all of them.

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
    """Return the missing names where part ``i`` of each name is its number."""
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
    """Return the pattern in brace notation of sorted, numbered files; the first name if there is none.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A shard: its file name, size in bytes, number of samples, and xxh3-128 in hexadecimal."""

    name: str
    num_bytes: int
    num_samples: int
    digest: str

    def __post_init__(self) -> None:
        if self.name in ("", "..") or PurePath(self.name).name != self.name or not re.fullmatch(_NAME, self.name):
            raise ValueError(f"a shard's name must be a file name without a folder, got {self.name!r}")
        if self.num_bytes < 0 or self.num_samples < 0:
            raise ValueError(f"{self.name} has a negative size or number of samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a dataset.

    Attributes:
        shards: Its shards, in manifest order.
        fields: The names of its samples' fields, sorted.
        classes: The class names, by label; empty if the samples have no classes.
        pack: The settings it was packed with; empty for tars that shardio did not pack.
        format: The version of the manifest format.
    """

    shards: tuple[ShardEntry, ...]
    fields: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    pack: dict[str, str | int | None] = field(default_factory=dict)
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
        """The number of samples of each shard, int64 [shards]."""
        return np.array([shard.num_samples for shard in self.shards], dtype=np.int64)

    @property
    def digest(self) -> str:
        """The dataset's identity: xxh3-128 over the contents of its shards in manifest order, in hexadecimal."""
        contents = "".join(f"{shard.digest} {shard.num_samples}\n" for shard in self.shards)
        return xxhash.xxh3_128_hexdigest(contents.encode())


def write_manifest(location: Location, manifest: Manifest) -> None:
    """Write a manifest, which appears whole or not at all."""
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
        return "it is compressed with gzip: decompress it, or let the server send it as it is"
    if content.lstrip().startswith(b"<"):
        return "it is a web page. Check the URL, and whether you must log in first"
    return str(error)


@cache
def _manifest_type() -> TypeAdapter[Manifest]:
    """Return the checker of manifests. It takes 1 ms to build, after pydantic's import of 0.1 s."""
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


ProblemKind = Literal[
    "manifest", "unfinished", "unlisted", "missing", "index", "stale", "header", "content", "digest", "unindexed",
    "duplicate", "undecodable",
]  # fmt: skip
"""The kinds of problems, in the order of a report:

=============  =======================================================================================
manifest       the manifest is unreadable, or does not match an index
unfinished     a pack into the directory was interrupted
unlisted       a tar in the directory is not in the manifest
missing        a tar or its index does not exist, or cannot be read
index          an index is damaged
stale          an index does not match the size, version or layout of its tar
header         the tar header of a member is damaged or has another name or size, or data follows the end
content        a content does not have the hash in the index, or is outside the tar
digest         a tar does not have the digest in its index
unindexed      a member is not in the index
duplicate      a key occurs twice
undecodable    an image cannot be decoded
=============  =======================================================================================
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of a dataset.

    Attributes:
        kind: The kind of the problem.
        where: The path of the tar, index, manifest or directory.
        message: The problem in words, with what was found and what was expected.
        key: The key of the sample; None if the problem is not about one sample.
        field: The name of the field; None if the problem is not about one field.
        offset: The problem's offset in the tar, in bytes; None if it is unknown.
    """

    kind: ProblemKind
    where: str
    message: str
    key: str | None = None
    field: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte {self.offset}"
        parts = [f"field {self.field!r}"] if self.field is not None else []
        parts += [f"sample {self.key}"] if self.key is not None else []
        return f"{self.where}{at}: {' of '.join(parts)}{': ' if parts else ''}{self.message}"

    def dump(self) -> dict[str, Any]:
        """Return the problem as values for JSON."""
        return asdict(self)
