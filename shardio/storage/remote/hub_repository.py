"""A dataset repository of the Hugging Face Hub at one commit: which files it has. Only the storage process uses it.

The Hub's interface is used with the sessions, headers and errors of huggingface_hub. Its HfApi.list_repo_tree is not
used, because it has no time-out, and repeats requests by itself.
https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

from shardio.errors import LocationError
from shardio.storage.remote.failures import FailedRequestError, RequestFailure, redact
from shardio.storage.remote.hub_names import split_repository
from shardio.storage.remote.options import RemoteOptions

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

Response = Any
"""An answer, as the HTTP library that huggingface_hub uses returns it: requests, httpx or httpx2, which agree here."""

Result = TypeVar("Result")

OPTIONS = {"endpoint", "token"}
"""The options of a repository."""

FLAGS = {"true": None, "false": False}
"""What the token can be instead of a text, as for huggingface_hub: the user's own, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """What the Hub knows about a file.

    Attributes:
        size: Its size in bytes.
        digest: The SHA-256 of its content in hexadecimal digits or, for a small file that git stores, the id of its
            blob, a SHA-1.
    """

    size: int
    digest: str


class Listing:
    """What is known of a folder's content. It is read page by page.

    Attributes:
        files: The files, by their keys.
        folders: The keys of folders.
        next_page: The parameters of the request for the next page; None if all pages were read.
    """

    def __init__(self, *, recursive: bool) -> None:
        self.files: dict[str, HubFile] = {}
        self.folders = set[str]()
        self.next_page: Mapping[str, str] | None = {"recursive": str(recursive).lower(), "expand": "false"}

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Add the entries of a page."""
        for entry in entries:
            if entry["type"] == "directory":
                self.folders.add(entry["path"])
            else:
                # "lfs" stands for all large files, however the Hub stores them.
                digest = (entry.get("lfs") or entry)["oid"]
                self.files[entry["path"]] = HubFile(size=int(entry["size"]), digest=str(digest))


