"""What a candidate is asked for, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TARGET = 224
"""Pixels of a crop's side."""

SHORTER_SIDE = 256
"""Pixels that the evaluation crop resizes an image's shorter side to."""

SCALE = (0.08, 1.0)
"""Bounds of a random crop's share of its image's area."""

RATIO = (3 / 4, 4 / 3)
"""Bounds of a random crop's width / height."""

Crop = Literal["train", "eval"]
"""``train``: a random crop, resized, and a flip; ``eval``: the centre of the resized image."""

Batch = Any
"""Images uint8 [n, 224, 224, 3] or [n, 3, 224, 224] and n labels; or a list of n bytes objects."""

Epochs = Iterable[Batch]
"""The batches of an epoch, anew at each ``iter``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a loader shall do.

    Attributes:
        data: Where the candidate's data lie, in its own format.
        num_samples: How many samples there are.
        is_persistent: Whether worker processes live on after an epoch.
    """

    data: Path
    num_samples: int
    crop: Crop = "train"
    batch_size: int = 128
    num_workers: int = 2
    is_persistent: bool = True


@dataclass(frozen=True, slots=True)
class Repeated:
    """An iterable of which each ``iter`` starts a generator anew."""

    start: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.start()
