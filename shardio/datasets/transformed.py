"""The transform of a dataset as an attribute, as torchvision's datasets have it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

from shardio.datasets.epoch_cell import EpochCell
from shardio.datasets.map_epoch import MapEpoch
from shardio.datasets.shared_cell import SharedCell
from shardio.decoding import Decode, FieldDecoder, Fields
from shardio.images import Orientation

Transform = Callable[[Any], Any]
Copied = TypeVar("Copied", bound="Transformed")

TOO_LATE = (
    "dataset.transform was set while samples were being loaded, or worker processes that stay have the one before: set "
    "it before iterating, or make a new loader"
)


SHARED = (EpochCell, MapEpoch, SharedCell)
"""Attributes that worker processes see change."""


class Transformed:
    """A dataset whose transform can be read and set.

    Attributes:
        decoder: Makes values of what is read.
    """

    def __init__(self, decoder: FieldDecoder) -> None:
        self.decoder = decoder
        self._num_sets = 0
        self._shared_num_sets = SharedCell(0)  # Copies in worker processes see it, and that they have an old transform.

    @property
    def transform(self) -> Transform | None:
        """What is applied to images. It can be set before they are loaded."""
        return self.decoder.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self.decoder = replace(self.decoder, transform=transform)
        self._num_sets += 1
        self._shared_num_sets.set(self._num_sets)

    def __copy__(self: Copied) -> Copied:
        """Return a copy with a transform and an epoch of its own: setting them leaves the original alone."""
        copied = object.__new__(type(self))
        own = {name: deepcopy(value) for name, value in self.__dict__.items() if isinstance(value, SHARED)}
        copied.__dict__.update({**self.__dict__, **own})
        return copied

    @property
    def target_transform(self) -> None:
        """None: labels stay as they are. Torchvision's datasets have one; here ``__getitem__`` can be overridden."""
        return

    @property
    def fields(self) -> Fields:
        """What a sample is made of. Like the next four, it is fixed when the dataset is made."""
        return self.decoder.fields

    @property
    def decode(self) -> Decode:
        """What transforms get: arrays or Pillow images."""
        return self.decoder.decode

    @property
    def orientation(self) -> Orientation:
        """Whether the EXIF orientation turns images."""
        return self.decoder.orientation

    @property
    def max_pixels(self) -> int:
        """The number of pixels above which an image is an error."""
        return self.decoder.max_pixels

    @property
    def trusted(self) -> bool:
        """Whether fields may be unpickled."""
        return self.decoder.trusted

    def check_transform(self) -> None:
        """Raise RuntimeError if the transform was set after this copy of the dataset was made for a worker process."""
        if self._shared_num_sets.values[0] != self._num_sets:
            raise RuntimeError(TOO_LATE)
