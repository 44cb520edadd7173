"""Find images that occur several times, in one source or in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.looking.hashing import ImageHashes, hash_images
from shardio.looking.images import ImageColumns
from shardio.looking.near_pairs import find_near_pairs, join_groups
from shardio.looking.perceptual import count_bits
from shardio.looking.source import ImageSource, Place
from shardio.looking.thresholds import DEFAULT_THRESHOLD, MAX_THRESHOLD
from shardio.values import check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A sample whose image occurs several times.

    Attributes:
        source_index: The place of its source in the list of sources.
        index: The sample's index in the source.
        key: Its key, or its path below the source.
        place: Where its image is.
        label: The name of its label; None if it has none.
        distance: The number of bits in which its perceptual hash differs from that of the group's first sample; None if
            their image files have the same bytes.
    """

    source_index: int
    index: int
    key: str
    place: Place
    label: str | None
    distance: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateGroup:
    """Samples that have the same image, or nearly the same."""

    copies: tuple[Copy, ...]

    @property
    def is_exact(self) -> bool:
        """Whether all image files have the same bytes."""
        return all(copy.distance is None for copy in self.copies)

    @property
    def labels(self) -> tuple[str, ...]:
        """The different labels of the samples, sorted."""
        return tuple(sorted({copy.label for copy in self.copies if copy.label is not None}))

    @property
    def source_indices(self) -> tuple[int, ...]:
        """The sources of the samples, sorted."""
        return tuple(sorted({copy.source_index for copy in self.copies}))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableImage:
    """An image that was not compared, or only by its bytes, because it cannot be read or decoded."""

    source_index: int
    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateReport:
    """The result of a search.

    Attributes:
        num_images: The number of images of each source.
        groups: The groups, in the order of their first samples.
        unreadable: The images that could not be compared in full.
        num_even: The number of images with too little contrast for a perceptual hash: only their bytes were compared.
    """

    num_images: tuple[int, ...]
    groups: tuple[DuplicateGroup, ...]
    unreadable: tuple[UnreadableImage, ...]
    num_even: int

    def count_within(self, source_index: int) -> tuple[int, int]:
        """Return how many groups have several samples of a source, and how many of these could be left out."""
        counts = [sum(copy.source_index == source_index for copy in group.copies) for group in self.groups]
        repeated = [count for count in counts if count > 1]
        return len(repeated), sum(repeated) - len(repeated)

    def count_between(self, first: int, second: int) -> tuple[int, int, int]:
        """Return how many groups have samples of both sources, and the numbers of these samples of each."""
        shared = [group for group in self.groups if {first, second} <= set(group.source_indices)]
        in_first, in_second = (
            sum(copy.source_index == source for group in shared for copy in group.copies) for source in (first, second)
        )
        return len(shared), in_first, in_second


