"""The URLs of remote stores, and the messages between the storage process and other processes.

URLs of Hugging Face repositories follow https://huggingface.co/docs/huggingface_hub/guides/hf_file_system.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from shardio.errors import LocationError
from shardio.storage.options import CacheSettings, RemoteOptions

SCHEME = "hf"
"""The scheme of URLs of the Hugging Face Hub."""

SCHEMES = ("s3", "gs", "az", "http", "https", SCHEME, "memory")
"""The schemes of URLs that name objects in remote stores."""

DEFAULT_REVISION = "main"

_SPECIAL = r"refs/(?:convert/[\w.-]+|pr/\d+)"
"""Revisions that contain slashes and need no escapes: pull requests and conversions."""

_BODY = re.compile(
    rf"(?P<id>\b[\w.-]+\b/\b[\w.-]+\b)(?:@(?P<revision>{_SPECIAL}|[^/]+))?(?:/(?P<key>.*))?", re.ASCII | re.DOTALL
)

_REVISION = re.compile(r"(?!(?:.*/)?\.{0,2}(?:/|\Z))[^\x00-\x1f\x7f]+")
"""A revision has no part that is empty, '.' or '..', which would lead to other URLs of the Hub."""

_UNREQUESTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and surrogates, which are not characters of UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryName:
    """A dataset repository at a revision.

    Attributes:
        id: The user and the name: ``user/repository``.
        revision: A branch, a tag, a commit or another reference, without escapes.
    """

    id: str
    revision: str

    @property
    def authority(self) -> str:
        """The part of the root of its store that follows ``hf://``."""
        if self.revision == DEFAULT_REVISION:
            return f"datasets/{self.id}"
        is_special = re.fullmatch(_SPECIAL, self.revision, re.ASCII)
        return f"datasets/{self.id}@{self.revision if is_special else quote(self.revision, safe='')}"


def split_repository(url: str) -> tuple[RepositoryName, str]:
    """Return the repository of a URL, and the key.

    >>> split_repository("hf://datasets/user/repository@v1.0/train/a b%20.tar")
    (RepositoryName(id='user/repository', revision='v1.0'), 'train/a b%20.tar')
    >>> split_repository("hf://datasets/user/repository@feature%2Fnew")[0].revision
    'feature/new'

    Raises:
        LocationError: If the URL names no dataset repository.
    """
    kind, _, body = url.partition("://")[2].partition("/")
    if kind != "datasets":
        raise LocationError(
            f"cannot read {url}: shardio reads dataset repositories of the Hugging Face Hub, not models, spaces or "
            "buckets. Use hf://datasets/USER/REPOSITORY/PATH"
        )
    found = _BODY.fullmatch(body)
    revision = unquote(found["revision"] or DEFAULT_REVISION) if found else ""
    if found is None or ".." in found["id"] or "--" in found["id"] or not _REVISION.fullmatch(revision):
        raise LocationError(
            f"the URL {url} names no dataset repository: use hf://datasets/USER/REPOSITORY/PATH, with a user or an "
            "organization, or hf://datasets/USER/REPOSITORY@REVISION/PATH for a branch, a tag or a commit. In a "
            "revision, write %2F for a slash"
        )
    return RepositoryName(id=found["id"], revision=revision), found["key"] or ""


def identify_file(root: str, key: str, version: str) -> str:
    """Return a file's identity, which is equal in all revisions that contain the file unchanged.

    Args:
        root: The root of the store, ``hf://datasets/user/repository@revision``.
        key: The file's key.
        version: A digest of the file's content.
    """
    return f"{root.partition('@')[0]}/{key}@{version}"


