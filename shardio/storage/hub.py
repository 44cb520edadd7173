"""Read dataset repositories of the Hugging Face Hub, through the same methods as obstore's stores.

The Hub lists the files, with digests of their contents (https://huggingface.co/docs/hub/api). obstore requests the
contents. Large files come from a different server: the Hub redirects each request to a signed URL that is valid for a
few minutes.

huggingface_hub provides the endpoint, the token and the connections, and interprets errors. HfFileSystem and
HfApi.list_repo_tree are not used, because their listings have no timeout: a stalled connection blocks a listing
forever. An interrupted listing starts over. Requests are repeated according to the rules of huggingface_hub, regardless
of ``retries`` and ``deadline_s``. HfFileSystem copies all bytes in Python, whereas obstore resumes a broken transfer
and reads many ranges at a time.
"""

from __future__ import annotations

import hashlib
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import parse_qsl, quote, urlsplit

from shardio.errors import LocationError
from shardio.storage.backends import FailedRequestError, RequestFailure, redact, refuse_options
from shardio.storage.locations import RemoteOptions, split_repository

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from obstore import GetOptions, GetResult, ListResult, ObjectMeta
    from obstore.store import HTTPStore, ObjectStore as Backend


OPTIONS = {"endpoint", "token"}
"""The options of a repository."""

_TOKEN = re.compile(r"Bearer [!-~]+")

FLAGS = {"true": None, "false": False}
"""The special values of the token, with huggingface_hub's equivalents: the user's saved token, and no token."""

MAX_BESIDE = 16
"""The maximum number of subfolders that are listed one by one. If more subfolders are requested, their parent folder is
listed recursively, because a folder may hold thousands of class folders."""

NO_TIME = datetime.fromtimestamp(0, tz=timezone.utc)
"""The modification time of all files. Only some listings of the Hub include times, and shardio does not use them."""

UNREDIRECTED = set("[]^|")
"""Characters that obstore does not escape in URLs. obstore follows no redirects from URLs with these characters."""

_REPOSITORIES: dict[tuple[str, RemoteOptions], HubRepository] = {}
"""The repositories by their roots and settings. A repository keeps its commit until the storage process ends."""


