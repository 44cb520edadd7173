"""Sources of images: directories and shards, with columns of the properties that are known without decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, SampleError
from shardio.images import (
    IMAGE_FIELDS,
    IMAGE_FORMATS,
    CropPlan,
    Picture,
    Pixels,
    render_chunk,
    sizes_of,
    use_one_thread,
)
from shardio.process import count_processors, let_through
from shardio.reading import SampleReader
from shardio.shards import LABEL_FIELD, MANIFEST_NAME, open_table
from shardio.storage import Location, RemoteAccess, parse_location, read_as_utf8

Result = TypeVar("Result")

IMAGES_PER_TASK = 16
"""The number of images that a thread reads at a time."""

SAMPLES_PER_LOOKUP = 512
"""The number of samples to look up in an index at a time. The index reads entries in parts of this size."""

MAX_LABELS = 100_000
"""The maximum number of labels whose names are read. Rarer labels share one name."""

MAX_LABEL_LENGTH = 80
"""The maximum length of a label's name in characters. In other tools' tars, the field may hold anything."""

OTHER_LABEL, UNREADABLE_LABEL = "other", "unreadable"
"""The names for rare labels and for unreadable labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldUse:
    """The number of samples with a field, or of files with a suffix, and their total size in bytes."""

    name: str
    num_samples: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageColumns:
    """The images of n samples. A million samples take about 30 MB of memory.

    Attributes:
        sizes: int64 [n], the size of each sample's image in bytes; -1 for samples without an image.
        offsets: int64 [n], the offset of the image's content in its tar; -1 if the image is not in a tar.
        content_hashes: uint64 [n], the xxh3-64 of each image's content; None if unknown until the files are read.
        label_ids: int64 [n], a number for each distinct label; -1 for samples without a label.
        label_names: The name of each of these labels: the class name, if there is one.
        fields: The statistics of all fields, or of all files by suffix.
    """

    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    content_hashes: NDArray[np.uint64] | None
    label_ids: NDArray[np.int64]
    label_names: tuple[str, ...]
    fields: tuple[FieldUse, ...]

    def label_of(self, index: int) -> str | None:
        """Return the name of a sample's label; None if the sample has no label."""
        label_id = int(self.label_ids[index])
        return None if label_id < 0 else self.label_names[label_id]

    def find_images(self) -> NDArray[np.int64]:
        """Return the indices of the samples that have an image."""
        return np.flatnonzero(self.sizes >= 0)


