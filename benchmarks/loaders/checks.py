"""Check the batches of the warm-up epoch, before anything is timed."""

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
    """A loader delivered wrong samples."""


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """Return a batch's images and labels."""
    images, labels = batch
    return images, labels


def count_samples(batch: Batch) -> int:
    """Return the number of samples in a batch: ``[images, labels]`` or a list of bytes."""
    return len(batch) if isinstance(batch[0], bytes) else len(split_batch(batch)[1])


class ImageCheck:
    """A check of an epoch's images and of its samples per label. The check also computes the mean of all pixels."""

    def __init__(self, labels: Iterable[int], batch_size: int) -> None:
        self._expected = Counter(labels)
        self._found: Counter[int] = Counter()
        self._batch_size = batch_size
        self._sum = 0.0

    def add(self, batch: Batch) -> None:
        """Check a batch."""
        images, labels = (np.asarray(part) for part in split_batch(batch))
        if images.dtype == np.float32:  # turboloader yields only float32 pixels.
            images = np.round(255 * images).astype(np.uint8)
        self._check_images(images)
        labels = labels.reshape(-1)
        if len(labels) != len(images) or len(labels) > self._batch_size:
            raise ContentError(f"a batch has {len(images)} images and {len(labels)} labels")
        self._found.update(labels.tolist())
        self._sum += float(images.mean(dtype=np.float64)) * len(images)

    def finish(self) -> Figures:
        """Return the mean of all pixels, after the whole epoch."""
        if self._found != self._expected:
            missing, extra = self._expected - self._found, self._found - self._expected
            raise ContentError(
                f"expected {self._expected.total()} samples, got {self._found.total()}: "
                f"according to their labels, {missing.total()} are missing and {extra.total()} are unexpected"
            )
        return {"mean_pixel": self._sum / self._found.total()}

    @staticmethod
    def _check_images(images: NDArray[Any]) -> None:
        if images.dtype != np.uint8 or images.shape[1:] not in ((TARGET, TARGET, 3), (3, TARGET, TARGET)):
            raise ContentError(f"images are {images.dtype} {images.shape}")
        flat = images.reshape(len(images), -1)
        if (flat.max(axis=1) - flat.min(axis=1) < 8).mean() > 0.05:  # A few crops may show only clear sky.
            raise ContentError("images have a single color")


class BytesCheck:
    """A check that each small sample of an epoch arrives once, byte for byte."""

    def __init__(self, samples: Iterable[bytes]) -> None:
        self._expected = Counter(map(fingerprint, samples))
        self._found: Counter[int] = Counter()

    def add(self, batch: Batch) -> None:
        """Count the samples of a batch."""
        self._found.update(map(fingerprint, batch))

    def finish(self) -> Figures:
        """Raise an error if samples are missing or repeated; return no figures."""
        if self._found != self._expected:
            raise ContentError(
                f"expected {self._expected.total()} samples, got {self._found.total()}, {len(self._found)} of them "
                f"distinct: {len(self._expected - self._found)} are missing"
            )
        return {}
