"""The interface of sources of images, and the function that opens what a user names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.images import IMAGE_FORMATS
from shardio.looking.images import ImageColumns
from shardio.shards import MANIFEST_NAME
from shardio.storage import Location, RemoteAccess, parse_location


class Place(NamedTuple):
    """Where a sample's image is: the name of its shard and the offset in it; "" and None for a file of its own."""

    shard: str
    offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Why an image cannot be read or decoded."""

    reason: str


class ImageSource(ABC):
    """Images that can be read by their samples' indices. Threads can share it; a context manager closes it.

    Attributes:
        name: The name that the user gave.
        num_samples: The number of samples.
    """

    name: str
    num_samples: int

    @abstractmethod
    def list_images(self) -> ImageColumns:
        """Return the columns of all samples. This reads indexes or directories, but no image."""

    @abstractmethod
    def read(self, indices: NDArray[np.int64]) -> list[bytes | Unreadable]:
        """Return the files of some samples' images. A sample that cannot be read does not affect the others."""

    @abstractmethod
    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """Return the keys of some samples, or the paths of files below the source."""

    @abstractmethod
    def places(self, indices: NDArray[np.int64], columns: ImageColumns) -> list[Place]:
        """Return where the images of some samples are."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what is known of the source as a whole, as values for JSON, in the order in which to show them."""

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
        name: What the user names.
        access: How remote shards are reached.

    Raises:
        FileNotFoundError: If the source does not exist, or holds neither shards nor images.
        FormatError: If a file of the dataset is invalid, or a directory holds both tars and images.
        ValueError: If the name is empty.
    """
    from shardio.looking.image_files import FolderImages
    from shardio.looking.shard_images import ShardImages

    location = parse_location(name, access)
    if location.is_folder() and not holds_shards(location):
        return FolderImages(name, location)
    return ShardImages(name, access)


def holds_shards(folder: Location) -> bool:
    """Return whether a folder holds a manifest or tars.

    Raises:
        FormatError: If it holds tars without a manifest, and images: either may be what is meant.
    """
    names = folder.list()
    if MANIFEST_NAME in names:
        return True
    tar = next((name for name in names if name.lower().endswith(".tar")), None)
    if tar is None:
        return False
    folders = (name for name in names if name.endswith("/") and not name.startswith("."))
    inner = (name + file for name in folders for file in (folder / name[:-1]).list())
    images = (name for name in chain(names, inner) if PurePosixPath(name).suffix[1:].lower() in IMAGE_FORMATS)
    if (image := next(images, None)) is None:
        return True
    raise FormatError(
        f"{folder} holds both tars, such as {tar}, and images, such as {image}: move one or the other to a folder of "
        "their own, or name the tars themselves, in brace notation if they are several"
    )