def find_duplicates(
    sources: Sequence[ImageSource],
    *,
    threshold: int | None = DEFAULT_THRESHOLD,
    is_between: bool = False,
    start: Callable[[int], object] = lambda num_images: None,
    advance: Callable[[int], object] = lambda num_images: None,
) -> DuplicateReport:
    """Find the groups of samples that have the same image.

    Near duplicates are grouped transitively: two samples of a group may differ more than the threshold if others are
    between them.

    Args:
        sources: Where the samples are.
        threshold: The number of bits in which the perceptual hashes of near duplicates differ at most; None to compare
            only bytes, which decodes no image. The indexes of shards hold the hashes of the bytes.
        is_between: Whether to return only groups with samples of several sources.
        start: Called with the number of images to read.
        advance: Called with the number of images that were read since the last call.

    Raises:
        ValueError: If the threshold is out of range.
        FormatError: If a file of a dataset is invalid.
    """
    if threshold is not None:
        check_integer("threshold", threshold, at_least=0, below=MAX_THRESHOLD + 1)
    columns = [source.list_images() for source in sources]
    to_read = _choose_images(columns, reads_all=threshold is not None)
    start(sum(map(len, to_read)))
    found = [
        hash_images(source, each, indices, is_perceptual=threshold is not None, advance=advance)
        for source, each, indices in zip(sources, columns, to_read, strict=True)
    ]
    table = _Table.join(columns, found)
    members = [rows for rows in _find_repeated(_group(table, threshold)) if not is_between or table.is_shared(rows)]
    unreadable = [
        UnreadableImage(source_index=source_index, key=source.keys(np.array([index]))[0], reason=reason)
        for source_index, (source, hashes) in enumerate(zip(sources, found, strict=True))
        for index, reason in hashes.unreadable
    ]
    return DuplicateReport(
        num_images=tuple(len(each.find_images()) for each in columns),
        groups=tuple(_describe(table, rows, sources, columns) for rows in members),
        unreadable=tuple(unreadable),
        num_even=sum(len(hashes.even) for hashes in found),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The samples of all sources, in n rows, one source after the other.

    Attributes:
        source_indices: The source of each row, int64 [n].
        indices: The sample's index in its source, int64 [n].
        content_ids: A number for each distinct content, int64 [n]; -1 if the content is unknown.
        perceptual: The perceptual hash, uint64 [n].
        has_perceptual: bool [n].
    """

    source_indices: NDArray[np.int64]
    indices: NDArray[np.int64]
    content_ids: NDArray[np.int64]
    perceptual: NDArray[np.uint64]
    has_perceptual: NDArray[np.bool_]

    @classmethod
    def join(cls, columns: Sequence[ImageColumns], hashes: Sequence[ImageHashes]) -> _Table:
        """Return the rows of all sources. Contents are equal if their sizes and hashes are."""
        lengths = [len(each.sizes) for each in columns]
        sizes = np.concatenate([each.sizes for each in columns])
        content = np.concatenate([each.content for each in hashes])
        known = np.flatnonzero(np.concatenate([each.has_content for each in hashes]))
        content_ids = np.full(len(sizes), -1, np.int64)
        pairs = np.zeros(len(known), [("size", np.int64), ("content", np.uint64)])
        pairs["size"], pairs["content"] = sizes[known], content[known]
        content_ids[known] = np.unique(pairs, return_inverse=True)[1]
        return cls(
            source_indices=np.repeat(np.arange(len(columns)), lengths),
            indices=np.concatenate([np.arange(length) for length in lengths]),
            content_ids=content_ids,
            perceptual=np.concatenate([each.perceptual for each in hashes]),
            has_perceptual=np.concatenate([each.has_perceptual for each in hashes]),
        )

    def is_shared(self, rows: NDArray[np.int64]) -> bool:
        """Return whether rows are of several sources."""
        sources = self.source_indices[rows]
        return bool((sources != sources[0]).any())


def _choose_images(columns: Sequence[ImageColumns], *, reads_all: bool) -> list[NDArray[np.int64]]:
    """Return the indices of the images to read, of each source.

    To compare bytes, only files without a known hash are read, and only those whose size occurs several times.
    """
    if reads_all:
        return [each.find_images() for each in columns]
    sizes, counts = np.unique(np.concatenate([each.sizes for each in columns]), return_counts=True)
    repeated = sizes[(counts > 1) & (sizes >= 0)]
    return [
        np.flatnonzero(np.isin(each.sizes, repeated)) if each.content_hashes is None else np.empty(0, np.int64)
        for each in columns
    ]


def _group(table: _Table, threshold: int | None) -> NDArray[np.int64]:
    """Return the group of each row, int64 [n]; -1 if the content of its image is unknown."""
    if threshold is None or not table.has_perceptual.any():
        return table.content_ids
    # Equal contents have equal perceptual hashes. So the groups are those of the distinct perceptual hashes, and those
    # of the other contents.
    groups = np.where(table.content_ids < 0, -1, table.content_ids + len(table.content_ids))
    distinct, ids = np.unique(table.perceptual[table.has_perceptual], return_inverse=True)
    groups[table.has_perceptual] = join_groups(len(distinct), find_near_pairs(distinct, threshold))[ids]
    return groups


def _find_repeated(groups: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the rows of each group that has several, in the order of their first rows."""
    order = np.argsort(groups, kind="stable")
    order = order[np.searchsorted(groups[order], 0) :]
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lengths = np.diff(starts, append=len(order))
    repeated = lengths > 1
    spans = zip(starts[repeated].tolist(), lengths[repeated].tolist(), strict=True)
    found = [order[start : start + length] for start, length in spans]
    return sorted(found, key=lambda rows: int(rows[0]))


def _describe(
    table: _Table, rows: NDArray[np.int64], sources: Sequence[ImageSource], columns: Sequence[ImageColumns]
) -> DuplicateGroup:
    """Return the group with some rows."""
    distances = count_bits(table.perceptual[rows] ^ table.perceptual[rows[0]]).tolist()
    is_equal = (table.content_ids[rows] == table.content_ids[rows[0]]).tolist()
    copies = list[Copy]()
    for row, distance, equal in zip(rows.tolist(), distances, is_equal, strict=True):
        source_index, index = int(table.source_indices[row]), int(table.indices[row])
        source, of_source, one = sources[source_index], columns[source_index], np.array([index])
        copies.append(
            Copy(
                source_index=source_index,
                index=index,
                key=source.keys(one)[0],
                place=source.places(one, of_source)[0],
                label=of_source.label_of(index),
                distance=None if equal else distance,
            )
        )
    return DuplicateGroup(copies=tuple(copies))