def make_store(root: str, options: RemoteOptions, config: Mapping[str, str], settings: Mapping[str, Any]) -> Backend:
    """Return a new client for a repository.

    Args:
        root: The root of the store, ``hf://datasets/user/repository@revision``.
        options: The settings.
        config: The settings other than obstore's.
        settings: The settings of obstore's client.

    Raises:
        LocationError: If huggingface_hub is not installed, or an option is unknown or invalid.
    """
    refuse_options(root, config.keys() - OPTIONS)
    repository = _REPOSITORIES.get((root, options))
    if repository is None:
        repository = _REPOSITORIES.setdefault((root, options), HubRepository(root, options))
    # A HubStore has only the reading methods of obstore's stores, because shardio does not write to repositories.
    return cast("Backend", HubStore(repository, settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file's status on the Hub.

    Attributes:
        size: The file's size in bytes.
        digest: The SHA-256 of its content in hexadecimal digits or, for a small file that git stores, the id of its
            blob, a SHA-1.
    """

    size: int
    digest: str


@dataclass(kw_only=True, eq=False)
class HubListing:
    """The known part of a folder's content, which is read page by page.

    Attributes:
        next_page: The parameters of the request for the next page; None if all pages were read.
        files: The files, by their keys.
        folders: The keys of folders.
    """

    next_page: Mapping[str, str] | None
    files: dict[str, HubFile] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all files, sorted. All pages must have been read."""
        return sorted(self.files)

    def add(self, entries: Any) -> None:
        """Add the entries of a page."""
        for entry in entries:
            if entry["type"] == "directory":
                self.folders.add(entry["path"])
            else:
                # "lfs" marks all large files, however the Hub stores them.
                digest = (entry.get("lfs") or entry)["oid"]
                self.files[entry["path"]] = HubFile(size=int(entry["size"]), digest=str(digest))


class HubRepository:
    """A repository at the commit to which its revision pointed when the repository was first used. Threads share it.

    All requests name this commit, so a listing never changes and is requested once.

    Args:
        root: The root of the store, ``hf://datasets/user/repository@revision``.
        options: The settings.

    Raises:
        LocationError: If huggingface_hub is not installed, or an option is invalid.
    """

    def __init__(self, root: str, options: RemoteOptions) -> None:
        try:
            from huggingface_hub import constants
        except ImportError as error:
            raise LocationError(
                f"reading {root} requires the package huggingface_hub ({error}): pip install 'shardio-loader[hf]'"
            ) from error
        config = dict(options.config)
        self.root = root
        self.name, self._revision, _ = split_repository(root)
        self.endpoint = _check_endpoint(config.get("endpoint") or constants.ENDPOINT)
        token = config.get("token", "true")
        self._token = token.lower() if token.lower() in FLAGS else token
        self._timeout_s = options.timeout_s
        self._commit: str | None = None
        self._listings: dict[tuple[str, bool], HubListing] = {}
        self._lock = threading.Lock()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of requests. Their token is read again each time, because it may have been renewed.

        Raises:
            LocationError: If the token is invalid.
        """
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # The function is public.

        headers = build_hf_headers(token=FLAGS.get(self._token, self._token), library_name="shardio")
        if not _TOKEN.fullmatch(headers.get("authorization", "Bearer none")):
            # Libraries would show the token in their errors.
            raise LocationError(
                "the token of the Hugging Face Hub (HF_TOKEN, the file of `hf auth login` or storage_options['token']) "
                "is invalid: it is empty, or contains spaces, line breaks or non-ASCII characters"
            )
        return headers

    def find_commit(self) -> str:
        """Return the commit, which is requested only once.

        Raises:
            LocationError: If the repository or the revision does not exist.
            FailedRequestError: If the request fails for another reason.
        """
        with self._lock:
            if self._commit is None:
                found = list[str]()
                path = f"revision/{quote(self._revision, safe='')}"
                self._get(path, {"expand": "sha"}, lambda answer: found.append(str(answer["sha"])))
                self._commit = found[0]
            return self._commit

    def list_folder(self, folder: str) -> HubListing:
        """Return the listing of a folder's immediate contents. The listing is empty if the folder does not exist.

        Raises:
            FailedRequestError: If a request fails. The next call continues with the page whose request failed.
        """
        return self._read_listing(folder, recursive=False)

    def walk(self, folder: str) -> list[tuple[str, HubFile]]:
        """Return the files below a folder, sorted by key.

        Raises:
            FailedRequestError: If a request fails. The next call continues with the page whose request failed.
        """
        listing = self._read_listing(*self._cover(folder, recursive=True))
        # In Unicode, "0" follows "/", so these bounds enclose all keys that start with "folder/".
        start, stop = (bisect_left(listing.keys, f"{folder}{end}") for end in "/0") if folder else (0, None)
        return [(key, listing.files[key]) for key in listing.keys[start:stop]]

    def find(self, key: str) -> HubFile:
        """Return a file's status.

        All files in the file's folder are listed together, because the Hub limits requests for single files to a few
        per second.

        Raises:
            FileNotFoundError: If the commit has no such file.
            FailedRequestError: If a request fails. The next call continues with the page whose request failed.
        """
        folder = key.rpartition("/")[0]
        found = self._read_listing(*self._cover(folder, recursive=False)).files.get(key)
        if found is None:
            raise FileNotFoundError(key)
        return found

    def explain_refusal(self, answer: str) -> str:
        """Return a message with the possible causes of a response such as 401, 403 or 404."""
        return (
            f"{answer}. The repository {self.name} does not exist, or it is private or gated and "
            f"the token, if there is one, gives no access. See {self.endpoint}/datasets/{self.name}, and run "
            "`hf auth login` or set HF_TOKEN"
        )

    def _cover(self, folder: str, *, recursive: bool) -> tuple[str, bool]:
        """Return which folder to list in order to find the files of ``folder``, and whether to list it recursively."""
        above = _folders_above(folder)
        with self._lock:
            for each in (folder, *above):
                if (each, True) in self._listings:
                    return each, True
            if (folder, recursive) not in self._listings and above:
                beside = {other for other, _ in self._listings if _folders_above(other)[:1] == above[:1]}
                if len(beside) >= MAX_BESIDE:
                    return above[0], True
        return folder, recursive

    def _read_listing(self, folder: str, recursive: bool) -> HubListing:
        from huggingface_hub.errors import EntryNotFoundError

        path = f"tree/{self.find_commit()}" + (f"/{quote(folder, safe='')}" if folder else "")
        first = {"recursive": str(recursive).lower(), "expand": "false"}
        with self._lock:
            listing = self._listings.setdefault((folder, recursive), HubListing(next_page=first))
        while True:
            with self._lock:
                if listing.next_page is None:
                    return listing
                try:
                    listing.next_page = self._get(path, listing.next_page, listing.add)
                except EntryNotFoundError:
                    listing.next_page = None

    def _get(self, path: str, parameters: Mapping[str, str], read: Callable[[Any], object]) -> dict[str, str] | None:
        """Pass the Hub's response to a function. Return the parameters of the request for the next page, if any."""
        from huggingface_hub import errors
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # These functions are public.
            get_session,
            hf_raise_for_status,
        )

        url = f"{self.endpoint}/api/datasets/{self.name}/{path}"
        try:
            response = get_session().get(url, params=dict(parameters), headers=self.headers, timeout=self._timeout_s)
            hf_raise_for_status(response)
        except errors.EntryNotFoundError:
            raise
        except errors.OfflineModeIsEnabled:
            cause = "huggingface_hub is in offline mode (HF_HUB_OFFLINE)"
            raise FailedRequestError(RequestFailure(kind="permanent", cause=cause)) from None
        except errors.HfHubHTTPError as error:
            raise FailedRequestError(self._explain(error)) from None
        # The errors of the HTTP library that this version of huggingface_hub uses.
        except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # `errors` imports it.
            cause = redact(str(error).partition("\n")[0]) or type(error).__name__
            is_reached = "Connect" not in type(error).__name__
            raise FailedRequestError(RequestFailure(kind="transient", cause=cause, reached=is_reached)) from None
        try:
            read(response.json())
        except (ValueError, KeyError, TypeError) as error:  # The response is damaged, or comes from a different server.
            cause = f"the Hub's response has an unexpected format ({type(error).__name__}). Check the endpoint"
            raise FailedRequestError(RequestFailure(kind="transient", cause=cause)) from None
        # Only the parameters are used, because the token must not be sent to another server.
        following = response.links.get("next", {}).get("url")
        return dict(parse_qsl(urlsplit(following).query)) if following else None

    def _explain(self, error: HfHubHTTPError) -> RequestFailure:
        from huggingface_hub.errors import RevisionNotFoundError

        status = int(error.response.status_code)
        answer = f"the Hub answered {status}" + (f" ({error.server_message})" if error.server_message else "")
        if isinstance(error, RevisionNotFoundError):
            raise LocationError(
                f"{self.root}: the repository has no such revision. Name a branch, a tag or a commit"
            ) from None
        if status == 404:
            # FileNotFoundError would mean a missing file, which may be optional.
            raise LocationError(f"cannot read {self.root}: {self.explain_refusal(answer)}") from None
        if status in (401, 403):
            return RequestFailure(kind="denied", cause=self.explain_refusal(answer))
        is_transient = status >= 500 or status in (408, 425, 429)
        return RequestFailure(kind="transient" if is_transient else "permanent", cause=answer)


def _check_endpoint(endpoint: str) -> str:
    if not endpoint.startswith(("https://", "http://")) or set("?#@") & set(endpoint):
        raise LocationError(
            "the endpoint of the Hugging Face Hub (HF_ENDPOINT or storage_options['endpoint']) must be a URL such as "
            "https://huggingface.co, without a query, a user name or a password"
        )
    return endpoint.rstrip("/")


def _folders_above(folder: str) -> list[str]:
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:stop]) for stop in reversed(range(len(parts)))]


