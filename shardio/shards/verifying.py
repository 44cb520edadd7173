"""Verify a dataset: compare its manifest, indexes and tars, and find keys that occur twice."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.process import WorkProgress, count_processors, let_through
from shardio.shards.index import INDEX_SUFFIX, IndexColumns, find_equal, index_location, read_columns
from shardio.shards.indexing import find_index, has_split_samples
from shardio.shards.manifest import MANIFEST_NAME, UNFINISHED_NAME, ShardEntry, read_manifest
from shardio.shards.shard import Shard, open_tar, was_packed
from shardio.shards.sources import DatasetSource, expand_pattern, find_indexed, find_tars
from shardio.shards.tar import (
    BLOCK,
    MAX_MEMBER,
    MAX_PLAIN_NAME,
    TOO_LARGE,
    Ints,
    are_plain_headers,
    header_fits,
    is_added_by_macos,
    split_name,
)
from shardio.shards.tar_scan import TAR_ERRORS, WITHOUT_CONTENT, ForwardFile, check_end, read_headers
from shardio.storage import Location, RemoteAccess, StoredFile, parse_location, read_pieces
from shardio.values import count

ContentCheck = Callable[[str, bytes], str | None]
"""A function that takes a field's name and content, and returns a description of the problem, if any."""

MEMBERS_AT_ONCE = 512
"""The approximate number of headers to compare at once. With fewer headers, the overhead of numpy's calls is larger.
More headers would not stay in the processor's cache."""

MAX_WORKERS = 4
"""The maximum number of threads that read shards, unless the caller chooses a number."""

MAX_DUPLICATES = 100_000
"""The maximum number of samples whose keys are compared because their hashes are equal. This limit bounds
memory use."""

_EMPTY = np.zeros(0, np.uint64)

