"""What the training process and its hosts tell each other.

Without slots: Python pickles a dataclass that has them ten times as slowly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.decoding import FieldDecoder
from shardio.errors import SampleError
from shardio.images import DecoderName
from shardio.loader.memory import Layout
from shardio.order import Words
from shardio.reading import FileReader, SampleReader


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a host must know beforehand: how samples are read and decoded. Which, it is told by chunks.

    Attributes:
        reader: Reads samples.
        decoder: Decodes them.
        num_threads: How many chunks the host makes at a time.
    """

    reader: SampleReader | FileReader
    decoder: FieldDecoder
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class NewSlot:
    """A new slot; its memory's descriptor comes along."""

    slot_id: int
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Forget:
    """Slots that no further chunk will name."""

    slot_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows of a batch that are to be made.

    Attributes:
        serial: Its number; larger than that of every chunk before it.
        samples: What the reader reads n samples by.
        rng_keys: uint64 [n], one for each sample's random transforms.
        slot_id: Where to put the columns of fixed size, or None for beside.
        row: The first row there.
        epoch_began: When its epoch began, by ``time.perf_counter``, which is the system's clock on Linux.
    """

    serial: int
    samples: Any
    rng_keys: Words
    slot_id: int | None
    row: int
    epoch_began: float

    @property
    def rows(self) -> slice:
        """Its rows of the batch."""
        return slice(self.row, self.row + len(self.rng_keys))


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Chunks that were sent before are not wanted any more. Those that are being made are finished."""


@dataclass(frozen=True, kw_only=True)
class Ping:
    """Asks for a sign of life: :class:`Pong`."""


@dataclass(frozen=True, kw_only=True)
class Pong:
    """A sign of life; also the first message of a host."""


Column = list[Any] | NDArray[np.generic] | None
"""The values of one field; None where they were put into the slot."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Where the time of a chunk went, in seconds of its thread."""

    read_s: float = 0.0
    transform_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


@dataclass(frozen=True, kw_only=True)
class Made:
    """A chunk is there: a column for each field, where the time went, and how many images who decoded."""

    serial: int
    columns: list[Column]
    times: StageTimes
    num_images_by_decoder: Counter[DecoderName]


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A chunk is not there because of one of its samples; the error says which. From a host comes its traceback."""

    serial: int
    error: SampleError
    traceback: str = ""

    def explain(self) -> None:
        """Give the error its traceback as cause."""
        _explain(self.error, self.traceback)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A chunk is not there because of an error that no single sample is to blame for.

    Attributes:
        serial: The chunk's number.
        error: The error.
        traceback: Where it happened in another process; None if it carries its own.
    """

    serial: int
    error: BaseException
    traceback: str | None

    def explain(self) -> None:
        """Give the error its traceback as cause."""
        _explain(self.error, self.traceback)


def _explain(error: BaseException, traceback: str | None) -> None:
    if traceback:  # Errors that are sent lose their own.
        error.__cause__ = RuntimeError(f"in a worker:\n{traceback}")


Outcome = Made | Unreadable | Failed
