"""What becomes of samples that cannot be read: an error, another sample in their place, or a smaller batch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SampleError
from shardio.order import Words, derive_key, make_key, random_words

OnError = Literal["raise", "replace", "skip"]

MAX_REPLACEMENTS = 10
"""How many samples are tried in the place of one; that many unreadable ones in a row are no accident."""


class _Skipped:
    """Stands in a list of samples where one was left out."""


SKIPPED = _Skipped


def check_on_error(on_error: str) -> OnError:
    """Return ``on_error`` if it is a policy; raise ValueError otherwise."""
    for policy in get_args(OnError):
        if on_error == policy:
            return policy  # type: ignore[no-any-return]  # get_args is typed to return Any
    raise ValueError(f"on_error must be one of {', '.join(get_args(OnError))}, got {on_error!r}")


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

    def decide(self, error: SampleError, number: int, key: np.uint64, num_tries: int) -> int | None:
        """Return the number of the sample to read instead, or None if there is to be none.

        Args:
            error: What is wrong.
            number: The number of the sample that cannot be read.
            key: The key of the transforms in its place; what is put there keeps it.
            num_tries: How often something was put there before.

        Raises:
            SampleError: If something was put there too often.
        """
        if num_tries == MAX_REPLACEMENTS:
            raise SampleError(
                f"{error} (and neither could the {num_tries} samples that were tried before it, each in the place of "
                "the one before: is the storage there?)",
            ) from error
        self._write_down(error, number)
        if self._on_error == "skip":
            return None
        stream = derive_key(np.array([key], np.uint64), make_key(0, "replace"))
        word = random_words(stream, np.array([num_tries], dtype=np.uint64))
        return int(word[0] % np.uint64(self._num_samples))

    def _write_down(self, error: SampleError, number: int) -> None:
        action = "replaced" if self._on_error == "replace" else "skipped"
        entry = {"key": error.key, "where": error.where, "error": str(error), "sample": number, "action": action}
        # One short write to a file that is open for appending: lines of several processes do not mix.
        with self._quarantine.open("ab", buffering=0) as file:
            file.write(json.dumps(entry, ensure_ascii=False).encode(errors="surrogateescape") + b"\n")


def read_with(
    bad_samples: BadSamples | None,
    read: Callable[[NDArray[np.int64], Words], Sequence[Any]],
    numbers: NDArray[np.int64],
    keys: Words,
) -> list[Any]:
    """Read samples; decide on those that cannot be.

    Args:
        bad_samples: Decides; None for an error.
        read: Reads n samples by numbers and keys.
        numbers: int64 [n].
        keys: uint64 [n].

    Returns:
        n samples, or SKIPPED.
    """
    if bad_samples is None:
        return list(read(numbers, keys))
    kept, numbers, num_tries = np.arange(len(numbers)), numbers.copy(), Counter[int]()
    while True:
        try:
            values = read(numbers[kept], keys[kept]) if len(kept) else []
            break
        except SampleError as error:
            place = int(kept[error.place])
            other = bad_samples.decide(error, int(numbers[place]), keys[place], num_tries[place])
            num_tries[place] += 1
            if other is None:
                kept = np.delete(kept, error.place)
            else:
                numbers[place] = other
    samples: list[Any] = [SKIPPED] * len(numbers)
    for place, value in zip(kept.tolist(), values, strict=True):
        samples[place] = value
    return samples
