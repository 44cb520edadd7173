"""Plan what to fetch of remote files. Each is a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shardio.storage.cache.cached_files import CachedFiles

MAX_FILES = 1024
"""The most files in a stretch. Requests cannot be joined, so a longer stretch would save none."""

MAX_BYTES = 256 * 2**20
"""The most bytes in a stretch, approximately."""

SHARE_OF_CACHE = 8
"""A stretch takes at most the cache's size divided by this number, because the cache removes whole bundles."""

FILES_TOGETHER = 8
"""How many files one message to the storage process asks for."""


class RemoteFiles:
    """Remote files as samples: see :class:`~shardio.reading.read_ahead.RemoteSamples`.

    Args:
        files: The files.
        list_keys: A function that returns the keys of the files of some samples, given the samples' indices.
    """

    def __init__(self, files: CachedFiles, list_keys: Callable[[NDArray[np.int64]], Sequence[str]]) -> None:
        self._files, self._list_keys = files, list_keys

    def choose_lengths(self, first: int | None, size: int | None) -> Iterator[int]:
        mean = max(1, int(self._files.listing.sizes.mean()))
        largest = min(MAX_BYTES, self._files.store.cache_bytes // SHARE_OF_CACHE) // mean
        return repeat(max(1, min(MAX_FILES, largest)))

    def plan(self, indices: NDArray[np.int64], num_before: int) -> list[Callable[[], object]]:
        keys = self._list_keys(indices)
        starts = range(0, len(keys), FILES_TOGETHER)
        return [partial(self._files.prefetch, keys[start : start + FILES_TOGETHER]) for start in starts]
