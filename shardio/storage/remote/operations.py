"""What the storage process does for each request, with obstore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardio.storage.remote.attempts import Attempts
from shardio.storage.remote.etags import is_md5_of
from shardio.storage.remote.failures import FailedRequestError, RequestFailure
from shardio.storage.remote.messages import Create, ListFolder, ReadRanges, Remove, Request, Stat, Walk, Write
from shardio.storage.remote.uploads import compare_upload
from shardio.storage.remote.urls import identify
from shardio.storage.store import FileStat, ReplacedError

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore as Backend

PROGRESS = 2**18
"""Bytes that arrive together. A broken transfer is resumed from the last of them."""

PART = 8 * 2**20
"""Bytes per part of a multipart upload. S3 allows 10,000 parts, so an object can have 80 GB."""

PAGE = 1000
"""Keys per page of a listing, as many as S3 returns at a time."""

MAX_PARTS_AT_A_TIME = 4
"""How many parts of an object are uploaded at a time."""


def stat(attempts: Attempts, request: Stat) -> FileStat:
    """Return what the store knows about an object."""
    return attempts.make(_name("read", request), lambda backend: _find_stat(backend, request))


def _find_stat(backend: Backend, request: Request) -> FileStat:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    try:
        meta = backend.head(request.key)
    except (PermissionDeniedError, UnauthenticatedError):
        # The answer to a HEAD has no body. That to a GET says why: the credentials may have expired.
        meta = backend.get(request.key).meta
    return _stat_of(request.root, meta)


def read_whole(attempts: Attempts, request: Request) -> bytes:
    """Return an object's content."""
    return bytes(read_version(attempts, request))


def read_version(
    attempts: Attempts, request: Request, version: str | None = None, size: int | None = None
) -> memoryview:
    """Return an object's content. If a version or a size in bytes is given, it must have them.

    Without TLS, it may be damaged on the way. If its ETag is not its MD5 either, it is read until two reads agree.
    """

    def read(backend: Backend) -> memoryview:
        result = backend.get(request.key)
        content = memoryview(result.bytes())
        if version is not None and (found := _stat_of(request.root, result.meta).version) != version:
            raise _replaced(request, version, found)
        if size is not None and len(content) != size:
            raise _try_again(f"the server sent {len(content)} bytes, expected {size}")
        if attempts.is_protected or is_md5_of(result.meta["e_tag"], [content]):
            return content
        if memoryview(backend.get(request.key).bytes()) != content:
            raise _try_again("two reads returned different contents")
        return content

    return attempts.make(_name("read", request), read)


def read_range(attempts: Attempts, request: ReadRanges, start: int, stop: int) -> memoryview:
    """Return the bytes [start, stop) of an object. A transfer that breaks is resumed."""
    content = np.empty(stop - start, np.uint8).data  # Unlike a bytearray, it is not cleared first.

    def write(position: int, piece: memoryview) -> None:
        content[position - start : position - start + len(piece)] = piece

    copy_range(attempts, request, start, stop, write)
    return content


def copy_range(
    attempts: Attempts, request: ReadRanges, start: int, stop: int, write: Callable[[int, memoryview], None]
) -> None:
    """Pass the bytes [start, stop) of an object to a function, each byte once. A transfer that breaks is resumed.

    Args:
        attempts: The store.
        request: The object.
        start: Where the range starts.
        stop: Where it stops.
        write: A function of a position in the object and the bytes that begin there.
    """
    transfer = _Transfer(request, start, stop, write)
    attempts.make(f"read bytes {start} to {stop} of {request.root}/{request.key}", transfer.resume)


class _Transfer:
    """A transfer of the range [start, stop): see :func:`copy_range`."""

    def __init__(self, request: ReadRanges, start: int, stop: int, write: Callable[[int, memoryview], None]) -> None:
        self._request, self._position, self._stop, self._write = request, start, stop, write

    def resume(self, backend: Backend) -> None:
        """Read on from the last byte that arrived. If the transfer breaks after further bytes, do so again at once."""
        from obstore.exceptions import BaseError

        while self._position < self._stop:
            before = self._position
            try:
                self._read_on(backend)
            except (BaseError, FailedRequestError):
                if self._position == before:
                    raise

    def _read_on(self, backend: Backend) -> None:
        import obstore

        begin = self._position
        version = self._request.version
        # Weak ETags, as servers that compress have, never match.
        if_match = version if version.startswith('"') else None
        try:
            result = backend.get(self._request.key, options={"range": (begin, self._stop), "if_match": if_match})
        except obstore.exceptions.PreconditionError:
            found = _find_stat(backend, self._request).version
            if found == version:
                raise _try_again("the server said that the object had changed, but it has not") from None
            raise _replaced(self._request, version, found) from None
        self._check(result, begin)
        for piece in result.stream(min_chunk_size=PROGRESS):
            view = memoryview(piece)
            if self._position + len(view) > self._stop:
                raise _try_again("the server sent more bytes than were requested")
            self._write(self._position, view)
            self._position += len(view)
        if self._position < self._stop:
            raise _try_again(f"the answer ended at byte {self._position}")

    def _check(self, result: GetResult, begin: int) -> None:
        """Raise an error if the server answers for another range or another object."""
        found = _stat_of(self._request.root, result.meta)
        if found.version != self._request.version:
            raise _replaced(self._request, self._request.version, found.version)
        if tuple(result.range) != (begin, self._stop) or found.size != self._request.size:
            raise _try_again(f"the server answered with bytes {result.range[0]} to {result.range[1]} of {found.size}")


