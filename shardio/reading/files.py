"""Read the files of a directory as samples, one labelled image each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from shardio.errors import SampleError
from shardio.interruptions import let_through
from shardio.reading.stored import StoredSamples
from shardio.shards import LABEL_FIELD
from shardio.storage import Location, ReplacedError

if TYPE_CHECKING:
    from shardio.storage.cache.cached_files import CachedFiles

LabelledFile = tuple[str, int]
"""An image's path or, if it is in a remote store, its URL; and its label."""


class FileReader:
    """A reader of labelled image files. Each file is a sample, and its path or URL is the sample's key.

    Args:
        root: The directory that contains the files.
        image_field: The name of the field that contains the image.
        files: The files, if they are in a remote store.
    """

    def __init__(self, root: Location, image_field: str, files: CachedFiles | None = None) -> None:
        self._root, self._image_field, self.files = root, image_field, files

    def read(self, samples: Sequence[LabelledFile], fields: Sequence[str]) -> StoredSamples:
        """Read some files.

        Args:
            samples: n files.
            fields: Ignored. Every sample has an image and a label.

        Raises:
            SampleError: If a file cannot be read.
            StoreError: If a remote store keeps failing.
            PermissionError: If a remote store refuses the credentials.
            TypeError: If a label is not an integer.
        """
        if self.files is None:
            images = [self._read_local(row, path) for row, (path, _) in enumerate(samples)]
        else:
            images = self._read_remote(self.files, samples)
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

    def find_key(self, path: str) -> str:
        """Return the key of a file in its store."""
        return path.removeprefix(self._root.store.prefix)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _read_local(self, row: int, path: str) -> bytes:
        try:
            return self._root.store.read_whole(path)
        except OSError as error:
            let_through(error)
            raise self._unreadable(row, path, str(error)) from error

    def _read_remote(self, files: CachedFiles, samples: Sequence[LabelledFile]) -> list[bytes]:
        keys = [self.find_key(path) for path, _ in samples]
        present = [files.read_present(key) for key in keys]
        missing = [key for key, content in zip(keys, present, strict=True) if content is None]
        if len(missing) > 1:
            # At the same time. The sample with an error is found below.
            with suppress(FileNotFoundError, PermissionError, ReplacedError):
                files.prefetch(missing, is_urgent=True)
        return [
            self._read_one(files, row, samples[row][0]) if content is None else content
            for row, content in enumerate(present)
        ]

    def _read_one(self, files: CachedFiles, row: int, path: str) -> bytes:
        try:
            return files.read(self.find_key(path))
        except (FileNotFoundError, ReplacedError) as error:
            let_through(error)
            kept = files.listing.path
            remedy = f". If the bucket has changed since it was listed, delete the listing {kept}" if kept else ""
            raise self._unreadable(row, path, f"{error}{remedy}") from error

    def _unreadable(self, row: int, path: str, cause: str) -> SampleError:
        return SampleError(f"the image {path} cannot be read: {cause}", row=row, key=path, where=str(self._root))


def _write_label(path: str, label: int) -> bytes:
    """Encode a label as shards store it."""
    try:
        return b"%d" % operator.index(label)
    except TypeError:  # b"%d" alone would truncate floats.
        raise TypeError(
            f"the labels in ImageFolder.samples must be integers, got {label!r} for {path}: set integer labels there. "
            "To return other targets, override __getitem__"
        ) from None
