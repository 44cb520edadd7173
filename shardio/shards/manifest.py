"""The manifest: one JSON file that makes a directory of shards a dataset."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.json_text import parse_json
from shardio.storage import PARTIAL_SUFFIX, write_whole

MANIFEST_FORMAT = 1
MANIFEST_NAME = "shardio.json"

UNFINISHED_NAME = f".shardio-pack{PARTIAL_SUFFIX}"
"""While a pack is unfinished, a file of this name lies in its directory, with the digest of its plan."""


_NAME = re.compile(r"[^\0\ud800-\udc7f\udd00-\udfff]*")
"""No file has a NUL in its name, nor a surrogate that stands for no byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard: its file name, size in bytes, number of samples, and xxh3-128 in hexadecimal."""

    name: str
    num_bytes: int
    num_samples: int
    digest: str

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name or not _NAME.fullmatch(self.name):
            raise ValueError(f"a shard lies beside its manifest, and {self.name!r} is not the name of a file there")
        if self.num_bytes < 0 or self.num_samples < 0:
            raise ValueError(f"{self.name} has a negative size or number of samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a dataset holds.

    Attributes:
        shards: Its shards, in manifest order.
        fields: The names of the fields that its samples have, sorted.
        classes: The class names, by label; empty where the samples have no classes.
        pack: How it was packed; empty for tars that shardio did not pack.
        format: The manifest format's version.
    """

    shards: tuple[ShardEntry, ...]
    fields: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    pack: dict[str, str | int | None] = field(default_factory=dict)
    format: int = MANIFEST_FORMAT

    @property
    def num_samples(self) -> int:
        """The samples of all shards."""
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
        """The dataset's identity: xxh3-128 over the contents of its shards in manifest order, hexadecimal."""
        contents = "".join(f"{shard.digest} {shard.num_samples}\n" for shard in self.shards)
        return xxhash.xxh3_128_hexdigest(contents.encode())


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest; it is there whole or not at all."""
    with write_whole(path) as file:
        file.write(json.dumps(asdict(manifest), indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n")


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        FormatError: If the file is not a manifest, or of a newer format; the message says what is wrong and where.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        values: Any = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FormatError(f"the manifest {path} cannot be read: {error}") from error
    version = values.get("format") if isinstance(values, dict) else None
    if version != MANIFEST_FORMAT:
        raise FormatError(f"{path} has manifest format {version!r}, and this shardio reads {MANIFEST_FORMAT}")
    try:
        return TypeAdapter(Manifest).validate_python(values)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise FormatError(f"the manifest {path} is damaged: {problems}") from error