ProblemKind = Literal[
    "manifest", "unfinished", "unlisted", "missing", "index", "stale", "header", "content", "digest", "unindexed",
    "duplicate", "undecodable",
]  # fmt: skip
"""The kinds of problems, in the order of a report:

=============  =======================================================================================
manifest       the manifest is unreadable, or does not match an index
unfinished     a pack into the directory was interrupted
unlisted       a tar in the directory is not in the manifest
missing        a tar or its index does not exist, or cannot be read
index          an index is damaged
stale          an index does not match the size, version or layout of its tar
header         the tar header of a member is damaged or has a different name or size, or data follows the end
content        a member's content does not match its hash in the index, or is outside the tar
digest         a tar does not match the digest in its index
unindexed      a member is not in the index
duplicate      a key occurs twice
undecodable    an image cannot be decoded
=============  =======================================================================================
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem in a dataset.

    Attributes:
        kind: The kind of the problem.
        where: The path of the tar, index, manifest or directory.
        message: A description of the problem, with the actual and the expected values.
        key: The key of the sample, or None if the problem is not about one sample.
        field: The name of the field, or None if the problem is not about one field.
        offset: The problem's offset in the tar, in bytes, or None if the offset is unknown.
    """

    kind: ProblemKind
    where: str
    message: str
    key: str | None = None
    field: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte {self.offset}"
        parts = [f"field {self.field!r}"] if self.field is not None else []
        parts += [f"sample {self.key}"] if self.key is not None else []
        return f"{self.where}{at}: {' of '.join(parts)}{': ' if parts else ''}{self.message}"

    def dump(self) -> dict[str, Any]:
        """Return the problem as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShard:
    """A shard that may be damaged or incomplete.

    Attributes:
        tar: The location of the tar.
        index: The location of the index, or None if the shard has no index.
        num_bytes: The size of the tar in bytes, or 0 if the tar does not exist.
        manifest: The location of the manifest that lists the shard, or None if no manifest lists it.
        entry: The shard's entry in the manifest.
        fields: The fields of the whole dataset, according to the manifest.
    """

    tar: Location
    index: Location | None
    num_bytes: int
    manifest: Location | None = None
    entry: ShardEntry | None = None
    fields: tuple[str, ...] = ()


def find_shards(source: DatasetSource, access: RemoteAccess | None = None) -> tuple[list[NamedShard], list[Problem]]:
    """Find the shards that a source names, and the problems that are visible without opening shards.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
    """
    if not isinstance(source, str | os.PathLike):
        return _name_tars([tar for pattern in source for tar in expand_pattern(pattern, access)])
    location = parse_location(source, access)
    if location.is_folder():
        return _find_in_folder(location, location / MANIFEST_NAME)
    if location.name.endswith(".json"):
        if not location.exists():
            raise FileNotFoundError(f"the manifest {location} does not exist")
        return _find_in_folder(location.folder, location)
    return _name_tars(expand_pattern(source, access))


def _name_tars(tars: list[Location]) -> tuple[list[NamedShard], list[Problem]]:
    shards, problems = [_name_shard(tar) for tar in tars], list[Problem]()
    missing = [tar for tar in tars if not tar.exists()]
    if tars == missing:
        raise FileNotFoundError(
            f"no such directory, manifest or tar: {', '.join(map(str, tars[:5])) or '(an empty list)'}"
        )
    problems += [Problem(kind="missing", where=str(tar), message="the tar does not exist") for tar in missing]
    return [shard for shard in shards if shard.tar not in missing], problems


def _find_in_folder(folder: Location, manifest: Location) -> tuple[list[NamedShard], list[Problem]]:
    names, problems = [name for name in folder.list() if not name.endswith("/")], list[Problem]()

    def add(kind: ProblemKind, where: Location, message: str) -> None:
        problems.append(Problem(kind=kind, where=str(where), message=message))

    if (folder / UNFINISHED_NAME).exists():
        add(
            "unfinished", folder, "the pack into this directory is unfinished: rerun the same pack command to resume it"
        )
    try:
        tars = [tar for tar in find_tars(folder) if not is_added_by_macos(tar.name)]
    except FormatError as error:
        add("unlisted", folder, str(error))
        tars = [folder / name for name in names if name.lower().endswith(".tar") and not name.startswith(".")]
    entries, fields, unlisted = dict[str, ShardEntry](), tuple[str, ...](), tars
    if manifest.exists():
        try:
            found = read_manifest(manifest)
        except FormatError as error:
            add("manifest", manifest, str(error).replace(str(manifest), "it", 1).removeprefix("the manifest "))
        else:
            counts = Counter(entry.name for entry in found.shards)
            for name, num_times in counts.items():
                if num_times > 1:
                    add("manifest", manifest, f"it lists {name} {num_times} times")
            for tar in tars:
                if tar.name not in counts:
                    add("unlisted", tar, f"the tar is not in {manifest.name}, so shardio does not read it")
            entries, fields, unlisted = {entry.name: entry for entry in found.shards}, found.fields, []
    elif any(map(_was_packed, tars)):
        message = "the manifest does not exist, but shardio packed the tars: rebuild it with shardio repair"
        add("manifest", manifest, message)
    shards = [_name_shard(folder / entry.name, manifest, entry, fields) for entry in entries.values()]
    shards += [_name_shard(tar) for tar in unlisted]
    for tar in find_indexed(folder):
        if tar not in tars and tar.name not in entries:
            add("missing", tar, f"the index {tar.name}{INDEX_SUFFIX} exists, but the tar does not")
    if not shards and not problems:
        raise FileNotFoundError(f"the directory {folder} holds neither {MANIFEST_NAME} nor any *.tar")
    return shards, problems


def _name_shard(
    tar: Location, manifest: Location | None = None, entry: ShardEntry | None = None, fields: tuple[str, ...] = ()
) -> NamedShard:
    index = find_index(tar)
    if manifest is not None and index != index_location(tar):  # Readers of packed shards use no other index.
        index = None
    try:
        num_bytes = tar.stat().size
    except OSError:
        num_bytes = 0
    return NamedShard(tar=tar, index=index, num_bytes=num_bytes, manifest=manifest, entry=entry, fields=fields)


def _was_packed(tar: Location) -> bool:
    with suppress(FormatError, OSError):
        return was_packed(tar)
    return False


def _find_entry_problems(
    manifest: Location, entry: ShardEntry, fields: tuple[str, ...], index: Location, columns: IndexColumns
) -> list[Problem]:
    header = columns.header
    messages = [
        f"{entry.name} has {name} {of_manifest}, but {index.name} says {of_index}"
        for name, of_manifest, of_index in (
            ("bytes", entry.num_bytes, header.num_bytes),
            ("samples", entry.num_samples, header.num_samples),
            ("digest", entry.digest, header.digest),
        )
        if of_manifest != of_index
    ]
    if other := sorted(set(header.fields).difference(fields)):
        messages.append(f"it lacks the fields {', '.join(other)}, which {index.name} has")
    return [Problem(kind="manifest", where=str(manifest), message=message) for message in messages]


class ShardVerification:
    """A comparison of a tar with its index that finds all problems, not only the first.

    Args:
        tar: The open tar.
        columns: The tar's index.
        check_content: A function that performs additional checks on contents that match their hashes, or None.
    """

    def __init__(self, tar: StoredFile, columns: IndexColumns, check_content: ContentCheck | None = None) -> None:
        self._tar, self._columns, self._check_content = tar, columns, check_content
        self._where = str(tar.location)
        self._members = np.flatnonzero(columns.starts >= 0)  # The members' places in the flattened columns.
        self._starts = columns.starts.ravel()[self._members]
        order = np.argsort(self._starts, kind="stable")
        self._members, self._starts = self._members[order], self._starts[order]
        self._stops = self._starts + columns.sizes.ravel()[self._members]
        self._suffixes = [f".{field}".encode(errors="surrogateescape") for field in columns.header.fields]

    def find_problems(self) -> Iterator[Problem]:
        """Yield the problems of the whole tar, followed by the problems of its members in tar order."""
        header, tar = self._columns.header, self._tar
        if tar.size != header.num_bytes:
            message = f"the tar has {tar.size} bytes, but its index was created for {header.num_bytes}"
            yield Problem(kind="stale", where=self._where, message=message)
        if np.any((self._columns.starts >= 0) != (self._columns.sizes >= 0)):
            message = "its index is damaged: it has sizes without offsets, or offsets without sizes"
            yield Problem(kind="index", where=self._where, message=message)
        yield from self._leave_out_impossible()
        digest, doubted, found = xxhash.xxh3_128(), set[int](), list[Problem]()
        intact = np.ones(len(self._starts), np.bool_)
        hashes, first = self._columns.hashes.ravel()[self._members], 0
        for blocks, content_hashes in _read_members(tar, self._starts, self._stops, digest):
            stop = first + len(blocks)
            doubted.update(self._doubt_names(blocks, first, stop))
            is_damaged = content_hashes != hashes[first:stop]
            intact[first:stop] = ~is_damaged
            for row in np.flatnonzero(is_damaged).tolist():
                num_bytes = self._stops[first + row] - self._starts[first + row]
                message = (
                    f"the content is damaged: {num_bytes} bytes with xxh3-64 {content_hashes[row]:016x}, expected "
                    f"{hashes[first + row]:016x}"
                )
                found.append(self._problem("content", first + row, message))
            first = stop
        is_same = digest.hexdigest() == header.digest
        if not is_same:
            message = f"the tar has xxh3-128 {digest.hexdigest()}, expected {header.digest}"
            yield Problem(kind="digest", where=self._where, message=message)
        if doubted or not is_same or not self._is_covered():
            found += self._compare_names(doubted)
        if self._check_content is not None:
            found += self._check_contents(self._check_content, np.flatnonzero(intact).tolist())
        yield from sorted(found, key=lambda problem: problem.offset or 0)

    def _leave_out_impossible(self) -> Iterator[Problem]:
        starts, stops = self._starts, self._stops
        is_outside = (starts < BLOCK) | (stops < starts) | (stops > self._tar.size)
        ends = np.maximum.accumulate(np.where(is_outside, 0, stops))
        overlaps = ~is_outside
        overlaps[1:] &= starts[1:] - BLOCK < ends[:-1]
        overlaps[:1] = False
        is_too_large = ~is_outside & (stops - starts > MAX_MEMBER)
        for i in np.flatnonzero(is_outside | overlaps | is_too_large).tolist():
            if is_outside[i]:
                message = f"the index points to bytes {starts[i]} to {stops[i]}, but the tar has {self._tar.size} bytes"
                yield self._problem("content", i, message)
            elif overlaps[i]:
                yield self._problem("index", i, "the index points to bytes of the previous member")
            else:
                yield self._problem("content", i, f"it has {stops[i] - starts[i]} bytes, {TOO_LARGE}")
        kept = ~(is_outside | overlaps)
        self._members, self._starts, self._stops = self._members[kept], starts[kept], stops[kept]

    def _doubt_names(self, blocks: NDArray[np.uint8], first: int, stop: int) -> Iterator[int]:
        field_indices, samples = np.divmod(self._members[first:stop], len(self._columns.keys))
        keys, suffixes = self._columns.keys, self._suffixes
        parts = zip(
            keys.bounds[samples].tolist(), keys.bounds[samples + 1].tolist(), field_indices.tolist(), strict=True
        )
        names = [keys.content[start:end] + suffixes[field_index] for start, end, field_index in parts]
        sizes = self._stops[first:stop] - self._starts[first:stop]
        for row in np.flatnonzero(~are_plain_headers(blocks, names, sizes)).tolist():
            block, key, suffix = blocks[row].tobytes(), keys[samples[row]], suffixes[field_indices[row]]
            if not _proves_name(block, key, suffix, int(sizes[row])):
                yield first + row

    def _is_covered(self) -> bool:
        padded = self._stops + -self._stops % BLOCK
        if np.any(self._starts - BLOCK != np.concatenate([np.zeros(1, np.int64), padded[:-1]])):
            return False
        try:
            check_end(self._tar, int(padded[-1]) if len(padded) else 0)
        except FormatError:
            return False
        return True

    def _compare_names(self, doubted: set[int]) -> list[Problem]:
        """Compare the names and sizes of all members, including those in extended headers, with the index.

        Reading all headers takes longer than reading the contents of small members, so this check is skipped for
        intact plain tars.

        Args:
            doubted: The places of the members whose plain headers do not match the index.
        """
        found, field_names, starts, where = list[Problem](), self._columns.header.fields, self._starts, self._where
        samples, field_indices = self._places()
        sizes = (self._stops - starts).tolist()
        seen, end, failure = np.zeros(len(starts), np.bool_), 0, None
        try:
            for info, next_header in read_headers(ForwardFile(self._tar)):
                offset, name, parts = info.offset_data, info.name, split_name(info.name)
                i = int(np.searchsorted(starts, offset))
                if i < len(starts) and starts[i] == offset and info.isreg():
                    seen[i] = True
                    expected = self._columns.keys.text(samples[i]), field_names[field_indices[i]]
                    if parts != expected or info.size != sizes[i]:
                        message = (
                            f"the tar has the member {name} of {info.size} bytes there, expected {'.'.join(expected)} "
                            f"of {sizes[i]} bytes"
                        )
                        found.append(self._problem("header", i, message))
                elif parts is not None and info.type not in WITHOUT_CONTENT and not is_added_by_macos(name):
                    message = f"the index lacks the member {name}, so shardio does not read this member"
                    found.append(Problem(kind="unindexed", where=where, message=message, offset=offset))
                end = next_header
            check_end(self._tar, end)
        except TAR_ERRORS as error:
            failure = f"the tar is damaged: {error}"
        except FormatError as error:
            failure = str(error).replace(where, "the tar", 1)
        last = int(np.searchsorted(starts, end))
        for i in np.flatnonzero(~seen).tolist():
            if i in doubted or i < last:
                found.append(self._problem("header", i, "the tar header before the content is damaged"))
        if failure is not None and not any(problem.kind == "header" for problem in found):
            found.append(Problem(kind="header", where=where, message=failure, offset=end))
        return found

    def _check_contents(self, check: ContentCheck, places: list[int]) -> Iterator[Problem]:
        fields = self._columns.header.fields
        _, field_indices = self._places()
        for i in places:
            start, stop = int(self._starts[i]), int(self._stops[i])
            if stop - start > MAX_MEMBER:
                continue
            if (message := check(fields[field_indices[i]], self._tar.read(start, stop))) is not None:
                yield self._problem("undecodable", i, message)

    def _places(self) -> tuple[list[int], list[int]]:
        field_indices, samples = np.divmod(self._members, max(1, len(self._columns.keys)))
        return samples.tolist(), field_indices.tolist()

    def _problem(self, kind: ProblemKind, i: int, message: str) -> Problem:
        field_index, sample = divmod(int(self._members[i]), len(self._columns.keys))
        return Problem(
            kind=kind,
            where=self._where,
            message=message,
            key=self._columns.keys.text(sample),
            field=self._columns.header.fields[field_index],
            offset=int(self._starts[i]),
        )


def _proves_name(block: bytes, key: bytes, suffix: bytes, num_bytes: int) -> bool:
    name = key + suffix
    # A plain header may shorten long names and encode non-ASCII names.
    is_exact = name.isascii() and len(name) <= MAX_PLAIN_NAME
    return (is_exact or block.startswith(name + b"\0")) and header_fits(block, key, suffix, num_bytes)


def _read_members(
    tar: StoredFile, starts: Ints, stops: Ints, digest: xxhash.xxh3_128
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint64]]]:
    """Read a tar once, piece by piece. Yield the header blocks and the xxh3-64 of many members at a time.

    Args:
        tar: The tar.
        starts: int64 [n], the sorted offsets of contents that do not overlap.
        stops: int64 [n], the offsets at which the contents end.
        digest: A digest to update with all bytes.

    Yields:
        Header blocks, uint8 [k, 512], and hashes of contents, uint64 [k], of the next k members.
    """
    i, begin = 0, 0
    blocks, hashes = list[NDArray[np.uint8]](), list[int]()
    head, partial = b"", xxhash.xxh3_64()  # The part of the current member that earlier pieces held.
    for piece in read_pieces(tar):
        digest.update(piece)
        end = begin + len(piece)
        num_ended = int(np.searchsorted(stops, end, side="right"))
        while i < len(starts) and starts[i] - BLOCK < end:
            if starts[i] - BLOCK >= begin and i < num_ended:  # The usual case: the piece contains these members.
                starts_here = starts[i:num_ended] - begin
                blocks.append(_take_blocks(piece, starts_here - BLOCK))
                bounds = zip(starts_here.tolist(), (stops[i:num_ended] - begin).tolist(), strict=True)
                hashes += [xxhash.xxh3_64_intdigest(piece[start:stop]) for start, stop in bounds]
                i = num_ended
                continue
            start, stop = int(starts[i]) - begin, int(stops[i]) - begin
            head += bytes(piece[max(0, start - BLOCK) : max(0, start)])
            partial.update(piece[max(0, start) : max(0, stop)])
            if stop > len(piece):
                break
            blocks.append(np.frombuffer(head, np.uint8)[None])
            hashes.append(partial.intdigest())
            head, partial, i = b"", xxhash.xxh3_64(), i + 1
        if len(hashes) >= MEMBERS_AT_ONCE or (hashes and end == tar.size):
            yield np.concatenate(blocks), np.array(hashes, np.uint64)
            blocks.clear()
            hashes.clear()
        begin = end


def _take_blocks(piece: memoryview, offsets: Ints) -> NDArray[np.uint8]:
    at_each_byte = np.ndarray((len(piece) - BLOCK + 1, BLOCK), np.uint8, buffer=piece, strides=(1, 1))
    return at_each_byte[offsets]


def find_problems(
    source: DatasetSource,
    access: RemoteAccess | None = None,
    *,
    check_content: ContentCheck | None = None,
    num_workers: int | None = None,
    progress: WorkProgress | None = None,
) -> Iterator[Problem]:
    """Verify a dataset and yield its problems. A problem in one place does not hide problems in other places.

    Each tar is read once and compared with its index: the size and the xxh3-128 of the tar, each member's header, and
    the xxh3-64 of each field's content. Nothing is written.

    Args:
        source: A packed directory, a manifest, a tar, a pattern of tars, a directory of tars, or a list of tars. Tars
            need indexes.
        access: The access to remote shards.
        check_content: A function that takes a field's name and its intact content, and returns a description of the
            problem, or None. Several threads call this function.
        num_workers: The number of shards to read at a time; by default, up to 4.
        progress: Receives the total number of shards, and the numbers of verified shards, bytes and samples.

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
            verified = pool.map(partial(_verify, check_content=check_content), shards)
            for shard, (problems, key_hashes) in zip(shards, verified, strict=True):
                yield from problems
                hashes.append(key_hashes)
                if progress is not None:
                    progress.advance(1, shard.num_bytes, len(key_hashes))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    yield from _find_duplicates(shards, hashes)


