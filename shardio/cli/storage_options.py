"""The options that set how remote data is reached and cached."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from shardio.cli.sizes import parse_size_option
from shardio.cli.terminal import printable
from shardio.storage import RemoteAccess, StorageOptions, make_access, make_direct_access

StorageOptionTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="NAME=VALUE",
        help="A setting of the object store of a URL, such as endpoint=https://… or region=…; may be repeated. Keep "
        "credentials in the environment.",
    ),
]

CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Local folder for what is fetched from a URL, which other processes and later runs share. By default, it "
        "is a private one, which is removed at the end.",
    ),
]

CacheSize = Annotated[
    int | None,
    typer.Option(
        "--cache-size",
        parser=parse_size_option,
        metavar="SIZE",
        help="Maximum size of the cache, such as 200GB (default: a fifth of the free space).",
    ),
]

CacheShared = Annotated[
    bool,
    typer.Option(
        "--cache-shared",
        help="Other users share the folder of --cache: believe what they put there.",
    ),
]


class RemoteArguments(TypedDict):
    """The arguments of a dataset that say how it is reached and cached if its source is a URL."""

    storage_options: StorageOptions
    cache: Path | None
    cache_size: int | None
    cache_shared: bool


def read_options(texts: list[str] | None) -> StorageOptions:
    """Return the settings that options of the form NAME=VALUE describe, as for ``storage_options=``.

    Raises:
        typer.BadParameter: If an option has another form, or a value is out of range.
    """
    options = dict[str, str | int | float]()
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            shown = name + equals + ("…" if value else "")  # The value may be a credential.
            raise _wrong(f"must be NAME=VALUE, got {shown!r}")
        options[name] = _read_value(value)
    try:
        make_direct_access(options)
    except (TypeError, ValueError) as error:
        raise _wrong(str(error)) from error
    return options


def read_access(texts: list[str] | None) -> RemoteAccess:
    """Return how the stores of a command's URLs are reached, without a cache.

    Raises:
        typer.BadParameter: As :func:`read_options` does.
    """
    return make_direct_access(read_options(texts))


def read_remote_arguments(
    texts: list[str] | None, cache: Path | None, cache_size: int | None, cache_shared: bool
) -> RemoteArguments:
    """Return a dataset's arguments from the four options of a command.

    Raises:
        typer.BadParameter: If a value is wrong.
    """
    options = read_options(texts)
    try:
        make_access(options, cache, cache_size, cache_shared)
    except ValueError as error:
        raise typer.BadParameter(printable(error), param_hint="--cache") from error
    return RemoteArguments(storage_options=options, cache=cache, cache_size=cache_size, cache_shared=cache_shared)


def _wrong(message: str) -> typer.BadParameter:
    return typer.BadParameter(printable(message), param_hint="--storage-option")


def _read_value(text: str) -> str | int | float:
    """Return a number if its text is the same: other settings, such as ``007``, stay as they are."""
    for kind in (int, float):
        with suppress(ValueError):
            if str(kind(text)) == text:
                return kind(text)
    return text
