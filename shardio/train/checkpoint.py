"""Checkpoints: all that a run needs to go on, in one file that is there whole or not at all."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardio.errors import FormatError
from shardio.whole_writes import write_whole

FORMAT = 1
"""Raised when files of before cannot be read any more."""

LOAD_ERRORS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What torch's and zipfile's readers raise for a damaged file."""

PARTS: dict[str, type] = {
    "config": dict,
    "model": dict,
    "step": dict,
    "results": list,
    "is_within_epoch": bool,
    "times": dict,
    "ranks": list,
}
"""What a run's checkpoint holds, and of which types."""

LAST, BEST = "last.pt", "best.pt"


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state: tensors, numbers, strings, and containers of them.

    Raises:
        OSError: If it cannot be written, for example because the disk is full; what was saved there before is kept.
    """
    path = Path(path)
    try:
        with write_whole(path) as file, _checksums():
            _save({"format": FORMAT, **state}, file)
    except OSError as error:
        what = error.strerror or error
        message = f"{what}; what was saved there before is kept: make room, and run the same command to resume"
        raise OSError(error.errno, message, str(path)) from error


@contextmanager
def _checksums() -> Iterator[None]:
    """Make torch write checksums, which are compared at loading, even where they were turned off."""
    are_written = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(are_written)


def _save(state: dict[str, Any], file: BinaryIO) -> None:
    """Save a state; raise what the system said, which torch replaces by a failed check of its own."""
    failure: OSError | None = None
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if not isinstance(error.__context__, OSError):
            raise
        failure = error.__context__
    if failure is not None:
        raise failure


def load_checkpoint(path: str | os.PathLike[str], map_location: str | torch.device | None = "cpu") -> dict[str, Any]:
    """Return what :func:`save_checkpoint` wrote. Nothing in the file is run as code.

    ``load_checkpoint("run/best.pt")["model"]`` is the model's ``state_dict``, without wrappers of ranks and compilers.

    Args:
        path: The file.
        map_location: The device to which its tensors come.

    Raises:
        FormatError: If it is not a checkpoint of this version.
    """
    with Path(path).open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise FormatError(f"{path} is not a checkpoint, or is truncated: use another one or start a new run")
    try:
        _check_content(path)
        state: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}, not a dict")
    except LOAD_ERRORS as error:
        raise FormatError(
            f"{path} cannot be read as a checkpoint: {error}: use another one or start a new run"
        ) from error
    found = state.get("format")
    if type(found) is not int or found != FORMAT:
        raise FormatError(
            f"{path} has the format {found}, and this shardio reads format {FORMAT}: use another one or start a new run"
        )
    return state


def _check_content(path: str | os.PathLike[str]) -> None:
    """Compare all bytes with the file's checksums, which torch writes and does not look at: a weight may be damaged."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"{name} in it is damaged")


def check_parts(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Raise FormatError if a run's state lacks a part, or one is of another type."""
    for name, kind in PARTS.items():
        if not isinstance(state.get(name), kind):
            raise FormatError(
                f"{path} is not a checkpoint of a training run, or is damaged: its {name!r} is of type "
                f"{type(state.get(name)).__name__}, expected {kind.__name__}: use another one or start a new run"
            )
