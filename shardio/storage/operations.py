"""Answer requests to the storage process with obstore, and repeat failed requests."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardio.errors import StoreError
from shardio.storage.backends import (
    TIMEOUTS_PER_REQUEST,
    FailedRequestError,
    Kind,
    Purpose,
    RequestFailure,
    explain,
    is_refused_head,
    make_backend,
)
from shardio.storage.local import bound_requests
from shardio.storage.locations import RemoteOptions, identify
from shardio.storage.store import REMOTE_PIECE, UNVERSIONED, FileStat, ReplacedError

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ObjectStore as Backend

PROGRESS = 2**18
"""The minimum size in bytes of a received piece. A broken transfer is resumed after the last complete piece."""

PART = REMOTE_PIECE
"""The number of bytes in a part of a multipart upload. S3 allows 10,000 parts, so objects can be up to 80 GB."""

PAGE = 1000
"""The number of keys in a page of a listing, the same as in S3."""

MAX_PARTS_AT_A_TIME = 4
"""The maximum number of parts of an object that are uploaded at a time."""

FIRST_WAIT_S = 0.1
"""The upper bound in seconds of the first wait before a request is repeated. The bound doubles with each retry."""

MAX_WAIT_S = 20.0
"""The maximum wait in seconds. S3's rate limits last about a second, and a server's restart takes up to a minute."""

UNREACHED_RETRIES = 3
"""The number of times to repeat requests to a server that has never answered: its name is probably wrong."""

KIND_RETRIES = {"unclear": 7, "unknown_size": 4}
"""The number of times to repeat a request whose responses do not match it, or do not state the object's size.

