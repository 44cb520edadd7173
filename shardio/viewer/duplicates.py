"""Find images that occur several times in one or more sources.

The hash is pHash, as Krawetz describes it ("Looks Like It", 2011, https://www.hackerfactor.com/blog) and the Python
package ImageHash computes it. The picture is reduced to 32×32 gray pixels. Each bit says whether one of the 8×8
lowest-frequency coefficients of the discrete cosine transform exceeds their median. The hash of the same name by Zauner
(https://www.phash.org, 2010) leaves out the constant frequencies, which makes the hash less stable.

To find similar hashes, their bits are split into bands. If two hashes differ in at most t bits, and there are t + k
bands, then at least k bands are equal: each differing bit changes only one band (the pigeonhole principle). So the
hashes agree on some choice of k bands, and sorting by these bands finds such pairs. Manku, Jain and Das Sarma
("Detecting Near-Duplicates for Web Crawling", 2007) use the same method: they search one table per choice of bands.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from math import comb

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.images import open_image
from shardio.pages import Markup, counted, element, join, make_page, section, table, tiles
from shardio.process import WorkProgress, let_through
from shardio.values import check_integer, count
from shardio.viewer import DEFAULT_THRESHOLD, MAX_THRESHOLD
from shardio.viewer.overview import Thumbnail, figure, make_thumbnails
from shardio.viewer.sources import ImageColumns, ImageSource, Place, Unreadable, map_images, read_resized

SIDE = 32
"""The side of the reduced picture, in pixels."""

NUM_FREQUENCIES = 8
"""The number of frequencies in each direction."""

MIN_CONTRAST = 2.0
"""The smallest standard deviation of the kept frequencies at which a picture gets a hash, in gray levels from 0 to 255.

The bits of a uniform picture, such as a black one, would depend on noise alone.
"""

_GRAY = np.array([0.299, 0.587, 0.114], np.float32)
"""The weights of red, green and blue (ITU-R BT.601), as in Pillow's mode L."""

NUM_BITS = 64
"""The number of bits of a hash."""

MAX_KEPT_BANDS = 4
"""The maximum number of bands that must agree."""

SORT_COST = 20
"""The time to sort one hash, as a multiple of the time to compare one pair."""

Floats = NDArray[np.float32]

Indices = NDArray[np.int64]

MAX_GROUPS = 200
"""The maximum number of groups on the page."""

MAX_COPIES = 12
"""The maximum number of images of a group on the page."""

_Thumbnails = dict[tuple[int, int], Thumbnail]
"""Thumbnails by source and index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A sample whose image occurs several times.

    Attributes:
        source_index: The index of its source in the list of sources.
        index: The sample's index in the source.
        key: The sample's key, or its path below the source.
        place: The place of its image.
        label: The name of the sample's label; None if the sample has no label.
        distance: The number of bits in which its perceptual hash differs from that of the group's first sample; None if
            the two image files have the same bytes.
    """

    source_index: int
    index: int
    key: str
    place: Place
    label: str | None
    distance: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateGroup:
    """Samples with the same or nearly the same image."""

    copies: tuple[Copy, ...]

    @property
    def is_exact(self) -> bool:
        """Whether all image files have the same bytes."""
        return all(copy.distance is None for copy in self.copies)

    @property
    def labels(self) -> tuple[str, ...]:
        """The distinct labels of the samples, sorted."""
        return tuple(sorted({copy.label for copy in self.copies if copy.label is not None}))

    @property
    def source_indices(self) -> tuple[int, ...]:
        """The sources of the samples, sorted."""
        return tuple(sorted({copy.source_index for copy in self.copies}))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableImage:
    """An image that cannot be read or decoded, and was therefore compared only by its bytes, or not at all."""

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
        """Return the number of groups with several samples from a source, and the number of surplus samples in them."""
        counts = [sum(copy.source_index == source_index for copy in group.copies) for group in self.groups]
        repeated = [count for count in counts if count > 1]
        return len(repeated), sum(repeated) - len(repeated)

    def list_between(self) -> list[list[int]]:
        """Return, for each pair of sources, the number of shared groups and the numbers of samples in them.

        Returns:
            For each pair, the two sources, the number of groups with samples from both, and each source's number of
            samples in these groups.
        """
        found = list[list[int]]()
        for first, second in combinations(range(len(self.num_images)), 2):
            shared = [group for group in self.groups if {first, second} <= set(group.source_indices)]
            counts = Counter(copy.source_index for group in shared for copy in group.copies)
            found.append([first, second, len(shared), counts[first], counts[second]])
        return found

    @property
    def num_conflicts(self) -> int:
        """The number of groups whose samples have different labels."""
        return sum(len(group.labels) > 1 for group in self.groups)


