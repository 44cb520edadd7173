"""Errors in the place of a batch or a chunk, perhaps from another process."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Stands where a batch or a chunk should be.

    Attributes:
        error: Why it is not there.
        traceback: The error's traceback in another process; empty if the error carries its own.
    """

    error: BaseException
    traceback: str = ""

    def restore(self) -> BaseException:
        """Return the error, with its traceback in another process as the cause."""
        if self.traceback:  # Pickled errors lose their own.
            self.error.__cause__ = RuntimeError(f"in a worker:\n{self.traceback}")
        return self.error


def describe_failure(error: BaseException) -> Failure:
    """Return a failure that can be sent to another process."""
    return Failure(error=_make_portable(error), traceback="".join(traceback.format_exception(error)))


def _make_portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # A class may refuse in any way. Its message is still sent.
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
