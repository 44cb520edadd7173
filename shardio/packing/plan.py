"""Planning: which sample goes into which shard, and in which order. A pure function of the scan and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from shardio.order import make_rng_key, permute
from shardio.packing.scan import SourceSample, SourceScan
from shardio.shards import END, LABEL_FIELD, join_name, size_in_tar
from shardio.values import check_choice, check_integer, check_optional_integer

JpegMode = Literal["copy", "tile", "reencode"]
"""How JPEGs are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """The settings of a pack.

    Attributes:
        max_shard_size: The maximum size of a shard in bytes. Only a shard with a single sample may exceed it. If
            JPEGs are rewritten, the limit applies to the sizes of the original files.
        max_shard_samples: The maximum number of samples in a shard; None for no limit.
        shuffle_seed: The seed of the packing order; None packs in the order of the keys.
        jpeg: ``copy`` stores JPEGs unchanged, ``tile`` rewrites them losslessly so that crops decode faster,
            ``reencode`` shrinks and tiles them.
        max_side: With ``reencode``, the maximum length of an image's longer side in pixels.
        quality: With ``reencode``, the JPEG quality, 1 to 100; None for 90.
        max_pixels: With ``reencode``, images with more pixels are stored unchanged; None for Pillow's limit.
    """

    max_shard_size: int
    max_shard_samples: int | None = None
    shuffle_seed: int | None = 0
    jpeg: JpegMode = "copy"
    max_side: int | None = None
    quality: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        # From here on, all integers are Python's own: JSON accepts no others, and the plan's digest hashes their repr.
        for name, at_least, below in (
            ("max_shard_samples", 1, None),
            ("shuffle_seed", 0, 2**63),
            ("max_side", 1, None),
            ("quality", 1, 101),
            ("max_pixels", 1, None),
        ):
            value = check_optional_integer(name, getattr(self, name), at_least=at_least, below=below)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "max_shard_size", check_integer("max_shard_size", self.max_shard_size, at_least=1))
        object.__setattr__(self, "jpeg", check_choice("jpeg", self.jpeg, JpegMode))
        if self.jpeg != "reencode":
            for name in ("max_side", "quality", "max_pixels"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"--{name.replace('_', '-')} ({name}) applies only with --jpeg reencode (jpeg='reencode')"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One shard to write: its file name and its samples in order."""

    name: str
    samples: tuple[SourceSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """All shards to write.

    Attributes:
        shards: The shards in manifest order.
        num_bytes: The total size of the files to pack.
        digest: The digest of the samples, their labels, their files' sizes and times, and the settings. It identifies
            an unfinished pack.
    """

    shards: tuple[ShardPlan, ...]
    num_bytes: int
    digest: str


def make_plan(scan: SourceScan, settings: PackSettings) -> PackPlan:
    """Order the samples of a scan and distribute them over shards."""
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
    return PackPlan(shards=tuple(shards), num_bytes=num_bytes, digest=digest.hexdigest())


def _pack_order(samples: list[SourceSample], shuffle_seed: int | None) -> list[SourceSample]:
    if shuffle_seed is None:
        return samples
    order = permute(np.arange(len(samples)), np.array([len(samples)]), make_rng_key(shuffle_seed, "pack"))
    return [samples[i] for i in order.tolist()]