def find_duplicates(
    sources: Sequence[ImageSource],
    *,
    threshold: int | None = DEFAULT_THRESHOLD,
    is_between: bool = False,
    progress: WorkProgress | None = None,
) -> DuplicateReport:
    """Find the groups of samples that have the same image.

    Near duplicates are grouped transitively: two samples in a group may differ by more than the threshold if other
    samples link them.

    Args:
        sources: The sources of the samples.
        threshold: The maximum number of bits in which the perceptual hashes of near duplicates differ; None to compare
            only bytes, without decoding images. For shards, the hashes in the indexes are compared.
        is_between: Whether to return only groups with samples from several sources.
        progress: Receives the number of images to read, then the number of images in each chunk that was read.

    Raises:
        ValueError: If the threshold is out of range.
        FormatError: If a file of a dataset is invalid.
    """
    if threshold is not None:
        check_integer("threshold", threshold, at_least=0, below=MAX_THRESHOLD + 1)
    columns = [source.list_images() for source in sources]
    to_read = _choose_images(columns, reads_all=threshold is not None)
    progress = WorkProgress() if progress is None else progress
    progress.start(sum(map(len, to_read)))
    table = _Table(columns)
    for source, indices, first in zip(sources, to_read, table.firsts, strict=True):
        for chunk, results in map_images(source, indices, _hash_bytes if threshold is None else _reduce_image):
            table.add((first + chunk).tolist(), results)
            progress.advance(len(chunk))
    content_ids = table.number_contents()
    found = _find_repeated(_group_rows(table, content_ids, threshold))
    return DuplicateReport(
        num_images=tuple(len(each.find_images()) for each in columns),
        groups=tuple(
            _make_group(table, rows, content_ids, sources, columns)
            for rows in found
            if not is_between or len(set(table.source_indices[rows].tolist())) > 1
        ),
        unreadable=tuple(
            UnreadableImage(source_index=source, key=sources[source].keys(np.array([index]))[0], reason=reason)
            for row, reason in table.unreadable
            for source, index in [(int(table.source_indices[row]), int(table.indices[row]))]
        ),
        num_even=table.num_even,
    )


_Reduced = tuple[int, Floats | Unreadable | None]
"""The hash of an image's bytes, and either the reduced picture, the reason why it is missing, or None if no picture is
needed."""


class _Table:
    """The samples of all sources, in n rows, one source after another.

    Attributes:
        firsts: The first row of each source.
        source_indices: The source of each row, int64 [n].
        indices: The sample's index in its source, int64 [n].
        content: The xxh3-64 of each image's bytes, uint64 [n].
        has_content: Whether the hash of the bytes is known, bool [n].
        perceptual: The perceptual hash of each image, uint64 [n].
        has_perceptual: Whether the perceptual hash exists, bool [n].
        unreadable: The rows of the images that cannot be read or decoded, and the reasons.
        num_even: The number of images with too little contrast for a perceptual hash.
    """

    def __init__(self, columns: Sequence[ImageColumns]) -> None:
        lengths = [len(each.sizes) for each in columns]
        self.firsts = [0, *np.cumsum(lengths).tolist()][:-1]
        self.source_indices = np.repeat(np.arange(len(columns)), lengths)
        self.indices = np.concatenate([np.arange(length) for length in lengths])
        self._sizes = np.concatenate([each.sizes for each in columns])
        self.content, self.perceptual = (np.zeros(sum(lengths), np.uint64) for _ in range(2))
        self.has_content, self.has_perceptual = (np.zeros(sum(lengths), np.bool_) for _ in range(2))
        for first, each in zip(self.firsts, columns, strict=True):
            if each.content_hashes is not None:
                rows = slice(first, first + len(each.sizes))
                self.content[rows], self.has_content[rows] = each.content_hashes, each.sizes >= 0
        self.unreadable: list[tuple[int, str]] = []
        self.num_even = 0

    def add(self, rows: list[int], results: list[_Reduced | Unreadable]) -> None:
        reduced, pictures = list[int](), list[Floats]()
        for row, result in zip(rows, results, strict=True):
            picture: Floats | Unreadable | None
            if isinstance(result, Unreadable):
                picture = result
            else:
                self.content[row], picture = result
                self.has_content[row] = True
            if isinstance(picture, Unreadable):
                self.unreadable.append((row, picture.reason))
            elif picture is not None:
                reduced.append(row)
                pictures.append(picture)
        if reduced:
            self.perceptual[reduced], has_contrast = hash_pictures(np.stack(pictures))
            self.has_perceptual[reduced] = has_contrast
            self.num_even += int(np.count_nonzero(~has_contrast))

    def number_contents(self) -> Indices:
        """Return a number for each distinct content, int64 [n]; -1 if the content is unknown.

        Contents are considered equal if their sizes and hashes are equal.
        """
        known = np.flatnonzero(self.has_content)
        pairs = np.zeros(len(known), [("size", np.int64), ("content", np.uint64)])
        pairs["size"], pairs["content"] = self._sizes[known], self.content[known]
        content_ids = np.full(len(self.indices), -1, np.int64)
        content_ids[known] = np.unique(pairs, return_inverse=True)[1]
        return content_ids


