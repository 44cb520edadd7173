"""The messages between the training process, its fork server and its worker processes.

The dataclasses have no ``__slots__``, because Python pickles dataclasses with slots ten times more slowly. They are not
frozen and do not compare, because such dataclasses take three times as long to define, whenever a fork server starts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shardio.decoding import FieldDecoder
    from shardio.images import DecoderName
    from shardio.loader.collation import Collation  # It imports torch.
    from shardio.loader.failures import Failure
    from shardio.loader.slots.memory import Column, Layout
    from shardio.order import Words
    from shardio.reading import Reader


@dataclass(kw_only=True, eq=False)
class WorkerSetup:
    """What worker processes need before their first chunk. The fork server receives it as bytes.

    Attributes:
        reader: Reads samples.
        decoder: Decodes them.
        collation: Makes whole batches where that takes people's own code; None if a batch consists of columns.
    """

    reader: Reader
    decoder: FieldDecoder
    collation: Collation | None = None

    @property
    def runs_user_code(self) -> bool:
        """Whether worker processes run code that is not shardio's."""
        return self.decoder.runs_user_code or self.collation is not None


@dataclass(kw_only=True, eq=False)
class StartWorker:
    """A request to the fork server for a worker process. The end of its socket pair is sent with the message.

    Attributes:
        worker_id: Its number, larger than that of every earlier worker process.
        num_threads: The number of chunks that it makes at a time.
    """

    worker_id: int
    num_threads: int


@dataclass(kw_only=True, eq=False)
class EndWorker:
    """A request to the fork server to kill a worker process that does not exit within ``patience_s``."""

    worker_id: int
    patience_s: float


@dataclass(kw_only=True, eq=False)
class WorkerEnded:
    """The answer to :class:`EndWorker`. As in ``subprocess``, a negative exit code is the number of a signal."""

    process_id: int
    exit_code: int


@dataclass(kw_only=True, eq=False)
class EndAllWorkers:
    """A request to the fork server to kill all its worker processes."""


@dataclass(kw_only=True, eq=False)
class AllWorkersEnded:
    """The answer to :class:`EndAllWorkers`."""


@dataclass(kw_only=True, eq=False)
class NewSlot:
    """A new slot. The descriptor of its memory is sent with the message."""

    slot_id: int
    layout: Layout


@dataclass(kw_only=True, eq=False)
class ForgetSlots:
    """Slots that no later chunk uses."""

    slot_ids: tuple[int, ...]


@dataclass(kw_only=True, eq=False)
class Chunk:
    """Some rows of a batch to make.

    Attributes:
        chunk_id: Its number, larger than that of every earlier chunk.
        samples: What the reader needs to find n samples.
        rng_keys: uint64 [n], one for each sample's transforms.
        slot_id: The slot for the fixed-size columns; None if all columns are sent in the answer.
        row: The first row in the slot.
        valid: bool [n], false for repeats; None unless ``remainder`` is ``mask`` and a collation makes the batch.
        epoch_began: When the epoch began, by ``time.perf_counter``, which all processes share on Linux.
    """

    chunk_id: int
    samples: Any
    rng_keys: Words
    slot_id: int | None
    row: int
    valid: NDArray[np.bool_] | None = None
    epoch_began: float

    @property
    def rows(self) -> slice:
        """The chunk's rows of the batch."""
        return slice(self.row, self.row + len(self.rng_keys))


@dataclass(kw_only=True, eq=False)
class Cancel:
    """A request to drop all chunks that were sent before. Chunks in flight are finished."""


@dataclass(kw_only=True, eq=False)
class Ping:
    """A request for a :class:`Pong`, to show that the process is alive."""


@dataclass(kw_only=True, eq=False)
class Pong:
    """The answer to :class:`Ping`, and the first message of a worker process."""


@dataclass(kw_only=True, eq=False)
class WorkerMemory:
    """The memory of a worker process in bytes, as :func:`read_private_bytes` returns it."""

    num_bytes: int


@dataclass(kw_only=True, eq=False)
class StageTimes:
    """The time that a thread spent in each stage of a chunk, in seconds; ``python_s`` is part of ``transform_s``."""

    read_s: float = 0.0
    transform_s: float = 0.0
    python_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


@dataclass(kw_only=True, eq=False)
class Made:
    """A finished chunk.

    Attributes:
        chunk_id: Its number.
        columns: One column for each field; if a collation made the batch in a worker process, one for each piece of
            its memory, with a single row.
        times: How long it took.
        num_images_by_decoder: The number of images by decoder.
        batch: The batch that a collation made, as a Structure if it comes from a worker process.
    """

    chunk_id: int
    columns: list[Column]
    batch: Any = None
    times: StageTimes
    num_images_by_decoder: Counter[DecoderName]


@dataclass(kw_only=True, eq=False)
class Failed:
    """A failed chunk. A SampleError names the sample at fault; any other error may have another cause."""

    chunk_id: int
    failure: Failure


Outcome = Made | Failed
