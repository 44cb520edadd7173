"""Verify one shard: compare its manifest entry, its index and its tar, and read the tar once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.shards.index_columns import IndexColumns
from shardio.shards.manifest import ShardEntry
from shardio.shards.member_names import MemberNames
from shardio.shards.plain_headers import are_plain_headers
from shardio.shards.problems import Problem, ProblemKind
from shardio.shards.tar import BLOCK, MAX_MEMBER, MAX_PLAIN_NAME, TOO_LARGE, header_fits
from shardio.shards.tar_scan import check_end
from shardio.storage import Location, StoredFile, read_pieces

ContentCheck = Callable[[str, bytes], str | None]
"""Returns what is wrong with a content, given the name of its field; None if nothing is wrong."""

MEMBERS_AT_ONCE = 512
"""About how many headers to compare at once. Fewer make numpy's calls cost more; more leave the processor's cache."""


def find_entry_problems(
    manifest: Location, entry: ShardEntry, fields: tuple[str, ...], index: Location, columns: IndexColumns
) -> list[Problem]:
    """Compare a shard's entry in the manifest, and the manifest's fields, with the header of the shard's index."""
    header = columns.header
    pairs = {
        "bytes": (entry.num_bytes, header.num_bytes),
        "samples": (entry.num_samples, header.num_samples),
        "digest": (entry.digest, header.digest),
    }
    found = [
        Problem(
            kind="manifest",
            where=str(manifest),
            message=f"{entry.name} has {name} {of_manifest}, but {index.name} says {of_index}",
        )
        for name, (of_manifest, of_index) in pairs.items()
        if of_manifest != of_index
    ]
    if other := sorted(set(header.fields).difference(fields)):
        message = f"it lacks the fields {', '.join(other)}, which {index.name} has"
        found.append(Problem(kind="manifest", where=str(manifest), message=message))
    return found


class ShardVerification:
    """Compares a tar with its index. Finds all problems, not only the first.

    Args:
        tar: The open tar.
        columns: Its index.
        check_content: A function that checks intact contents.
    """

    def __init__(self, tar: StoredFile, columns: IndexColumns, check_content: ContentCheck | None = None) -> None:
        self._tar, self._columns, self._check_content = tar, columns, check_content
        self._members = np.flatnonzero(columns.starts >= 0)  # Places in the flattened columns, then in tar order.
        self._starts = columns.starts.ravel()[self._members]
        order = np.argsort(self._starts, kind="stable")
        self._members, self._starts = self._members[order], self._starts[order]
        self._stops = self._starts + columns.sizes.ravel()[self._members]
        self._suffixes = [f".{field}".encode(errors="surrogateescape") for field in columns.header.fields]

    def find_problems(self) -> Iterator[Problem]:
        """Yield the problems: first those of the whole tar, then those of its members in tar order."""
        header, tar = self._columns.header, self._tar
        if tar.size != header.num_bytes:
            message = f"the tar has {tar.size} bytes, but its index was created for {header.num_bytes}"
            yield Problem(kind="stale", where=str(tar.location), message=message)
        if np.any((self._columns.starts >= 0) != (self._columns.sizes >= 0)):
            message = "its index is damaged: it has sizes without offsets, or offsets without sizes"
            yield Problem(kind="index", where=str(tar.location), message=message)
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
            yield Problem(kind="digest", where=str(tar.location), message=message)
        if doubted or not is_same or not self._is_covered():
            found += self._compare_names(doubted)
        if self._check_content is not None:
            found += self._check_contents(self._check_content, np.flatnonzero(intact).tolist())
        yield from sorted(found, key=lambda problem: problem.offset or 0)

    def _leave_out_impossible(self) -> Iterator[Problem]:
        """Yield a problem for each content that is outside the tar, overlaps another, or is too large."""
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
                yield self._problem("index", i, "the index points to bytes of the member before")
            else:
                yield self._problem("content", i, f"it has {stops[i] - starts[i]} bytes, {TOO_LARGE}")
        kept = ~(is_outside | overlaps)
        self._members, self._starts, self._stops = self._members[kept], starts[kept], stops[kept]

    def _doubt_names(self, blocks: NDArray[np.uint8], first: int, stop: int) -> Iterator[int]:
        """Yield the places of the members from ``first`` to ``stop`` whose plain headers do not prove name and size."""
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
        """Return whether the tar holds nothing but the members in the index, each with one header block."""
        padded = self._stops + -self._stops % BLOCK
        if np.any(self._starts - BLOCK != np.concatenate([np.zeros(1, np.int64), padded[:-1]])):
            return False
        try:
            check_end(self._tar, int(padded[-1]) if len(padded) else 0)
        except FormatError:
            return False
        return True

    def _compare_names(self, doubted: set[int]) -> list[Problem]:
        """Compare the names and sizes of all members with the index, also those in extended headers.

        Reading all headers takes longer than reading the contents of small members, so intact plain tars skip it.

        Args:
            doubted: The places of the members whose plain headers do not fit.
        """
        names = MemberNames(self._tar, self._starts)
        found, field_names = list[Problem](), self._columns.header.fields
        samples, field_indices = self._places()
        sizes = (self._stops - self._starts).tolist()
        seen = np.zeros(len(self._starts), np.bool_)
        for member in names.read():
            if member.place is None:
                message = f"the index lacks the member {member.name}, so shardio does not read it"
                found.append(
                    Problem(kind="unindexed", where=str(self._tar.location), message=message, offset=member.offset)
                )
                continue
            i = member.place
            seen[i] = True
            expected = self._columns.keys.text(samples[i]), field_names[field_indices[i]]
            if member.parts != expected or member.size != sizes[i]:
                message = (
                    f"the tar has the member {member.name} of {member.size} bytes there, expected "
                    f"{'.'.join(expected)} of {sizes[i]} bytes"
                )
                found.append(self._problem("header", i, message))
        last = int(np.searchsorted(self._starts, names.end))
        for i in np.flatnonzero(~seen).tolist():
            if i in doubted or i < last:
                found.append(self._problem("header", i, "the tar header before the content is damaged"))
        if names.failure is not None and not any(problem.kind == "header" for problem in found):
            where, offset = str(self._tar.location), names.end
            found.append(Problem(kind="header", where=where, message=names.failure, offset=offset))
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
        """Return each member's sample and the place of its field."""
        field_indices, samples = np.divmod(self._members, max(1, len(self._columns.keys)))
        return samples.tolist(), field_indices.tolist()

    def _problem(self, kind: ProblemKind, i: int, message: str) -> Problem:
        field_index, sample = divmod(int(self._members[i]), len(self._columns.keys))
        return Problem(
            kind=kind,
            where=str(self._tar.location),
            message=message,
            key=self._columns.keys.text(sample),
            field=self._columns.header.fields[field_index],
            offset=int(self._starts[i]),
        )


