"""What the other processes ask of the storage process."""

from __future__ import annotations

from dataclasses import dataclass

from shardio.storage.cache.settings import CacheSettings
from shardio.storage.remote.options import RemoteOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one object or folder.

    Attributes:
        root: The root of the store, such as ``s3://bucket``.
        options: The store's settings.
        key: The key of the object or folder.
    """

    root: str
    options: RemoteOptions
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat(Request):
    """Return an object's :class:`~shardio.storage.store.FileStat`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWhole(Request):
    """Return an object's content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRanges(Request):
    """Return the contents of ranges of an object, one after the other, while it has a version.

    Attributes:
        size: The object's size in bytes.
        version: The object's version.
        ranges: Start and stop of each range. None is empty or ends after the object.
    """

    size: int
    version: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCached(Request):
    """Return an object's FileStat, and the path of its copy in a cache.

    Attributes:
        cache: The cache.
        is_fresh: Whether to ask the store even if it was asked before.
        is_whole: Whether the object will be fetched as a whole.
    """

    cache: CacheSettings
    is_fresh: bool
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCache(Request):
    """Return the path of a cache's folder, and the size of the cache in bytes.

    Attributes:
        cache: The cache.
    """

    cache: CacheSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill(ReadRanges):
    """Make ranges of an object present in its copy. Return a warning for the user, or None.

    Attributes:
        path: The path of the copy.
        cache: The cache that it belongs to.
        is_urgent: Whether a sample waits for it. Otherwise it is read ahead.
        is_whole: Whether to fetch the whole object, which can be compared with its ETag, rather than the ranges.
    """

    path: str
    cache: CacheSettings
    is_urgent: bool
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledFile:
    """A small object, and where its content lies in a bundle: see :mod:`shardio.storage.cache.bundles`.

    Attributes:
        key: The object's key.
        size: Its size in bytes.
        version: Its version.
        path: The path of the bundle.
        bundle_size: The bundle's size in bytes.
        start: Where the content begins in the bundle.
    """

    key: str
    size: int
    version: str
    path: str
    bundle_size: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FillFiles(Request):
    """Make small objects of a folder present in their bundles.

    Attributes:
        cache: The cache that the bundles belong to.
        files: The objects.
        is_urgent: Whether samples wait for them. Otherwise they are read ahead.
    """

    cache: CacheSettings
    files: tuple[BundledFile, ...]
    is_urgent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFolder(Request):
    """Return the names directly in a folder; those of folders end with a slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk(Request):
    """Return all objects below a folder, page by page.

    Attributes:
        after: Only objects whose keys come after this one.
    """

    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write(Request):
    """Write an object.

    Attributes:
        path: The local file with its content.
    """

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Create(Request):
    """Write a small object if none exists. Return whether the object has this content now.

    Attributes:
        content: The content.
    """

    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove(Request):
    """Remove an object if it exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The answer's next message is the content of a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a listing.

    Attributes:
        objects: The key, the size in bytes and the version of each object.
    """

    objects: list[tuple[str, int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of an answer.

    Attributes:
        value: What the request returns.
    """

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The end of an answer to a request that failed.

    Attributes:
        error: Why.
    """

    error: Exception
