"""Names that are URLs, which are not paths."""

from __future__ import annotations

import os
import re

# A Path has one of the two slashes. A single letter is a drive of Windows.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def find_url(name: str | os.PathLike[str]) -> str | None:
    """Return the URL that a name is, also where a Path was made of it; None for a path.

    >>> find_url("s3:/bucket/images")
    's3://bucket/images'
    >>> find_url("images")
    """
    match = _URL.fullmatch(os.fspath(name))
    return match and f"{match[1]}://{match[2]}"