Fewer retries are enough if the responses were damaged in transit. A server's cache needs about a second to get an
object of a few megabytes.
"""

MIN_RANKS, MAX_START_DELAY_S, DELAY_PER_RANK_S = 16, 2.0, 0.002
"""Settings that spread out the first requests of many ranks: see :func:`bound_start_delay`. Times are in seconds."""

_MD5 = re.compile(r'"?(?P<digest>[0-9a-f]{32})(?P<parts>-\d+)?"?')

Result = TypeVar("Result")


def bound_start_delay(world_size: int) -> float:
    """Return the maximum time in seconds for which a rank waits before its first request to a store.

    All ranks of a run start at the same time. Random waits spread out their first requests.
    """
    return 0.0 if world_size < MIN_RANKS else min(MAX_START_DELAY_S, world_size * DELAY_PER_RANK_S)


class TryAgainError(FailedRequestError):
    """A request failed, but may succeed when it is repeated."""


class NoRangesError(StoreError):
    """The server does not send parts of an object, but may send all of it."""


class Attempts:
    """A client that makes requests to a store, and repeats those that fail. Threads can share this object.

    Args:
        root: The root of the store.
        options: The settings of the store.
        world_size: The number of ranks that start at the same time.

    Attributes:
        max_requests: The maximum number of requests at a time.
    """

    def __init__(self, root: str, options: RemoteOptions, world_size: int = 1) -> None:
        self.root, self.options = root, options
        self._backends: dict[Purpose, Backend] = {}
        self._answered = False
        self.max_requests = bound_requests(options.max_requests)
        self._places = threading.BoundedSemaphore(self.max_requests)
        self._start_delay_s = random.uniform(0, bound_start_delay(world_size))
        self._starting = threading.Lock()

    @property
    def is_protected(self) -> bool:
        """Whether TLS protects transfers."""
        allows_http = dict(self.options.config).get("allow_http") or os.environ.get("AWS_ALLOW_HTTP", "")
        return not self.root.startswith("http://") and allows_http.lower() not in ("1", "true")

    def make(self, verb: str, key: str, request: Callable[[Backend], Result], *, purpose: Purpose = "read") -> Result:
        """Make a request, and repeat it until it succeeds.

        Args:
            verb: The verb for messages, such as ``read``.
            key: The key of the object or folder.
            request: The function that makes the request. It may keep its progress for the next call.
            purpose: The purpose of the client.

        Raises:
            FileNotFoundError: If the object does not exist.
            PermissionError: If the credentials do not allow the request.
            ReplacedError: If the object was replaced.
            EOFError: If the object ends before the requested range.
            NoRangesError: If the server does not send parts of the object.
            StoreError: If the request keeps failing, or cannot succeed.
        """
        with self._starting:
            if self._start_delay_s:
                time.sleep(self._start_delay_s)  # Other ranks make their first requests in the meantime.
                self._start_delay_s = 0.0
        what, number, began, kinds = f"{verb} {self.root}/{key}", 0, time.monotonic(), Counter[str]()
        while True:
            number += 1
            try:
                return self._make_once(what, request, purpose)
            except TryAgainError as error:
                kinds[error.failure.kind] += 1
                elapsed_s = time.monotonic() - began
                if elapsed_s >= self.options.deadline_s or self._gives_up(number, kinds):
                    raise self._give_up(what, error.failure, number, elapsed_s) from None
            wait_s = random.uniform(0, min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(number - 1, 30)))
            # Random waits spread the retries of many ranks whose requests failed at the same time.
            time.sleep(min(wait_s, max(0.0, self.options.deadline_s - elapsed_s)))

    def _make_once(self, what: str, request: Callable[[Backend], Result], purpose: Purpose) -> Result:
        from obstore.exceptions import BaseError

        with self._places:
            backend = self._backends.get(purpose)
            if backend is None:
                backend = self._backends[purpose] = make_backend(self.root, self.options, purpose)
            try:
                result = request(backend)
            except (BaseError, FailedRequestError, FileNotFoundError, TimeoutError) as error:
                self._raise(what, explain(error), backend)
        self._answered = True
        return result

    def _raise(self, what: str, failure: RequestFailure, backend: Backend) -> None:
        self._answered |= failure.reached
        if self.root.startswith("http"):
            if failure.kind == "expired":  # There are no credentials that could be read again.
                failure = replace(failure, kind="denied")
        elif failure.kind == "no_ranges":  # Object stores can send a part of any object.
            failure = replace(failure, kind="unclear")
        match failure.kind:
            case "missing":
                raise FileNotFoundError(errno.ENOENT, f"cannot {what}: {failure.cause}")
            case "denied":
                remedy = (
                    "shardio does not log in to web servers: check your access rights, or download the files"
                    if self.root.startswith("http")
                    else "Check the credentials, in the environment or storage_options, and their permissions"
                )
                raise PermissionError(errno.EACCES, f"cannot {what}: {failure.cause}. {remedy}")
            case "beyond_end":
                raise EOFError(f"cannot {what}: {failure.cause}")
            case "no_ranges":
                raise NoRangesError(f"cannot {what}: {failure.cause}. {failure.remedy}")
            case "permanent":
                remedy = failure.remedy or "Check the URL and the storage options"
                raise StoreError(f"cannot {what}: {failure.cause}. {remedy}")
            case "expired":
                if backend in self._backends.values():
                    self._backends = {}  # New clients read the credentials again.
        raise TryAgainError(failure)

    def _gives_up(self, num_attempts: int, kinds: Counter[str]) -> bool:
        retries = self.options.retries if self._answered else min(self.options.retries, UNREACHED_RETRIES)
        return num_attempts > retries or any(kinds[kind] > limit for kind, limit in KIND_RETRIES.items())

    def _give_up(self, what: str, failure: RequestFailure, num_attempts: int, elapsed_s: float) -> StoreError:
        remedy = failure.remedy or (
            "The credentials have expired: renew them"
            if failure.kind == "expired"
            else "Check the server"
            if failure.kind == "unclear"
            else "Check the network and the server"
            if self._answered
            else "Check the URL, the endpoint and the proxy in the storage options or the environment, and the network"
        )
        times = f"after {num_attempts} attempts in {elapsed_s:.0f} s" if num_attempts > 1 else "at the first attempt"
        return StoreError(f"cannot {what} {times}: {failure.cause}. {remedy}")


def is_md5_of(e_tag: str | None, parts: Iterable[bytes | memoryview]) -> bool:
    """Return whether an ETag is the MD5 of the content or, after a multipart upload, the MD5 of the MD5s of its parts.

    Args:
        e_tag: The ETag.
        parts: The content, in the parts that were uploaded.
    """
    tag = _MD5.fullmatch(e_tag or "")
    if tag is None:
        return False
    digests = [hashlib.md5(part, usedforsecurity=False).digest() for part in parts]
    if tag["parts"]:
        digests = [hashlib.md5(b"".join(digests), usedforsecurity=False).digest()]
    return digests == [bytes.fromhex(tag["digest"])]


def compare_upload(backend: Backend, key: str, path: Path, e_tag: str | None, part_size: int | None) -> str | None:
    """Return what is wrong with an uploaded object, or None if it has the file's content.

    Nothing is read back if :func:`is_md5_of` accepts the object's ETag, as it does on S3 without KMS encryption.

    Args:
        backend: The store.
        key: The object's key.
        path: The local file.
        e_tag: The ETag that the store returned for the upload.
        part_size: The size of the upload's parts in bytes; None if the file was not uploaded in parts.
    """
    import obstore

    found = obstore.head(backend, key)
    expected = path.stat().st_size
    if found["size"] != expected:
        return f"the uploaded object has {found['size']} bytes, expected {expected}"
    if e_tag is not None and found["e_tag"] not in (None, e_tag):
        return None  # Another process has replaced the object in the meantime.
    with path.open("rb") as file:
        # An empty file has one part.
        parts = [b""] if not expected else iter(lambda: file.read(part_size or -1), b"")
        if is_md5_of(found["e_tag"], parts):
            return None
    with path.open("rb") as file:
        is_equal = all(file.read(len(piece)) == bytes(piece) for piece in obstore.get(backend, key).stream())
        is_equal = is_equal and not file.read(1)
    return None if is_equal else "the uploaded object's content differs from the file's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """An object, with the version and the size in bytes that it must have. None accepts any version or size."""

    root: str
    key: str
    version: str | None = None
    size: int | None = None

    def check(self, result: GetResult) -> None:
        """Raise an error if a response describes an object with a different version or size."""
        found = _stat_of(self.root, result.meta)
        wrong_size = f"the server sent {found.size} bytes, expected {self.size}"
        encoding = result.attributes.get("Content-Encoding", "identity")
        if self.size not in (None, found.size) and encoding != "identity":
            cause = f"{wrong_size}, because it compresses the object (Content-Encoding: {encoding})"
            remedy = "Configure the server to send files unchanged"
            raise FailedRequestError(RequestFailure(kind="permanent", cause=cause, remedy=remedy))
        if self.version not in (None, found.version):
            raise self.replaced(found.version)
        if self.size not in (None, found.size):
            raise _try_again(wrong_size, "unclear")

    def replaced(self, found: str) -> ReplacedError:
        """Return the error for an object that has a different version."""
        hint = ". If it has not changed, several servers give it different ETags or dates: use only one of them"
        return ReplacedError(
            f"{self.root}/{self.key} was replaced while it was in use: expected version {self.version}, got {found}. "
            f"Restart with the current object{hint if self.root.startswith('http') else ''}"
        )


def stat(attempts: Attempts, key: str) -> FileStat:
    """Return an object's status in the store."""
    return attempts.make("read", key, lambda backend: _find_stat(backend, attempts.root, key))