def list_folder(attempts: Attempts, request: ListFolder) -> list[str]:
    """Return the names directly in a folder."""
    found = attempts.make(_name("list", request), lambda backend: backend.list_with_delimiter(request.key or None))
    start = len(request.key) + 1 if request.key else 0
    names = [each["path"][start:] for each in found["objects"]]
    # Some stores list the folder itself, as an empty object with a slash at the end of its name.
    return sorted([name for name in names if name] + [path[start:] + "/" for path in found["common_prefixes"]])


def walk(attempts: Attempts, request: Walk) -> Iterator[list[tuple[str, int, str]]]:
    """Yield the key, size and version of each object below a folder, page by page. Hidden objects are skipped."""
    pages, start = _Pages(request.key), len(request.key)
    while page := attempts.make(_name("list", request), pages.read):
        stats = [(each["path"], _stat_of(request.root, each)) for each in page]
        yield [
            (key, stat.size, stat.version)
            for key, stat in stats
            if key[start:].strip("/") and "/." not in f"/{key[start:].lstrip('/')}"
        ]


class _Pages:
    """A listing of the keys below a folder, in order. If it breaks, it is resumed after the last key.

    Args:
        key: The folder.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._pages: Iterator[Sequence[ObjectMeta]] | None = None
        self._last = ""

    def read(self, backend: Backend) -> Sequence[ObjectMeta]:
        """Return the next objects; none at the end."""
        pages = self._pages or backend.list(self._key or None, offset=self._last or None, chunk_size=PAGE)
        self._pages = None
        page = next(pages, [])
        self._pages, self._last = pages, page[-1]["path"] if page else self._last
        return page


def write(attempts: Attempts, request: Write) -> None:
    """Write an object from a local file, and compare it with the file afterwards."""
    import obstore

    path = Path(request.path)
    is_large = path.stat().st_size > PART

    def upload(backend: Backend) -> None:
        # obstore aborts a multipart upload that fails.
        result = obstore.put(
            backend,
            request.key,
            path,
            use_multipart=is_large,
            chunk_size=PART,
            max_concurrency=MAX_PARTS_AT_A_TIME,
        )
        problem = compare_upload(backend, request.key, path, result["e_tag"], PART if is_large else None)
        if problem is not None:
            raise _try_again(problem)

    attempts.make(_name("write", request), upload, is_upload=True)


def create(attempts: Attempts, request: Create) -> bool:
    """Write an object if none exists. Return whether it has the requested content now."""
    import obstore

    def put(backend: Backend) -> bool:
        try:
            obstore.put(backend, request.key, request.content, mode="create")
        except obstore.exceptions.AlreadyExistsError:  # Perhaps by an earlier attempt, whose answer was lost.
            return bytes(obstore.get(backend, request.key).bytes()) == request.content
        return True

    return attempts.make(_name("write", request), put)


def remove(attempts: Attempts, request: Remove) -> None:
    """Remove an object if it exists."""
    import obstore

    def delete(backend: Backend) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(backend, request.key)

    attempts.make(_name("remove", request), delete)


def _name(verb: str, request: Request) -> str:
    return f"{verb} {request.root}/{request.key}"


def _replaced(request: Request, expected: str, found: str) -> ReplacedError:
    return ReplacedError(
        f"{request.root}/{request.key} was replaced while it was in use: expected version {expected}, got {found}. "
        "Restart with the current object"
    )


def _try_again(cause: str) -> FailedRequestError:
    return FailedRequestError(RequestFailure(kind="transient", cause=cause))


def _stat_of(root: str, meta: ObjectMeta) -> FileStat:
    tag = meta["e_tag"] or meta["version"] or f"{meta['size']}-{meta['last_modified'].timestamp():.6f}"
    if meta["e_tag"] and not tag.startswith(('"', "W/")):
        tag = f'"{tag}"'  # Azure lists ETags without the quotation marks of its headers.
    return FileStat(size=meta["size"], version=tag, identity=identify(root, meta["path"], tag))