def _choose_images(columns: Sequence[ImageColumns], *, reads_all: bool) -> list[Indices]:
    """Return the indices of the images to read in each source.

    To compare bytes, it is enough to read the files that have no known hash and whose size occurs several times.
    """
    if reads_all:
        return [each.find_images() for each in columns]
    sizes, counts = np.unique(np.concatenate([each.sizes for each in columns]), return_counts=True)
    repeated = sizes[(counts > 1) & (sizes >= 0)]
    return [
        np.flatnonzero(np.isin(each.sizes, repeated)) if each.content_hashes is None else np.empty(0, np.int64)
        for each in columns
    ]


def _group_rows(table: _Table, content_ids: Indices, threshold: int | None) -> Indices:
    """Return the group of each row, int64 [n]; -1 if the content of its image is unknown."""
    if threshold is None or not table.has_perceptual.any():
        return content_ids
    # Equal contents have equal perceptual hashes. Each group is therefore a set of similar perceptual hashes, or one
    # content without a perceptual hash.
    groups = np.where(content_ids < 0, -1, content_ids + len(content_ids))
    distinct, ids = np.unique(table.perceptual[table.has_perceptual], return_inverse=True)
    groups[table.has_perceptual] = join_groups(len(distinct), find_near_pairs(distinct, threshold))[ids]
    return groups


def _find_repeated(groups: Indices) -> list[Indices]:
    order = np.argsort(groups, kind="stable")
    order = order[np.searchsorted(groups[order], 0) :]
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    lengths = np.diff(starts, append=len(order))
    repeated = lengths > 1
    spans = zip(starts[repeated].tolist(), lengths[repeated].tolist(), strict=True)
    found = [order[start : start + length] for start, length in spans]
    return sorted(found, key=lambda rows: int(rows[0]))


def _make_group(
    table: _Table, rows: Indices, content_ids: Indices, sources: Sequence[ImageSource], columns: Sequence[ImageColumns]
) -> DuplicateGroup:
    distances = count_bits(table.perceptual[rows] ^ table.perceptual[rows[0]]).tolist()
    is_equal = (content_ids[rows] == content_ids[rows[0]]).tolist()
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


def _hash_bytes(content: bytes) -> _Reduced:
    return xxhash.xxh3_64_intdigest(content), None


def _reduce_image(content: bytes) -> _Reduced:
    picture: Floats | Unreadable
    try:
        picture = reduce_picture(content)
    except ValueError as error:  # Only the bytes of this image are compared.
        let_through(error)
        picture = Unreadable(reason=str(error))
    return xxhash.xxh3_64_intdigest(content), picture


def reduce_picture(content: bytes) -> Floats:
    """Return the gray pixels that determine an image's hash, float32 [32, 32].

    Each pixel is the average of an area. Sides are first shrunk to at most 128 pixels; this hardly changes averages.

    Raises:
        ValueError: If the image cannot be decoded.
    """
    picture = open_image(content)
    height, width = (min(side, 4 * SIDE) for side in picture.size)
    pixels = read_resized(picture, height, width)
    rows, columns = _make_averages(height), _make_averages(width)
    red, green, blue = (rows @ pixels[..., channel].astype(np.float32) for channel in range(3))
    gray: Floats = (_GRAY[0] * red + _GRAY[1] * green + _GRAY[2] * blue) @ columns.T
    return gray


