"""The cursor, which is all that is needed to go on, and the rules by which epochs follow each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in training: ``position`` samples of epoch ``epoch`` have been delivered by all ranks together."""

    epoch: int
    position: int = 0


class EpochCounter:
    """Decides which epoch comes next, and where in it to begin.

    The rules: each start is the next epoch, unless ``set_epoch`` names one. A loaded cursor is gone on with;
    ``set_epoch`` of the loaded epoch keeps its position, another epoch drops it. A loaded cursor at the end
    of its epoch starts the next one, unless ``set_epoch`` asks for the rest of the loaded one, which is empty.

    Attributes:
        next: Where the next start begins.
        num_changes: How often the user set an epoch or loaded a cursor.
    """

    def __init__(self) -> None:
        self.next = Cursor(epoch=0)
        self.num_changes = 0
        self._is_loaded = False
        self._is_set = False

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next start begins."""
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not (self._is_loaded and epoch == self.next.epoch):
            self.next = Cursor(epoch=epoch)
            self._is_loaded = False
        self._is_set = True
        self.num_changes += 1

    def load(self, cursor: Cursor) -> None:
        """Go on from ``cursor`` at the next start."""
        self.next = cursor
        self._is_loaded, self._is_set = True, False
        self.num_changes += 1

    def start(self, num_samples: int) -> Cursor:
        """Begin an epoch of ``num_samples`` samples; return where."""
        cursor = self.next
        if cursor.position >= num_samples and not self._is_set:
            cursor = Cursor(epoch=cursor.epoch + 1)
        self.next = Cursor(epoch=cursor.epoch + 1)
        self._is_loaded = self._is_set = False
        return cursor
