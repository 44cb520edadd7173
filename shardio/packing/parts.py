"""Divide samples into named parts, by a hash of each sample's key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from shardio.errors import PackError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Named parts of a dataset.

    A sample's part depends only on its key and on the fractions: the xxh3-64 of the key in UTF-8, divided by 2**64, is
    compared with the running sums of the fractions. So samples stay in their parts when others are added.

    Attributes:
        names: The name of each part.
        thresholds: The first hash of each part but the first.
    """

    names: tuple[str, ...]
    thresholds: tuple[int, ...]

    def assign(self, key_hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the number of the part of each sample, int64 [n], given the hashes of the keys, uint64 [n]."""
        return np.searchsorted(np.array(self.thresholds, np.uint64), key_hashes, side="right")

    def refuse_empty(self, num_samples: Sequence[int], where: str) -> None:
        """Raise PackError if a part would have no samples.

        Args:
            num_samples: The number of samples of each part.
            where: What is divided, for the message.
        """
        if empty := [name for name, number in zip(self.names, num_samples, strict=True) if not number]:
            raise PackError(
                f"none of the {sum(num_samples)} samples of {where} would be in {empty[0]}: choose larger fractions"
            )


def make_parts(fractions: Sequence[float | str], names: Sequence[str]) -> Parts:
    """Return parts, given the fraction and the name of each one.

    Raises:
        ValueError: If the fractions are not positive or do not sum to 1, or a name cannot be a directory's or is given
            twice.
    """
    if isinstance(fractions, str) or isinstance(names, str) or len(fractions) != len(names) or len(fractions) < 2:
        raise ValueError(
            f"the fractions and the names must be lists of the same length, at least 2, got {fractions!r} and {names!r}"
        )
    for name in names:
        if PurePath(name).name != name or name.startswith("."):
            raise ValueError(f"the name of a part must be a directory's name, got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"the names of the parts must differ, got {', '.join(names)}")
    try:
        exact = [Fraction(str(fraction)) for fraction in fractions]  # Decimals, as they are written.
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"the fractions must be numbers such as 0.9 and 0.1, got {fractions!r}") from error
    total = sum(exact, Fraction())
    if min(exact) <= 0 or abs(total - 1) > Fraction(1, 10**9):
        raise ValueError(f"the fractions must be positive and sum to 1, got {', '.join(map(str, fractions))}")
    ends = np.cumsum(np.array(exact, object)).tolist()
    return Parts(names=tuple(names), thresholds=tuple(int(end / total * 2**64) for end in ends[:-1]))
