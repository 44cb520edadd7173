"""The operations of the storage process, which answer requests by means of obstore."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardio.storage.remote.backends import TIMEOUTS_PER_REQUEST, Attempts
from shardio.storage.remote.failures import FailedRequestError, Kind, RequestFailure, is_refused_head
from shardio.storage.remote.messages import Create, ListFolder, ReadRanges, Remove, Request, Stat, Walk, Write, identify
from shardio.storage.store import FileStat, ReplacedError

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ObjectStore as Backend


PROGRESS = 2**18
"""The number of bytes that arrive together. A broken transfer is resumed from the last of them."""

PART = 8 * 2**20
"""The number of bytes in a part of a multipart upload. S3 allows 10,000 parts, so an object can have 80 GB."""

PAGE = 1000
"""The number of keys in a page of a listing, as many as S3 returns at a time."""

UNVERSIONED = "unversioned"
"""The end of an object's version if the store knows only its size."""

MAX_PARTS_AT_A_TIME = 4
"""The maximum number of parts of an object that are uploaded at a time."""

_MD5 = re.compile(r'"?(?P<digest>[0-9a-f]{32})(?P<parts>-\d+)?"?')


def is_md5_of(e_tag: str | None, parts: Iterable[bytes | memoryview]) -> bool:
    """Return whether an ETag is the MD5 of a content or, after a multipart upload, the MD5 of its parts' MD5s.

    Args:
        e_tag: The ETag.
        parts: The content, in the parts that were uploaded.
    """
    tag = _MD5.fullmatch(e_tag or "")
    if tag is None:
        return False
    digests = [hashlib.md5(part, usedforsecurity=False) for part in parts]
    if tag["parts"]:
        return (
            tag["digest"] == hashlib.md5(b"".join(each.digest() for each in digests), usedforsecurity=False).hexdigest()
        )
    return [tag["digest"]] == [each.hexdigest() for each in digests]


def compare_upload(backend: Backend, key: str, path: Path, e_tag: str | None, part_size: int | None) -> str | None:
    """Return what is wrong with an uploaded object, or None if it has the file's content.

    Nothing is read back if :func:`is_md5_of` accepts the object's ETag, as in S3 without encryption by KMS.

    Args:
        backend: The store.
        key: The object's key.
        path: The local file.
        e_tag: The ETag that the store returned for the upload.
        part_size: The size of the upload's parts in bytes; None if there was only one request.
    """
    import obstore

    found = obstore.head(backend, key)
    expected = path.stat().st_size
    if found["size"] != expected:
        return f"the uploaded object has {found['size']} bytes, expected {expected}"
    if e_tag is not None and found["e_tag"] not in (None, e_tag):
        return None  # Another process has replaced it since.
    with path.open("rb") as file:
        # An empty file has one part.
        parts = [b""] if not expected else iter(lambda: file.read(part_size or -1), b"")
        if is_md5_of(found["e_tag"], parts):
            return None
    return None if _equals(backend, key, path) else "the uploaded object's content differs from the file's"


def _equals(backend: Backend, key: str, path: Path) -> bool:
    import obstore

    with path.open("rb") as file:
        for piece in obstore.get(backend, key).stream():
            if file.read(len(piece)) != bytes(piece):
                return False
        return not file.read(1)


def stat(attempts: Attempts, request: Stat) -> FileStat:
    """Return an object's status in the store."""
    return attempts.make(_name("read", request), lambda backend: _find_stat(backend, request))


def _find_stat(backend: Backend, request: Request) -> FileStat:
    from obstore.exceptions import BaseError

    try:
        meta = backend.head(request.key)
    except (BaseError, FileNotFoundError) as error:
        if not is_refused_head(error):
            raise
        meta = backend.get(request.key).meta  # Only the head of the answer is read.
    return _stat_of(request.root, meta)


def read_whole(attempts: Attempts, request: Request) -> bytes:
    """Return an object's content."""
    return bytes(read_version(attempts, request))