def _verify(shard: NamedShard, check_content: ContentCheck | None) -> tuple[list[Problem], NDArray[np.uint64]]:
    where = str(shard.tar)
    if shard.index is None:
        message = "it has no index, so it cannot be verified: create one with shardio index or shardio repair"
        return [Problem(kind="missing", where=where, message=message)], _EMPTY
    try:
        columns = read_columns(shard.index)
    except FormatError as error:
        return [_as_problem("index", shard.index, error)], _EMPTY
    except OSError as error:
        return [Problem(kind="missing", where=str(shard.index), message=f"it cannot be read: {error}")], _EMPTY
    problems = list[Problem]()
    if shard.manifest is not None and shard.entry is not None:
        problems += _find_entry_problems(shard.manifest, shard.entry, shard.fields, shard.index, columns)
    if has_split_samples(shard.index, columns.header):
        message = (
            "it was created by an early version of shardio, which listed a sample with non-adjacent members as several "
            "samples: create it again with shardio index"
        )
        problems.append(Problem(kind="index", where=str(shard.index), message=message))
    try:
        with closing(open_tar(shard.tar, columns.header)) as tar:
            found = list(ShardVerification(tar, columns, check_content).find_problems())
        problems += found
        if not found and columns.header.compression is None:
            problems += _open_as_datasets_do(shard.tar, shard.index)
    except FileNotFoundError:
        problems.append(Problem(kind="missing", where=where, message="the tar does not exist"))
    except FormatError as error:
        problems.append(_as_problem("content", shard.tar, error))
    except (OSError, EOFError) as error:
        let_through(error)
        problems.append(Problem(kind="missing", where=where, message=f"it cannot be read: {error}"))
    return problems, columns.keys.hash_all()


