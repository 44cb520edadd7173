"""The cursor, which is all that is needed to go on, and the rules by which epochs follow each other."""

from __future__ import annotations

from dataclasses import dataclass

from shardio.order.split import Split
from shardio.values import check_integer

MAX_EPOCH = 2**62
"""Epochs have numbers below this, so that those that follow one fit 64 bits, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in training: ``position`` samples of epoch ``epoch`` have been delivered by all ranks together."""

    epoch: int
    position: int = 0


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a rank has come in an epoch.

    Attributes:
        cursor: Where it began.
        split: The rank's share from there on.
        num_batches: How many of its batches were delivered.
        is_finished: Whether it asked for another batch and there was none.
    """

    cursor: Cursor
    split: Split
    num_batches: int = 0
    is_finished: bool = False

    @property
    def now(self) -> Cursor:
        """Where all ranks are, once each has had as many batches, or all that it has."""
        # With `keep` a rank may be through before the others: then the epoch is over for it when it asked for more.
        position = self.split.num_samples if self.is_finished else self.split.position_after(self.num_batches)
        return Cursor(epoch=self.cursor.epoch, position=position)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left of it for this rank."""
        return self.is_finished or self.num_batches == self.split.num_batches


def check_epoch(epoch: int) -> int:
    """Return an epoch's number; integers of numpy's are taken, too.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is negative, or not below MAX_EPOCH.
    """
    return check_integer("epoch", epoch, at_least=0, below=MAX_EPOCH)


class EpochCounter:
    """Decides which epoch comes next, and where in it to begin; and knows where the last one has come to.

    The rules: each start is the next epoch, unless ``set_epoch`` names one. A loaded cursor is gone on with;
    ``set_epoch`` of the loaded epoch keeps its position, another epoch drops it. A loaded cursor at the end
    of its epoch starts the next one, unless ``set_epoch`` asks for the rest of the loaded one, which is empty.

    Attributes:
        next: Where the next start begins.
        progress: The epoch that was started last; None before the first, and once a cursor was loaded.
    """

    def __init__(self) -> None:
        self.next = Cursor(epoch=0)
        self.progress: Progress | None = None
        self._is_loaded = False
        self._is_set = False

    @property
    def now(self) -> Cursor:
        """Where training is: what a state holds.

        An epoch that is under way goes on when ``set_epoch`` names the next one, so until that is started, or the
        running one is over, the state is the running one's.
        """
        if self.progress is None or (self._is_set and self.progress.is_over):
            return self.next
        return self.progress.now

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next start begins."""
        epoch = check_epoch(epoch)
        if not (self._is_loaded and epoch == self.next.epoch):
            self.next = Cursor(epoch=epoch)
            self._is_loaded = False
        self._is_set = True

    def load(self, cursor: Cursor) -> None:
        """Go on from ``cursor`` at the next start."""
        self.next = cursor
        self._is_loaded, self._is_set = True, False
        self.progress = None

    def find_start(self, num_samples: int) -> Cursor:
        """Return where the next start begins, in an epoch of ``num_samples`` samples."""
        is_over = self.next.position >= num_samples and not self._is_set
        return Cursor(epoch=self.next.epoch + 1) if is_over else self.next

    def start(self, num_samples: int, *, repeats: bool = False) -> Cursor:
        """Begin an epoch of ``num_samples`` samples; return where. The caller sets ``progress``.

        Args:
            num_samples: Of the whole epoch.
            repeats: Whether the start after this one is the same epoch again, unless ``set_epoch`` names one.
        """
        cursor = self.find_start(num_samples)
        self.next = Cursor(epoch=cursor.epoch if repeats else cursor.epoch + 1)
        self._is_loaded = self._is_set = False
        return cursor
