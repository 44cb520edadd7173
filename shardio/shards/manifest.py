"""The manifest: one JSON file that makes a directory of shards a dataset."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.json_text import parse_json
from shardio.storage import Location
from shardio.whole_writes import PARTIAL_SUFFIX

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MANIFEST_FORMAT = 1
MANIFEST_NAME = "shardio.json"

UNFINISHED_NAME = f".shardio-pack{PARTIAL_SUFFIX}"
"""The name of the file in an unfinished pack's directory that holds the digest of the plan."""

_NAME = r"[^\0\ud800-\udc7f\udd00-\udfff]*"
"""A file name contains neither NUL nor a surrogate that does not represent a byte."""


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
    """Return why a content is no JSON, if that can be told."""
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
