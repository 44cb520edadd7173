"""The overview of a source's contents: counts, histograms, and thumbnails of some images."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.images import Picture, Pixels, find_format, open_image, use_one_thread
from shardio.images.formats import errors_of_pillow
from shardio.images.jpeg.regions import Box
from shardio.images.rendering import SCALES
from shardio.order import make_rng_key, permute
from shardio.process import count_processors, let_through
from shardio.viewer.sources import FieldUse, ImageColumns, ImageSource, Unreadable, choose_evenly

Result = TypeVar("Result")

IMAGES_PER_TASK = 16
"""The number of images that a thread reads at a time."""

MAX_BINS = 24
"""The maximum number of bins."""

BINS_PER_OCTAVE = (4.0, 2.0, 1.0, 0.5, 0.25)
"""The possible numbers of bins for each doubling, the largest first."""

MAX_HEADERS = 2000
"""The maximum number of images whose headers are read. In a larger source, they are evenly spaced."""

THUMBNAIL_SIDE = 256
"""The maximum side of a thumbnail in pixels. Pages show them at up to half of it, for screens with fine pixels."""

THUMBNAIL_QUALITY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A histogram: the number of values in each bin.

    Attributes:
        edges: The b + 1 bounds of the bins, ascending. A bin includes its lower bound, and the last one both bounds.
        counts: The numbers of values, b of them.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def dump(self) -> dict[str, Any]:
        """Return the histogram as values for JSON."""
        return {"edges": list(self.edges), "counts": list(self.counts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    """A sample's image at a small size.

    Attributes:
        key: The sample's key, or its path below the source.
        label: The name of its label; None if it has none.
        size: Height and width of the image in pixels; None if it cannot be decoded.
        jpeg: The small image as a JPEG; None if the image cannot be decoded.
        reason: The reason why it cannot be decoded, or "".
    """

    key: str
    label: str | None
    size: tuple[int, int] | None
    jpeg: bytes | None
    reason: str = ""

    @property
    def url(self) -> str:
        """The small image as a data URI."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg or b'').decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """The headers of some images.

    Attributes:
        num_images: The number of images that were examined.
        sizes: The number of these images with each height and width in pixels.
        formats: The number of these images with each format.
        unreadable: The keys of the images whose headers cannot be read, and the reasons.
    """

    num_images: int
    sizes: Counter[tuple[int, int]]
    formats: Counter[str]
    unreadable: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The contents of a source.

    Attributes:
        name: The name of the source.
        facts: The facts about it as a whole.
        num_images: The number of samples with an image.
        num_image_bytes: The size of all images together.
        fields: The uses of its fields or, in a directory, of its files by suffix.
        class_counts: The number of samples with each label; "" for samples without one, if others have one.
        file_sizes: The histogram of the sizes of all images in bytes.
        headers: The headers of some images.
        thumbnails: Some images.
    """

    name: str
    facts: dict[str, Any]
    num_images: int
    num_image_bytes: int
    fields: tuple[FieldUse, ...]
    class_counts: Counter[str]
    file_sizes: Histogram
    headers: Headers
    thumbnails: tuple[Thumbnail, ...]

    def dump(self) -> dict[str, Any]:
        """Return everything except the thumbnails as values for JSON."""
        headers = self.headers
        return {
            "source": self.name,
            **self.facts,
            "images": self.num_images,
            "image_bytes": self.num_image_bytes,
            "fields": {use.name: {"samples": use.num_samples, "bytes": use.num_bytes} for use in self.fields},
            "classes": dict(self.class_counts.most_common()),
            "file_sizes": self.file_sizes.dump(),
            "headers": {
                "images": headers.num_images,
                "sizes": {f"{width}×{height}": count for (height, width), count in headers.sizes.most_common()},
                "formats": dict(headers.formats.most_common()),
                "unreadable": dict(headers.unreadable),
            },
            "thumbnails": len(self.thumbnails),
            "undecodable": {each.key: each.reason for each in self.thumbnails if each.jpeg is None},
        }