def _find_stat(backend: Backend, root: str, key: str) -> FileStat:
    from obstore.exceptions import BaseError

    try:
        meta = backend.head(key)
    except (BaseError, FileNotFoundError) as error:
        if not is_refused_head(error):
            raise
        meta = backend.get(key).meta  # Only the headers of the response are read.
    return _stat_of(root, meta)


def read_whole(attempts: Attempts, key: str) -> bytes:
    """Return an object's content."""
    return bytes(read_version(attempts, Expected(root=attempts.root, key=key)))


def read_version(attempts: Attempts, expected: Expected) -> memoryview:
    """Return an object's content.

    Without TLS, content may be damaged in transit. Unless the object's ETag is the MD5 of the content, the object is
    therefore read until two reads agree.
    """

    def read(backend: Backend) -> memoryview:
        result = backend.get(expected.key)
        expected.check(result)
        content = memoryview(result.bytes())
        if attempts.is_protected or is_md5_of(result.meta["e_tag"], [content]):
            return content
        if memoryview(backend.get(expected.key).bytes()) != content:
            raise _try_again("two reads returned different contents")
        return content

    return attempts.make("read", expected.key, read)


def read_range(attempts: Attempts, expected: Expected, start: int, stop: int) -> memoryview:
    """Return the bytes [start, stop) of an object. A broken transfer is resumed."""
    content = np.empty(stop - start, np.uint8).data  # Unlike a bytearray, this array is not zeroed first.

    def write(position: int, piece: memoryview) -> None:
        content[position - start : position - start + len(piece)] = piece

    copy_range(attempts, expected, start, stop, write)
    return content


