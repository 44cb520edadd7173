"""Write to standard output and error. Any file name is accepted, and control characters are escaped."""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import sys
import warnings
from pathlib import Path

import typer

from shardio.images import ignore_pillows_warnings

# C0, DEL and C1, and characters that change the direction of text (Unicode, UAX #9).
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_PACKAGE = Path(__file__).parents[1]

_format_warning = warnings.formatwarning


def printable(text: object, *, keep: str = "") -> str:
    r"""Return text with control characters escaped, except for those in ``keep``.

    Names of files, classes and keys may contain control characters. On a terminal, these could clear the screen, hide
    text, or type input.

    >>> printable("cats\x1b[2J")
    'cats\\x1b[2J'
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def echo(text: str, *, err: bool = False) -> None:
    """Write lines to standard output, or to standard error."""
    typer.echo(printable(text, keep="\n\t"), err=err)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def prepare_streams() -> None:
    """Prepare standard output and error for all names and control characters. Call this before a command runs."""
    _open_closed_streams()
    _take_any_name()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
    warnings.formatwarning = _format_printable_warning
    ignore_pillows_warnings()


def _open_closed_streams() -> None:
    """Open the null device in place of closed standard streams, such as after ``2>&-``.

    Otherwise, a file opened later would get the descriptor of a closed stream, and output to that stream would go to
    the file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # For the whole process.


def _take_any_name() -> None:
    """Make standard output and error accept every name. UTF-8 replaces ASCII; undecodable bytes stay as they are."""
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):
            if codecs.lookup(stream.encoding).name in ("ascii", "utf-8"):
                stream.reconfigure(encoding="utf-8", errors="surrogateescape")
            else:
                stream.reconfigure(errors="backslashreplace")


def _format_printable_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return the text of a warning. It shows a line of source code unless the code is shardio's."""
    if Path(filename).is_relative_to(_PACKAGE):
        text = f"warning: {message}\n"
    else:
        text = _format_warning(message, category, filename, lineno, line)
    return printable(text, keep="\n\t")
