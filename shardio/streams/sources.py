"""Streams as users name them: commands, URLs and paths, in brace notation."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shardio.errors import FormatError
from shardio.storage import Location, find_url, make_path, parse_location
from shardio.streams.opening import COMMAND, is_opened_by_webdataset

StreamNames = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A command, URL or path of a tar, a brace pattern of these, or a list of them."""

_TAR = re.compile(r"[^\s/\\'\"=?&:;|<>()]+\.(?:tar\.[a-z0-9]+|tar|tgz)\b", re.IGNORECASE)
"""The name of a tar in a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """Where a stream comes from.

    Attributes:
        name: What WebDataset opens. It may contain passwords or tokens, so it is not shown.
        shown: The name in messages and states: of a command, only the program and the tar; of a URL, no query.
        location: The location of a stored tar, which needs no WebDataset; None for other streams.
    """

    name: str = field(repr=False)
    shown: str
    location: Location | None = None

    def __str__(self) -> str:
        return self.shown


def find_streams(source: StreamNames) -> tuple[StreamSource, ...]:
    """Return the streams that ``source`` names.

    Raises:
        FileNotFoundError: If a local tar does not exist.
        FormatError: If a stream is named twice.
        ImportError: If WebDataset is needed to open a stream, and is not installed.
        LocationError: If a URL is not supported.
        ValueError: If nothing is named, or the braces of a pattern do not match.
    """
    patterns = [source] if isinstance(source, str | os.PathLike) else list(source)
    names = [name for pattern in patterns for name in _expand(os.fspath(pattern))]
    if not names:
        raise ValueError("the list of streams is empty: name at least one")
    if len(set(names)) < len(names):
        index = next(index for index, name in enumerate(names) if name in names[:index])
        raise FormatError(
            f"{_describe(names[index], index)} is named twice, so each of its samples would be delivered twice: name "
            "it once"
        )
    streams = tuple(_make_source(name, index) for index, name in enumerate(names))
    local = [each.location for each in streams if each.location is not None and each.location.store.is_local]
    if folders := [str(location) for location in local if location.is_folder()]:
        raise FileNotFoundError(f"{folders[0]} is a directory: name its tars, such as {folders[0]}/{{000..099}}.tar")
    if missing := [str(location) for location in local if not location.exists()]:
        raise FileNotFoundError(f"no such tar: {', '.join(missing[:5])}")
    return streams


def _expand(pattern: str) -> list[str]:
    from braceexpand import braceexpand

    if "{" not in pattern or (not pattern.startswith(COMMAND) and make_path(pattern).exists()):
        return [pattern]
    # braceexpand removes backslashes, and expands what the shell expands itself.
    escaped = re.sub(r"\\(?![{},])", r"\\\\", pattern)
    escaped = re.sub(r"\$\{([^{}]*)\}", r"$\\{\1\\}", escaped)
    try:
        return list(braceexpand(escaped))
    except ValueError:
        raise ValueError(
            f"the braces in the name of a stream, {_describe(pattern, 0)}, do not match: write \\{{ and \\}} for those "
            "that are not a pattern"
        ) from None


def _make_source(name: str, index: int) -> StreamSource:
    shown = _describe(name, index)
    if is_opened_by_webdataset(name):
        return StreamSource(name=name, shown=shown)
    if name.startswith("file:"):
        name = url2pathname(urlsplit(name).path)
    location = parse_location(name)
    return StreamSource(name=name, shown=str(location), location=location)


def _describe(name: str, index: int) -> str:
    """Return a name without what may be secret."""
    if not name.startswith(COMMAND):
        return re.sub(r"//.*@", "//", re.split(r"[?#]", name)[0]) if find_url(name) else name
    try:
        words = shlex.split(name[len(COMMAND) :])
    except ValueError:  # Quotes that do not match: the shell will refuse it.
        words = []
    words = list(dropwhile(lambda word: "=" in word, words))  # Variables of the environment.
    tars = _TAR.findall(name)
    return " ".join([f"stream {index} ({COMMAND}{words[0] if words else ''}", "…", *tars[-1:]]) + ")"
