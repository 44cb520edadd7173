"""ETags that are MD5s, as those of S3 without encryption by KMS."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

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