def look_at(source: ImageSource, *, num_thumbnails: int, seed: int | None = None) -> Overview:
    """Return an overview of a source. The time and memory for images do not grow with the source.

    Args:
        source: The source.
        num_thumbnails: The maximum number of thumbnails.
        seed: The seed of a random choice of thumbnails, which keep the order of the source; None for evenly spaced
            ones.

    Raises:
        FormatError: If a file of the dataset is invalid.
    """
    columns = source.list_images()
    indices = columns.find_images()
    sizes = columns.sizes[indices]
    chosen = choose_evenly(indices, num_thumbnails) if seed is None else _choose_randomly(indices, num_thumbnails, seed)
    return Overview(
        name=source.name,
        facts=source.describe(),
        num_images=len(indices),
        num_image_bytes=int(sizes.sum()),
        fields=columns.fields,
        class_counts=_count_classes(columns),
        file_sizes=make_log_histogram(sizes),
        headers=_read_headers(source, choose_evenly(indices, MAX_HEADERS)),
        thumbnails=tuple(make_thumbnails(source, columns, chosen)),
    )


def make_thumbnails(
    source: ImageSource, columns: ImageColumns | None, indices: NDArray[np.int64], side: int = THUMBNAIL_SIDE
) -> list[Thumbnail]:
    """Return thumbnails whose sides have at most ``side`` pixels; without labels if there are no columns."""
    thumbnails = list[Thumbnail]()
    for chunk, results in map_images(source, indices, lambda content: _shrink(content, side)):
        for index, key, result in zip(chunk.tolist(), source.keys(chunk), results, strict=True):
            label = columns.label_of(index) if columns else None
            if isinstance(result, Unreadable):
                thumbnails.append(Thumbnail(key=key, label=label, size=None, jpeg=None, reason=result.reason))
            else:
                size, jpeg = result
                thumbnails.append(Thumbnail(key=key, label=label, size=size, jpeg=jpeg))
    return thumbnails


def _shrink(content: bytes, side: int) -> tuple[tuple[int, int], bytes]:
    """Return an image's height and width, and a JPEG of it whose sides have at most ``side`` pixels."""
    from PIL import Image

    picture = open_image(content)
    height, width = picture.size
    scale = side / max(height, width)
    min_side = min(height, width, max(1, round(min(height, width) * scale)))
    pixels, factor = read_small(picture, min_side)
    small = Image.fromarray(pixels)
    if scale < 1:
        small = small.resize(
            (max(1, round(width * scale)), max(1, round(height * scale))),
            Image.Resampling.BILINEAR,
            box=(0, 0, width / factor, height / factor),
        )
    file = io.BytesIO()
    small.save(file, "JPEG", quality=THUMBNAIL_QUALITY)
    return picture.size, file.getvalue()


def _choose_randomly(indices: NDArray[np.int64], num_chosen: int, seed: int) -> NDArray[np.int64]:
    size = np.array([len(indices)])
    rows = permute(np.arange(min(num_chosen, len(indices))), size, make_rng_key(seed, "view"))
    return indices[np.sort(rows)]


def _count_classes(columns: ImageColumns) -> Counter[str]:
    """Return the number of samples with each label, adding up labels with the same name."""
    counts = Counter[str]()
    of_label = np.bincount(columns.label_ids[columns.label_ids >= 0], minlength=len(columns.label_names))
    for name, count in zip(columns.label_names, of_label.tolist(), strict=True):
        counts[name] += count
    num_others = int(np.count_nonzero(columns.label_ids < 0))
    if counts and num_others:
        counts[""] += num_others
    return counts


def _read_headers(source: ImageSource, indices: NDArray[np.int64]) -> Headers:
    sizes, formats, unreadable = Counter[tuple[int, int]](), Counter[str](), list[tuple[str, str]]()
    for chunk, results in map_images(source, indices, _read_header):
        for index, result in zip(chunk.tolist(), results, strict=True):
            if isinstance(result, Unreadable):
                unreadable.append((source.keys(np.array([index]))[0], result.reason))
            else:
                size, name = result
                sizes[size] += 1
                formats[name] += 1
    return Headers(num_images=len(indices), sizes=sizes, formats=formats, unreadable=tuple(unreadable))