def _proves_name(block: bytes, key: bytes, suffix: bytes, num_bytes: int) -> bool:
    """Return whether a plain header has exactly this name and size. It may shorten or encode other names."""
    name = key + suffix
    if not name.isascii() or len(name) > MAX_PLAIN_NAME:
        return block.startswith(name + b"\0") and header_fits(block, key, suffix, num_bytes)
    return header_fits(block, key, suffix, num_bytes)


def _read_members(
    tar: StoredFile, starts: NDArray[np.int64], stops: NDArray[np.int64], digest: xxhash.xxh3_128
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint64]]]:
    """Read a tar once, in pieces, and update its digest. Yield the members' header blocks and xxh3-64, many at a time.

    Args:
        tar: The tar.
        starts: int64 [n], the offsets of contents that do not overlap, sorted.
        stops: int64 [n], where the contents end.
        digest: Updated with all bytes.

    Yields:
        Header blocks, uint8 [k, 512], and hashes of contents, uint64 [k], of the next k members.
    """
    i, begin = 0, 0
    blocks, hashes = list[NDArray[np.uint8]](), list[int]()
    head, partial = b"", xxhash.xxh3_64()  # Of a member that is only partly in the pieces so far.
    for piece in read_pieces(tar):
        digest.update(piece)
        end = begin + len(piece)
        num_ended = int(np.searchsorted(stops, end, side="right"))
        while i < len(starts) and starts[i] - BLOCK < end:
            if starts[i] - BLOCK >= begin and i < num_ended:  # Nearly always. All members up to num_ended are inside.
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


def _take_blocks(piece: memoryview, offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return copies of the blocks at n offsets, uint8 [n, 512]."""
    at_each_byte = np.ndarray((len(piece) - BLOCK + 1, BLOCK), np.uint8, buffer=piece, strides=(1, 1))
    return at_each_byte[offsets]
