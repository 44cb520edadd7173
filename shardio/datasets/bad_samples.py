"""What becomes of samples that cannot be read: an error, another sample in their place, or a smaller batch."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.shared_cell import SharedCount
from shardio.errors import SampleError
from shardio.interruptions import let_through
from shardio.order import Words, derive_rng_key, make_rng_key, random_words
from shardio.world import find_worker

OnError = Literal["raise", "replace", "skip"]

MAX_REPLACEMENTS = 10
"""How many samples are tried in the place of one; that many unreadable ones in a row are no accident."""


MAX_NAMED = 8
"""How many samples an error about a whole batch names."""

Describe = Callable[[int], tuple[str, str]]
"""Returns a sample's key and where it lies, from its number."""

Read = Callable[[NDArray[np.int64], Words], Sequence[Any]]
"""Reads n samples, from their numbers and keys."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Stands in a list of samples where one was left out."""

    key: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Stands in a list of samples where one cannot be made, so that those beside it can."""

    error: Exception


def check_quarantine(quarantine: str | os.PathLike[str]) -> Path:
    """Return the whole path of a quarantine file, if it can be written. It is not made before there is a bad sample.

    Raises:
        TypeError: If it is no path.
        ValueError: If no such file can be written.
    """
    try:
        path = Path(quarantine).absolute()
    except TypeError:
        raise TypeError(f"quarantine must be the path of a file, got {quarantine!r}") from None
    if path.is_dir():
        why = "that is a directory"
    elif not path.parent.is_dir():
        why = f"there is no directory {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "this process may not write there"
    else:
        return path
    raise ValueError(
        f"quarantine={str(quarantine)!r} cannot be written: {why}. Replaced and skipped samples are logged "
        "there: name a file in an existing directory"
    )


def all_skipped(keys: Sequence[str]) -> SampleError:
    """Return the error for a batch of which no sample is left, from the keys that it had."""
    named = ", ".join(keys[:MAX_NAMED]) + (f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else "")
    return SampleError(
        f"all samples of a batch were skipped: there is nothing to deliver. They are {named}. "
        "Repair or remove them, or put others in their place by on_error='replace'"
    )


class BadSamples:
    """Decides on samples that cannot be read.

    Args:
        on_error: ``replace`` takes another sample, a function of the seed, the epoch
            and the sample. ``skip`` leaves the sample out, so that its batch is smaller.
        quarantine: Where samples that are replaced or skipped are written down, a JSON object a line.
        num_samples: How many samples the dataset has.
    """

    def __init__(self, on_error: Literal["replace", "skip"], quarantine: Path, num_samples: int) -> None:
        self._on_error = on_error
        self._quarantine = quarantine
        self._num_samples = num_samples
        self._count = SharedCount(0)

    def decide(
        self,
        error: SampleError,
        number: int,
        replacement_rng_key: np.uint64,
        num_tries: int,
        *,
        epoch: int | None,
        describe: Describe | None,
    ) -> int | None:
        """Return the number of the sample to read instead, or None if there is to be none.

        Args:
            error: What is wrong.
            number: The number of the sample that cannot be read.
            replacement_rng_key: By which another is drawn. Like the rng key of the transforms, it stays with the row.
            num_tries: How often something was put there before.
            epoch: The epoch, where it is known.
            describe: Names the dataset's samples, where it can.

        Raises:
            SampleError: If something was put there too often, or there is no other sample.
            OSError: If the quarantine file cannot be written.
        """
        if self._on_error == "replace" and self._num_samples == 1:
            raise error
        if num_tries == MAX_REPLACEMENTS:
            raise SampleError(
                f"{error} (the {num_tries} samples tried before it could not be read either: is the storage "
                "reachable?)",
            ) from error
        entry = {"key": error.key, "where": error.where, "error": str(error), "sample": number, "epoch": epoch}
        if self._on_error == "skip":
            self._write_down({**entry, "action": "skipped"})
            return None
        stream = derive_rng_key(np.array([replacement_rng_key], np.uint64), make_rng_key(0, "replace"))
        word = random_words(stream, np.array([num_tries], dtype=np.uint64))
        other = int(word[0] % np.uint64(self._num_samples))
        if other == number:
            other = (other + 1) % self._num_samples
        others_key = None if describe is None else describe(other)[0]
        self._write_down({**entry, "action": "replaced", "replacement": other, "replacement_key": others_key})
        return other

    def begin_count(self, num_workers: int, *, are_new: bool) -> None:
        """Count from 0, in workers of torch's that are to be started, or run already."""
        if are_new:
            self._count = SharedCount(num_workers)
        else:
            self._count.clear()

    def count_one(self) -> None:
        """Count a decision, in the worker that this is."""
        self._count.add_one(find_worker().worker_id)

    def warn_of_counted(self, epoch: int | None) -> None:
        """Warn as :meth:`warn`, of what torch's workers counted."""
        self.warn(self._count.total, epoch)

    def warn(self, num_bad: int, epoch: int | None) -> None:
        """Warn of an epoch's bad samples, if there are any. At the epoch's end: then it is known how many they are."""
        if num_bad:
            which = "samples" if epoch is None else f"samples of epoch {epoch}"
            done = "replaced by others" if self._on_error == "replace" else "skipped"
            said = f"{which} that cannot be read and were {done}: {num_bad}. {self._quarantine} says what is wrong"
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _write_down(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False).encode(errors="surrogateescape") + b"\n"
        try:
            # One short write to a file that is open for appending: lines of several processes do not mix.
            with self._quarantine.open("ab", buffering=0) as file:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            let_through(error)
            what = f"sample {entry['key'] or entry['sample']} is bad, and the quarantine file cannot be written"
            raise OSError(error.errno, f"{what}: {error.strerror or error}", str(self._quarantine)) from error


