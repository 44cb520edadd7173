"""Reading of samples from datasets, with the policy for unreadable ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.bad_samples.policy import BadSamples, Describe, all_skipped
from shardio.errors import SampleError, is_marked, mark_sample, move_mark
from shardio.interruptions import let_through
from shardio.order import Words

Read = Callable[[NDArray[np.int64], Words], Sequence[Any]]
"""A function that reads n samples, given their indices and rng keys."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A placeholder for a sample that was left out."""

    key: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A placeholder for a sample that cannot be made, so that the others are still delivered."""

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
    """Read samples; replace or leave out unreadable ones.

    Args:
        bad_samples: The policy for unreadable samples; None raises their errors.
        read: Reads n samples, given their indices and rng keys.
        indices: int64 [n].
        rng_keys: uint64 [n].
        replacement_rng_keys: uint64 [n], the rng keys that draw replacements.
        epoch: The epoch, if known.
        describe: Returns a sample's key and location; None if the dataset cannot.
        keeps_broken: Whether to return errors as Broken in their samples' rows instead of raising them.

    Returns:
        n samples, with Skipped in the rows of samples that were left out.

    Raises:
        Exception: If a sample cannot be read, and neither the policy nor ``keeps_broken`` covers it.
    """
    if bad_samples is not None:
        read = _convert_errors(read, bad_samples)
    if keeps_broken:
        read = _isolate_errors(read)
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
        Exception: The dataset's error, which says or is marked with the sample at fault.
    """
    read_several = getattr(dataset, "__getitems__", None)
    if callable(read_several):
        try:
            return list(read_several(indices.tolist()))
        except Exception as error:
            let_through(error)
            # It does not say which of these samples failed: read them one by one to find it.
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
        Exception: That of the first broken sample.
        SampleError: If all samples were left out.
    """
    for sample in samples:
        if isinstance(sample, Broken):
            raise sample.error
    kept = [sample for sample in samples if not isinstance(sample, Skipped)]
    if not kept:
        raise all_skipped([sample.key for sample in samples])
    return kept


def _convert_errors(read: Read, bad_samples: BadSamples) -> Read:
    """Return a function that reads the same, but raises SampleError for errors of the user's code that are covered."""

    def read_converted(indices: NDArray[np.int64], rng_keys: Words) -> Sequence[Any]:
        try:
            return read(indices, rng_keys)
        except SampleError:
            raise
        except Exception as error:
            if (found := bad_samples.find(error)) is None:
                raise
            raise found from error

    return read_converted


def _isolate_errors(read: Read) -> Read:
    """Return a function that reads the same, but returns Broken for a sample whose error does not name it."""

    def read_isolated(indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        try:
            return list(read(indices, rng_keys))
        except SampleError:
            raise
        except Exception as error:
            let_through(error)
            if len(indices) == 1:
                return [Broken(error)]
        middle = len(indices) // 2
        first = read_isolated(indices[:middle], rng_keys[:middle])
        try:
            return [*first, *read_isolated(indices[middle:], rng_keys[middle:])]
        except SampleError as error:
            raise error.at_row(middle + error.row) from error

    return read_isolated
