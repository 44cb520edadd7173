"""Names as users give them: paths and URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path

# A Path has one of the two slashes. A single letter is a drive of Windows.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def make_path(name: str | os.PathLike[str]) -> Path:
    """Return the path of a file of this name. Under a locale without its letters, the name's bytes are its UTF-8.

    Raises:
        ValueError: If the name is empty, which a Path takes for the working directory, or holds a NUL.
    """
    text = os.fspath(name)
    if not text:
        raise ValueError("the path is empty: name a file or a directory, or '.' for the working directory")
    if "\0" in text:
        raise ValueError(f"the path {text!r} holds a NUL character, which no file has in its name")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))
    return Path(text)


def absolute_path(path: Path) -> Path:
    """Return a path that stays right when the working directory changes or is removed.

    Raises:
        FileNotFoundError: If the path is relative, and there is no working directory.
    """
    if path.is_absolute():
        return path
    # The operating system returns the working directory without links, so the names of its parents are right.
    here, parts = Path.cwd(), path.parts
    while parts[:1] == ("..",):
        here, parts = here.parent, parts[1:]
    return here.joinpath(*parts)


def find_url(name: str | os.PathLike[str]) -> str | None:
    """Return the URL that a name is, even if it went through a Path; None for a path.

    >>> find_url("s3:/bucket/images")
    's3://bucket/images'
    >>> find_url("images")
    """
    match = _URL.fullmatch(os.fspath(name))
    return match and f"{match[1]}://{match[2]}"


def read_as_utf8(name: str) -> str:
    """Return what the bytes of a file's name mean in UTF-8: the same under all locales. Other bytes stay escaped."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "surrogateescape")
