"""Divide URLs into the root of a store and a key."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from shardio.errors import LocationError
from shardio.storage.remote import hub_names

SCHEMES = ("s3", "gs", "az", "http", "https", hub_names.SCHEME, "memory")
"""The schemes of URLs that name objects in remote stores."""

_UNREQUESTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and what is no character of UTF-8."""


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
    if scheme == hub_names.SCHEME:
        repository, key = hub_names.split_repository(url)
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
    if root.startswith(f"{hub_names.SCHEME}://"):
        return hub_names.identify_file(root, key, version)
    return f"{root}/{key}"
