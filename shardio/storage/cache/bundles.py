"""Where the copies of small files lie in a cache: many of them share one sparse file, a *bundle*.

A file for each of a million images would make every scan of the cache's folder slow. So the files of a listing are cut
into bundles, each with some neighbours by key. In a bundle, each file begins at a multiple of 512 bytes. It is followed
by a hash of its content, because a listing, unlike the index of a shard, has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.storage.cache.budget import COPY_SUFFIX
from shardio.storage.cache.cached_copy import BLOCK
from shardio.storage.listing import Listing

MEAN_BYTES = 16 * 2**20
"""The mean size of a bundle: of a million images of 100 kB, there are 6,000. The cache removes whole bundles."""

HASH_BYTES = 16
"""The size of the hash, xxh3-128, that follows each content."""


Size = TypeVar("Size", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundles:
    """Where the n files of a listing lie in m bundles.

    Attributes:
        numbers: int32 [n], the bundle of each file.
        starts: int64 [n], where each file begins in its bundle.
        sizes: int64 [m], the size of each bundle in bytes.
        names: The names of the bundles in the cache's folder. They depend on what the bundles contain.
    """

    numbers: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: list[str]


def cut_bundles(listing: Listing) -> Bundles:
    """Cut the files of a listing into bundles.

    The hash of a file's key decides whether a bundle ends there, so a file that is added or replaced changes only its
    own bundle (content-defined chunking: Muthitacharoen et al., A Low-Bandwidth Network File System, 2001).
    """
    spans = size_in_bundle(listing.sizes)  # [n]
    is_last = listing.hashes.astype(np.float64) < spans * (2.0**64 / MEAN_BYTES)
    is_last[-1:] = True
    stops = np.cumsum(spans)
    lasts = np.flatnonzero(is_last)  # [m]
    numbers = np.zeros(len(listing), np.int32)
    numbers[1:] = np.cumsum(is_last[:-1])
    begins = np.concatenate([[0], stops[lasts][:-1]]).astype(np.int64)[: len(lasts)]
    return Bundles(
        numbers=numbers,
        starts=stops - spans - begins[numbers],
        sizes=stops[lasts] - begins,
        names=_name_bundles(listing, lasts),
    )


def size_in_bundle(size: Size) -> Size:
    """Return the bytes that a content of some size, or each of an array of sizes, takes in a bundle."""
    return -(-(size + HASH_BYTES) // BLOCK) * BLOCK


def make_tail(content: bytes | memoryview) -> bytes:
    """Return what follows a content in a bundle: its hash, and zeros up to the end of the block."""
    return hash_content(content) + bytes(-(len(content) + HASH_BYTES) % BLOCK)


def hash_content(content: bytes | memoryview) -> bytes:
    """Return the hash of a content."""
    return xxhash.xxh3_128_digest(content)


def _name_bundles(listing: Listing, lasts: NDArray[np.int64]) -> list[str]:
    names, start = list[str](), 0
    prefix, sizes = listing.folder.store.prefix, listing.sizes.tolist()
    for last in lasts.tolist():
        stop = last + 1
        files = zip(listing.keys[start:stop], sizes[start:stop], listing.versions[start:stop], strict=True)
        text = "\n".join([prefix, *(f"{key}\t{size}\t{version}" for key, size, version in files)])
        names.append(xxhash.xxh3_128_hexdigest(text.encode(errors="surrogateescape")) + COPY_SUFFIX)
        start = stop
    return names