class HubRepository:
    """A repository at the commit to which its revision led when it was first used. Threads share it.

    All requests name this commit. So a listing never changes, and is requested once.

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
                f"{root} is read by the package huggingface_hub ({error}): pip install 'shardio-loader[hf]'"
            ) from error
        self.root = root
        self.name, _ = split_repository(root)
        config = dict(options.config)
        self.endpoint = _check_endpoint(config.get("endpoint") or constants.ENDPOINT)
        self._token = _check_token(config.get("token", "true"))
        self._timeout_s = options.timeout_s
        self._commit: str | None = None
        self._listings: dict[tuple[str, bool], Listing] = {}
        self._lock = threading.Lock()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of requests, with the token, which is read again each time because it may be renewed."""
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # It is public.

        return build_hf_headers(token=FLAGS.get(self._token, self._token), library_name="shardio")

    @property
    def content_url(self) -> str:
        """The URL below which the files of the commit are."""
        return f"{self.endpoint}/datasets/{self.name.id}/resolve/{self.find_commit()}"

    def find_commit(self) -> str:
        """Return the commit. It is requested once.

        Raises:
            FailedRequestError: If the request fails.
        """
        with self._lock:
            if self._commit is None:
                path = f"revision/{quote(self.name.revision, safe='')}"
                self._commit = _read(self._get(path, {"expand": "sha"}), lambda found: str(found["sha"]))
            return self._commit

    def list(self, folder: str, *, recursive: bool = False) -> Listing:
        """Return what is in a folder. It is empty if there is no such folder.

        If a request fails, the next call continues with its page.

        Args:
            folder: The folder's key.
            recursive: Whether to include what is in folders below it.

        Raises:
            FailedRequestError: If a request fails.
        """
        path = f"tree/{self.find_commit()}" + (f"/{quote(folder, safe='')}" if folder else "")
        with self._lock:
            listing = self._listings.setdefault((folder, recursive), Listing(recursive=recursive))
        while True:
            with self._lock:
                if listing.next_page is None:
                    return listing
                self._read_page(path, listing, listing.next_page)

    def find(self, key: str) -> HubFile:
        """Return what the Hub knows about a file.

        All files of its folder are listed, because the Hub allows only some hundred requests of this kind per minute.

        Raises:
            FileNotFoundError: If the commit has no such file.
            FailedRequestError: If a request fails.
        """
        found = self.list(key.rpartition("/")[0]).files.get(key)
        if found is None:
            raise FileNotFoundError(key)
        return found

    def explain_refusal(self, answer: str) -> str:
        """Return why the Hub may have given an answer such as 401, 403 or 404."""
        return (
            f"{answer}. The repository {self.name.id} does not exist, or it is private or gated and "
            f"the token, if there is one, gives no access. See {self.endpoint}/datasets/{self.name.id}, and run "
            "`hf auth login` or set HF_TOKEN"
        )

    def _read_page(self, path: str, listing: Listing, parameters: Mapping[str, str]) -> None:
        """Add a page to a listing."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            response = self._get(path, parameters)
        except EntryNotFoundError:
            listing.next_page = None
            return
        _read(response, listing.add)
        # Only the parameters are used, because the token must not be sent to another server.
        following = response.links.get("next", {}).get("url")
        listing.next_page = dict(parse_qsl(urlsplit(following).query)) if following else None

    def _get(self, path: str, parameters: Mapping[str, str]) -> Response:
        """Request something about the repository.

        Raises:
            EntryNotFoundError: If the commit has no such folder.
            LocationError: If the repository or the revision does not exist.
            FailedRequestError: If the request fails otherwise.
        """
        from huggingface_hub import errors
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # They are public.
            get_session,
            hf_raise_for_status,
        )

        url = f"{self.endpoint}/api/datasets/{self.name.id}/{path}"
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
        # The errors of the HTTP library, which depends on huggingface_hub's version.
        except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # It is imported there.
            cause = redact(str(error).partition("\n")[0]) or type(error).__name__
            is_reached = "Connect" not in type(error).__name__
            raise FailedRequestError(RequestFailure(kind="transient", cause=cause, reached=is_reached)) from None
        return response

    def _explain(self, error: HfHubHTTPError) -> RequestFailure:
        """Return what an answer means that is an error.

        Raises:
            LocationError: If the repository or the revision does not exist.
        """
        from huggingface_hub.errors import RevisionNotFoundError

        status = int(error.response.status_code)
        answer = f"the Hub answered {status}" + (f" ({error.server_message})" if error.server_message else "")
        if isinstance(error, RevisionNotFoundError):
            raise LocationError(
                f"the repository {self.name.id} has no revision {self.name.revision}: name a branch, a tag or a commit"
            ) from None
        if status == 404:
            # Not as a missing file, which may be optional.
            raise LocationError(f"cannot read {self.root}: {self.explain_refusal(answer)}") from None
        if status in (401, 403):
            return RequestFailure(kind="denied", cause=self.explain_refusal(answer))
        is_transient = status >= 500 or status in (408, 425, 429)
        return RequestFailure(kind="transient" if is_transient else "permanent", cause=answer)


def _read(response: Response, read: Callable[[Any], Result]) -> Result:
    """Return what is in the JSON of an answer."""
    try:
        return read(response.json())
    except (ValueError, KeyError, TypeError) as error:  # It was damaged on the way, or comes from another server.
        cause = f"the Hub's answer has an unexpected form ({type(error).__name__}). Check the endpoint"
        raise FailedRequestError(RequestFailure(kind="transient", cause=cause)) from None


def _check_endpoint(endpoint: str) -> str:
    if not endpoint.startswith(("https://", "http://")) or set("?#@") & set(endpoint):
        raise LocationError(
            "the endpoint of the Hugging Face Hub (HF_ENDPOINT or storage_options['endpoint']) must be a URL such as "
            "https://huggingface.co, without a query, a user name or a password"
        )
    return endpoint.rstrip("/")


def _check_token(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        # Libraries would show it in their errors.
        raise LocationError("storage_options['token'] cannot be a token: it is empty, or has spaces or line ends")
    return token
