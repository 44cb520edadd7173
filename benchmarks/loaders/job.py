"""The task of a candidate, and the batches that it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TARGET = 224
"""The side length of a crop in pixels."""

SHORTER_SIDE = 256
"""The length of an image's shorter side, in pixels, after the resize for the evaluation crop."""

SCALE = (0.08, 1.0)
"""The range of a random crop's area, as a share of the image's area."""

RATIO = (3 / 4, 4 / 3)
"""The range of a random crop's width / height."""

Crop = Literal["train", "eval"]
"""``train``: a random crop, resized and perhaps flipped; ``eval``: the center of the resized image."""

Batch = Any
"""Images, uint8 [n, 224, 224, 3] or [n, 3, 224, 224], and n labels; or a list of n bytes objects."""

Epochs = Iterable[Batch]
"""Batches; each ``iter`` starts a new epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The task of a loader.

    Attributes:
        data: The directory of the data, in the candidate's format.
        num_samples: The number of samples.
        is_persistent: Whether worker processes outlive an epoch.
    """

    data: Path
    num_samples: int
    crop: Crop = "train"
    batch_size: int = 128
    num_workers: int = 2
    is_persistent: bool = True


@dataclass(frozen=True, slots=True)
class Repeated:
    """An iterable that starts a new generator at each ``iter``."""

    start: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.start()
