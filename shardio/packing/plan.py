"""Planning: which sample goes into which shard, and where. A pure function of the scan and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import xxhash

from shardio.order import make_key, permute
from shardio.packing.scan import Scan, SourceSample
from shardio.shards import END, LABEL_FIELD, join_name, size_in_tar

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
        if self.max_shard_size < 1:
            raise ValueError(f"max_shard_size must be at least 1 byte, got {self.max_shard_size}")
        if self.max_shard_samples is not None and self.max_shard_samples < 1:
            raise ValueError(f"max_shard_samples must be at least 1, got {self.max_shard_samples}")
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 2**63:
            raise ValueError(f"shuffle_seed must be at least 0 and below 2**63, got {self.shuffle_seed}")
        if self.jpeg not in get_args(JpegMode):
            raise ValueError(f"jpeg must be 'copy', 'tile' or 'reencode', got {self.jpeg!r}")
        if self.max_side is not None and self.max_side < 1:
            raise ValueError(f"max_side must be at least 1 pixel, got {self.max_side}")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ValueError(f"quality must be 1 to 100, got {self.quality}")
        if self.max_pixels is not None and self.max_pixels < 1:
            raise ValueError(f"max_pixels must be at least 1, got {self.max_pixels}")
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
    order = permute(np.arange(len(samples)), np.array([len(samples)]), make_key(shuffle_seed, "pack"))
    return [samples[i] for i in order.tolist()]
