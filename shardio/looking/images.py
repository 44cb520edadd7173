"""What is known of all images of a source without decoding them, in columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldUse:
    """How often samples have a field, or how many files have a suffix, and the size of all these contents in bytes."""

    name: str
    num_samples: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageColumns:
    """The images of n samples. A million samples take about 30 MB.

    Attributes:
        sizes: int64 [n], the size of each sample's image in bytes; -1 for samples without an image.
        offsets: int64 [n], where the image's content begins in its tar; -1 if it is not in a tar.
        content_hashes: uint64 [n], the xxh3-64 of each content; None if it is unknown until the files are read.
        label_ids: int64 [n], a number for each distinct label; -1 for samples without a label.
        label_names: The name of each of these labels: the class name, if there is one.
        fields: What all fields, or all files, hold.
    """

    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    content_hashes: NDArray[np.uint64] | None
    label_ids: NDArray[np.int64]
    label_names: tuple[str, ...]
    fields: tuple[FieldUse, ...]

    def label_of(self, index: int) -> str | None:
        """Return the name of a sample's label; None if it has none."""
        label_id = int(self.label_ids[index])
        return None if label_id < 0 else self.label_names[label_id]

    def find_images(self) -> NDArray[np.int64]:
        """Return the indices of the samples that have an image."""
        return np.flatnonzero(self.sizes >= 0)


def choose_evenly(indices: NDArray[np.int64], num_chosen: int) -> NDArray[np.int64]:
    """Return evenly spaced elements, the first of as many equal parts; all of them if there are fewer.

    >>> choose_evenly(np.arange(10), 4).tolist()
    [0, 2, 5, 7]
    """
    num_chosen = min(len(indices), num_chosen)
    return indices[np.arange(num_chosen) * len(indices) // max(1, num_chosen)]
