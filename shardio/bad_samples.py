"""Unreadable samples: the user's policy, the quarantine file and the replacements."""

from __future__ import annotations

import errno
import json
import os
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SampleError, Stage, as_sample_error, is_marked, mark_sample, move_mark
from shardio.order import Words, derive_rng_key, make_rng_key, random_words
from shardio.process import let_through
from shardio.shared import SharedNumbers
from shardio.world import find_worker

OnError = Literal["raise", "replace", "skip"]

MAX_REPLACEMENTS = 10
"""The maximum number of replacements tried for one sample. If all replacements are unreadable, the storage is
probably at fault."""

MAX_NAMED = 8
"""The number of samples that an error about a whole batch names."""

Describe = Callable[[int], tuple[str, str]]
"""A function that returns a sample's key and location, given the sample's index."""

Read = Callable[[NDArray[np.int64], Words], Sequence[Any]]
"""A function that reads n samples, given their indices and rng keys."""


def check_quarantine(quarantine: str | os.PathLike[str]) -> Path:
    """Check that a quarantine file can be written, and return its absolute path.

    The file is not created until a bad sample is logged.

    Raises:
        TypeError: If the argument is not a path.
        ValueError: If the file cannot be written.
    """
    try:
        path = Path(quarantine).absolute()
    except TypeError:
        raise TypeError(f"quarantine must be a file path, got {quarantine!r}") from None
    if path.is_dir():
        why = "it is a directory"
    elif not path.parent.is_dir():
        why = f"the directory {path.parent} does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission denied"
    else:
        return path
    raise ValueError(
        f"quarantine={str(quarantine)!r} cannot be written: {why}. Replaced and skipped samples are logged "
        "in this file: choose a writable file in an existing directory"
    )