Write = Callable[[int, memoryview], None]
"""A function that accepts an offset in an object and the bytes that begin there."""


def copy_range(attempts: Attempts, expected: Expected, start: int, stop: int, write: Write) -> None:
    """Pass the bytes [start, stop) of an object to a function, each byte once. A broken transfer is resumed."""
    transfer = _Transfer(expected, start, stop, write)
    attempts.make(f"read bytes {start} to {stop} of", expected.key, transfer.resume)


def copy_whole(attempts: Attempts, expected: Expected, size: int, write: Write) -> None:
    """Pass all bytes of an object to a function, as :func:`copy_range` does, but with a single request.

    A broken transfer starts over, and passes the same bytes again.
    """
    seconds_per_piece = attempts.options.timeout_s * TIMEOUTS_PER_REQUEST

    def read(backend: Backend) -> None:
        _Transfer(expected, 0, size, write).receive(backend.get(expected.key), seconds_per_piece)

    attempts.make("read", expected.key, read, purpose="whole")


class _Transfer:
    def __init__(self, expected: Expected, start: int, stop: int, write: Write) -> None:
        self._expected, self._position, self._stop, self._write = expected, start, stop, write

    def resume(self, backend: Backend) -> None:
        """Continue after the last byte that arrived.

        If the transfer is interrupted after more bytes have arrived, continue immediately.
        """
        from obstore.exceptions import BaseError

        while self._position < self._stop:
            before = self._position
            try:
                self._read_on(backend)
            except (BaseError, FailedRequestError):
                if self._position == before:
                    raise

    def _read_on(self, backend: Backend) -> None:
        from obstore.exceptions import PreconditionError

        root, key, version = self._expected.root, self._expected.key, str(self._expected.version)
        options: GetOptions = {"range": (self._position, self._stop)}
        if version.startswith('"'):  # Weak ETags, such as those from servers that compress responses, never match.
            options["if_match"] = version
        try:
            result = backend.get(key, options=options)
        except PreconditionError:
            found = _find_stat(backend, root, key).version
            if found == version:
                raise _try_again("the server reported that the object had changed, but it had not") from None
            raise self._expected.replaced(found) from None
        self.receive(result)

    def receive(self, result: GetResult, seconds_per_piece: float | None = None) -> None:
        """Pass a response to the function. The response begins after the last byte that arrived.

        If the client itself sets no time limit, each :data:`PART` may take ``seconds_per_piece``.
        """
        self._expected.check(result)
        if tuple(result.range) != (self._position, self._stop):
            raise _try_again(f"the server answered with bytes {result.range[0]} to {result.range[1]}", "unclear")
        began = time.monotonic()
        for piece in result.stream(min_chunk_size=1 if seconds_per_piece else PROGRESS):
            view = memoryview(piece)
            if self._position + len(view) > self._stop:
                raise _try_again("the server sent more bytes than were requested", "unclear")
            self._write(self._position, view)
            self._position += len(view)
            if seconds_per_piece and time.monotonic() - began > seconds_per_piece * (1 + self._position / PART):
                raise _try_again(
                    f"the response is too slow: {self._position} bytes in {time.monotonic() - began:.0f} s"
                )
        if self._position < self._stop:
            raise _try_again(f"the response ended at byte {self._position}")


