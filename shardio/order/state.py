"""The cursor, from which a run resumes, and the state that a run saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardio.epochs import MAX_EPOCH
from shardio.errors import StateError
from shardio.order.epoch_order import OrderSettings
from shardio.order.split import Split
from shardio.values import check_integer

STATE_VERSION = 2
"""The version of the order, and of the state's format. A state is valid only for the order in which it was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A point in training: all ranks together have delivered ``position`` samples of epoch ``epoch``."""

    epoch: int
    position: int = 0


@dataclass(slots=True, kw_only=True)
class Progress:
    """A rank's progress in an epoch.

    Attributes:
        cursor: The start of the epoch.
        split: The rank's share, beginning at the cursor.
        num_batches: The number of delivered batches.
        is_finished: Whether another batch was requested after the rank's last batch of the epoch.
    """

    cursor: Cursor
    split: Split
    num_batches: int = 0
    is_finished: bool = False

    @property
    def now(self) -> Cursor:
        """The cursor after every rank has received ``num_batches`` batches, or all of its batches."""
        # With `keep`, a rank may finish before the others. The epoch of that rank then ends when the rank requests
        # another batch.
        position = self.split.num_samples if self.is_finished else self.split.position_after(self.num_batches)
        return Cursor(epoch=self.cursor.epoch, position=position)

    @property
    def is_over(self) -> bool:
        """Whether this rank has no batches left in the epoch."""
        return self.is_finished or self.num_batches == self.split.num_batches


def check_epoch(epoch: int) -> int:
    """Check an epoch's number and return it as an int. numpy's integers are accepted.

    Raises:
        TypeError: If ``epoch`` is not an integer.
        ValueError: If ``epoch`` is negative or not below MAX_EPOCH.
    """
    return check_integer("epoch", epoch, at_least=0, below=MAX_EPOCH)


class EpochCounter:
    """The choice of the next epoch and its start, and the progress of the latest epoch.

    Each start begins the next epoch, unless ``set_epoch`` has set an epoch. A start after ``load`` resumes at the
    loaded cursor. After ``load``, setting the loaded epoch keeps the position; setting a different epoch discards it.
    If the loaded cursor is at the end of its epoch, the next epoch begins. If ``set_epoch`` has been called with the
    loaded epoch, that epoch resumes at its end instead, with no samples left.

    Attributes:
        next: The start of the next epoch.
        progress: The progress of the latest epoch; None before the first epoch and after ``load``.
    """

    def __init__(self) -> None:
        self.next = Cursor(epoch=0)
        self.progress: Progress | None = None
        self._is_loaded = False
        self._is_set = False

    @property
    def now(self) -> Cursor:
        """The current cursor, which a state saves.

        ``set_epoch`` does not end an epoch in progress, so the cursor stays in that epoch until it is over or the next
        epoch begins.
        """
        if self.progress is None or (self._is_set and self.progress.is_over):
            return self.next
        return self.progress.now

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        epoch = check_epoch(epoch)
        if not (self._is_loaded and epoch == self.next.epoch):
            self.next = Cursor(epoch=epoch)
            self._is_loaded = False
        self._is_set = True

    def load(self, cursor: Cursor) -> None:
        """Resume at ``cursor`` at the next start."""
        self.next = cursor
        self._is_loaded, self._is_set = True, False
        self.progress = None

    def find_start(self, num_samples: int) -> Cursor:
        """Return the start of the next epoch, given the number of samples in an epoch."""
        is_over = self.next.position >= num_samples and not self._is_set
        return Cursor(epoch=self.next.epoch + 1) if is_over else self.next

    def start(self, num_samples: int, *, repeats: bool = False) -> Cursor:
        """Begin an epoch and return its start. The caller sets ``progress``.

        Args:
            num_samples: The number of samples in a whole epoch.
            repeats: Whether the next start repeats this epoch, unless ``set_epoch`` sets a different epoch.
        """
        cursor = self.find_start(num_samples)
        self.next = Cursor(epoch=cursor.epoch if repeats else cursor.epoch + 1)
        self._is_loaded = self._is_set = False
        return cursor


def dump_state(cursor: Cursor, settings: OrderSettings, digest: str, num_samples: int) -> dict[str, Any]:
    """Return the state of a run that has reached ``cursor``, given the dataset's digest and number of samples."""
    return {
        "version": STATE_VERSION,
        "epoch": cursor.epoch,
        "position": cursor.position,
        "dataset": {"digest": digest, "samples": num_samples},
        "order": asdict(settings),
    }


def read_state(state: dict[str, Any], settings: OrderSettings, digest: str, num_samples: int) -> Cursor:
    """Check that a state belongs to this dataset and order, and return its cursor.

    Raises:
        StateError: If the state belongs to a different dataset or order; the message names the differences.
    """
    check_version(state)
    here = dump_state(Cursor(epoch=0), settings, digest, num_samples)
    if differences := find_differences(state, {part: here[part] for part in ("dataset", "order")}):
        raise StateError(
            f"the state belongs to a different dataset or order ({differences}): use the dataset and the "
            "settings that it was saved with, or start from the beginning without it"
        )
    return read_cursor(state, num_samples)


def check_version(state: Any) -> None:
    """Raise StateError if a state is not from this version of shardio."""
    if not isinstance(state, dict):
        raise StateError(f"a state must be a dict from state_dict(), got {type(state).__name__}")
    if "version" not in state:
        found = ", ".join(map(str, state)) or "(none)"
        raise StateError(f"this is not a shardio state: it has no key 'version'; its keys are: {found}")
    version = _read_integer(state, "version")
    if version != STATE_VERSION:
        raise StateError(
            f"the state has version {state['version']!r}, but this version of shardio reads version {STATE_VERSION}: "
            "resume with the version of shardio that saved the state"
        )


def read_cursor(state: dict[str, Any], num_samples: int) -> Cursor:
    """Return the cursor of a state.

    Raises:
        StateError: If the epoch or the position is not an integer or is out of range.
    """
    epoch, position = _read_integer(state, "epoch"), _read_integer(state, "position")
    if epoch is None or not 0 <= epoch < MAX_EPOCH:
        raise StateError(
            f"the state's epoch must be an integer, at least 0 and below 2**62, got {state.get('epoch')!r}"
        )
    if position is None or not 0 <= position <= num_samples:
        raise StateError(
            f"the state's position must be an integer from 0 to {num_samples}, got {state.get('position')!r}"
        )
    return Cursor(epoch=epoch, position=position)


def find_differences(saved: Any, here: Mapping[str, Any], prefix: str = "") -> str:
    """Return a description of how a state, or part of a state, differs from this run; "" if nothing differs."""
    found = list[str]()
    for name, value in here.items():
        there = saved.get(name) if isinstance(saved, Mapping) else None
        if isinstance(value, Mapping):
            found.append(find_differences(there, value, f"{name}."))
        elif there != value:
            found.append(f"{prefix}{name} is {there!r} in the state and {value!r} here")
    return "; ".join(filter(None, found))


def _read_integer(state: dict[str, Any], name: str) -> int | None:
    try:  # Some checkpoints turn integers into numpy integers.
        return check_integer(name, state.get(name))  # type: ignore[arg-type]  # The value may have any type.
    except TypeError:
        return None