def hash_pictures(reduced: Floats) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the hashes of some reduced pictures.

    Args:
        reduced: float32 [n, 32, 32].

    Returns:
        The hashes, uint64 [n], and a mask of the pictures with enough contrast for a hash, bool [n].
    """
    waves = _make_waves()
    frequencies = (waves @ reduced @ waves.T).reshape(len(reduced), NUM_FREQUENCIES**2)
    bits = frequencies > np.median(frequencies, axis=1, keepdims=True)
    hashes = np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)
    contrast = np.sqrt((frequencies[:, 1:] ** 2).sum(axis=1)) / SIDE
    return hashes, contrast >= MIN_CONTRAST


def count_bits(words: NDArray[np.uint64]) -> Indices:
    """Return the number of bits that are set in each word (Warren, "Hacker's Delight", section 5-1).

    >>> count_bits(np.array([0, 5, 2**64 - 1], np.uint64)).tolist()
    [0, 2, 64]
    """
    ones, twos, fours, bytes_ = (np.uint64(mask * 0x0101010101010101) for mask in (0x55, 0x33, 0x0F, 0x01))
    words = words - ((words >> np.uint64(1)) & ones)
    words = (words & twos) + ((words >> np.uint64(2)) & twos)
    words = (words + (words >> np.uint64(4))) & fours
    return ((words * bytes_) >> np.uint64(56)).astype(np.int64)


def _make_averages(length: int) -> Floats:
    """Return the weights that average the pixels of a side over 32 equal parts, float32 [32, length]."""
    bounds = np.linspace(0, length, SIDE + 1)
    starts = np.maximum(bounds[:-1, None], np.arange(length))
    stops = np.minimum(bounds[1:, None], np.arange(1, length + 1))
    weights: Floats = (np.maximum(stops - starts, 0) * (SIDE / length)).astype(np.float32)
    return weights


@cache
def _make_waves() -> Floats:
    """Return the cosines of the frequencies 0 to 7 of an orthonormal DCT-II, float32 [8, 32]."""
    frequencies = np.arange(NUM_FREQUENCIES)[:, None]
    waves: NDArray[np.float64] = np.cos(np.pi / SIDE * (np.arange(SIDE) + 0.5) * frequencies) * np.sqrt(2 / SIDE)
    waves[0] /= np.sqrt(2)
    return waves.astype(np.float32)


def find_near_pairs(hashes: NDArray[np.uint64], threshold: int) -> Iterator[tuple[Indices, Indices]]:
    """Find all pairs of hashes that differ in at most ``threshold`` bits.

    Args:
        hashes: uint64 [n], all different.
        threshold: At most :data:`shardio.viewer.MAX_THRESHOLD`.

    Yields: The indices of the first and the second hashes of some pairs. A pair may occur several times.
    """
    num_kept = _choose_num_kept(len(hashes), threshold)
    num_bands = threshold + num_kept
    bounds = [NUM_BITS * band // num_bands for band in range(num_bands + 1)]
    masks = [(1 << stop) - (1 << start) for start, stop in pairwise(bounds)]
    for kept in combinations(masks, num_kept):
        key = hashes & np.bitwise_or.reduce(np.array(kept, np.uint64))
        order = np.argsort(key)
        for first, second in _pairs_in_runs(key[order]):
            pair = order[first], order[second]
            is_near = count_bits(hashes[pair[0]] ^ hashes[pair[1]]) <= threshold
            yield pair[0][is_near], pair[1][is_near]


def join_groups(num_items: int, pairs: Iterator[tuple[Indices, Indices]]) -> Indices:
    """Return the group of each item, as the smallest index in that group, given pairs of items that belong together.

    Returns:
        int64 [num_items].
    """
    groups = np.arange(num_items)
    for first, second in pairs:
        while True:
            of_first, of_second = groups[first], groups[second]
            differ = of_first != of_second
            if not differ.any():
                break
            first, second, of_first, of_second = (part[differ] for part in (first, second, of_first, of_second))
            np.minimum.at(groups, np.maximum(of_first, of_second), np.minimum(of_first, of_second))
            while not np.array_equal(groups, above := groups[groups]):  # Follow the links to the smallest index.
                groups = above
    return groups


def _choose_num_kept(num_hashes: int, threshold: int) -> int:
    """Return the number of bands that must agree. More bands mean more sorts, and fewer pairs to compare."""

    def cost(num_kept: int) -> float:
        num_bands = threshold + num_kept
        num_pairs = num_hashes**2 / 2 / 2 ** (NUM_BITS * num_kept / num_bands)
        return comb(num_bands, num_kept) * (SORT_COST * num_hashes + num_pairs)

    return min(range(1, MAX_KEPT_BANDS + 1), key=cost)


def _pairs_in_runs(key: NDArray[np.uint64]) -> Iterator[tuple[Indices, Indices]]:
    """Yield all pairs of equal elements of a sorted array: first neighbors, then pairs two apart, and so on."""
    first, distance = np.arange(len(key)), 0
    while len(first):
        distance += 1
        first = first[: np.searchsorted(first, len(key) - distance)]
        first = first[key[first] == key[first + distance]]
        if len(first):
            yield first, first + distance


def make_duplicates_page(report: DuplicateReport, sources: Sequence[ImageSource]) -> bytes:
    """Return an HTML page that shows the images of each group side by side."""
    shown = report.groups[:MAX_GROUPS]
    thumbnails = _make_thumbnails(shown, sources)
    names = [source.name for source in sources]
    short = _shorten(names)
    parts = [_make_duplicate_tiles(report), _show_counts(report, short)]
    if len(shown) < len(report.groups):
        parts.append(element("p", f"The first {len(shown):,} of {len(report.groups):,} groups.", class_="soft"))
    groups = [_show_group(number, group, short, thumbnails) for number, group in enumerate(shown, 1)]
    parts.append(element("div", *groups, class_="panels"))
    return make_page(f"shardio dups {' '.join(names)}", parts)


def describe_group(group: DuplicateGroup) -> str:
    """Return a description of the similarity of a group's images."""
    if group.is_exact:
        return "same bytes"
    most = max(copy.distance or 0 for copy in group.copies)
    return f"similar, with up to {count(most, 'different bit')}" if most else "look the same"


