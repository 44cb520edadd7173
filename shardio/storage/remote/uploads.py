"""Compare an uploaded object with the local file."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

_MD5 = re.compile(r'"?(?P<digest>[0-9a-f]{32})(-(?P<parts>\d+))?"?')


def compare_upload(backend: Backend, key: str, path: Path, e_tag: str | None, part_size: int | None) -> str | None:
    """Return what is wrong with an uploaded object, or None if it has the file's content.

    If its ETag is the MD5 of the content, as in S3 without encryption by KMS, nothing is read back. For a multipart
    upload, that is the MD5 of its parts' MD5s.

    Args:
        backend: The store.
        key: The object's key.
        path: The local file.
        e_tag: The ETag that the store returned for the upload.
        part_size: The size of its parts in bytes; None if it was uploaded at once.
    """
    import obstore

    found = obstore.head(backend, key)
    expected = path.stat().st_size
    if found["size"] != expected:
        return f"the uploaded object has {found['size']} bytes, expected {expected}"
    if e_tag is not None and found["e_tag"] not in (None, e_tag):
        return None  # Another process has replaced it since.
    tag = _MD5.fullmatch(found["e_tag"] or "")
    if tag is not None and tag["digest"] == _md5_of(path, part_size):
        return None
    return None if _equals(backend, key, path) else "the uploaded object's content differs from the file's"


def _md5_of(path: Path, part_size: int | None) -> str:
    digests = list[bytes]()
    with path.open("rb") as file:
        while part := file.read(part_size or -1):
            digests.append(hashlib.md5(part, usedforsecurity=False).digest())
    if part_size is None:
        return (digests or [hashlib.md5(usedforsecurity=False).digest()])[0].hex()
    return hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()


def _equals(backend: Backend, key: str, path: Path) -> bool:
    import obstore

    with path.open("rb") as file:
        for piece in obstore.get(backend, key).stream():
            if file.read(len(piece)) != bytes(piece):
                return False
        return not file.read(1)
