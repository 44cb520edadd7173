"""The index: the offset, size and hash of each field of each sample in one shard.

A safetensors file (https://github.com/huggingface/safetensors) next to the tar. F fields, n samples, little-endian:

    offset      int64  [F, n]   offset of the content in the tar; -1 if the sample lacks the field
    size        int64  [F, n]   size of the content in bytes; -1 if the sample lacks the field
    hash        uint64 [F, n]   xxh3-64 of the content; 0 if the sample lacks the field
    key_stop    int64  [n]      the end of each key in key_bytes
    key_bytes   uint8  [...]    the keys in UTF-8, end to end

Samples are in the order of their first members. In tars that shardio packs, the members of a sample are adjacent. In
others, a sample may be *scattered*: other samples' members are between its own. Packed tars have indexes of format 1.
Those of other tars have format 2, which records the number of scattered samples. Early versions of shardio gave them
format 1, too, and made a sample of each run of adjacent members.

Its metadata has one key, ``shardio``, with a canonical JSON object (see :class:`IndexHeader`), because safetensors
writes several keys in random order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.shards.tar import BLOCK
from shardio.storage import Location

INDEX_FORMAT = 1
SCATTERED_FORMAT = 2
INDEX_SUFFIX = ".idx"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """The metadata of an index, which describes its shard.

    Attributes:
        format: The version of the index format.
        fields: The names of the fields, sorted.
        num_samples: The number of samples in the shard.
        num_bytes: The size of the tar.
        digest: xxh3-128 of the tar, in hexadecimal.
        header_digest: xxh3-64 of the tar headers of the first and the last sample, in hexadecimal. Together with the
            tar's size, it shows at opening whether the tar is the one that was indexed.
        version: The tar's version in its store if the tar was indexed on first use. None for a packed shard, because
            the shard may be copied and equal input must give equal indexes.
        compression: ``gzip`` if the tar is compressed: its offsets, size and digests are then those of the decompressed
            tar. None for an uncompressed tar.
        num_scattered: The number of scattered samples in format 2; None in format 1.
    """

    format: int
    fields: tuple[str, ...]
    num_samples: int
    num_bytes: int
    digest: str
    header_digest: str
    version: str | None = None
    compression: str | None = None
    num_scattered: int | None = None


def find_scattered(starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which samples of a tar are scattered: others have members between theirs.

    Args:
        starts: int64 [F, n], the offset of each content in the tar; negative if the sample lacks the field.

    Returns:
        bool [n].
    """
    fields, samples = np.nonzero(starts >= 0)
    in_tar_order = samples[np.argsort(starts[fields, samples], kind="stable")]
    runs = in_tar_order[np.diff(in_tar_order, prepend=-1) != 0]
    found: NDArray[np.bool_] = np.bincount(runs, minlength=starts.shape[1]) > 1
    return found


def index_location(tar: Location) -> Location:
    """Return the location of a tar's index next to the tar."""
    return tar.folder / (tar.name + INDEX_SUFFIX)


class TarHeaders(Protocol):
    """What an index needs of its tar: a StoredFile, or what is known of a tar that was just written."""

    @property
    def location(self) -> Location:
        """The tar's location."""

    @property
    def size(self) -> int:
        """Its size in bytes."""

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        """Return blocks that are the headers of the first or the last sample's members."""


def digest_headers(tar: TarHeaders, starts: Iterable[NDArray[np.int64]]) -> str:
    """Hash the plain tar headers of some samples, which are the blocks before their contents.

    Args:
        tar: The tar.
        starts: For each sample, the offset of each field's content, int64 [F]; -1 if the sample lacks the field.

    Returns:
        xxh3-64 in hexadecimal.
    """
    found = np.concatenate([fields[fields >= BLOCK] for fields in starts] or [np.empty(0, np.int64)])
    digest = xxhash.xxh3_64()
    for header in tar.read_many(found - BLOCK, found):
        digest.update(header)
    return digest.hexdigest()
