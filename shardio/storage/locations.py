"""Parse users' paths, URLs and settings for remote data. This is the only module that chooses a store.

URLs of Hugging Face repositories follow https://huggingface.co/docs/huggingface_hub/guides/hf_file_system.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from shardio.errors import LocationError
from shardio.storage.local import LocalStore
from shardio.storage.store import Location, absolute_path, find_url, make_path, read_pieces
from shardio.values import check_flag, check_integer, check_seconds, parse_size

OPENERS = dict.fromkeys(("s3", "gs", "az", "http", "https", "hf", "memory"), "shardio.storage.remote:open_url")
"""For each URL scheme, the function that takes a URL and a :class:`RemoteAccess`, and returns the location that the
URL names. The module of a function is imported when the function is first needed."""

NUM_THREADS = 16
"""The maximum number of calls that :func:`map_locations` makes at a time."""

Result = TypeVar("Result")

_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors from file systems that cannot link two files, but may be able to copy them."""

StorageOptions = Mapping[str, str | int | float | bool]
"""``storage_options`` as users pass it: see :class:`RemoteOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """The settings of a remote store. They can be compared, hashed and pickled.

    Attributes:
        retries: The maximum number of times that a failed request is repeated.
        timeout_s: The time in seconds without progress after which a request fails.
        deadline_s: The time in seconds after which a request that keeps failing is no longer repeated.
        max_requests: The maximum number of requests that a run's storage process makes at a time to one store.
        config: The other options, sorted by name: those of the backend, such as ``endpoint`` or ``region``. They may
            contain credentials, so they are not shown.
    """

    retries: int = 20
    timeout_s: float = 10.0
    deadline_s: float = 300.0
    max_requests: int = 64
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def _make_options(storage_options: StorageOptions | None) -> RemoteOptions:
    if storage_options is None:
        return RemoteOptions()
    if not isinstance(storage_options, Mapping):
        raise TypeError(f"storage_options must be a dict, got {type(storage_options).__name__}")
    options = storage_options.items()
    own: Any = {name: _CHECKS[name](f"storage_options[{name!r}]", value) for name, value in options if name in _CHECKS}
    config = {name.lower(): _write_value(name, value) for name, value in options if name not in _CHECKS}
    return RemoteOptions(config=tuple(sorted(config.items())), **own)


def _write_value(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    # The value is not shown, because it may be a credential.
    raise TypeError(f"storage_options[{name!r}] must be a string, a number or a boolean, got {type(value).__name__}")


_CHECKS: dict[str, Callable[[str, Any], int | float]] = {
    "retries": partial(check_integer, at_least=0, below=1000),
    "max_requests": partial(check_integer, at_least=1, below=1000),
    "timeout_s": check_seconds,
    "deadline_s": check_seconds,
}
"""The options that shardio handles itself, with the functions that check them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The settings of a cache.

    Attributes:
        folder: The cache's folder; None for a private cache, which the storage process removes when it ends.
        max_bytes: The cache's size in bytes; if None, a fraction of the free space.
        is_shared: Whether to trust copies that other users wrote and may change.
    """

    folder: str | None = None
    max_bytes: int | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAccess:
    """The settings for access to remote data. These settings have no effect on local files.

    Attributes:
        options: The settings of the stores.
        cache: The cache through which objects are read; None to read without a cache.
    """

    options: RemoteOptions = field(default_factory=RemoteOptions)
    cache: CacheSettings | None = None


def make_access(
    storage_options: StorageOptions | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_size: str | int | None = None,
    cache_shared: bool = False,
) -> RemoteAccess:
    """Check a user's settings for remote data that is read through a cache.

    Args:
        storage_options: The settings of the stores: see :class:`RemoteOptions`.
        cache: A local folder that processes and jobs share; None for a private cache, removed when the program ends.
        cache_size: The cache's size, such as ``200GB``; by default, a fifth of the free space, and at most 32 GiB if
            the cache is private.
        cache_shared: Whether to let other users write to the folder, and to trust their copies.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range, the folder is a URL, or a private cache is to be shared.
    """
    is_shared = check_flag("cache_shared", cache_shared)
    if is_shared and cache is None:
        raise ValueError("cache_shared=True needs cache: the folder that users share")
    if cache is not None and (url := find_url(cache)) is not None:
        raise ValueError(f"cache must be a local folder, got {url}")
    settings = CacheSettings(
        folder=None if cache is None else str(absolute_path(make_path(cache))),
        max_bytes=None if cache_size is None else parse_size("cache_size", cache_size),
        is_shared=is_shared,
    )
    return RemoteAccess(options=_make_options(storage_options), cache=settings)


def make_direct_access(storage_options: StorageOptions | None = None) -> RemoteAccess:
    """Check a user's settings for a store that is used without a cache, such as the destination of a pack.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range.
    """
    return RemoteAccess(options=_make_options(storage_options))


def parse_location(name: str | os.PathLike[str], access: RemoteAccess | None = None) -> Location:
    """Return the location that a path or URL names. The location stays valid when the working directory changes.

    Args:
        name: A path, or a URL of an object store or an HTTP server.
        access: The access to remote data; by default, the settings from the environment, without a cache.

    Raises:
        FileNotFoundError: If the name is a relative path and the working directory does not exist.
        LocationError: If the URL is invalid or not supported.
        ValueError: If the name is empty or contains a NUL character.
    """
    path = make_path(name)
    if (url := find_url(name)) is not None and not path.exists():
        scheme = url.partition("://")[0].lower()
        if scheme not in OPENERS:
            raise LocationError(
                f"cannot read {url}: the scheme {scheme}:// is not supported. Use a local path or "
                f"{', '.join(f'{each}://' for each in OPENERS)}, or shardio.StreamDataset, which opens all "
                "URLs that WebDataset opens"
            )
        opener: Callable[[str, RemoteAccess], Location] = resolve_name(OPENERS[scheme])
        return opener(url, access or RemoteAccess())
    if os.fspath(name).startswith("pipe:") and not path.exists():
        raise LocationError(
            "a pipe: URL stands for the output of a command, which can be read only once: read it with "
            "shardio.StreamDataset, or write the output to a file and pass its path"
        )
    return Location(store=LocalStore(), key=absolute_path(path).as_posix())


def map_locations(function: Callable[[Location], Result], locations: Sequence[Location]) -> list[Result]:
    """Call a function with each location. Return the results in the same order, or raise the first error.

    If locations are remote, several calls are made at a time, because each waits for answers. After an error or Ctrl-C,
    the function does not wait for running calls: a call to a store that does not answer may take minutes.
    """
    if len(locations) < 2 or all(each.store.is_local for each in locations):
        return list(map(function, locations))
    answers = SimpleQueue[tuple[int, Result | None, BaseException | None]]()
    remaining, is_over = iter(list(enumerate(locations))), threading.Event()  # Threads share both.

    def work() -> None:
        for place, location in remaining:
            if is_over.is_set():
                return
            try:
                answers.put((place, function(location), None))
            except BaseException as error:  # The error is raised below, in the calling thread.
                answers.put((place, None, error))

    for _ in range(min(NUM_THREADS, len(locations))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, Result] = {}
    try:
        while len(results) < len(locations):
            place, result, error = answers.get()
            if error is not None:
                raise error
            results[place] = result  # type: ignore[assignment]  # Without an error, there is a result.
    finally:
        is_over.set()
    return [results[place] for place in range(len(locations))]


def link_or_copy(source: Location, target: Location, *, copy: bool = False) -> bool:
    """Create ``target`` with the content of ``source``, as a hard link if possible.

    The target appears whole or not at all.

    Args:
        source: An object that is never changed in place.
        target: A new object.
        copy: Whether to copy even if a link is possible.

    Returns:
        Whether ``target`` is a hard link.

    Raises:
        FileExistsError: If a hard link is possible, but ``target`` exists.
        OSError: If the source cannot be read, or the target cannot be written.
    """
    if not copy and isinstance(source.store, LocalStore) and isinstance(target.store, LocalStore):
        Path(target.key).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source.resolve(), target.key)  # Some systems would hard-link a symbolic link itself.
            return True
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
    with closing(source.open()) as file, target.write_whole() as copied:
        for piece in read_pieces(file):
            copied.write(piece)
    return False


DEFAULT_REVISION = "main"

_SPECIAL = r"refs/(?:convert/[\w.-]+|pr/\d+)"
"""Revisions that contain slashes and need no escapes: pull requests and conversions."""

_BODY = re.compile(
    rf"(?P<id>\b[\w.-]+\b/\b[\w.-]+\b)(?:@(?P<revision>{_SPECIAL}|[^/]+))?(?:/(?P<key>.*))?", re.ASCII | re.DOTALL
)

_REVISION = re.compile(r"(?!(?:.*/)?\.{0,2}(?:/|\Z))[^\x00-\x1f\x7f]+")
"""No part of a revision is empty, '.' or '..': such a part would change the path of the URL that is requested."""

_UNREQUESTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and surrogates, which UTF-8 cannot encode."""


