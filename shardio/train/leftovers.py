"""What lies in a run's directory where its last checkpoint is missing: begun anew, the run would write over it."""

from __future__ import annotations

from pathlib import Path

from shardio.train.checkpoint import BEST, LAST, load_checkpoint
from shardio.train.config import TrainConfig
from shardio.train.logs import LOG, read_log


def explain_lost_checkpoint(directory: Path, config: TrainConfig) -> str | None:
    """Return why a new run must not start in a directory that has no last checkpoint; None if it may.

    A run that was killed before its first checkpoint leaves the log of the first epoch, and perhaps the best checkpoint
    of that epoch, which is saved before the last one. Started anew, it writes the same again. All else is of a run
    whose last checkpoint was removed.

    Raises:
        FormatError: If the best checkpoint cannot be read.
    """
    best, last_epoch = directory / BEST, max((line["epoch"] for line in read_log(directory / LOG)), default=None)
    if not best.exists():
        is_of_first_epoch, found = not last_epoch, f"a {LOG} of {last_epoch} epochs"
    else:
        is_of_first_epoch, found = last_epoch == 0 and _is_of_first_epoch(best, config), BEST
    if is_of_first_epoch:
        return None
    return (
        f"{directory} holds {found} of an earlier run, and no {LAST} to resume it from. Put {LAST} back, name another "
        f"directory, or start a new run over what is there with resume=False (--fresh)"
    )


def _is_of_first_epoch(best: Path, config: TrainConfig) -> bool:
    """Say whether a checkpoint can be one of the same run's first epoch."""
    state = load_checkpoint(best)
    return len(state["results"]) == 1 and not config.find_differing(state["config"])
