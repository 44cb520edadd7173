"""What happens to samples that cannot be read: an error, another sample in their place, or a smaller batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from shardio.errors import SampleError
from shardio.loader.batches import BatchPlan
from shardio.order import derive_key, make_key, random_words

OnError = Literal["raise", "replace", "skip"]

MAX_REPLACEMENTS = 10
"""How many samples are tried in the place of one; that many unreadable ones in a row are no accident."""


class BadSamples:
    """Decides on samples that cannot be read.

    Args:
        on_error: ``raise`` stops with an error. ``replace`` takes another sample, a function of the seed, the epoch
            and the sample. ``skip`` leaves the sample out, so that its batch is smaller.
        quarantine: Where samples that are replaced or skipped are written down, a JSON object a line.
        num_samples: How many samples the dataset has.
        describe: Returns the key of a sample by its number, and where it lies.
    """

    def __init__(
        self, on_error: OnError, quarantine: Path, num_samples: int, describe: Callable[[int], tuple[str, str]]
    ) -> None:
        self._on_error = on_error
        self._quarantine = quarantine
        self._num_samples = num_samples
        self._describe = describe

    def resolve(self, plan: BatchPlan, place: int, message: str, num_tries: int) -> BatchPlan:
        """Return what is to be read instead of some samples one of which cannot be read.

        Args:
            plan: The samples.
            place: Which of them.
            message: What is wrong with it.
            num_tries: How often something else was put in its place already.

        Raises:
            SampleError: If it is not to be replaced or skipped, or has been too often.
        """
        if self._on_error == "raise":
            raise SampleError(message, place=place)
        if num_tries == MAX_REPLACEMENTS:
            raise SampleError(
                f"{message} (and neither can the {num_tries} samples that were tried before it, each in the place "
                "of another: is the storage there?)",
                place=place,
            )
        number = int(plan.numbers[place])
        self._write_down(number, message)
        if self._on_error == "skip":
            return plan.take(np.delete(np.arange(len(plan)), place))
        key = derive_key(plan.keys[place : place + 1], make_key(0, "replace"))
        word = random_words(key, np.array([num_tries], dtype=np.uint64))
        numbers = plan.numbers.copy()
        numbers[place] = int(word[0] % np.uint64(self._num_samples))
        return BatchPlan(numbers=numbers, keys=plan.keys, valid=plan.valid)

    def _write_down(self, number: int, message: str) -> None:
        key, where = self._describe(number)
        action = "replaced" if self._on_error == "replace" else "skipped"
        entry = {"key": key, "where": where, "error": message, "sample": number, "action": action}
        # One short write to a file that is open for appending: lines of several ranks do not mix.
        with self._quarantine.open("ab", buffering=0) as file:
            file.write(json.dumps(entry, ensure_ascii=False).encode(errors="surrogateescape") + b"\n")


def check_on_error(on_error: str) -> OnError:
    """Return ``on_error`` if it is a policy; raise ValueError otherwise."""
    for policy in get_args(OnError):
        if on_error == policy:
            return policy  # type: ignore[no-any-return]  # get_args is typed to return Any
    raise ValueError(f"on_error must be one of {', '.join(get_args(OnError))}, got {on_error!r}")
