"""Plan a pack: assign samples to parts and to shards, in order. Plans depend only on the scan and the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import ConvertedFormat
from shardio.order import make_rng_key, permute
from shardio.packing.sources.source import SourceTable
from shardio.shards import END
from shardio.values import check_choice, check_flag, check_integer, check_optional_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Named parts of a dataset.

    A sample's part depends only on its key and on the fractions: the xxh3-64 of the key in UTF-8, divided by 2**64, is
    compared with the running sums of the fractions. So a sample stays in its part when others are added.

    Attributes:
        names: The name of each part.
        thresholds: The first hash of each part except the first.
    """

    names: tuple[str, ...]
    thresholds: tuple[int, ...]

    def assign(self, key_hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the number of the part of each sample, int64 [n], given the hashes of the keys, uint64 [n]."""
        return np.searchsorted(np.array(self.thresholds, np.uint64), key_hashes, side="right")

    def refuse_empty(self, num_samples: Sequence[int], where: str) -> None:
        """Raise PackError if a part would have no samples.

        Args:
            num_samples: The number of samples of each part.
            where: The dataset that is divided, for the message.
        """
        if empty := [name for name, number in zip(self.names, num_samples, strict=True) if not number]:
            raise PackError(
                f"none of the {sum(num_samples)} samples of {where} would be in {empty[0]}: choose larger fractions"
            )


def make_parts(fractions: Sequence[float | str], names: Sequence[str]) -> Parts:
    """Return parts, given the fraction and the name of each one.

    Raises:
        ValueError: If the fractions are not positive or do not sum to 1, or a name cannot be a directory's or is given
            twice.
    """
    if isinstance(fractions, str) or isinstance(names, str) or len(fractions) != len(names) or len(fractions) < 2:
        raise ValueError(
            f"the fractions and the names must be lists of the same length, at least 2, got {fractions!r} and {names!r}"
        )
    for name in names:
        if PurePath(name).name != name or name.startswith("."):
            raise ValueError(f"the name of a part must be a directory's name, got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"the names of the parts must differ, got {', '.join(names)}")
    try:
        exact = [Fraction(str(fraction)) for fraction in fractions]  # The decimals that the user has written.
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"the fractions must be numbers such as 0.9 and 0.1, got {fractions!r}") from error
    total = sum(exact, Fraction())
    if min(exact) <= 0 or abs(total - 1) > Fraction(1, 10**9):
        raise ValueError(f"the fractions must be positive and sum to 1, got {', '.join(map(str, fractions))}")
    ends = np.cumsum(np.array(exact, object)).tolist()
    return Parts(names=tuple(names), thresholds=tuple(int(end / total * 2**64) for end in ends[:-1]))


JpegMode = Literal["copy", "tile", "reencode"]
"""The ways to store JPEGs: see :class:`PackSettings`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """The settings of a pack.

    Attributes:
        max_shard_size: The maximum size of a shard in bytes. Only a shard with a single sample may exceed it. If
            JPEGs are rewritten, the limit applies to the sizes of the original files.
        max_shard_samples: The maximum number of samples in a shard; None for no limit.
        shuffle_seed: The seed of the packing order; None packs in the order of the keys.
        check: Whether each image is decoded before it is packed, and rejected if that fails.
        jpeg: ``copy`` stores JPEGs unchanged, ``tile`` rewrites them losslessly so that crops decode faster,
            ``reencode`` shrinks and tiles them.
        convert_to: The format that images in other formats are converted to; None to keep all formats.
        max_side: The maximum length of the longer side of an image that is re-encoded or converted, in pixels.
        quality: The quality of images that are re-encoded or converted, 1 to 100; None for 90.
        to_srgb: Whether the colours of images that are re-encoded or converted become sRGB.
        max_pixels: Images with more pixels are rejected; None for Pillow's limit.
    """

    max_shard_size: int
    max_shard_samples: int | None = None
    shuffle_seed: int | None = 0
    check: bool = True
    jpeg: JpegMode = "copy"
    convert_to: ConvertedFormat | None = None
    max_side: int | None = None
    quality: int | None = None
    to_srgb: bool = False
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
        object.__setattr__(self, "check", check_flag("check", self.check))
        object.__setattr__(self, "jpeg", check_choice("jpeg", self.jpeg, JpegMode))
        if self.convert_to is not None:
            object.__setattr__(self, "convert_to", check_choice("convert_to", self.convert_to, ConvertedFormat))
        object.__setattr__(self, "to_srgb", check_flag("to_srgb", self.to_srgb))
        if not self.does_encode:
            for name in ("max_side", "quality", "to_srgb"):
                if getattr(self, name) not in (None, False):
                    raise ValueError(
                        f"--{name.replace('_', '-')} ({name}) applies only with --jpeg reencode (jpeg='reencode') or "
                        "--convert-to (convert_to)"
                    )
        if self.max_pixels is not None and not self.check and not self.does_encode:
            raise ValueError("--max-pixels (max_pixels) does not apply with --no-check (check=False)")

    @property
    def does_encode(self) -> bool:
        """Whether images are re-encoded or converted."""
        return self.jpeg == "reencode" or self.convert_to is not None


def name_shard(number: int) -> str:
    """Return the name that a pack gives to a shard."""
    return f"shard-{number:06d}.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One shard to write: its file name, and the rows of its samples in order, int64 [n]."""

    name: str
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """All shards to write, in manifest order.

    Attributes:
        order: The rows of all samples in packing order, int64 [n].
        stops: The end of each shard in this order, int64 [shards].
        digest: The digest of the samples, their labels, their files' sizes and times, and the settings. It identifies
            an unfinished pack.
    """

    order: NDArray[np.int64]
    stops: NDArray[np.int64]
    digest: str

    def __len__(self) -> int:
        return len(self.stops)

    def __iter__(self) -> Iterator[ShardPlan]:
        start = 0
        for number, stop in enumerate(self.stops.tolist()):
            yield ShardPlan(name=name_shard(number), rows=self.order[start:stop])
            start = stop

    @property
    def names(self) -> set[str]:
        """The file names of all shards."""
        return set(map(name_shard, range(len(self))))


def make_plan(samples: SourceTable, classes: Sequence[str], settings: PackSettings) -> PackPlan:
    """Order the samples of a source and distribute them over shards."""
    rows = np.arange(len(samples))
    if settings.shuffle_seed is None:
        order = rows
    else:
        order = permute(rows, np.array([len(samples)]), make_rng_key(settings.shuffle_seed, "pack"))
    digest = xxhash.xxh3_128(repr((settings, tuple(classes))).encode() + samples.digest())
    sizes = samples.sizes_in_tar()[order]
    return PackPlan(order=order, stops=np.array(_cut(sizes, settings), np.int64), digest=digest.hexdigest())


def _cut(sizes: NDArray[np.int64], settings: PackSettings) -> list[int]:
    """Return the end of each shard, given the samples' sizes in a tar in packing order."""
    ends, stops, start = np.cumsum(sizes), list[int](), 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + settings.max_shard_size - len(END), side="right"))
        most = start + (settings.max_shard_samples or len(sizes))
        start = min(max(stop, start + 1), most)
        stops.append(start)
    return stops
