"""Verify a dataset: compare manifest, indexes and tars, and find keys that occur twice."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.interruptions import let_through
from shardio.processors import count_processors
from shardio.shards.compressed import DecompressedFile
from shardio.shards.foreign import has_split_samples
from shardio.shards.index_columns import read_columns
from shardio.shards.named_shards import NamedShard, find_shards
from shardio.shards.problems import Problem
from shardio.shards.shard import Shard
from shardio.shards.shard_problems import ContentCheck, ShardVerification, find_entry_problems
from shardio.shards.sources import DatasetSource
from shardio.storage import Location, RemoteAccess

MAX_WORKERS = 4
"""The maximum number of threads that read shards, unless the caller chooses a number."""


MAX_DUPLICATES = 100_000
"""The maximum number of samples whose keys are compared because their hashes are equal, which bounds memory."""


class VerifyProgress(Protocol):
    """Receives progress reports."""

    def start(self, total: int) -> None:
        """Receive the number of shards; called once, before the first tar is read."""

    def advance(self, num_done: int, num_bytes: int, num_samples: int) -> None:
        """Receive the numbers of shards, bytes and samples that are done since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    problems: list[Problem]
    key_hashes: NDArray[np.uint64]


_EMPTY = np.zeros(0, np.uint64)


def find_problems(
    source: DatasetSource,
    access: RemoteAccess | None = None,
    *,
    check_content: ContentCheck | None = None,
    num_workers: int | None = None,
    progress: VerifyProgress | None = None,
) -> Iterator[Problem]:
    """Verify a dataset and yield its problems. A problem in one place does not hide those in others.

    Each tar is read once and compared with its index: the size and the xxh3-128 of the tar, each member's header, and
    each content's xxh3-64. Nothing is written.

    Args:
        source: A packed directory, a manifest, a tar, a pattern of tars, a directory of tars, or a list of tars. Tars
            need indexes.
        access: How remote shards are reached.
        check_content: A function that checks each intact content, given its field and its bytes, and returns what is
            wrong with it, or None. Threads call it.
        num_workers: The number of shards to read at a time; by default, up to 4.
        progress: Receives progress reports.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
    """
    shards, problems = find_shards(source, access)
    yield from problems
    if progress is not None:
        progress.start(len(shards))
    num_threads = num_workers or min(MAX_WORKERS, count_processors())
    hashes = list[NDArray[np.uint64]]()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="shardio-verify") as pool:
        try:
            for shard, verified in zip(
                shards, pool.map(partial(_verify, check_content=check_content), shards), strict=True
            ):
                yield from verified.problems
                hashes.append(verified.key_hashes)
                if progress is not None:
                    progress.advance(1, shard.num_bytes, len(verified.key_hashes))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    yield from _find_duplicates(shards, hashes)


def _verify(shard: NamedShard, check_content: ContentCheck | None) -> _Verified:
    where = str(shard.tar)
    if shard.index is None:
        message = "it has no index, so it cannot be verified: create one with shardio index or shardio repair"
        return _Verified(problems=[Problem(kind="missing", where=where, message=message)], key_hashes=_EMPTY)
    try:
        columns = read_columns(shard.index)
    except FormatError as error:
        problem = Problem(kind="index", where=str(shard.index), message=str(error).replace(str(shard.index), "it", 1))
        return _Verified(problems=[problem], key_hashes=_EMPTY)
    except OSError as error:
        problem = Problem(kind="missing", where=str(shard.index), message=f"it cannot be read: {error}")
        return _Verified(problems=[problem], key_hashes=_EMPTY)
    problems = list[Problem]()
    if shard.manifest is not None and shard.entry is not None:
        problems += find_entry_problems(shard.manifest, shard.entry, shard.fields, shard.index, columns)
    if has_split_samples(shard.index, columns.header):
        message = (
            "it lists the parts of samples whose members are not adjacent as samples of their own, because an early "
            "version of shardio made it: create it again with shardio index"
        )
        problems.append(Problem(kind="index", where=str(shard.index), message=message))
    try:
        header = columns.header
        tar = DecompressedFile(shard.tar, header.num_bytes) if header.compression else shard.tar.open()
        with closing(tar):
            found = list(ShardVerification(tar, columns, check_content).find_problems())
        problems += found
        if not found and header.compression is None:
            problems += _open_as_datasets_do(shard.tar, shard.index)
    except FileNotFoundError:
        problems.append(Problem(kind="missing", where=where, message="the tar does not exist"))
    except FormatError as error:
        problems.append(Problem(kind="content", where=where, message=str(error).replace(where, "it", 1)))
    except (OSError, EOFError) as error:
        let_through(error)
        problems.append(Problem(kind="missing", where=where, message=f"it cannot be read: {error}"))
    return _Verified(problems=problems, key_hashes=columns.keys.hash_all())


def _open_as_datasets_do(tar: Location, index: Location) -> list[Problem]:
    """Return what prevents opening a shard whose contents have no problems, such as a wrong digest of headers."""
    try:
        Shard(tar, index).close()
    except FormatError as error:
        return [Problem(kind="index", where=str(index), message=str(error).replace(str(index), "it", 1))]
    return []


def _find_duplicates(shards: list[NamedShard], hashes: list[NDArray[np.uint64]]) -> Iterator[Problem]:
    """Yield a problem for each sample with the key of an earlier one.

    Args:
        shards: The shards.
        hashes: For each shard, the xxh3-64 of its samples' keys. Only keys with equal hashes are read again.
    """
    stops = np.cumsum([len(of_shard) for of_shard in hashes])
    together = np.concatenate([_EMPTY, *hashes])
    if len(together) < 2:
        return
    order = np.argsort(together, kind="stable")
    equals_next = together[order[1:]] == together[order[:-1]]
    suspects = np.sort(order[np.append(equals_next, False) | np.insert(equals_next, 0, False)])
    num_more = len(suspects) - MAX_DUPLICATES
    suspects = suspects[:MAX_DUPLICATES]
    first_places = dict[str, str]()
    in_shards = np.searchsorted(stops, suspects, side="right")
    for shard_place in np.unique(in_shards).tolist():
        shard = shards[shard_place]
        assert shard.index is not None, "its keys were read"
        columns = read_columns(shard.index)
        first = int(stops[shard_place]) - len(columns.keys)
        for sample in (suspects[in_shards == shard_place] - first).tolist():
            key, starts = columns.keys.text(sample), columns.starts[:, sample]
            offset = int(min(starts[starts >= 0], default=0))
            place = f"{shard.tar} at byte {offset}"
            if (earlier := first_places.setdefault(key, place)) != place:
                message = f"its key is also in {earlier}: readers by key find only one of the samples"
                yield Problem(kind="duplicate", where=str(shard.tar), message=message, key=key, offset=offset)
    if num_more > 0:
        message = f"there may be up to {num_more} more samples with repeated keys"
        yield Problem(kind="duplicate", where=str(shards[-1].tar.folder), message=message)