def list_folder(attempts: Attempts, key: str) -> list[str]:
    """Return the names of objects and folders directly in a folder. Folder names end with a slash."""
    found = attempts.make("list", key, lambda backend: backend.list_with_delimiter(key or None))
    start = len(key) + 1 if key else 0
    names = [each["path"][start:] for each in found["objects"]]
    # Some stores list the folder itself, as an empty object with a slash at the end of its name.
    return sorted([name for name in names if name] + [path[start:] + "/" for path in found["common_prefixes"]])


def walk(attempts: Attempts, key: str, after: str = "") -> Iterator[list[tuple[str, int, str]]]:
    """Yield the key, size and version of each object below a folder, page by page. Hidden objects are skipped.

    Args:
        attempts: The store.
        key: The folder.
        after: The key after which the listing begins.
    """
    pages: Iterator[Sequence[ObjectMeta]] | None = None
    last, start = after, len(key)

    def read(backend: Backend) -> Sequence[ObjectMeta]:
        nonlocal pages  # If the listing is interrupted, it is resumed after the last key.
        reading, pages = pages or backend.list(key or None, offset=last or None, chunk_size=PAGE), None
        page, pages = next(reading, []), reading
        return page

    while page := attempts.make("list", key, read):
        last = page[-1]["path"]
        stats = [(each["path"], _stat_of(attempts.root, each)) for each in page]
        yield [
            (path, found.size, found.version)
            for path, found in stats
            if path[start:].strip("/") and "/." not in f"/{path[start:].lstrip('/')}"
        ]


def write(attempts: Attempts, key: str, path: Path) -> None:
    """Write an object from a local file, and compare it with the file afterwards."""
    import obstore

    is_large = path.stat().st_size > PART

    def upload(backend: Backend) -> None:
        # obstore aborts a multipart upload that fails.
        result = obstore.put(
            backend, key, path, use_multipart=is_large, chunk_size=PART, max_concurrency=MAX_PARTS_AT_A_TIME
        )
        problem = compare_upload(backend, key, path, result["e_tag"], PART if is_large else None)
        if problem is not None:
            raise _try_again(problem)

    attempts.make("write", key, upload, purpose="upload")


def create(attempts: Attempts, key: str, content: bytes) -> bool:
    """Write a small object if none exists. Return whether the object now has this content."""
    import obstore

    def put(backend: Backend) -> bool:
        try:
            obstore.put(backend, key, content, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            # An earlier attempt may have written the object even though its response was lost.
            return bytes(obstore.get(backend, key).bytes()) == content
        return True

    return attempts.make("write", key, put)


def remove(attempts: Attempts, key: str) -> None:
    """Remove an object if it exists."""
    import obstore

    def delete(backend: Backend) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(backend, key)

    attempts.make("remove", key, delete)


def _try_again(cause: str, kind: Kind = "transient") -> FailedRequestError:
    return FailedRequestError(RequestFailure(kind=kind, cause=cause))


def _stat_of(root: str, meta: ObjectMeta) -> FileStat:
    seconds = meta["last_modified"].timestamp()  # obstore returns zero if a web server sends no date.
    time_tag = f"{meta['size']}-{seconds:.6f}" if seconds else f"{meta['size']}-{UNVERSIONED}"
    tag = meta["e_tag"] or meta["version"] or time_tag
    if meta["e_tag"] and not tag.startswith(('"', "W/")):
        tag = f'"{tag}"'  # Azure's headers put ETags in quotation marks, but its listings do not.
    return FileStat(size=meta["size"], version=tag, identity=identify(root, meta["path"], tag))