def read_version(
    attempts: Attempts, request: Request, version: str | None = None, size: int | None = None
) -> memoryview:
    """Return an object's content. The object must have the version and the size in bytes, if they are given.

    Without TLS, content may be damaged on the way. If its ETag is not its MD5 either, it is read until two reads agree.
    """

    def read(backend: Backend) -> memoryview:
        result = backend.get(request.key)
        _check_object(request, result, version, size)
        content = memoryview(result.bytes())
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
        start: The start of the range.
        stop: Its stop.
        write: A function of an offset in the object and the bytes that begin there.
    """
    transfer = _Transfer(request, start, stop, write)
    attempts.make(f"read bytes {start} to {stop} of {request.root}/{request.key}", transfer.resume)


def copy_whole(attempts: Attempts, request: ReadRanges, write: Callable[[int, memoryview], None]) -> None:
    """Pass all bytes of an object to a function, as :func:`copy_range` does, with one request for all of them.

    A transfer that breaks begins again, and passes the same bytes once more.
    """
    timeout_s = attempts.options.timeout_s

    def read(backend: Backend) -> None:
        transfer = _Transfer(request, 0, request.size, write)
        transfer.receive(backend.get(request.key), seconds_per_piece=timeout_s * TIMEOUTS_PER_REQUEST)

    attempts.make(_name("read", request), read, purpose="whole")


class _Transfer:
    """A transfer of the range [start, stop): see :func:`copy_range`."""

    def __init__(self, request: ReadRanges, start: int, stop: int, write: Callable[[int, memoryview], None]) -> None:
        self._request, self._position, self._stop, self._write = request, start, stop, write

    def resume(self, backend: Backend) -> None:
        """Continue after the last byte that arrived. If the transfer breaks after further bytes, continue at once."""
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
        options: GetOptions = {"range": (begin, self._stop)}
        if version.startswith('"'):  # Weak ETags, as servers that compress have, never match.
            options["if_match"] = version
        try:
            result = backend.get(self._request.key, options=options)
        except obstore.exceptions.PreconditionError:
            found = _find_stat(backend, self._request).version
            if found == version:
                raise _try_again("the server said that the object had changed, but it has not") from None
            raise _replaced(self._request, version, found) from None
        self.receive(result)

    def receive(self, result: GetResult, seconds_per_piece: float | None = None) -> None:
        """Pass on an answer that begins after the last byte that arrived.

        Args:
            result: The answer.
            seconds_per_piece: The maximum time in seconds for each :data:`PART` of the answer; None if the client sets
                a limit itself.
        """
        self._check(result, self._position)
        began = time.monotonic()
        for piece in result.stream(min_chunk_size=1 if seconds_per_piece else PROGRESS):
            view = memoryview(piece)
            if self._position + len(view) > self._stop:
                raise _try_again("the server sent more bytes than were requested", "unclear")
            self._write(self._position, view)
            self._position += len(view)
            if seconds_per_piece and time.monotonic() - began > seconds_per_piece * (1 + self._position / PART):
                raise _try_again(f"the answer is too slow: {self._position} bytes in {time.monotonic() - began:.0f} s")
        if self._position < self._stop:
            raise _try_again(f"the answer ended at byte {self._position}")

    def _check(self, result: GetResult, begin: int) -> None:
        _check_object(self._request, result, self._request.version, self._request.size)
        if tuple(result.range) != (begin, self._stop):
            cause = f"the server answered with bytes {result.range[0]} to {result.range[1]}"
            raise _try_again(cause, "unclear")


def list_folder(attempts: Attempts, request: ListFolder) -> list[str]:
    """Return the names directly in a folder."""
    found = attempts.make(_name("list", request), lambda backend: backend.list_with_delimiter(request.key or None))
    start = len(request.key) + 1 if request.key else 0
    names = [each["path"][start:] for each in found["objects"]]
    # Some stores list the folder itself, as an empty object with a slash at the end of its name.
    return sorted([name for name in names if name] + [path[start:] + "/" for path in found["common_prefixes"]])


def walk(attempts: Attempts, request: Walk) -> Iterator[list[tuple[str, int, str]]]:
    """Yield the key, size and version of each object below a folder, page by page. Hidden objects are skipped."""
    pages, start = _Pages(request.key, request.after), len(request.key)
    while page := attempts.make(_name("list", request), pages.read):
        stats = [(each["path"], _stat_of(request.root, each)) for each in page]
        yield [
            (key, stat.size, stat.version)
            for key, stat in stats
            if key[start:].strip("/") and "/." not in f"/{key[start:].lstrip('/')}"
        ]


class _Pages:
    """A listing of the keys below a folder, in order. If it breaks, it is resumed after the last key."""

    def __init__(self, key: str, after: str = "") -> None:
        self._key = key
        self._pages: Iterator[Sequence[ObjectMeta]] | None = None
        self._last = after

    def read(self, backend: Backend) -> Sequence[ObjectMeta]:
        """Return the next objects, or none at the end."""
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

    attempts.make(_name("write", request), upload, purpose="upload")


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
    hint = ""
    if request.root.startswith("http"):
        hint = ". If it is the same object, several servers give it different ETags or dates: use one of them"
    return ReplacedError(
        f"{request.root}/{request.key} was replaced while it was in use: expected version {expected}, got {found}. "
        f"Restart with the current object{hint}"
    )


def _try_again(cause: str, kind: Kind = "transient") -> FailedRequestError:
    return FailedRequestError(RequestFailure(kind=kind, cause=cause))


def _check_object(request: Request, result: GetResult, version: str | None, size: int | None) -> None:
    """Raise an error if an answer is about an object with another version or size; None accepts any."""
    found = _stat_of(request.root, result.meta)
    wrong_size = f"the server sent {found.size} bytes, expected {size}"
    encoding = result.attributes.get("Content-Encoding", "identity")
    if size not in (None, found.size) and encoding != "identity":
        cause = f"{wrong_size}, because it compresses the object (Content-Encoding: {encoding})"
        raise FailedRequestError(RequestFailure(kind="permanent", cause=cause, remedy="Let it send files as they are"))
    if version not in (None, found.version):
        raise _replaced(request, str(version), found.version)
    if size not in (None, found.size):
        raise _try_again(wrong_size, "unclear")


def _stat_of(root: str, meta: ObjectMeta) -> FileStat:
    seconds = meta["last_modified"].timestamp()  # Zero is what obstore returns for a web server that sends no date.
    time_tag = f"{meta['size']}-{seconds:.6f}" if seconds else f"{meta['size']}-{UNVERSIONED}"
    tag = meta["e_tag"] or meta["version"] or time_tag
    if meta["e_tag"] and not tag.startswith(('"', "W/")):
        tag = f'"{tag}"'  # Azure lists ETags without the quotation marks of its headers.
    return FileStat(size=meta["size"], version=tag, identity=identify(root, meta["path"], tag))
