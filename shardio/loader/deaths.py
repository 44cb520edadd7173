"""Hosts that died, and what the user is told of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from shardio.errors import WorkerError

MAX_DEATHS = 3
"""How often a host may die while it makes the same chunk alone, and how many may fail to start in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A host died, and was replaced. All chunks that were submitted before and not answered must be submitted again.

    Attributes:
        cause: How, for people.
        at_work: The serials of the chunks that it was making.
        was_ready: Whether it had started.
        num_hosts: How many hosts died so, if several did together.
    """

    cause: str
    at_work: tuple[int, ...]
    was_ready: bool
    num_hosts: int = 1


def cannot_start(death: Death) -> WorkerError:
    """Return the error for hosts that die before they are ready, the last of them so."""
    return WorkerError(f"worker hosts cannot start; standard error says why. The last one: {death.cause}")


def blame(keys: Sequence[str], death: Death) -> WorkerError:
    """Return the error for samples over which too many hosts died, the last of them so."""
    return WorkerError(
        f"{MAX_DEATHS} worker hosts died while they made the same samples, the last one so: {death.cause}. "
        f"Memory may have run out (fewer workers or smaller images need less), or one of these samples crashes the "
        f"decoder: {', '.join(keys)}"
    )


def warn_of(death: Death) -> None:
    """Warn of a death that is survived."""
    said = f"{death.cause}; it was restarted; its unfinished batches are being redone"
    warnings.warn(said, RuntimeWarning, stacklevel=2)