def split_url(url: str) -> tuple[str, str]:
    """Return the root of a URL's store, and the key.

    Keys of object stores are taken literally. In HTTP URLs, ``%`` escapes are decoded, because they are encoded again
    when a request is made.

    >>> split_url("s3://bucket/train/a b%20.tar")
    ('s3://bucket', 'train/a b%20.tar')
    >>> split_url("https://example.org/a%20b.tar")
    ('https://example.org', 'a b.tar')
    >>> split_url("hf://datasets/user/repository@v1.0/train/a.tar")
    ('hf://datasets/user/repository@v1.0', 'train/a.tar')

    Raises:
        LocationError: If the URL has an unknown scheme or a query, or if no store can request its key.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise LocationError(
            f"cannot read {url}: the scheme {scheme}:// is not supported. Use a local path or "
            f"{', '.join(f'{each}://' for each in SCHEMES)}, or shardio.StreamDataset, which opens what WebDataset does"
        )
    if scheme == SCHEME:
        repository, key = split_repository(url)
        authority = repository.authority
    else:
        authority, _, key = rest.partition("/")
    if not authority:
        raise LocationError(f"the URL {url} names no {'host' if scheme.startswith('http') else 'bucket'}")
    if scheme in ("http", "https"):
        if "@" in authority:
            raise LocationError(
                f"the {scheme} URL contains a user name or a password, but shardio does not log in to web servers: use "
                "a URL that needs no login, or download the files"
            )
        parts = urlsplit(url)
        if parts.query or parts.fragment:
            raise LocationError(
                f"the URL {parts._replace(query='', fragment='').geturl()} has a query or a fragment, which shardio "
                "cannot pass on: use a URL without them, or read its tar with shardio.StreamDataset"
            )
        key = unquote(key)
    root, key = f"{scheme}://{authority}", key.rstrip("/")
    check_key(root, key)
    return root, key


def check_key(root: str, key: str) -> None:
    """Raise LocationError if no store can request the key of an object or a folder."""
    if key and any(part in ("", ".", "..") for part in key.split("/")):
        raise LocationError(
            f"the URL {root}/{key} has an empty part, '.' or '..', which cannot be requested: rename the object"
        )
    if found := _UNREQUESTABLE.search(key):
        raise LocationError(
            f"the URL {f'{root}/{key}'!r} has the character {found[0]!r}, which cannot be requested: rename the object"
        )


def identify(root: str, key: str, version: str) -> str:
    """Return the identity of an object: see :class:`~shardio.storage.store.FileStat`."""
    if root.startswith(f"{SCHEME}://"):
        return identify_file(root, key, version)
    return f"{root}/{key}"


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
    """Return the contents of ranges of an object, one after the other, as long as it has a given version.

    Attributes:
        size: The object's size in bytes.
        version: The object's version.
        ranges: The start and the stop of each range. No range is empty or ends after the object.
    """

    size: int
    version: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCached(Request):
    """Return an object's :class:`~shardio.storage.store.FileStat`, and the path of its copy in a cache.

    Attributes:
        cache: The cache.
        is_fresh: Whether to ask the store again if it was asked before.
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
        cache: The cache of the copy.
        is_urgent: Whether a sample waits for the ranges. Otherwise, they are read ahead.
        is_whole: Whether to fetch the whole object, which can be compared with its ETag, rather than the ranges.
    """

    path: str
    cache: CacheSettings
    is_urgent: bool
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledFile:
    """A small object, and the place of its content in a bundle: see :mod:`shardio.storage.cache.copies`.

    Attributes:
        key: The object's key.
        size: Its size in bytes.
        version: Its version.
        path: The path of the bundle.
        bundle_size: The bundle's size in bytes.
        start: The offset of the content in the bundle.
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
        cache: The cache of the bundles.
        files: The objects.
        is_urgent: Whether samples wait for the objects. Otherwise, they are read ahead.
    """

    cache: CacheSettings
    files: tuple[BundledFile, ...]
    is_urgent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFolder(Request):
    """Return the names directly in a folder. Names of folders end with a slash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk(Request):
    """Return all objects below a folder, page by page.

    Attributes:
        after: The key after which the listing begins.
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
    """A part of an answer. The next message is the content of a range."""


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
        value: The value that the request returns.
    """

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The end of an answer to a request that failed.

    Attributes:
        error: The error to raise.
    """

    error: Exception