class HubStore:
    """A client of a repository, with the credentials that were valid at the client's first request. Threads share it.

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

        The condition ``if_match`` is not passed on, because it would be compared with a different server's ETag. The
        result has the Hub's ETag.
        """
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        file = self._repository.find(path)
        if UNREDIRECTED & set(path):
            raise LocationError(
                f"cannot read {self._repository.root}/{path}: a file of the Hugging Face Hub cannot be "
                f"requested if its name contains one of {' '.join(sorted(UNREDIRECTED))}. Rename it"
            )
        contents = self._contents = self._contents or self._make_contents()
        wanted: Any = {name: value for name, value in (options or {}).items() if name != "if_match"}
        try:
            return HubResult(path, file, contents.get(path, options=wanted))
        except PermissionDeniedError:
            raise self._refused(403, "denied") from None
        except UnauthenticatedError:
            is_renewed = self._repository.headers.get("authorization") != self._authorization
            raise self._refused(401, "expired" if is_renewed else "denied") from None

    def _refused(self, status: int, kind: Literal["denied", "expired"]) -> FailedRequestError:
        cause = self._repository.explain_refusal(f"the Hub answered {status}")
        return FailedRequestError(RequestFailure(kind=kind, cause=cause))

    def list_with_delimiter(self, prefix: str | None = None) -> ListResult[list[ObjectMeta]]:
        listing = self._repository.list_folder(prefix or "")
        # The Hub lists a file as if it were a folder that contains itself.
        files = [_describe(path, file) for path, file in listing.files.items() if path != prefix]
        return {"common_prefixes": sorted(listing.folders), "objects": files}

    def list(self, prefix: str | None = None, *, offset: str | None, chunk_size: int) -> Iterator[list[ObjectMeta]]:
        """Yield the files below a folder in the order of their keys, beginning after an offset, page by page."""
        found = [(path, file) for path, file in self._repository.walk(prefix or "") if path > (offset or "")]
        for start in range(0, len(found), chunk_size):
            yield [_describe(path, file) for path, file in found[start : start + chunk_size]]

    def _make_contents(self) -> HTTPStore:
        from obstore.store import HTTPStore

        headers, commit = self._repository.headers, self._repository.find_commit()
        url = f"{self._repository.endpoint}/datasets/{self._repository.name}/resolve/{commit}"
        self._authorization = headers.get("authorization")
        client_options = {
            "allow_http": url.startswith("http://"),
            "user_agent": headers["user-agent"],
            **self._settings["client_options"],
        }
        if self._authorization is not None:
            # obstore does not send the token to the servers to which the Hub redirects.
            client_options["default_headers"] = {"authorization": self._authorization}
        return HTTPStore.from_url(url, **{**self._settings, "client_options": client_options})


class HubResult:
    """The response to a request for a file.

    Args:
        path: The file's key.
        file: The file's status.
        result: obstore's response.
    """

    def __init__(self, path: str, file: HubFile, result: GetResult) -> None:
        self._file, self._result = file, result
        self.meta: ObjectMeta = {**_describe(path, file), "size": result.meta["size"]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)

    def bytes(self) -> bytes:
        """Return the content of the file, after checking it against its digest."""
        content = bytes(self._result.bytes())
        if len(self._file.digest) == 64:
            digest = hashlib.sha256(content).hexdigest()
        else:
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if digest != self._file.digest:
            cause = f"the content of {len(content)} bytes does not have the digest {self._file.digest}"
            raise FailedRequestError(RequestFailure(kind="transient", cause=cause))
        return content


def _describe(path: str, file: HubFile) -> ObjectMeta:
    return {"path": path, "last_modified": NO_TIME, "size": file.size, "e_tag": f'"{file.digest}"', "version": None}
