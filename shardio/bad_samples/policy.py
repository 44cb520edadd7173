"""The policy for unreadable samples, and the count of replaced and skipped ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from shardio.bad_samples.quarantine import append_entry
from shardio.errors import SampleError, Stage, as_sample_error
from shardio.order import derive_rng_key, make_rng_key, random_words
from shardio.shared_numbers import SharedCount
from shardio.world import find_worker

OnError = Literal["raise", "replace", "skip"]

MAX_REPLACEMENTS = 10
"""How many replacements are tried for one sample. If all of them are unreadable, the storage is probably at fault."""

MAX_NAMED = 8
"""How many samples an error about a whole batch names."""

Describe = Callable[[int], tuple[str, str]]
"""A function from a sample's index to its key and location."""


class BadSamples:
    """A policy for unreadable samples.

    Args:
        on_error: ``replace`` uses another sample instead. ``skip`` leaves the sample out, so its batch is smaller.
        quarantine: The file that logs replaced and skipped samples.
        num_samples: The number of samples in the dataset.
        stages: What may fail: other errors are raised.

    Attributes:
        on_error: As above.
    """

    def __init__(
        self, on_error: Literal["replace", "skip"], quarantine: Path, num_samples: int, stages: Collection[Stage]
    ) -> None:
        self.on_error = on_error
        self._stages = frozenset(stages)
        self._quarantine = quarantine
        self._num_samples = num_samples
        self._count = SharedCount(0)

    def find(self, error: BaseException) -> SampleError | None:
        """Return the error as that of a sample to replace or leave out; None if the error must be raised."""
        return as_sample_error(error, self._stages)

    def decide(
        self,
        error: SampleError,
        index: int,
        replacement_rng_key: np.uint64,
        num_tries: int,
        *,
        epoch: int | None,
        describe: Describe | None,
    ) -> int | None:
        """Return the index of the sample to read instead, or None to leave the sample out.

        Args:
            error: The error of the unreadable sample.
            index: The index of the unreadable sample.
            replacement_rng_key: Draws the replacement. Like the rng key of the transforms, it belongs to the row.
            num_tries: The number of replacements already tried for this row.
            epoch: The epoch, if known.
            describe: Returns a sample's key and location; None if the dataset cannot.

        Raises:
            SampleError: If too many replacements were tried, or there is no other sample.
            OSError: If the quarantine file cannot be written.
        """
        if self.on_error == "replace" and self._num_samples == 1:
            raise error
        if num_tries == MAX_REPLACEMENTS:
            raise SampleError(
                f"{error} (all {num_tries} attempts to replace the sample failed: check the files and the storage)",
            ) from error
        entry = {"key": error.key, "where": error.where, "error": str(error), "sample": index, "epoch": epoch}
        if self.on_error == "skip":
            append_entry(self._quarantine, {**entry, "action": "skipped"})
            return None
        replacement = self._draw(index, replacement_rng_key, num_tries)
        key = None if describe is None else describe(replacement)[0]
        replaced = {"action": "replaced", "replacement": replacement, "replacement_key": key}
        append_entry(self._quarantine, {**entry, **replaced})
        return replacement

    def begin_count(self, num_workers: int, *, are_new: bool) -> None:
        """Reset the count before an epoch of workers that are new or still running."""
        if are_new:
            self._count = SharedCount(num_workers)
        else:
            self._count.clear()

    def count_one(self) -> None:
        """Count one replaced or skipped sample in this worker."""
        self._count.add_one(find_worker().worker_id)

    def warn_of_counted(self, epoch: int | None) -> None:
        """Warn like :meth:`warn`, with the count of the workers."""
        self.warn(self._count.total, epoch)

    def warn(self, num_bad: int, epoch: int | None) -> None:
        """Warn of an epoch's bad samples, if there are any. Call this at the end of the epoch."""
        if num_bad:
            done = "replaced" if self.on_error == "replace" else "skipped"
            when = "" if epoch is None else f" in epoch {epoch}"
            said = f"unreadable samples {done}{when}: {num_bad}. {self._quarantine} lists them with their errors"
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _draw(self, index: int, replacement_rng_key: np.uint64, num_tries: int) -> int:
        """Return the index of another sample."""
        stream = derive_rng_key(np.array([replacement_rng_key], np.uint64), make_rng_key(0, "replace"))
        word = random_words(stream, np.array([num_tries], dtype=np.uint64))
        other = int(word[0] % np.uint64(self._num_samples))
        return (other + 1) % self._num_samples if other == index else other


def all_skipped(keys: Sequence[str]) -> SampleError:
    """Return the error for a batch whose samples were all skipped, from their keys."""
    named = ", ".join(keys[:MAX_NAMED]) + (f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else "")
    return SampleError(
        f"all samples of a batch were skipped ({named}), so the batch is empty: repair or remove these samples, or use "
        "on_error='replace'"
    )
