"""Make batches: cut them into chunks, queue the chunks for workers, and assemble the outcomes."""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.pin_memory import pin_memory

from shardio.bad_samples import BadSamples, all_skipped
from shardio.datasets import as_tensor
from shardio.decoding import FieldDecoder
from shardio.device.streams import map_tensors, pin_movable
from shardio.device.tiles import TiledImages
from shardio.errors import SampleError, Stage, WorkerError, as_sample_error
from shardio.images import DecoderName, Pixels, TiledChunk, holds_images
from shardio.kernel.functions import CHUNK_ALIGNMENT, count_chunk_bytes
from shardio.loader.batches import BatchPlan, Collation, SampleSource, check_equal_sizes, collate_column
from shardio.loader.buffers import Buffer, BufferPool, Column, Layout, Views, as_stored, is_image
from shardio.loader.chunk_pool import Death, WorkerPool
from shardio.loader.chunk_worker import ChunkBuilder
from shardio.loader.pickles import Pickle, put_memory_back
from shardio.loader.statistics import Tally
from shardio.loader.wire import Chunk, Failed, Failure, Made, Outcome
from shardio.process import let_through

MIN_CHUNK = 8
"""The minimum size of a chunk, in samples: each chunk has a fixed cost."""

MAX_DEATHS = 3
"""The number of worker deaths on the same chunk, or of consecutive failed starts, after which an error is raised."""

DEFAULT_PREFETCH = 2
"""The minimum default number of batches made in advance: one that is ready, and one in progress."""


