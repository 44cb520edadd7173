"""A dataset repository of the Hugging Face Hub at one commit: which files it has. Only the storage process uses it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote

from shardio.storage.remote.hub_names import split_repository
from shardio.storage.remote.hub_requests import HubRequests
from shardio.storage.remote.options import RemoteOptions

MAX_BESIDE = 16
"""How many folders of one folder are listed. Then this folder is listed with all that is in it: class folders may be
thousands."""


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


class HubListing:
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

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all files, sorted. All pages must have been read."""
        return sorted(self.files)

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
        self.name, _ = split_repository(root)
        self.requests = HubRequests(root, self.name.id, options)
        self._commit: str | None = None
        self._listings: dict[tuple[str, bool], HubListing] = {}
        self._lock = threading.Lock()

    @property
    def content_url(self) -> str:
        """The URL below which the files of the commit are."""
        return f"{self.requests.endpoint}/datasets/{self.name.id}/resolve/{self.find_commit()}"

    def find_commit(self) -> str:
        """Return the commit. It is requested once.

        Raises:
            FailedRequestError: If the request fails.
        """
        with self._lock:
            if self._commit is None:
                path = f"revision/{quote(self.name.revision, safe='')}"
                answer = self.requests.get(path, {"expand": "sha"})
                self._commit = answer.read(lambda found: str(found["sha"]))
            return self._commit

    def list_folder(self, folder: str) -> HubListing:
        """Return what is directly in a folder. It is empty if there is no such folder.

        Raises:
            FailedRequestError: If a request fails. The next call continues with its page.
        """
        return self._read_listing(folder, recursive=False)

    def walk(self, folder: str) -> list[tuple[str, HubFile]]:
        """Return the files below a folder, sorted by key.

        Raises:
            FailedRequestError: If a request fails. The next call continues with its page.
        """
        listing = self._read_listing(*self._cover(folder, recursive=True))
        # A zero follows a slash in Unicode.
        start, stop = (bisect_left(listing.keys, f"{folder}{end}") for end in "/0") if folder else (0, None)
        return [(key, listing.files[key]) for key in listing.keys[start:stop]]

    def find(self, key: str) -> HubFile:
        """Return what the Hub knows about a file.

        All files of its folder are listed, because the Hub limits such requests to a few per second.

        Raises:
            FileNotFoundError: If the commit has no such file.
            FailedRequestError: If a request fails. The next call continues with its page.
        """
        folder = key.rpartition("/")[0]
        found = self._read_listing(*self._cover(folder, recursive=False)).files.get(key)
        if found is None:
            raise FileNotFoundError(key)
        return found

    def _cover(self, folder: str, *, recursive: bool) -> tuple[str, bool]:
        """Return the folder to list for the files of a folder, and whether to do so recursively."""
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
        """Return a listing. If its last reader failed, it is continued."""
        path = f"tree/{self.find_commit()}" + (f"/{quote(folder, safe='')}" if folder else "")
        with self._lock:
            listing = self._listings.setdefault((folder, recursive), HubListing(recursive=recursive))
        while True:
            with self._lock:
                if listing.next_page is None:
                    return listing
                self._read_page(path, listing, listing.next_page)

    def _read_page(self, path: str, listing: HubListing, parameters: Mapping[str, str]) -> None:
        """Add a page to a listing."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            answer = self.requests.get(path, parameters)
        except EntryNotFoundError:
            listing.next_page = None
            return
        answer.read(listing.add)
        listing.next_page = answer.next_page


def _folders_above(folder: str) -> list[str]:
    """Return the folders that contain a folder, the innermost one first."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:stop]) for stop in reversed(range(len(parts)))]
