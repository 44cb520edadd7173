"""The option that sets how an object store is reached."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from shardio.storage import RemoteAccess, make_direct_access

StorageOptionTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="NAME=VALUE",
        help="A setting of the object store of a URL, such as endpoint=https://… or region=…; may be repeated. Keep "
        "credentials in the environment.",
    ),
]


def read_access(texts: list[str] | None) -> RemoteAccess:
    """Return the settings that options of the form NAME=VALUE describe.

    Raises:
        ValueError: If an option has another form, or a value is out of range.
    """
    options = dict[str, str | int | float]()
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"--storage-option must be NAME=VALUE, got {text!r}")
        options[name] = _read_value(value)
    try:
        return make_direct_access(options)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _read_value(text: str) -> str | int | float:
    """Return a number if its text is the same: other settings, such as ``007``, stay as they are."""
    for kind in (int, float):
        with suppress(ValueError):
            if str(kind(text)) == text:
                return kind(text)
    return text
