"""The transform as an attribute of a dataset, as in torchvision."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

from shardio.datasets.epoch_cell import EpochCell
from shardio.datasets.map_epoch import MapEpoch
from shardio.decoding import Decode, FieldDecoder, Fields
from shardio.images import Orientation
from shardio.reading import RemoteSamples
from shardio.shared_numbers import SharedCell

Transform = Callable[[Any], Any]
Copied = TypeVar("Copied", bound="Transformed")

TOO_LATE = (
    "dataset.transform was set during an iteration, or persistent worker processes still hold the previous one: set "
    "it before iterating, or create a new loader"
)


SHARED = (EpochCell, MapEpoch, SharedCell)
"""Types of attributes whose changes worker processes see."""


class Transformed:
    """A dataset whose transform can be read and set.

    Attributes:
        decoder: Decodes the stored fields.
    """

    def __init__(self, decoder: FieldDecoder) -> None:
        self.decoder = decoder
        self._num_sets = 0
        self._shared_num_sets = SharedCell(0)  # Copies in workers compare it to notice an old transform.

    @property
    def transform(self) -> Transform | None:
        """The transform of the images. It can be set before an iteration, not during one."""
        return self.decoder.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self.decoder = replace(self.decoder, transform=transform)
        self._num_sets += 1
        self._shared_num_sets.set(self._num_sets)

    def __copy__(self: Copied) -> Copied:
        """Return a copy with its own transform and epoch: setting them leaves the original unchanged."""
        copied = object.__new__(type(self))
        own = {name: deepcopy(value) for name, value in self.__dict__.items() if isinstance(value, SHARED)}
        copied.__dict__.update({**self.__dict__, **own})
        return copied

    @property
    def target_transform(self) -> None:
        """Always None: labels are not transformed. Override ``__getitem__`` to change them."""
        return

    @property
    def fields(self) -> Fields:
        """The fields of a sample. Like the five settings below, they are fixed at construction."""
        return self.decoder.fields

    @property
    def decode(self) -> Decode:
        """What transforms receive: arrays or Pillow images."""
        return self.decoder.decode

    @property
    def orientation(self) -> Orientation:
        """Whether the EXIF orientation is applied."""
        return self.decoder.orientation

    @property
    def max_pixels(self) -> int:
        """The maximum number of pixels in an image; a larger image is an error."""
        return self.decoder.max_pixels

    @property
    def trusted(self) -> bool:
        """Whether fields may be unpickled."""
        return self.decoder.trusted

    @property
    def seed_transforms(self) -> bool:
        """Whether samples' rng keys seed the generators of your own transforms."""
        return self.decoder.seed_transforms

    def remote_samples(self) -> RemoteSamples | None:
        """Return what can be read ahead of the samples; None if they are local."""
        return None

    def check_transform(self) -> None:
        """Raise RuntimeError if the transform was set after this copy was made for a worker process."""
        if self._shared_num_sets.values[0] != self._num_sets:
            raise RuntimeError(TOO_LATE)
