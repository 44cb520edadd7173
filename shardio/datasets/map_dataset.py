"""The base class of map-style datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shardio.datasets.indices import check_indices
from shardio.datasets.map_epoch import MapEpoch
from shardio.datasets.samples import decode_samples
from shardio.datasets.transformed import Transformed
from shardio.decoding import FieldDecoder
from shardio.errors import SampleError, move_mark
from shardio.order import Words, check_epoch
from shardio.reading import Reader
from shardio.torch_modes import own_tensors
from shardio.values import check_integer


class MapDataset(Transformed, Dataset[Any]):
    """The base class of shardio's map-style datasets.

    Attributes:
        decoder: Decodes the stored fields.
        reader: Reads samples, given the result of :meth:`locate`.
        map_epoch: The seed and epoch, if the user set them.
    """

    def __init__(self, decoder: FieldDecoder, reader: Reader) -> None:
        super().__init__(decoder)
        self.reader = reader
        self.map_epoch = MapEpoch()

    def set_epoch(self, epoch: int, seed: int | None = None) -> None:
        """Make random transforms a function of (seed, epoch, sample) from now on.

        An EpochSampler in shardio.DataLoader does not need this call.

        Args:
            epoch: The epoch's number.
            seed: The seed of the transforms; by default, the previous one, which is initially 0.

        Raises:
            TypeError: If an argument is not an integer.
            ValueError: If one is negative, the epoch is not below 2**62, or the seed is not below 2**63.
        """
        if seed is None:
            seed, _ = self.map_epoch.known or (0, 0)
        self.map_epoch.set(check_epoch(epoch), check_integer("seed", seed, at_least=0, below=2**63))

    def locate(self, indices: NDArray[np.int64]) -> Any:
        """Return what the reader needs to find samples: their indices, unless a subclass overrides this."""
        return indices

    def describe(self, index: int) -> tuple[str, str]:
        """Return a sample's key and location, for messages."""
        return self.reader.describe(self.locate(np.array([index]))[0], self.decoder.stored_fields)

    def __len__(self) -> int:
        raise NotImplementedError  # Abstract: each kind of dataset counts its own samples.

    def __getitem__(self, index: int) -> Any:
        """Return one sample; a negative index counts from the end.

        Raises:
            TypeError: If ``index`` is not an integer.
            IndexError: If it is out of range.
            SampleError: If the sample cannot be read or decoded.
        """
        if self._owner("__getitem__") is MapDataset:
            return self.__getitems__([index])[0]
        return self._get([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch of samples. torch's DataLoader calls this method.

        If a subclass overrides only ``__getitem__``, the samples come from that method.

        Raises:
            TypeError: If an index is not an integer.
            IndexError: If an index is out of range.
            SampleError: If a sample cannot be read or decoded.
        """
        single = self._owner("__getitem__")
        # A class that overrides both methods handles single samples in its own __getitems__.
        if single is MapDataset or single is self._owner("__getitems__"):
            return self._get(indices)
        return [self._get_single(row, index) for row, index in enumerate(indices)]

    def _owner(self, method: str) -> type:
        """Return the class that defines a method for this dataset."""
        return next(kind for kind in type(self).__mro__ if method in vars(kind))

    def _get_single(self, row: int, index: int) -> Any:
        try:
            return self[index]
        except SampleError as error:
            raise error.at_row(row) from error

    def _get(self, indices: Sequence[int]) -> list[Any]:
        checked = check_indices(indices, len(self))
        return self.read(checked, self.map_epoch.rng_keys(checked))

    def read(self, indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        """Return the samples at the indices, int64 [n], with the rng keys of their transforms, uint64 [n].

        Raises:
            SampleError: If a sample cannot be read or decoded.
        """
        self.check_transform()
        values = list[Any]()
        for start in range(0, len(indices), self.decoder.chunk_size):
            chunk = slice(start, start + self.decoder.chunk_size)
            try:
                with own_tensors():
                    stored = self.reader.read(self.locate(indices[chunk]), self.decoder.stored_fields)
                    values += decode_samples(self.decoder, stored, rng_keys[chunk])
            except SampleError as error:
                raise error.at_row(start + error.row) from error
            except Exception as error:  # Re-raised: one of the user's own code.
                move_mark(error, start)
                raise
        return values
