"""Checkpoints: everything that a run needs to resume, in one file that is written atomically."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardio.errors import FormatError
from shardio.whole_writes import write_whole

FORMAT = 1
"""The version of the format. It increases when older files can no longer be read."""

PARTS: dict[str, type] = {
    "config": dict,
    "model": dict,
    "step": dict,
    "results": list,
    "is_within_epoch": bool,
    "times": dict,
    "ranks": list,
}
"""The parts of a run's checkpoint, and their types."""

LAST, BEST = "last.pt", "best.pt"


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state to a file. It may contain tensors, numbers, strings, and containers of these.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full. The previous
            file is kept.
    """
    path = Path(path)
    try:
        with write_whole(path) as file, _checksums():
            _save({"format": FORMAT, **state}, file)
    except OSError as error:
        what = error.strerror or error
        remedy = "fix the cause (if the disk is full, free some space) and rerun the same command to resume"
        raise OSError(error.errno, f"{what}. Any previous checkpoint is kept: {remedy}", str(path)) from error


@contextmanager
def _checksums() -> Iterator[None]:
    """Make torch write checksums, which loading verifies, even if the user turned them off."""
    are_written = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(are_written)


def _save(state: dict[str, Any], file: BinaryIO) -> None:
    """Save a state. Raise the operating system's error, which torch hides in a RuntimeError."""
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
    """Load the state that :func:`save_checkpoint` wrote. No code in the file is executed.

    ``load_checkpoint("run/best.pt")["model"]`` is the ``state_dict`` of the model without its
    wrappers.

    Args:
        path: The file.
        map_location: The device to load tensors to.

    Raises:
        FormatError: If the file is not a checkpoint, is damaged, or has another format.
    """
    with Path(path).open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise FormatError(f"{path} is not a checkpoint, or is truncated: use another one or start a new run")
    try:
        _check_content(path)
        state: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it contains an object of type {type(state).__name__}, not a dict")
    except MemoryError:
        raise
    except Exception as error:  # A damaged file may raise errors of nearly every type.
        raise FormatError(
            f"{path} cannot be read as a checkpoint ({error}): use another one or start a new run"
        ) from error
    if "format" not in state:
        raise FormatError(
            f"{path} has no 'format', so it was not written by save_checkpoint: use another one or start a new run"
        )
    found = state["format"]
    if type(found) is not int or found != FORMAT:
        raise FormatError(
            f"{path} has format {found}, but this version of shardio reads format {FORMAT}: use another one or "
            "start a new run"
        )
    return state


def _check_content(path: str | os.PathLike[str]) -> None:
    """Verify the file's checksums, which torch writes but does not verify."""
    with zipfile.ZipFile(path) as archive:
        if (name := archive.testzip()) is not None:
            raise ValueError(f"the part {name} is damaged")


def check_parts(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Raise FormatError if a run's state lacks a part or a part has the wrong type."""
    for name, kind in PARTS.items():
        if not isinstance(state.get(name), kind):
            raise FormatError(
                f"{path} is not a checkpoint of a training run, or is damaged ({name!r} must be a {kind.__name__}, got "
                f"{type(state.get(name)).__name__}): use another one or start a new run"
            )
