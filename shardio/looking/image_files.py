"""The images in a directory, in any folders."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import IMAGE_FIELDS
from shardio.interruptions import let_through
from shardio.looking.images import FieldUse, ImageColumns
from shardio.looking.source import ImageSource, Place, Unreadable
from shardio.storage import Location, read_as_utf8


class FolderImages(ImageSource):
    """The images in a directory, in any folders. An image's class is its first folder below the directory.

    Args:
        name: The name that the user gave.
        root: The directory.

    Raises:
        FileNotFoundError: If there are no images.
    """

    def __init__(self, name: str, root: Location) -> None:
        self.name = name
        self._root = root
        self._paths = sorted(filter(_is_image, root.walk()), key=_split)
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
        alike = (path for path in self._paths if path.endswith(location.name))
        return any(self._root.store.stat(path).identity == identity for path in alike)

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
        """Return a file's size in bytes, 0 if it cannot be found out: reading the file will say why."""
        try:
            return self._root.store.stat(path).size
        except OSError as error:
            let_through(error)
            return 0


def _suffix_of(path: str) -> str:
    return PurePath(path).suffix[1:].lower()


def _is_image(path: str) -> bool:
    return _suffix_of(path) in IMAGE_FIELDS


def _split(path: str) -> tuple[str, str]:
    """Return what images are sorted by: the folder, then the name."""
    folder, _, name = path.rpartition("/")
    return folder, name