def _as_problem(kind: ProblemKind, location: Location, error: FormatError) -> Problem:
    return Problem(kind=kind, where=str(location), message=str(error).replace(str(location), "it", 1))


def _open_as_datasets_do(tar: Location, index: Location) -> list[Problem]:
    try:
        Shard(tar, index).close()
    except FormatError as error:  # For example, the digest of headers is wrong.
        return [_as_problem("index", index, error)]
    return []


def _find_duplicates(shards: list[NamedShard], hashes: list[NDArray[np.uint64]]) -> Iterator[Problem]:
    """Yield a problem for each sample with the same key as an earlier sample.

    Args:
        shards: The shards.
        hashes: For each shard, the xxh3-64 of its samples' keys. Only keys with equal hashes are read again.
    """
    stops = np.cumsum([len(of_shard) for of_shard in hashes])
    suspects = find_equal(np.concatenate([_EMPTY, *hashes]))
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
                message = f"its key is also in {earlier}: lookups by key find only one of the samples"
                yield Problem(kind="duplicate", where=str(shard.tar), message=message, key=key, offset=offset)
    if num_more > 0:
        message = f"there may be up to {count(num_more, 'more sample')} with repeated keys"
        yield Problem(kind="duplicate", where=str(shards[-1].tar.folder), message=message)