def split_repository(url: str) -> tuple[str, str, str]:
    """Return a URL's repository (``user/repository``), its revision without escapes, and its key.

    >>> split_repository("hf://datasets/user/repository@v1.0/train/a b%20.tar")
    ('user/repository', 'v1.0', 'train/a b%20.tar')
    >>> split_repository("hf://datasets/user/repository@feature%2Fnew")
    ('user/repository', 'feature/new', '')

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
    return found["id"], revision, found["key"] or ""


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
        LocationError: If the URL has a query, or if no store can request its key.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme == "hf":
        name, revision, key = split_repository(url)
        is_special = re.fullmatch(_SPECIAL, revision, re.ASCII)
        suffix = f"@{revision if is_special else quote(revision, safe='')}"
        authority = f"datasets/{name}{'' if revision == DEFAULT_REVISION else suffix}"
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
            f"the URL {root}/{key} has an empty part, '.' or '..', so it cannot be requested: rename the object"
        )
    if found := _UNREQUESTABLE.search(key):
        raise LocationError(
            f"the URL {f'{root}/{key}'!r} contains {found[0]!r}, so it cannot be requested: rename the object"
        )


def identify(root: str, key: str, version: str) -> str:
    """Return an object's identity. A repository's file has the same identity in all revisions that do not change it."""
    return f"{root.partition('@')[0]}/{key}@{version}" if root.startswith("hf://") else f"{root}/{key}"
