"""Planning: which sample goes into which shard, and where. A pure function of the scan and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from shardio.order import make_rng_key, permute
from shardio.packing.scan import Scan, SourceSample
from shardio.shards import END, LABEL_FIELD, join_name, size_in_tar
from shardio.values import check_choice, check_integer, check_optional_integer

JpegMode = Literal["copy", "tile", "reencode"]
"""What is made of JPEGs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """How to pack.

    Attributes:
        max_shard_size: A shard's size in bytes that is not exceeded, unless by a single sample: of the files that
            go into it, where JPEGs are rewritten.
        max_shard_samples: A shard's number of samples at the most, or None.
        shuffle_seed: Of the packing order; None packs in the order of the keys.
        jpeg: ``copy`` leaves JPEGs as they are, ``tile`` rewrites them without loss so that crops of them decode
            quicker, ``reencode`` makes them smaller, and tiles them.
        max_side: With ``reencode``, pixels of an image's longer side at the most.
        quality: With ``reencode``, 1 to 100, or None for 90.
        max_pixels: With ``reencode``, an image of more pixels is stored as it is; None for Pillow's limit.
    """

    max_shard_size: int
    max_shard_samples: int | None = None
    shuffle_seed: int | None = 0
    jpeg: JpegMode = "copy"
    max_side: int | None = None
    quality: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        # Python's own integers from here on: the manifest is JSON, and a digest of these settings tells packs apart.
        for name, at_least, below in (
            ("max_shard_samples", 1, None),
            ("shuffle_seed", 0, 2**63),
            ("max_side", 1, None),
            ("quality", 1, 101),
            ("max_pixels", 1, None),
        ):
            number = check_optional_integer(name, getattr(self, name), at_least=at_least, below=below)
            object.__setattr__(self, name, number)
        object.__setattr__(self, "max_shard_size", check_integer("max_shard_size", self.max_shard_size, at_least=1))
        object.__setattr__(self, "jpeg", check_choice("jpeg", self.jpeg, JpegMode))
        if self.jpeg != "reencode" and (self.max_side, self.quality, self.max_pixels) != (None, None, None):
            raise ValueError(f"max_side, quality and max_pixels are for jpeg='reencode', and jpeg is {self.jpeg!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One shard to write: its file name and its samples in order."""

    name: str
    samples: tuple[SourceSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All shards to write.

    Attributes:
        shards: In manifest order.
        num_bytes: The size of the files to pack.
        digest: Of the samples, their labels, their files' sizes and times, and the settings: by it an unfinished pack
            is known again.
    """

    shards: tuple[ShardPlan, ...]
    num_bytes: int
    digest: str


def make_plan(scan: Scan, settings: PackSettings) -> Plan:
    """Order the samples of a scan and deal them to shards."""
    shards: list[ShardPlan] = []
    current: list[SourceSample] = []
    digest = xxhash.xxh3_128(repr((settings, scan.classes)).encode())
    size = num_bytes = 0

    def finish_shard() -> None:
        shards.append(ShardPlan(name=f"shard-{len(shards):06d}.tar", samples=tuple(current)))
        current.clear()

    for sample in _pack_order(scan.samples, settings.shuffle_seed):
        sample_size = 0 if sample.label is None else size_in_tar(join_name(sample.key, LABEL_FIELD), 1)
        for field, file in sorted(sample.files.items()):
            sample_size += size_in_tar(join_name(sample.key, field), file.size)
            num_bytes += file.size
            digest.update(f"{sample.key}\0{field}\0{sample.label}\0{file.size}\0{file.mtime_ns}\n".encode())
        is_full = size + sample_size > settings.max_shard_size or len(current) == settings.max_shard_samples
        if current and is_full:
            finish_shard()
            size = 0
        size = (size or len(END)) + sample_size
        current.append(sample)
    finish_shard()
    return Plan(shards=tuple(shards), num_bytes=num_bytes, digest=digest.hexdigest())


def _pack_order(samples: list[SourceSample], shuffle_seed: int | None) -> list[SourceSample]:
    if shuffle_seed is None:
        return samples
    order = permute(np.arange(len(samples)), np.array([len(samples)]), make_rng_key(shuffle_seed, "pack"))
    return [samples[i] for i in order.tolist()]
