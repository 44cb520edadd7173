"""The errors of shardio, one class per way to recover.

::

    ShardioError
    ├── PackError           a pack cannot read its source or use its destination: change the directory or the options
    ├── FormatError         a manifest, index, tar, checkpoint or recording is invalid: create or download it again
    │   └── StaleIndexError     an index does not match its tar: download both, or pack again
    ├── LocationError       a URL or a storage option is invalid: correct it (also a ValueError)
    ├── StoreError          an object store keeps failing: check network and credentials, and resume (also an OSError)
    ├── SampleError         a sample cannot be read or decoded: repair or remove it
    ├── WorkerError         worker processes die: check memory, or the samples in the message (also a RuntimeError)
    ├── StateError          a saved state or a directory does not match this run: use those of this run
    ├── BusyError           another run is writing to the directory: wait for it, or choose another directory
    ├── NonFiniteLossError  the loss or a weight is NaN or infinite: start a new run with a lower learning rate
    ├── CoverageError       a loader repeated or lost samples (also an AssertionError, for tests): fix the loader
    └── IdentityError       samples cannot be identified: specify where their keys are (also a TypeError)

As in the standard library, arguments out of range raise ValueError, and arguments of the wrong type raise TypeError.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Literal

Stage = Literal["read", "decode", "transform"]
"""The stages in which a sample can fail."""

_MARK = "_shardio_sample"


class ShardioError(Exception):
    """The base class of shardio's errors."""


class PackError(ShardioError):
    """The source cannot be packed, or the destination cannot be used."""


class FormatError(ShardioError):
    """A file is invalid: a manifest, an index, a tar, a checkpoint or a coverage recording."""


class StaleIndexError(FormatError):
    """An index does not match its tar."""


class LocationError(ShardioError, ValueError):
    """A URL is not a valid location of data, or a store cannot be used with the given options."""


class StoreError(ShardioError, OSError):
    """An object store or a server keeps failing. The data is not the cause."""


class SampleError(ShardioError):
    """A sample cannot be read or decoded.

    Attributes:
        row: The sample's row among the samples that were requested together.
        key: The sample's key, or "" if unknown.
        where: The place where the sample is stored, or "" if unknown.
        stage: The stage that failed: ``read``, ``decode`` or, in your own code, ``transform``.
    """

    def __init__(self, message: str, *, row: int = 0, key: str = "", where: str = "", stage: Stage = "read") -> None:
        super().__init__(message)
        self.row, self.key, self.where = row, key, where
        self.stage: Stage = stage

    def at_row(self, row: int) -> SampleError:
        """Return the same error for another row."""
        return type(self)(str(self), row=row, key=self.key, where=self.where, stage=self.stage)


class WorkerError(ShardioError, RuntimeError):
    """Worker processes cannot start, or have died.

    Worker processes that decode shardio's datasets are restarted, and cause this error only if they cannot start, or
    die repeatedly on the same samples.
    """


class StateError(ShardioError):
    """A saved state, or the directory of a run, does not match this dataset, order or run."""


class BusyError(ShardioError):
    """Another training run is writing to the directory."""


class NonFiniteLossError(ShardioError):
    """The loss or a weight is NaN or infinite.

    Attributes:
        step: The step of the training run.
        keys: The keys of the batch's samples; None if unknown.
    """

    def __init__(self, message: str, *, step: int, keys: Sequence[str] | None = None) -> None:
        super().__init__(message)
        self.step, self.keys = step, keys


class CoverageError(ShardioError, AssertionError):
    """A loader repeated or lost samples, or delivered unexpected ones."""


class IdentityError(ShardioError, TypeError):
    """Samples cannot be identified: a batch holds no keys, or the given keys do not identify them."""


def add_note(error: BaseException, note: str) -> None:
    """Add a line to an error's traceback, like Python 3.11's ``add_note``. The error keeps its type and its text."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]


def find_user_level() -> int:
    """Return the ``stacklevel`` with which the caller's warning points to the user's code, not a library's.

    The command line is treated as the user's program.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_of_library(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_of_library(module: str) -> bool:
    return module.startswith(("shardio.", "torch.")) and not module.startswith("shardio.cli.")


def mark_sample(error: Exception, stage: Stage, row: int, key: str, where: str, during: str) -> None:
    """Mark an error of user code with the sample that it concerns. The error keeps its type and its text.

    Args:
        error: The error.
        stage: The stage that failed.
        row: The sample's row among those that were requested together.
        key: The sample's key.
        where: The place where the sample is stored.
        during: The step of the user's code, such as "while transforming sample".
    """
    add_note(error, f"{during} {key} in {where}")
    with suppress(Exception):  # Some classes, such as those with __slots__, reject the attribute.
        setattr(error, _MARK, {"stage": stage, "row": row, "key": key, "where": where})


def is_marked(error: Exception) -> bool:
    """Return whether an error is marked with a sample."""
    return hasattr(error, _MARK)


def move_mark(error: Exception, first_row: int) -> None:
    """Add ``first_row`` to the row of a marked error."""
    if (mark := getattr(error, _MARK, None)) is not None:
        mark["row"] += first_row


def place_mark(error: Exception, rows: Sequence[int]) -> None:
    """Replace a marked error's row, an index into ``rows`` (a part of a request), with its row in the whole request."""
    if (mark := getattr(error, _MARK, None)) is not None:
        mark["row"] = int(rows[mark["row"]])


def copy_mark(error: BaseException, other: BaseException) -> None:
    """Copy an error's mark, if it has one, to another error."""
    if (mark := getattr(error, _MARK, None)) is not None:
        setattr(other, _MARK, mark)


def as_sample_error(error: BaseException, stages: Collection[Stage]) -> SampleError | None:
    """Return a SampleError, or a marked error as a SampleError, if its stage is in ``stages``; otherwise, None."""
    if isinstance(error, MemoryError):
        return None  # The sample is not necessarily at fault.
    if not isinstance(error, SampleError):
        if (mark := getattr(error, _MARK, None)) is None:
            return None
        said = f"{type(error).__name__}: {error}"
        error, cause = SampleError(f"sample {mark['key']} in {mark['where']}: {said}", **mark), error
        error.__cause__ = cause
    return error if error.stage in stages else None