def describe_labels(group: DuplicateGroup) -> str:
    """Return a warning if a group's samples have different labels, else ""."""
    if len(group.labels) < 2:
        return ""
    return f"{'same image' if group.is_exact else 'similar images'}, different classes: {', '.join(group.labels)}"


def describe_distance(copy: Copy) -> str:
    """Return a description of a sample's difference from the first sample of its group."""
    return "same bytes" if copy.distance is None else count(copy.distance, "bit")


def _shorten(names: Sequence[str]) -> list[str]:
    last = [name.rstrip("/").rpartition("/")[2] for name in names]
    return last if len(set(last)) == len(names) else list(names)


def _make_thumbnails(groups: Sequence[DuplicateGroup], sources: Sequence[ImageSource]) -> _Thumbnails:
    indices = defaultdict[int, set[int]](set)
    for group in groups:
        for copy in group.copies[:MAX_COPIES]:
            indices[copy.source_index].add(copy.index)
    found = _Thumbnails()
    for source_index, wanted in indices.items():
        source = sources[source_index]
        ordered = np.array(sorted(wanted))
        for index, thumbnail in zip(ordered.tolist(), make_thumbnails(source, None, ordered), strict=True):
            found[source_index, index] = thumbnail
    return found


def _make_duplicate_tiles(report: DuplicateReport) -> Markup:
    facts = [
        counted(sum(report.num_images), "image"),
        counted(len(report.groups), "group"),
        ("of them with the same bytes", f"{sum(group.is_exact for group in report.groups):,}"),
        ("of them with different classes", f"{report.num_conflicts:,}"),
    ]
    if report.unreadable:
        facts.append(("unreadable", f"{len(report.unreadable):,}"))
    return tiles(facts)


def _show_counts(report: DuplicateReport, names: Sequence[str]) -> Markup:
    within = [(name, *report.count_within(number)) for number, name in enumerate(names)]
    parts = [table(["within", "groups", "extra copies"], within)]
    if len(names) > 1:
        between = [(f"{names[a]} and {names[b]}", groups, *counts) for a, b, groups, *counts in report.list_between()]
        parts.append(table(["between", "groups", "samples of the first", "samples of the second"], between))
    return section("Counts", *parts)


def _show_group(number: int, group: DuplicateGroup, names: Sequence[str], thumbnails: _Thumbnails) -> Markup:
    figures = list[Markup]()
    for copy in group.copies[:MAX_COPIES]:
        lines = [copy.key]
        if len(names) > 1:
            lines.append(names[copy.source_index])
        if copy.place.shard:
            lines.append(f"{copy.place.shard}, byte {copy.place.offset}")
        lines.append(describe_distance(copy) if copy is not group.copies[0] else "first")
        figures.append(figure(thumbnails[copy.source_index, copy.index], copy.label, *lines))
    warning = describe_labels(group)
    parts = list[Markup]()
    if warning:
        parts.append(element("p", warning, class_="warn"))
    if (num_others := len(group.copies) - MAX_COPIES) > 0:
        parts.append(element("p", f"and {num_others:,} more", class_="soft"))
    return section(f"Group {number}: {describe_group(group)}", *parts, element("div", join(figures), class_="grid"))
