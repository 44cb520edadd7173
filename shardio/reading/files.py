"""Read the files of a directory as samples, one labelled image each."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from shardio.errors import SampleError
from shardio.interruptions import let_through
from shardio.reading.stored import StoredSamples
from shardio.shards import LABEL_FIELD
from shardio.storage import Location

LabelledFile = tuple[str, int]
"""An image's key in its store (its path, if the store is local) and its label."""


class FileReader:
    """A reader of labelled image files. Each file is a sample, and its path is the sample's key.

    Args:
        root: The directory that contains the files.
        image_field: The name of the field that contains the image.
    """

    def __init__(self, root: Location, image_field: str) -> None:
        self._root, self._image_field = root, image_field

    def read(self, samples: Sequence[LabelledFile], fields: Sequence[str]) -> StoredSamples:
        """Read some files.

        Args:
            samples: n files.
            fields: Ignored. Every sample has an image and a label.

        Raises:
            SampleError: If a file cannot be read.
            TypeError: If a label is not an integer.
        """
        images = [self._read_whole(row, path) for row, (path, _) in enumerate(samples)]
        labels = [_write_label(path, label) for path, label in samples]
        return StoredSamples(
            {self._image_field: images, LABEL_FIELD: labels},
            len(samples),
            describe=lambda row, some: self.describe(samples[row], some),
            list_keys=lambda: [path for path, _ in samples],
        )

    def describe(self, sample: LabelledFile, fields: Sequence[str]) -> tuple[str, str]:
        """Return a sample's key and the root directory, for messages."""
        return sample[0], str(self._root)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _read_whole(self, row: int, path: str) -> bytes:
        try:
            return self._root.store.read_whole(path)
        except OSError as error:
            let_through(error)
            message = f"the image {path} cannot be read: {error}"
            raise SampleError(message, row=row, key=path, where=str(self._root)) from error


def _write_label(path: str, label: int) -> bytes:
    """Encode a label as shards store it."""
    try:
        return b"%d" % operator.index(label)
    except TypeError:  # b"%d" alone would truncate floats.
        raise TypeError(
            f"the labels in ImageFolder.samples must be integers, got {label!r} for {path}: set integer labels there. "
            "To return other targets, override __getitem__"
        ) from None
