"""A repository of the Hugging Face Hub with those methods of obstore's stores that read.

The Hub lists the files, with digests of their contents. obstore requests the contents. Large files come from another
server: the Hub redirects each request to a URL that is signed for some minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from shardio.errors import LocationError
from shardio.storage.remote.failures import FailedRequestError, RequestFailure
from shardio.storage.remote.hub_repository import HubFile, HubRepository

if TYPE_CHECKING:
    from obstore import Attributes, BytesStream, GetOptions, GetResult, ListResult, ObjectMeta
    from obstore.store import HTTPStore

NO_TIME = datetime.fromtimestamp(0, tz=timezone.utc)
"""The Hub's listings have no times unless they are short. Nothing depends on them."""

UNREDIRECTED = set("[]^|")
"""obstore does not escape these characters in URLs, and follows no redirects from URLs that contain them."""


class HubStore:
    """A repository with the credentials that were valid when it was first used. Threads share it.

    Args:
        repository: The repository.
        settings: The settings of obstore's client.
    """

    def __init__(self, repository: HubRepository, settings: Mapping[str, Any]) -> None:
        self._repository, self._settings = repository, settings
        self._authorization: str | None = None
        self._contents: HTTPStore | None = None

    def head(self, path: str) -> ObjectMeta:
        return _describe(path, self._repository.find(path))

    def get(self, path: str, *, options: GetOptions | None = None) -> HubResult:
        """Request a file or a range of it.

        The condition ``if_match`` is not passed on, because it would compare the ETag of another server. The result has
        the Hub's ETag.
        """
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        file = self._repository.find(path)
        if UNREDIRECTED & set(path):
            raise LocationError(
                f"cannot read {self._repository.requests.root}/{path}: a file of the Hugging Face Hub cannot be "
                f"requested if its name has one of {' '.join(sorted(UNREDIRECTED))}. Rename it"
            )
        contents = self._contents = self._contents or self._make_contents()
        wanted: Any = {name: value for name, value in (options or {}).items() if name != "if_match"}
        try:
            return HubResult(path, file, contents.get(path, options=wanted))
        except PermissionDeniedError:
            cause = self._repository.requests.explain_refusal("the Hub answered 403")
            raise FailedRequestError(RequestFailure(kind="denied", cause=cause)) from None
        except UnauthenticatedError:
            is_renewed = self._repository.requests.headers.get("authorization") != self._authorization
            cause = self._repository.requests.explain_refusal("the Hub answered 401")
            raise FailedRequestError(RequestFailure(kind="expired" if is_renewed else "denied", cause=cause)) from None

    def list_with_delimiter(self, prefix: str | None = None) -> ListResult[list[ObjectMeta]]:
        listing = self._repository.list_folder(prefix or "")
        # The Hub lists a file as if it were a folder that contains itself.
        files = [_describe(path, file) for path, file in listing.files.items() if path != prefix]
        return {"common_prefixes": sorted(listing.folders), "objects": files}

    def list(self, prefix: str | None = None, *, offset: str | None, chunk_size: int) -> Iterator[list[ObjectMeta]]:
        """Yield the files below a folder in the order of their keys, page by page, that come after an offset."""
        found = [(path, file) for path, file in self._repository.walk(prefix or "") if path > (offset or "")]
        for start in range(0, len(found), chunk_size):
            yield [_describe(path, file) for path, file in found[start : start + chunk_size]]

    def _make_contents(self) -> HTTPStore:
        from obstore.store import HTTPStore

        url, headers = self._repository.content_url, self._repository.requests.headers
        self._authorization = headers.get("authorization")
        client_options = {
            "allow_http": url.startswith("http://"),
            "user_agent": headers["user-agent"],
            **self._settings["client_options"],
        }
        if self._authorization is not None:
            # It is not sent to other servers, to which the Hub redirects.
            client_options["default_headers"] = {"authorization": self._authorization}
        return HTTPStore.from_url(url, **{**self._settings, "client_options": client_options})


class HubResult:
    """The answer to a request for a file.

    Args:
        path: The file's key.
        file: What the Hub knows about it.
        result: The answer.
    """

    def __init__(self, path: str, file: HubFile, result: GetResult) -> None:
        self._file, self._result = file, result
        self.meta: ObjectMeta = {**_describe(path, file), "size": result.meta["size"]}

    @property
    def attributes(self) -> Attributes:
        return self._result.attributes

    @property
    def range(self) -> tuple[int, int]:
        return self._result.range

    def bytes(self) -> bytes:
        """Return the content of the file. It is compared with its digest."""
        content = bytes(self._result.bytes())
        if digest_like(self._file.digest, content) != self._file.digest:
            cause = f"the content of {len(content)} bytes does not have the digest {self._file.digest}"
            raise FailedRequestError(RequestFailure(kind="transient", cause=cause))
        return content

    def stream(self, min_chunk_size: int) -> BytesStream:
        return self._result.stream(min_chunk_size=min_chunk_size)


def digest_like(digest: str, content: bytes) -> str:
    """Return the SHA-256 of a content, or the id of its blob in git if the digest is as long as a SHA-1."""
    if len(digest) == 64:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _describe(path: str, file: HubFile) -> ObjectMeta:
    return {
        "path": path,
        "last_modified": NO_TIME,
        "size": file.size,
        "e_tag": f'"{file.digest}"',
        "version": None,
    }
