"""Failures: errors that are returned instead of a batch or a chunk, perhaps from another process."""

from __future__ import annotations

import copy
import pickle
import sys
import traceback
from dataclasses import dataclass

from shardio.errors import copy_mark


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a batch or a chunk, returned instead of it.

    Attributes:
        error: The error.
        traceback: The error's traceback in another process; empty if the error has its own.
    """

    error: BaseException
    traceback: str = ""

    def restore(self) -> BaseException:
        """Return the error, with its traceback in another process as the cause."""
        if self.traceback:  # Pickling drops the original one.
            self.error.__cause__ = RuntimeError(f"in a worker:\n{self.traceback}")
        return self.error

    def renewed(self) -> Failure:
        """Return the same failure with an error of its own, for one that is raised several times.

        An error's traceback holds every frame that it has passed, and so the loader that has raised it.
        """
        try:
            error = copy.copy(self.error)
        except Exception:  # Copying may fail in any way.
            error = _as_runtime_error(self.error)
        error.__cause__ = self.error.__cause__
        return Failure(error=error.with_traceback(self.error.__traceback__), traceback=self.traceback)


def describe_failure(error: BaseException) -> Failure:
    """Return a failure that can be sent to another process."""
    lines = traceback.format_exception(error)
    if sys.version_info < (3, 11):  # Python writes notes from then on.
        lines += [f"{note}\n" for note in getattr(error, "__notes__", [])]
    return Failure(error=_make_portable(error), traceback="".join(lines))


def _make_portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # Pickling may fail in any way. Send at least the message.
        return _as_runtime_error(error)
    return error


def _as_runtime_error(error: BaseException) -> BaseException:
    portable = RuntimeError(f"{type(error).__name__}: {error}")
    copy_mark(error, portable)
    return portable
