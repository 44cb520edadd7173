"""The errors of shardio, one class for each way to recover.

::

    ShardioError
    ├── PackError           the source or the destination of a pack: change the directory or the options
    ├── FormatError         a manifest, index or tar is not what it should be: repack or fetch it again
    │   └── StaleIndexError     the tar changed after its index was made: delete the index
    ├── SampleError         one sample cannot be read or decoded: repair or remove that sample
    ├── WorkerError         worker processes die again and again: check memory, or the samples that the error names
    ├── StateError          a saved state belongs to another dataset or order: use the run's own
    ├── BusyError           another run writes into the directory: wait for it, or name another directory
    ├── NonFiniteLossError  the loss is NaN or infinite: go back to a checkpoint, with a lower learning rate
    ├── CoverageError       a loader repeated or lost samples (also an AssertionError, for tests)
    └── IdentityError       samples cannot be identified: say where their keys lie (also a TypeError)

Arguments out of range raise ValueError, objects of the wrong kind TypeError, as in the standard library.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any


class ShardioError(Exception):
    """The base of all errors that shardio raises about data."""


class PackError(ShardioError):
    """The source cannot be packed, or the destination is not free."""


class FormatError(ShardioError):
    """A manifest, an index or a tar is not what it should be."""


class StaleIndexError(FormatError):
    """An index does not belong to the tar beside it."""


class SampleError(ShardioError):
    """A sample cannot be read or decoded.

    Attributes:
        row: The sample's place among those that were requested together.
        key: Its key, where that is known.
        where: Where it lies, likewise.
    """

    def __init__(self, message: str, *, row: int = 0, key: str = "", where: str = "") -> None:
        super().__init__(message)
        self.row = row
        self.key = key
        self.where = where

    def at_row(self, row: int) -> SampleError:
        """Return the same error for a sample at another row."""
        return type(self)(str(self), row=row, key=self.key, where=self.where)


class WorkerError(ShardioError):
    """Worker processes died repeatedly over the same samples, or cannot start."""


class StateError(ShardioError):
    """A saved state does not belong to this dataset or order."""


class BusyError(ShardioError):
    """Another training run writes into the directory."""


class NonFiniteLossError(ShardioError):
    """The loss is NaN or infinite.

    Attributes:
        step: In which step of the training run.
        keys: The keys of the batch's samples, where those are known.
    """

    def __init__(self, message: str, *, step: int, keys: Sequence[str] | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.keys = keys


class CoverageError(ShardioError, AssertionError):
    """A loader delivered some samples more than once, or not at all."""


class IdentityError(ShardioError, TypeError):
    """Samples cannot be identified by what a batch holds: keys are needed, or the given ones do not identify them."""


def __getattr__(name: str) -> Any:
    if name == "HostError":
        warnings.warn("shardio.HostError is now shardio.WorkerError", DeprecationWarning, stacklevel=2)
        return WorkerError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
