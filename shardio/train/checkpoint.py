"""Checkpoints: all that a run needs to go on, in one file that is there whole or not at all."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardio.errors import FormatError
from shardio.storage import write_whole

FORMAT = 1
"""Raised when files of before cannot be read any more."""

LAST, BEST = "last.pt", "best.pt"


def save_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state: tensors, numbers, strings, and containers of them.

    Raises:
        OSError: If it cannot be written, for example because the disk is full; what was saved there before is kept.
    """
    path = Path(path)
    try:
        with write_whole(path) as file:
            _save({"format": FORMAT, **state}, file)
    except OSError as error:
        message = (
            f"{error.strerror}; what was saved there before is kept: make room, and run the same command to resume"
        )
        raise OSError(error.errno, message, str(path)) from error


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
            raise FormatError(f"{path} is no checkpoint, or was cut off: take another one, or begin anew")
    try:
        state: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise FormatError(f"{path} cannot be read as a checkpoint: {error}: take another one, or begin anew") from error
    if (found := state.get("format")) != FORMAT:
        raise FormatError(f"{path} has the format {found}, and {FORMAT} is understood: take another one, or begin anew")
    return state
