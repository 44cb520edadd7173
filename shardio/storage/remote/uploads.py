"""Compare an uploaded object with the local file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardio.storage.remote.etags import is_md5_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend


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