def append_entry(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to the quarantine file.

    Raises:
        OSError: If the file cannot be written.
    """
    line = json.dumps(entry, ensure_ascii=False).encode(errors="surrogateescape") + b"\n"
    try:
        # A single short write in append mode is not interleaved with the lines of other processes.
        with path.open("ab", buffering=0) as file:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        let_through(error)
        what = f"sample {entry['key'] or entry['sample']} cannot be read, and the quarantine file cannot be written"
        raise OSError(error.errno, f"{what}: {error.strerror or error}", str(path)) from error


class BadSamples:
    """A policy for unreadable samples.

    Args:
        on_error: ``replace`` uses another sample instead. ``skip`` leaves the sample out, so its batch is smaller.
        quarantine: The file that logs replaced and skipped samples.
        num_samples: The number of samples in the dataset.
        stages: The stages whose errors the policy handles. Other errors are raised.
        starts: int64 [parts], the index of the first sample of each part of the dataset. A sample is replaced by one
            from the same part. By default, there is one part.

    Attributes:
        on_error: ``replace`` or ``skip``.
    """

    def __init__(
        self,
        on_error: Literal["replace", "skip"],
        quarantine: Path,
        num_samples: int,
        stages: Collection[Stage],
        starts: NDArray[np.int64] | None = None,
    ) -> None:
        self.on_error = on_error
        self._stages = frozenset(stages)
        self._quarantine = quarantine
        self._num_samples = num_samples
        self._bounds = [0, num_samples] if starts is None else [*starts.tolist(), num_samples]
        self._count = SharedNumbers([0])  # One count per worker, because increments are not atomic.

    def find(self, error: BaseException) -> SampleError | None:
        """Return the error of the sample that must be replaced or left out; None if the error must be raised."""
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
            replacement_rng_key: The rng key with which the replacement is drawn. Like the rng key of the
                transforms, this key is the same for all samples that are tried for the row.
            num_tries: The number of replacements already tried for this row.
            epoch: The epoch, if known.
            describe: A function that returns a sample's key and location; None if the dataset cannot describe samples.

        Raises:
            SampleError: If too many replacements have been tried, or there is no other sample.
            OSError: If the quarantine file cannot be written.
        """
        first, num_samples = self._find_part(index)
        if self.on_error == "replace" and num_samples == 1:
            raise error
        if num_tries == MAX_REPLACEMENTS:
            raise SampleError(
                f"{error} (all {num_tries} attempts to replace the sample failed: check the files and the storage)"
            ) from error
        entry = {"key": error.key, "where": error.where, "error": str(error), "sample": index, "epoch": epoch}
        if self.on_error == "skip":
            append_entry(self._quarantine, {**entry, "action": "skipped"})
            return None
        replacement = first + self._draw(index % self._num_samples - first, num_samples, replacement_rng_key, num_tries)
        key = None if describe is None else describe(replacement)[0]
        replaced = {"action": "replaced", "replacement": replacement, "replacement_key": key}
        append_entry(self._quarantine, {**entry, **replaced})
        return replacement

    def begin_count(self, num_workers: int, *, are_new: bool) -> None:
        """Reset the count before an epoch.

        Args:
            num_workers: The number of workers.
            are_new: Whether the workers are new. Workers of the previous epoch keep using the existing count.
        """
        if are_new:
            self._count = SharedNumbers([0] * max(num_workers, 1))
        else:
            self._count.array[:] = 0

    def count_one(self) -> None:
        """Count one replaced or skipped sample in this worker."""
        self._count.array[find_worker().worker_id % len(self._count.array)] += 1

    @property
    def num_counted(self) -> int:
        """The sum of all workers' counts."""
        return sum(self._count.values)

    def warn_of_counted(self, epoch: int | None) -> None:
        """Call :meth:`warn` with the sum of all workers' counts."""
        self.warn(self.num_counted, epoch)

    def warn(self, num_bad: int, epoch: int | None) -> None:
        """Warn about an epoch's bad samples, if there are any. Call this at the end of the epoch."""
        if num_bad:
            done = "replaced" if self.on_error == "replace" else "skipped"
            when = "" if epoch is None else f" in epoch {epoch}"
            said = f"unreadable samples {done}{when}: {num_bad}. {self._quarantine} lists them with their errors"
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _find_part(self, index: int) -> tuple[int, int]:
        # The first sample of the part, and the number of its samples. A mixture's indices also encode the source epoch.
        part = bisect_right(self._bounds, index % self._num_samples)
        return self._bounds[part - 1], self._bounds[part] - self._bounds[part - 1]

    def _draw(self, index: int, num_samples: int, replacement_rng_key: np.uint64, num_tries: int) -> int:
        stream = derive_rng_key(np.array([replacement_rng_key], np.uint64), make_rng_key(0, "replace"))
        word = random_words(stream, np.array([num_tries], dtype=np.uint64))
        other = int(word[0] % np.uint64(num_samples))
        return (other + 1) % num_samples if other == index else other


def all_skipped(keys: Sequence[str]) -> SampleError:
    """Return the error for a batch whose samples, with these keys, were all skipped."""
    named = ", ".join(keys[:MAX_NAMED]) + (f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else "")
    return SampleError(
        f"all samples of a batch were skipped ({named}), so the batch is empty: repair or remove these samples, or use "
        "on_error='replace'"
    )


@dataclass(frozen=True, slots=True)
class Skipped:
    """A placeholder for a sample that was left out."""

    key: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A placeholder for a sample that cannot be made. The other samples are still delivered."""

    error: Exception


def read_around(
    bad_samples: BadSamples | None,
    read: Read,
    indices: NDArray[np.int64],
    rng_keys: Words,
    replacement_rng_keys: Words,
    *,
    epoch: int | None,
    describe: Describe | None,
    keeps_broken: bool = False,
) -> list[Any]:
    """Read samples, and replace or skip unreadable samples.

    Args:
        bad_samples: The policy for unreadable samples; None raises their errors.
        read: A function that reads n samples, given their indices and rng keys.
        indices: int64 [n].
        rng_keys: uint64 [n].
        replacement_rng_keys: uint64 [n], the rng keys with which replacements are drawn.
        epoch: The epoch, if known.
        describe: A function that returns a sample's key and location; None if the dataset cannot describe samples.
        keeps_broken: Whether to return errors as Broken in their samples' rows instead of raising them.

    Returns:
        n samples, with Skipped in the rows of samples that were left out.

    Raises:
        Exception: If a sample cannot be read, and neither the policy nor ``keeps_broken`` covers the error.
    """
    read = _guard(read, bad_samples, keeps_broken=keeps_broken)
    rows, indices, num_tries = np.arange(len(indices)), indices.copy(), Counter[int]()
    samples: list[Any] = [None] * len(indices)
    while True:
        try:
            values = read(indices[rows], rng_keys[rows]) if len(rows) else []
            break
        except SampleError as error:
            row = int(rows[error.row])
            index, tries = int(indices[row]), num_tries[row]
            try:
                if bad_samples is None or bad_samples.find(error) is None:
                    raise
                other = bad_samples.decide(
                    error, index, replacement_rng_keys[row], tries, epoch=epoch, describe=describe
                )
            except SampleError as final:
                if not keeps_broken:
                    raise
                samples[row] = Broken(final)
                rows = np.delete(rows, error.row)
                continue
            bad_samples.count_one()
            num_tries[row] += 1
            if other is None:
                samples[row] = Skipped(error.key or str(index))
                rows = np.delete(rows, error.row)
            else:
                indices[row] = other
    for row, value in zip(rows.tolist(), values, strict=True):
        samples[row] = value
    return samples


def read_samples(dataset: Any, indices: NDArray[np.int64]) -> list[Any]:
    """Return samples of any map-style dataset.

    Args:
        dataset: The dataset.
        indices: int64 [n].

    Raises:
        Exception: The dataset's error. A SampleError names the failed sample, and any other error is marked with the
            sample.
    """
    read_several = getattr(dataset, "__getitems__", None)
    if callable(read_several):
        try:
            return list(read_several(indices.tolist()))
        except Exception as error:
            let_through(error)
            # The error does not say which sample failed: read the samples one by one.
    samples = list[Any]()
    for row, index in enumerate(indices.tolist()):
        try:
            samples.append(read_several([index])[0] if callable(read_several) else dataset[index])
        except SampleError as error:  # noqa: PERF203  # Each sample may fail.
            raise error.at_row(row) from error
        except Exception as error:
            let_through(error)
            if is_marked(error):
                move_mark(error, row)
            else:
                mark_sample(error, "read", row, str(index), type(dataset).__name__, "while getting sample")
            raise
    return samples


def keep_samples(samples: Sequence[Any]) -> list[Any]:
    """Return the samples that were not left out.

    Raises:
        Exception: The error of the first broken sample.
        SampleError: If all samples were left out.
    """
    for sample in samples:
        if isinstance(sample, Broken):
            raise sample.error
    kept = [sample for sample in samples if not isinstance(sample, Skipped)]
    if not kept:
        raise all_skipped([sample.key for sample in samples])
    return kept


def _guard(read: Read, bad_samples: BadSamples | None, *, keeps_broken: bool) -> Read:
    def read_guarded(indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        try:
            return list(read(indices, rng_keys))
        except SampleError:
            raise
        except Exception as error:
            if bad_samples is not None and (found := bad_samples.find(error)) is not None:
                raise found from error
            if not keeps_broken:
                raise
            let_through(error)
            if len(indices) == 1:
                return [Broken(error)]
        # The error does not say which sample failed: read each half separately.
        middle = len(indices) // 2
        first = read_guarded(indices[:middle], rng_keys[:middle])
        try:
            return [*first, *read_guarded(indices[middle:], rng_keys[middle:])]
        except SampleError as error:
            raise error.at_row(middle + error.row) from error

    return read_guarded