class DefaultPrefetch(int):
    """A ``prefetch_factor`` that the user did not set: torch's default, which is meant for torch's workers.

    The class marks the value as a default when a framework re-creates the loader from its attributes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizing:
    """The numbers of batches and chunks that are made at once.

    Attributes:
        num_threads: The number of chunks that are made at once.
        chunk_size: The maximum number of samples that are decoded together.
        prefetch: The number of batches that all workers together make in advance; None for the default.
        keeps_whole: Whether each batch is one chunk, because a collate function makes it.
    """

    num_threads: int
    chunk_size: int
    prefetch: int | None
    keeps_whole: bool = False

    def num_chunks(self, num_samples: int, layout: Layout | None) -> int:
        """Return the number of chunks of a batch: if possible, a multiple of the number of threads, so none waits."""
        if self.keeps_whole or layout is None or not layout.columns:
            return 1
        rounds = -(-num_samples // (self.num_threads * self.chunk_size))
        return max(min(self.num_threads * rounds, num_samples // MIN_CHUNK), -(-num_samples // self.chunk_size), 1)

    def num_ahead(self, layout: Layout | None) -> int:
        """Return the number of batches to make in advance: by default, enough for two chunks per thread."""
        if self.prefetch is not None:
            return self.prefetch
        num_chunks = 1 if layout is None else self.num_chunks(layout.num_rows, layout)
        return max(DEFAULT_PREFETCH, -(-2 * self.num_threads // num_chunks))

    def num_spare(self, layout: Layout) -> int:
        """Return the number of free buffers to keep."""
        # The user holds one batch, and the previous one until the next request is answered.
        return self.num_ahead(layout) + 2


def choose_layout(names: Sequence[str], sample: Sequence[Column], num_rows: int) -> Layout:
    """Return the layout of batches in buffers, given the columns of one sample.

    Args:
        names: The names of the fields.
        sample: The columns of one sample.
        num_rows: The number of samples in a full batch.
    """
    columns = dict[int, tuple[str, tuple[int, ...]]]()
    for column_index, (name, values) in enumerate(zip(names, sample, strict=True)):
        if isinstance(values, TiledChunk):
            num_bytes = -(-count_chunk_bytes(1, values.sizes) // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
            columns[column_index] = "|u1", (num_bytes,)
        elif isinstance(values, list) and (stored := as_stored(name, values[0])) is not None:
            columns[column_index] = stored.dtype.str, stored.shape
    return Layout(num_rows=num_rows, columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """The settings of all batches of a loader.

    Attributes:
        batch_size: The number of samples in a full batch, if the user set it.
        sizing: The numbers of batches and chunks that are made at once.
        bad_samples: The policy for unreadable samples; None raises their errors.
        pins: Whether batches are copied to torch's pinned memory.
        collation: Makes whole batches, if that requires user code; None if a batch consists of columns.
    """

    batch_size: int | None
    sizing: ChunkSizing
    bad_samples: BadSamples | None
    pins: bool
    collation: Collation | None = None

    def begin_tally(self, decoder: FieldDecoder, num_workers: int, began: float) -> Tally:
        """Return the counts of a new epoch.

        Args:
            decoder: The decoder of its samples.
            num_workers: The number of workers.
            began: The start of the epoch, according to ``time.perf_counter``.
        """
        steps = [*decoder.python_steps, *([] if self.collation is None else [self.collation.collate_fn])]
        return Tally(
            num_workers=num_workers,
            began=began,
            in_python=tuple(getattr(step, "__qualname__", type(step).__name__) for step in steps),
            recognized=tuple(map(repr, decoder.replacements)),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """A batch that is being made, or is ready to be taken."""

    buffer: Buffer | None = None
    chunks: list[BatchChunk] = field(default_factory=list)
    error: BaseException | None = None
    is_probe: bool = False  # Whether the batch is made to find the layout of batches, not for the user.

    @property
    def is_made(self) -> bool:
        return all(chunk.columns is not None for chunk in self.chunks)

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.is_made

    @property
    def num_samples(self) -> int:
        return sum(len(chunk.plan) for chunk in self.chunks)

    @property
    def num_images_by_decoder(self) -> Counter[DecoderName]:
        return sum((chunk.num_images_by_decoder for chunk in self.chunks), Counter())


@dataclass(slots=True, kw_only=True, eq=False)
class BatchChunk:
    """A chunk of a batch, before and after it is made."""

    plan: BatchPlan
    row: int
    columns: list[Column] | None = None
    batch: Any = None  # The batch that a collate function made.
    num_images_by_decoder: Counter[DecoderName] = field(default_factory=Counter)
    num_tries: Counter[int] = field(default_factory=Counter)  # The number of replacements tried, by row.
    skipped: list[str] = field(default_factory=list)  # The keys of skipped samples.
    num_deaths: int = 0  # The number of worker processes that died while making only this chunk.
    is_suspect: bool = False  # Whether the chunk may have killed a worker process.

    def request(self, chunk_id: int, source: SampleSource, buffer: Buffer | None, tally: Tally) -> Chunk:
        """Return the request to make this chunk."""
        return Chunk(
            chunk_id=chunk_id,
            samples=source.dataset.locate(self.plan.indices),
            rng_keys=self.plan.rng_keys,
            buffer_id=None if buffer is None else buffer.buffer_id,
            row=self.row,
            valid=self.plan.valid,
            epoch_began=tally.began,
            takes_tiles=source.takes_tiles,
        )


def cut_batch(plan: BatchPlan, layout: Layout | None, sizing: ChunkSizing) -> list[BatchChunk]:
    """Cut a batch into chunks of about equal size."""
    num_chunks = sizing.num_chunks(len(plan), layout)
    cuts = [len(plan) * number // num_chunks for number in range(num_chunks + 1)]
    return [BatchChunk(plan=plan.take(slice(start, stop)), row=start) for start, stop in pairwise(cuts)]


def fit_layout(
    layout: Layout | None, plan: BatchPlan, make: Callable[[Batch], None], source: SampleSource, settings: BatchSettings
) -> tuple[Layout | None, BaseException | None]:
    """Return the layout for the next batch.

    Args:
        layout: The layout of the previous batches. If it is None, or if the source has switched between pixels and
            tiles, a readable sample determines the layout.
        plan: The plan of the batch.
        make: Makes a probe, which is a batch of one sample.
        source: The source of the samples.
        settings: The settings of all batches of the loader.

    Returns:
        The layout, and the error of the batch if a probe failed for a reason unrelated to its sample. The layout is
        None if no sample of the plan can be read, or if a collate function makes the batch and ``layout`` is None.
    """
    if settings.collation is not None:
        return layout, None
    if layout is not None and layout.takes_tiles == source.takes_tiles:
        return replace(layout, num_rows=len(plan)) if len(plan) > layout.num_rows else layout, None
    for row in range(len(plan)):
        probe = Batch(chunks=[BatchChunk(plan=plan.take(slice(row, row + 1)), row=0)], is_probe=True)
        make(probe)
        if probe.error is None:
            num_rows = max(settings.batch_size or 0, len(plan))
            found = choose_layout(source.column_names, probe.chunks[0].columns or [], num_rows)
            return replace(found, takes_tiles=source.takes_tiles), None
        if as_sample_error(probe.error, get_args(Stage)) is None:
            return None, probe.error
        # The policy for bad samples handles this sample when its batch is made.
    return None, None


Entry = tuple[Batch, BatchChunk]
"""A chunk does not refer to its batch: reference cycles would keep buffers alive until the garbage collector runs."""


class ChunkQueue:
    """The unfinished chunks of batches.

    Args:
        workers: The worker processes.
        buffers: The buffers of the batches.
        source: The source of the samples.
        tally: Counts restarts.
    """

    def __init__(self, workers: WorkerPool, buffers: BufferPool, source: SampleSource, tally: Tally) -> None:
        self._workers, self._buffers, self._source, self._tally = workers, buffers, source, tally
        self._in_flight: dict[int, Entry] = {}  # By chunk id.
        self._pending: deque[Entry] = deque()
        self._num_failed_starts = 0

    def add(self, batch: Batch, chunks: Iterable[BatchChunk]) -> None:
        """Queue chunks of a batch."""
        self._pending.extend((batch, chunk) for chunk in chunks)
        self._submit()

    def receive(self, timeout_s: float | None) -> Iterator[tuple[Batch, BatchChunk, Outcome]]:
        """Wait at most ``timeout_s`` for outcomes and yield them. The wait may end early without any outcome.

        The caller must apply each outcome before it requests the next. A worker's death moves unfinished chunks to
        different buffers: an outcome that arrived earlier but is applied later would finish a chunk in the wrong one.

        Raises:
            WorkerError: If worker processes cannot start.
        """
        self._submit()
        for received in self._workers.receive(timeout_s):
            if isinstance(received, Death):
                self._redo(received)
            elif (entry := self._in_flight.pop(received.chunk_id, None)) is not None:  # None if the chunk was dropped.
                self._num_failed_starts = 0
                yield (*entry, received)

    def drop(self, batch: Batch) -> None:
        """Remove all chunks of a batch that failed."""
        self._in_flight = {chunk_id: entry for chunk_id, entry in self._in_flight.items() if entry[0] is not batch}

    def clear(self) -> list[Batch]:
        """Remove all chunks and return their batches."""
        batches = dict.fromkeys(batch for batch, _ in (*self._in_flight.values(), *self._pending))
        self._in_flight.clear()
        self._pending.clear()
        return list(batches)

    def _submit(self) -> None:
        # A suspect chunk is made alone, with nothing else in flight.
        requests = []
        while self._pending and not (self._in_flight and (self._pending[0][1].is_suspect or self._tries_suspect)):
            batch, chunk = self._pending.popleft()
            if batch.error is not None:
                continue
            request = chunk.request(self._workers.next_chunk_id(), self._source, batch.buffer, self._tally)
            self._in_flight[request.chunk_id] = batch, chunk
            requests.append(request)
        if requests:
            self._workers.submit(requests)

    @property
    def _tries_suspect(self) -> bool:
        _, chunk = next(iter(self._in_flight.values()))  # If a suspect chunk is in flight, it is the only one.
        return chunk.is_suspect

    def _redo(self, death: Death) -> None:
        """Queue all unfinished batches again, in different buffers.

        Each chunk that a dead process was making may be at fault. Such a chunk is made again alone: if it kills another
        process, it is at fault.
        """
        self._tally.num_worker_restarts += death.num_processes
        self._buffers.retire()
        self._num_failed_starts = 0 if death.was_ready else self._num_failed_starts + 1
        if self._num_failed_starts == MAX_DEATHS:
            raise WorkerError(f"worker processes cannot start ({death.cause}): standard error may show the reason")
        is_fatal = False
        for batch, chunk in [self._in_flight[i] for i in death.in_flight if i in self._in_flight]:
            chunk.is_suspect = True
            chunk.num_deaths += death.was_ready and len(death.in_flight) == 1
            if chunk.num_deaths == MAX_DEATHS:
                keys = [self._source.dataset.describe(index)[0] for index in chunk.plan.indices.tolist()]
                is_fatal = True
                batch.error = WorkerError(
                    f"{MAX_DEATHS} worker processes died while processing the same samples. The last one: "
                    f"{death.cause}. Memory may have run out (use fewer workers or smaller images), or one of these "
                    f"samples crashes the decoder: {', '.join(keys)}"
                )
        entries = []
        for batch in self.clear():
            if batch.buffer is not None:
                self._buffers.drop([batch.buffer])
                batch.buffer = self._buffers.take() if batch.error is None else None
            if batch.error is None:
                for chunk in batch.chunks:
                    if len(chunk.plan):
                        chunk.columns = None  # Finished columns are in the old buffer.
                        entries.append((batch, chunk))
        self._pending.extend(sorted(entries, key=lambda entry: not entry[1].is_suspect))
        self._submit()
        if not is_fatal:  # Otherwise, an error reports the death.
            it, its = ("it was", "its") if death.num_processes == 1 else ("they were", "their")
            said = f"{death.cause}; {it} restarted; {its} unfinished batches are being redone"
            warnings.warn(said, RuntimeWarning, stacklevel=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeHandler:
    """The handler of chunks' outcomes.

    Attributes:
        source: The source of the samples.
        bad_samples: The policy for unreadable samples; None raises their errors.
        tally: Adds up times, and counts replaced and skipped samples.
    """

    source: SampleSource
    bad_samples: BadSamples | None
    tally: Tally

    def apply(self, batch: Batch, chunk: BatchChunk, outcome: Outcome) -> bool:
        """Apply an outcome to its batch; return whether to make the chunk again without a bad sample."""
        match outcome:
            case Made():
                chunk.columns, chunk.num_images_by_decoder = outcome.columns, outcome.num_images_by_decoder
                chunk.batch = outcome.batch
                self.tally.count_times(outcome.times)
                return False
            case Failed():
                error = outcome.failure.restore()
                if self.bad_samples is not None and not batch.is_probe:
                    found = self.bad_samples.find(error)
                    if found is not None:
                        return self._replace_or_skip(batch, chunk, found, self.bad_samples)
                batch.error = error
                return False

    def _replace_or_skip(self, batch: Batch, chunk: BatchChunk, error: SampleError, bad_samples: BadSamples) -> bool:
        row, plan = error.row, chunk.plan
        index, rng_key, num_tries = int(plan.indices[row]), plan.replacement_rng_keys[row], chunk.num_tries[row]
        source = self.source
        try:
            other = bad_samples.decide(
                error, index, rng_key, num_tries, epoch=source.epoch, describe=source.dataset.describe
            )
        except SampleError as final:
            batch.error = final
            return False
        if other is None:
            self.tally.num_skipped += 1
            chunk.skipped.append(error.key or str(index))
            chunk.plan = plan.take(np.delete(np.arange(len(plan)), row))
        else:
            self.tally.num_replaced += 1
            chunk.num_tries[row] += 1
            plan.indices[row] = other
        if len(chunk.plan):
            return True
        chunk.columns, chunk.num_images_by_decoder = [], Counter()
        return False


def finish_batch(
    source: SampleSource, batch: Batch, views: Views, tally: Tally, began: float, settings: BatchSettings
) -> Any:
    """Return the user's batch and count it, or return a Failure instead.

    Args:
        source: The source of the samples.
        batch: A batch that is finished or has failed.
        views: The columns in its buffer.
        tally: The counts of the epoch.
        began: The time of the user's request, according to ``time.perf_counter``.
        settings: The settings of all batches of the loader.
    """
    if batch.error is not None:
        return Failure(error=batch.error)
    try:
        if settings.collation is not None:
            assembled = _unpack_collated(batch, views)
            if settings.pins:
                assembled = pin_memory(assembled)  # torch's function can pin instances of user classes.
        else:
            assembled = assemble_batch(source, batch, views)
            if settings.pins:
                assembled = map_tensors(assembled, torch.Tensor.pin_memory, pin_movable)
    except Exception as error:
        let_through(error)
        return Failure(error=error)
    tally.count_batch(batch.num_samples, batch.num_images_by_decoder, time.perf_counter() - began)
    return assembled


def assemble_batch(source: SampleSource, batch: Batch, views: Views) -> Any:
    """Return the user's batch.

    Args:
        source: The source of the samples.
        batch: A finished batch.
        views: The columns in its buffer.

    Returns:
        A list of columns, or a single column, of the types that torch returns. Images are uint8 [N, 3, H, W] in
        channels_last memory, or a list of such tensors for a MultiCrop; or TiledImages, if a device decodes them.

    Raises:
        SampleError: If all samples were skipped.
        ValueError: If images differ in size.
    """
    decoder, chunks = source.decoder, _drop_empty_chunks(batch)
    rows = [slice(chunk.row, chunk.row + len(chunk.plan)) for chunk in chunks]  # Skipped samples leave gaps.
    is_marked = chunks[0].plan.valid is not None
    is_bare = isinstance(decoder.fields, str) and not is_marked
    columns = list[Any]()
    for index, name in enumerate(source.column_names):
        pieces, view = [(chunk.columns or [])[index] for chunk in chunks], views.get(index)
        if any(isinstance(piece, TiledChunk) for piece in pieces):
            columns.append(_join_tiles(source, chunks, pieces, rows, view, name))
        else:
            columns.append(_join(name, rows, pieces, view, is_bare=is_bare))
    if not source.takes_tiles:
        columns = decoder.join_crops(columns, list)
    if is_marked:
        columns.append(torch.from_numpy(np.concatenate([chunk.plan.valid for chunk in chunks])))
    return columns[0] if is_bare else columns


def _drop_empty_chunks(batch: Batch) -> list[BatchChunk]:
    chunks = [chunk for chunk in batch.chunks if len(chunk.plan)]
    if not chunks:
        raise all_skipped([key for chunk in batch.chunks for key in chunk.skipped])
    return chunks


def _unpack_collated(batch: Batch, views: Views) -> Any:
    (chunk,) = _drop_empty_chunks(batch)
    if not isinstance(chunk.batch, Pickle):
        return chunk.batch
    pieces = [
        # Index the tensor, not the array: numpy's slices refer to the buffer's memory, not the array the pool watches.
        torch.from_numpy(views[index])[0] if column is None else torch.from_numpy(column[0])
        for index, column in enumerate(chunk.columns or [])
    ]
    return put_memory_back(chunk.batch, pieces)


def _join_tiles(
    source: SampleSource,
    chunks: Sequence[BatchChunk],
    pieces: Sequence[Column],
    rows: Sequence[slice],
    view: NDArray[Any] | None,
    name: str,
) -> TiledImages:
    tiles = [piece for piece in pieces if isinstance(piece, TiledChunk)]
    # Images that differ in size within a chunk are not collected.
    others = [value.shape[:2] for piece in pieces if isinstance(piece, list) for value in piece]
    for sizes in zip(*(each.sizes for each in tiles), strict=True):
        check_equal_sizes([*sizes, *others])
    shared = None if view is None else torch.from_numpy(view)
    memory = [_find_tiles(each, shared, chunk_rows) for each, chunk_rows in zip(tiles, rows, strict=True)]
    redo = partial(_redo_image, source, chunks, name)
    return TiledImages.join(tiles, memory, redo, is_multiple=source.decoder.num_crops is not None)


def _redo_image(source: SampleSource, chunks: Sequence[BatchChunk], name: str, index: int) -> list[Pixels]:
    """Decode an image of a batch in this process. Return its crops, or raise a SampleError that names the image."""
    stops = np.cumsum([len(chunk.plan) for chunk in chunks])
    number = int(np.searchsorted(stops, index, side="right"))
    row = index - int(stops[number])  # Counted from the end of the chunk.
    plan = chunks[number].plan.take(slice(row, row + 1 or None))
    on_cpu = replace(source, takes_tiles=False)
    try:
        request = BatchChunk(plan=plan, row=0).request(0, on_cpu, None, Tally(num_workers=0))
        made = ChunkBuilder(source.dataset.dataset.reader, source.decoder).make(request, {})
    except SampleError as error:
        raise error.at_row(index) from None
    columns = zip(on_cpu.column_names, made.columns, strict=True)
    return [column[0] for each, column in columns if each == name and isinstance(column, list)]


def _join(
    name: str, rows: Sequence[slice], pieces: Sequence[Column], view: NDArray[Any] | None, *, is_bare: bool
) -> Any:
    if all(piece is None for piece in pieces):
        assert view is not None, "a piece that is None is in the buffer"
        return _as_images(name, _cut(view, rows))
    if all(isinstance(piece, np.ndarray) for piece in pieces):
        return torch.from_numpy(np.concatenate(pieces))  # type: ignore[arg-type]  # all are arrays
    values: list[Any] = []
    for piece, chunk_rows in zip(pieces, rows, strict=True):
        if piece is None:
            assert view is not None, "a piece that is None is in the buffer"
            values += _as_images(name, torch.from_numpy(view)[chunk_rows])
        else:
            values += piece
    if holds_images(name):
        values = list(map(as_tensor, values))
    return collate_column(values if is_bare else tuple(values))  # A tuple, as when torch transposes samples.


def _find_tiles(chunk: TiledChunk, shared: torch.Tensor | None, rows: slice) -> torch.Tensor:
    if chunk.memory is not None:
        return torch.from_numpy(chunk.memory)
    assert shared is not None, "tiles without memory are in the buffer"
    return shared[rows].flatten()


def _cut(view: NDArray[Any], rows: Sequence[slice]) -> torch.Tensor:
    """Return some rows, without copying them if they are adjacent."""
    is_gapless = all(previous.stop == following.start for previous, following in pairwise(rows))
    if not is_gapless:
        return torch.from_numpy(np.concatenate([view[chunk_rows] for chunk_rows in rows]))
    # Slice the tensor, not the array: numpy's slices refer to the buffer's memory, not the array the pool watches.
    return torch.from_numpy(view)[rows[0].start : rows[-1].stop]


def _as_images(name: str, column: torch.Tensor) -> torch.Tensor:
    """Return images [N, height, width, 3] as [N, 3, height, width], and any other column unchanged."""
    item = column.numpy()[:0]
    return column.permute(0, 3, 1, 2) if is_image(name, item.dtype, item.shape[1:]) else column