def read_with(
    bad_samples: BadSamples | None,
    read: Read,
    numbers: NDArray[np.int64],
    rng_keys: Words,
    replacement_rng_keys: Words,
    *,
    epoch: int | None,
    describe: Describe | None,
    keeps_broken: bool = False,
) -> list[Any]:
    """Read samples; decide on those that cannot be.

    Args:
        bad_samples: Decides; None for an error.
        read: Reads n samples by numbers and keys.
        numbers: int64 [n].
        rng_keys: uint64 [n].
        replacement_rng_keys: uint64 [n], by which others are drawn for those that cannot be read.
        epoch: The epoch, where it is known.
        describe: Names samples, where that is possible.
        keeps_broken: Whether errors are returned as Broken in their samples' places, and not raised.

    Returns:
        n samples, or Skipped where one was left out.

    Raises:
        Exception: If a sample cannot be read, and nothing else is to happen then.
    """
    if keeps_broken:
        read = _apart(read)
    kept, numbers, num_tries = np.arange(len(numbers)), numbers.copy(), Counter[int]()
    samples: list[Any] = [None] * len(numbers)
    while True:
        try:
            values = read(numbers[kept], rng_keys[kept]) if len(kept) else []
            break
        except SampleError as error:
            row = int(kept[error.row])
            number, tries = int(numbers[row]), num_tries[row]
            try:
                if bad_samples is None:
                    raise
                other = bad_samples.decide(
                    error, number, replacement_rng_keys[row], tries, epoch=epoch, describe=describe
                )
            except SampleError as final:
                if not keeps_broken:
                    raise
                samples[row] = Broken(final)
                kept = np.delete(kept, error.row)
                continue
            bad_samples.count_one()
            num_tries[row] += 1
            if other is None:
                samples[row] = Skipped(error.key or str(number))
                kept = np.delete(kept, error.row)
            else:
                numbers[row] = other
    for row, value in zip(kept.tolist(), values, strict=True):
        samples[row] = value
    return samples


def _apart(read: Read) -> Read:
    """Return the same function, but Broken stands where a sample fails and the error does not say which it is."""

    def read_apart(numbers: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        try:
            return list(read(numbers, rng_keys))
        except SampleError:
            raise
        except Exception as error:
            let_through(error)
            if len(numbers) == 1:
                return [Broken(error)]
        middle = len(numbers) // 2
        first = read_apart(numbers[:middle], rng_keys[:middle])
        try:
            return [*first, *read_apart(numbers[middle:], rng_keys[middle:])]
        except SampleError as error:
            raise error.at_row(middle + error.row) from error

    return read_apart