def _read_header(content: bytes) -> tuple[tuple[int, int], str]:
    name = find_format(content)
    if name == "TIFF":  # Opening a TIFF would decode it.
        from PIL import Image

        with errors_of_pillow(), Image.open(io.BytesIO(content)) as image:
            return (image.height, image.width), name
    return open_image(content).size, name or "unknown"


def read_small(picture: Picture, min_side: int) -> tuple[Pixels, int]:
    """Decode a picture, and a JPEG as small as possible with both sides at least ``min_side`` pixels.

    Returns:
        The pixels, uint8 [height, width, 3], valid until the same thread decodes the next picture; and the factor by
        which they are smaller: 1, 2, 4 or 8. The last pixels may reach beyond the picture.

    Raises:
        ValueError: If the image is damaged.
    """
    height, width = picture.size
    scales = SCALES if picture.can_scale else ()
    scale = next((scale for scale in scales if min(height, width) >= scale * min_side), 1)
    return picture.read(Box(0, 0, -(-height // scale), -(-width // scale)), scale), scale


def map_images(
    source: ImageSource, indices: NDArray[np.int64], use: Callable[[bytes], Result]
) -> Iterator[tuple[NDArray[np.int64], list[Result | Unreadable]]]:
    """Call a function with the image files of some samples, in threads. Few images are in memory at a time.

    Args:
        source: The source of the images.
        indices: The samples' indices.
        use: The function. A ValueError means that the image cannot be decoded.

    Yields:
        The indices of some samples, and their results, in order.
    """
    use_one_thread()
    num_threads = count_processors()
    with ThreadPoolExecutor(num_threads) as threads:
        pending = deque[tuple[NDArray[np.int64], Future[list[Result | Unreadable]]]]()
        try:
            for start in range(0, len(indices), IMAGES_PER_TASK):
                chunk = indices[start : start + IMAGES_PER_TASK]
                pending.append((chunk, threads.submit(_use_images, source, chunk, use)))
                if len(pending) > 2 * num_threads:
                    done, future = pending.popleft()
                    yield done, future.result()
            for done, future in pending:
                yield done, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _use_images(
    source: ImageSource, indices: NDArray[np.int64], use: Callable[[bytes], Result]
) -> list[Result | Unreadable]:
    return [content if isinstance(content, Unreadable) else _try_use(content, use) for content in source.read(indices)]


def _try_use(content: bytes, use: Callable[[bytes], Result]) -> Result | Unreadable:
    try:
        return use(content)
    except ValueError as error:
        let_through(error)
        return Unreadable(reason=str(error) or type(error).__name__)


def make_log_histogram(values: NDArray[np.int64]) -> Histogram:
    """Return a histogram of positive integers whose bins are equally wide on a logarithmic scale.

    The bounds are powers of two with simple exponents, rounded up. Smaller values than 1 count as 1.

    >>> make_log_histogram(np.array([1, 2, 3, 8, 1000]))
    Histogram(edges=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), counts=(1, 2, 0, 1, 0, 0, 0, 0, 0, 1))
    """
    if not len(values):
        return Histogram(edges=(), counts=())
    values = np.maximum(values, 1)
    low, high = math.log2(values.min()), math.log2(values.max())
    for per_octave in BINS_PER_OCTAVE:
        first, last = math.floor(low * per_octave), math.floor(high * per_octave) + 1
        edges = np.unique(np.ceil(2 ** (np.arange(first, last + 1) / per_octave)).astype(np.int64))
        if last - first <= MAX_BINS and len(edges) == last + 1 - first:
            break
    counts, _ = np.histogram(values, edges)
    return Histogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


def take_most_common(counts: Counter[str], num_kept: int) -> tuple[list[tuple[str, int]], int, int]:
    """Return the most frequent names with their counts, the number of other names, and the sum of their counts."""
    common = counts.most_common(num_kept)
    return common, len(counts) - len(common), counts.total() - sum(count for _, count in common)


def describe_imbalance(counts: Sequence[int]) -> str:
    """Return a description of the balance of classes, given their counts."""
    smallest, largest = min(counts), max(counts)
    if smallest == largest:
        return f"{smallest} each"
    ratio = f"the largest has {largest / smallest:.3g} times as many as the smallest"
    return f"{smallest} to {largest} each, median {np.median(counts):g}; {ratio}"
