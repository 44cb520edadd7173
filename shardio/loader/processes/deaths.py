"""Worker processes that died, and the errors and warnings about them."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from shardio.errors import WorkerError

MAX_DEATHS = 3
"""The number of deaths over one chunk alone, or of failed starts in a row, that raises an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death and restart of worker processes. All unanswered chunks must be submitted again.

    Attributes:
        cause: How they died, for messages.
        in_flight: The ids of the chunks that they were making.
        was_ready: Whether one of them had started.
        num_processes: How many died at the same time.
    """

    cause: str
    in_flight: tuple[int, ...]
    was_ready: bool
    num_processes: int = 1


def describe_exit(process: str, code: int) -> str:
    """Return how a process ended, in the words of torch's DataLoader, by which programs know a dead worker.

    Args:
        process: Its name, such as ``DataLoader worker (pid 12)``.
        code: Its exit code; negative for a signal.
    """
    if code >= 0:
        return f"{process} exited unexpectedly with exit code {code}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}  # Real-time signals have none.
    return f"{process} is killed by signal: {signal.strsignal(-code)}{names.get(-code, '')}"


def startup_error(death: Death) -> WorkerError:
    """Return the error for worker processes that cannot start, given the latest death."""
    return WorkerError(f"worker processes cannot start ({death.cause}): standard error may show the reason")


def samples_error(keys: Sequence[str], death: Death) -> WorkerError:
    """Return the error for samples over which too many worker processes died, given the latest death."""
    return WorkerError(
        f"{MAX_DEATHS} worker processes died while processing the same samples. The last one: {death.cause}. "
        f"Memory may have run out (use fewer workers or smaller images), or one of these samples crashes the "
        f"decoder: {', '.join(keys)}"
    )


def warn_of(death: Death) -> None:
    """Warn of a death after which the epoch continues."""
    it, its = ("it was", "its") if death.num_processes == 1 else ("they were", "their")
    said = f"{death.cause}; {it} restarted; {its} unfinished batches are being redone"
    warnings.warn(said, RuntimeWarning, stacklevel=2)
