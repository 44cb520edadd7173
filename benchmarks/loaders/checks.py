"""What a batch must hold: looked at in the warm-up epoch, before anything is timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loaders.data import fingerprint
from benchmarks.loaders.job import TARGET, Batch

Figures = dict[str, float]


class ContentError(Exception):
    """Raised where a loader does not deliver what was asked for."""


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """Return a batch's images and labels."""
    images, labels = batch
    return images, labels


def count_samples(batch: Batch) -> int:
    """Return how many samples a batch has; ``[images, labels]`` or a list of bytes."""
    return len(batch) if isinstance(batch[0], bytes) else len(split_batch(batch)[1])


class ImageCheck:
    """Check an epoch of images: each label as often as it is there, sound images; and measure their mean."""

    def __init__(self, labels: Iterable[int], batch_size: int) -> None:
        self._expected = Counter(labels)
        self._found: Counter[int] = Counter()
        self._batch_size = batch_size
        self._sum = 0.0

    def add(self, batch: Batch) -> None:
        """Look at a batch."""
        images, labels = (np.asarray(part) for part in split_batch(batch))
        self._check_images(images)
        labels = labels.reshape(-1)
        if len(labels) != len(images) or len(labels) > self._batch_size:
            raise ContentError(f"a batch of {len(images)} images and {len(labels)} labels")
        self._found.update(labels.tolist())
        self._sum += float(images.mean(dtype=np.float64)) * len(images)

    def finish(self) -> Figures:
        """Return the mean of all pixels, after the whole epoch."""
        if self._found != self._expected:
            missing, extra = self._expected - self._found, self._found - self._expected
            raise ContentError(
                f"{self._found.total()} samples instead of {self._expected.total()}: "
                f"{missing.total()} missing and {extra.total()} too many, by their labels"
            )
        return {"mean_pixel": self._sum / self._found.total()}

    @staticmethod
    def _check_images(images: NDArray[Any]) -> None:
        if images.dtype != np.uint8 or images.shape[1:] not in ((TARGET, TARGET, 3), (3, TARGET, TARGET)):
            raise ContentError(f"images of {images.dtype} {images.shape}")
        flat = images.reshape(len(images), -1)
        if (flat.max(axis=1) - flat.min(axis=1) < 8).mean() > 0.05:  # A crop may be of clear sky.
            raise ContentError("images of one colour")


class BytesCheck:
    """Check an epoch of small samples: each one once, byte for byte."""

    def __init__(self, samples: Iterable[bytes]) -> None:
        self._expected = Counter(map(fingerprint, samples))
        self._found: Counter[int] = Counter()

    def add(self, batch: Batch) -> None:
        """Look at a batch."""
        self._found.update(map(fingerprint, batch))

    def finish(self) -> Figures:
        """Return nothing, after the whole epoch."""
        if self._found != self._expected:
            raise ContentError(
                f"{self._found.total()} samples, {len(self._found)} of them different, "
                f"instead of {self._expected.total()}; {len(self._expected - self._found)} missing"
            )
        return {}