def choose_evenly(indices: NDArray[np.int64], num_chosen: int) -> NDArray[np.int64]:
    """Return evenly spaced elements: the first of each of ``num_chosen`` equal parts, or all if there are fewer.

    >>> choose_evenly(np.arange(10), 4).tolist()
    [0, 2, 5, 7]
    """
    num_chosen = min(len(indices), num_chosen)
    return indices[np.arange(num_chosen) * len(indices) // max(1, num_chosen)]


class Place(NamedTuple):
    """The place of a sample's image: its shard's name and its offset in the shard; "" and None for a separate file."""

    shard: str
    offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """The reason why an image cannot be read or decoded."""

    reason: str


class ImageSource(ABC):
    """Images that can be read, given the indices of their samples.

    Threads can share a source, and a ``with`` block closes it.

    Attributes:
        name: The name that the user gave.
        num_samples: The number of samples.
    """

    name: str
    num_samples: int

    @abstractmethod
    def list_images(self) -> ImageColumns:
        """Return the columns of all samples. Indexes or directories are read, but no images."""

    @abstractmethod
    def read(self, indices: NDArray[np.int64]) -> list[bytes | Unreadable]:
        """Return the files of some samples' images. A sample that cannot be read does not affect the others."""

    @abstractmethod
    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """Return the keys of some samples, or the paths of their files below the source."""

    @abstractmethod
    def places(self, indices: NDArray[np.int64], columns: ImageColumns) -> list[Place]:
        """Return the places of some samples' images."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the facts about the source as a whole, as values for JSON, in the order in which to show them."""

    def contains(self, location: Location) -> bool:
        """Return whether a location is the file of one of the images."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> ImageSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_source(name: str, access: RemoteAccess | None = None) -> ImageSource:
    """Open a packed directory, a manifest, tars in brace notation, a directory of tars, or a directory of images.

    Args:
        name: The name that the user gave.
        access: The access to remote shards.

    Raises:
        FileNotFoundError: If the source does not exist, or holds neither shards nor images.
        FormatError: If a file of the dataset is invalid, or a directory holds both tars and images.
        ValueError: If the name is empty.
    """
    location = parse_location(name, access)
    if location.is_folder() and not holds_shards(location):
        return FolderImages(name, location)
    return ShardImages(name, access)


def holds_shards(folder: Location) -> bool:
    """Return whether a folder holds a manifest or tars.

    Raises:
        FormatError: If the folder holds both images and tars without a manifest, because the user may mean either.
    """
    names = folder.list()
    if MANIFEST_NAME in names:
        return True
    tar = next((name for name in names if name.lower().endswith(".tar")), None)
    if tar is None:
        return False
    folders = (name for name in names if name.endswith("/") and not name.startswith("."))
    inner = (name + file for name in folders for file in (folder / name[:-1]).list())
    images = (name for name in chain(names, inner) if _suffix_of(name) in IMAGE_FORMATS)
    if (image := next(images, None)) is None:
        return True
    raise FormatError(
        f"{folder} holds both tars, such as {tar}, and images, such as {image}: move the images or the tars to "
        "another folder, or name the tars themselves, in brace notation if there are several"
    )


class FolderImages(ImageSource):
    """The images in a directory and in all folders below it. The class is the first folder of an image's relative path.

    Raises:
        FileNotFoundError: If there are no images.
    """

    def __init__(self, name: str, root: Location) -> None:
        self.name = name
        self._root = root
        self._paths = sorted(
            (path for path in root.walk() if _suffix_of(path) in IMAGE_FIELDS),
            key=lambda path: path.rpartition("/")[::2],
        )
        self.num_samples = len(self._paths)
        if not self._paths:
            raise FileNotFoundError(f"{root} holds neither images ({', '.join(IMAGE_FIELDS)}) nor shards")

    def list_images(self) -> ImageColumns:
        sizes = np.full(self.num_samples, -1, np.int64)
        classes = list[str]()
        counts, num_bytes = Counter[str](), Counter[str]()
        for index, path in enumerate(self._paths):
            sizes[index] = size = self._find_size(path)
            folder, slash, _ = self._below_root(path).partition("/")
            classes.append(folder if slash else "")
            suffix = _suffix_of(path)
            counts[suffix] += 1
            num_bytes[suffix] += size
        folders = Counter(filter(None, classes))
        names = tuple(name for name, _ in folders.most_common())
        ids = {name: label_id for label_id, name in enumerate(names)}
        return ImageColumns(
            sizes=sizes,
            offsets=np.full(self.num_samples, -1, np.int64),
            content_hashes=None,
            label_ids=np.array([ids.get(name, -1) for name in classes], np.int64),
            label_names=names,
            fields=tuple(FieldUse(name=s, num_samples=counts[s], num_bytes=num_bytes[s]) for s in sorted(counts)),
        )

    def read(self, indices: NDArray[np.int64]) -> list[bytes | Unreadable]:
        return [self._read(self._paths[index]) for index in indices.tolist()]

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        return [self._below_root(self._paths[index]) for index in indices.tolist()]

    def places(self, indices: NDArray[np.int64], columns: ImageColumns) -> list[Place]:
        return [Place("", None)] * len(indices)

    def describe(self) -> dict[str, Any]:
        return {"samples": self.num_samples}

    def contains(self, location: Location) -> bool:
        if not location.exists():
            return False
        identity = location.stat().identity
        with_name = (path for path in self._paths if path.endswith(location.name))
        return any(self._root.store.stat(path).identity == identity for path in with_name)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _below_root(self, path: str) -> str:
        return read_as_utf8(path.removeprefix(self._root.key).lstrip("/"))

    def _read(self, path: str) -> bytes | Unreadable:
        try:
            return self._root.store.read_whole(path)
        except OSError as error:
            let_through(error)
            return Unreadable(reason=str(error))

    def _find_size(self, path: str) -> int:
        try:
            return self._root.store.stat(path).size
        except OSError as error:
            let_through(error)
            return 0  # Reading the file reports the error.


def _suffix_of(path: str) -> str:
    return PurePath(path).suffix[1:].lower()


class ShardImages(ImageSource):
    """The images of a sharded dataset that :func:`shardio.shards.open_table` finds by the source's name.

    The columns come from the indexes alone.
    """

    def __init__(self, name: str, access: RemoteAccess | None = None) -> None:
        self.name = name
        self._table = open_table(name, access)
        self._manifest = self._table.manifest
        self.num_samples = self._manifest.num_samples
        self._image_fields = tuple(field for field in IMAGE_FIELDS if field in self._manifest.fields)
        self._stops = np.cumsum(self._manifest.shard_sizes)
        self._reader = SampleReader(self._table)

    def list_images(self) -> ImageColumns:
        """Return the columns of all samples.

        Each distinct label is read once: samples whose label fields have equal hashes have equal labels.
        """
        fields = tuple(self._manifest.fields)
        sizes, offsets = (np.full(self.num_samples, -1, np.int64) for _ in range(2))
        hashes, labels = (np.zeros(self.num_samples, np.uint64) for _ in range(2))
        has_label = np.zeros(self.num_samples, np.bool_)
        counts, num_bytes = (np.zeros(len(fields), np.int64) for _ in range(2))
        image_columns = [fields.index(field) for field in self._image_fields]
        for shard, stop in enumerate(self._stops.tolist()):
            first = stop - self._manifest.shards[shard].num_samples
            for start in range(first, stop, SAMPLES_PER_LOOKUP):
                indices = np.arange(start, min(start + SAMPLES_PER_LOOKUP, stop))
                _, starts, stops, found = self._reader.locate(shard, indices - first, fields)  # each [n, fields]
                counts += np.count_nonzero(starts >= 0, axis=0)
                num_bytes += (stops - starts).sum(axis=0)
                for column in reversed(image_columns):  # A sample's image is in the sample's first image field.
                    has = starts[:, column] >= 0
                    rows = indices[has]
                    offsets[rows], hashes[rows] = starts[has, column], found[has, column]
                    sizes[rows] = (stops - starts)[has, column]
                if LABEL_FIELD in fields:
                    column = fields.index(LABEL_FIELD)
                    labels[indices], has_label[indices] = found[:, column], starts[:, column] >= 0
        label_ids, names = self._name_labels(labels, has_label)
        uses = zip(fields, counts.tolist(), num_bytes.tolist(), strict=True)
        return ImageColumns(
            sizes=sizes,
            offsets=offsets,
            content_hashes=hashes,
            label_ids=label_ids,
            label_names=names,
            fields=tuple(FieldUse(name=name, num_samples=count, num_bytes=size) for name, count, size in uses),
        )

    def read(self, indices: NDArray[np.int64]) -> list[bytes | Unreadable]:
        return self._read(indices, self._image_fields)

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        return self._reader.keys(indices)

    def places(self, indices: NDArray[np.int64], columns: ImageColumns) -> list[Place]:
        shards = np.searchsorted(self._stops, indices, side="right").tolist()
        offsets = columns.offsets[indices].tolist()
        names = [self._manifest.shards[shard].name for shard in shards]
        return [Place(name, offset) for name, offset in zip(names, offsets, strict=True)]

    def describe(self) -> dict[str, Any]:
        manifest = self._manifest
        return {
            "samples": manifest.num_samples,
            "shards": len(manifest.shards),
            "bytes": manifest.num_bytes,
            "digest": manifest.digest,
            "pack": {name: value for name, value in manifest.pack.items() if value is not None},
        }

    def close(self) -> None:
        self._reader.close()

    def _read(self, indices: NDArray[np.int64], fields: Sequence[str]) -> list[bytes | Unreadable]:
        try:
            stored = self._reader.read(indices, fields)
        except SampleError as error:
            if len(indices) == 1:
                return [Unreadable(reason=str(error))]
            return [content for index in indices for content in self._read(np.array([index]), fields)]
        rows = zip(*stored.columns.values(), strict=True) if fields else [()] * len(indices)
        absent = Unreadable(reason="the sample has no image")
        return [next((content for content in row if content is not None), absent) for row in rows]

    def _name_labels(
        self, labels: NDArray[np.uint64], has_label: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Return the number of each sample's label (0 for the most frequent, -1 for none), and the labels' names."""
        label_ids = np.full(len(labels), -1, np.int64)
        labeled = np.flatnonzero(has_label)
        _, firsts, ids, counts = np.unique(labels[labeled], return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        label_ids[labeled] = np.minimum(ranks[ids], MAX_LABELS)
        contents = self._read(labeled[firsts[order[:MAX_LABELS]]], (LABEL_FIELD,)) if len(labeled) else []
        names = [*map(self._name_label, contents), *[OTHER_LABEL] * (len(order) > MAX_LABELS)]
        return label_ids, tuple(names)

    def _name_label(self, content: bytes | Unreadable) -> str:
        if isinstance(content, Unreadable):
            return UNREADABLE_LABEL
        text = content.decode(errors="replace").strip()
        classes = self._manifest.classes
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < len(classes):
            return classes[int(text)]
        return text if len(text) <= MAX_LABEL_LENGTH else text[: MAX_LABEL_LENGTH - 1] + "…"


def read_resized(picture: Picture, height: int, width: int) -> Pixels:
    """Decode a picture, and resize it by averaging. Return uint8 [height, width, 3].

    Raises:
        ValueError: If the image is damaged.
    """
    plan = CropPlan.whole(sizes_of([picture])).resize(np.array([[height, width]]), "antialiased bilinear")
    pixels: Pixels = render_chunk([picture], plan).images[0]
    return pixels


def map_images(
    source: ImageSource, indices: NDArray[np.int64], use: Callable[[bytes], Result]
) -> Iterator[tuple[NDArray[np.int64], list[Result | Unreadable]]]:
    """Call a function with the image files of some samples, in threads. Only a few images are in memory at a time.

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
