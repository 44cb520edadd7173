"""The names of the Hugging Face Hub's dataset repositories in URLs, as huggingface_hub's HfFileSystem reads them.

https://huggingface.co/docs/huggingface_hub/guides/hf_file_system
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from shardio.errors import LocationError

SCHEME = "hf"

DEFAULT_REVISION = "main"

_SPECIAL = r"refs/(?:convert/[\w.-]+|pr/\d+)"
"""Revisions that contain slashes and need no escapes: pull requests and conversions."""

_BODY = re.compile(
    rf"(?P<id>\b[\w.-]+\b/\b[\w.-]+\b)(?:@(?P<revision>{_SPECIAL}|[^/]+))?(?:/(?P<key>.*))?", re.ASCII | re.DOTALL
)

_REVISION = re.compile(r"(?!(?:.*/)?\.{0,2}(?:/|\Z))[^\x00-\x1f\x7f]+")
"""A revision has no part that is empty, '.' or '..', which would lead to other URLs of the Hub."""


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
        """What follows ``hf://`` in the root of its store."""
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
    """Return an identity that is equal for a file in all revisions that contain it unchanged.

    Args:
        root: The root of the store, ``hf://datasets/user/repository@revision``.
        key: The file's key.
        version: A digest of the file's content.
    """
    return f"{root.partition('@')[0]}/{key}@{version}"
