"""Paths and URLs as users write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

# A Path keeps only one of a URL's two slashes. A single letter before the colon is a Windows drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def make_path(name: str | os.PathLike[str]) -> Path:
    """Return the path for a name. If the locale cannot encode the name, the path has its UTF-8 bytes.

    Raises:
        ValueError: If the name is empty, which a Path treats as the working directory, or contains a NUL character.
    """
    text = os.fspath(name)
    if not text:
        raise ValueError("the path is empty: pass a file or a directory, or '.' for the working directory")
    if "\0" in text:
        raise ValueError(f"the path {text!r} contains a NUL character, which file names cannot contain")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))
    return Path(text)


def absolute_path(path: Path) -> Path:
    """Return an absolute path, which stays valid when the working directory changes or is removed.

    Raises:
        FileNotFoundError: If the path is relative and the working directory does not exist.
    """
    if path.is_absolute():
        return path
    # The operating system resolves links in the working directory's path, so dropping its last part yields the parent.
    here, parts = Path.cwd(), path.parts
    while parts[:1] == ("..",):
        here, parts = here.parent, parts[1:]
    return here.joinpath(*parts)


def find_url(name: str | os.PathLike[str]) -> str | None:
    """Return a name's URL, even if the name passed through a Path. Return None if the name is a path.

    >>> find_url("s3:/bucket/images")
    's3://bucket/images'
    >>> find_url("images")
    """
    match = _URL.fullmatch(os.fspath(name))
    return match and f"{match[1]}://{match[2]}"


def read_as_utf8(name: str) -> str:
    """Decode the bytes of a file's name as UTF-8, whatever the locale. Invalid bytes stay escaped."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "surrogateescape")
