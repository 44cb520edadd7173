"""The code of fork servers, and of the worker processes forked from them.

A fork server imports the modules that worker processes need, and reads their setup once. As a result, a fork takes 1 ms
(the imports take 150 ms), and the worker processes share the memory of the modules and the setup. The fork server has
one thread, so its forks are safe.

A worker process receives buffers and chunks through one end of a socket pair. The process imports torch and user code
only if a user's transform needs them, and never runs the user's script.

Fork servers and worker processes end as soon as the other end of their socket pair is closed. Before a fork server
ends, it ends all its worker processes.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shardio.decoding import FieldDecoder, PlannedFields, copy_arrays, extension_of, refuse_wide
from shardio.errors import SampleError, move_mark
from shardio.images import DecoderName
from shardio.kernel import find_kernel
from shardio.loader.buffers import Column, Layout, MappedBuffers, as_stored
from shardio.loader.wire import (
    AllWorkersEnded,
    Cancel,
    Chunk,
    EndAllWorkers,
    EndWorker,
    Failed,
    Failure,
    Made,
    Outcome,
    Ping,
    Pong,
    StageTimes,
    StartWorker,
    WorkerEnded,
    WorkerMemory,
    WorkerSetup,
    describe_failure,
    load_setup,
    receive_all,
    send,
)
from shardio.process import ignore_pillows_warnings
from shardio.shards import LABEL_FIELD

if TYPE_CHECKING:
    from shardio.loader.batches import Collation
    from shardio.reading import Reader, StoredSamples

Rows = Mapping[int, NDArray[Any]]
"""The destination of a chunk's n values, by column: [n, *shape of an item]."""

_MappedBuffer = tuple[Layout, NDArray[np.uint8]]

_MakeChunk = Callable[[Chunk, _MappedBuffer | None, float], Outcome]

CHECK_EXIT_S = 0.01
"""The interval at which the fork server checks whether a worker process has exited, in seconds."""


def main() -> None:
    """Run a fork server. The command line holds the descriptor of its socket and the ID of the parent process."""
    descriptor, parent_id = map(int, sys.argv[1:])
    if isinstance(sys.stdout, TextIOWrapper):  # sys.stdout is None if standard output is closed.
        sys.stdout.reconfigure(line_buffering=True)  # Worker processes are killed, so they cannot flush the output.
    server = ForkServerProcess(socket.socket(fileno=descriptor))
    try:
        with suppress(ConnectionError, StopIteration):  # The other end was closed, perhaps before the first message.
            server.run(parent_id)
    finally:
        server.end_all()
    os._exit(0)  # Shutting the interpreter down takes longer than several forks.


class ForkServerProcess:
    """The state of a fork server.

    Args:
        end: The fork server's end of the socket pair.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._process_ids: dict[int, int] = {}  # Keyed by worker ID; an entry is removed when its process has ended.

    def run(self, parent_id: int) -> None:
        """Start and end worker processes until the other end is closed, or the process ``parent_id`` has ended."""
        setup: WorkerSetup | Failure | None = None
        for message, descriptors in receive_all(self._end, parent_id):
            match message:
                case bytes() | bytearray():
                    setup = None  # Free the previous setup first.
                    setup = _load(message)
                case StartWorker():
                    assert setup is not None, "the setup is the first message"
                    with socket.socket(fileno=descriptors[0]) as end:
                        self._process_ids[message.worker_id] = self._fork(end, setup, message.num_threads)
                case EndWorker():
                    process_id = self._process_ids.pop(message.worker_id)
                    code = _end_process(process_id, message.patience_s)
                    send(self._end, WorkerEnded(process_id=process_id, exit_code=code))
                case EndAllWorkers():
                    self.end_all()
                    if isinstance(setup, Failure):
                        return  # The next pool gets a new process, which imports the user's modules again.
                    send(self._end, AllWorkersEnded())

    def end_all(self) -> None:
        """Kill all worker processes."""
        for process_id in self._process_ids.values():
            os.kill(process_id, signal.SIGKILL)
        for process_id in self._process_ids.values():
            os.waitpid(process_id, 0)
        self._process_ids.clear()

    def _fork(self, end: socket.socket, setup: WorkerSetup | Failure, num_threads: int) -> int:
        server_id, process_id = os.getpid(), os.fork()
        if process_id == 0:
            self._end.close()  # Only the fork server may keep this end open.
            run_worker_process(end, setup, num_threads, server_id)
        return process_id


def _load(content: bytes | bytearray) -> WorkerSetup | Failure:
    """Return the setup, and prepare the memory that worker processes share."""
    if gc.get_freeze_count():  # An earlier setup may have left reference cycles.
        gc.unfreeze()
        gc.collect()
    gc.disable()  # A garbage collection would take 5 ms, and imports leave few reference cycles.
    setup = load_setup(content)
    if isinstance(setup, WorkerSetup) and setup.decoder.image_names:
        find_kernel()  # Load the kernel once for all worker processes.
    # The garbage collector would write to all objects, and pages that are written to are no longer shared.
    gc.freeze()
    gc.enable()
    return setup


def _end_process(process_id: int, patience_s: float) -> int:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process_id, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(CHECK_EXIT_S)  # waitpid has no timeout.
    os.kill(process_id, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def run_worker_process(end: socket.socket, setup: WorkerSetup | Failure, num_threads: int, parent_id: int) -> NoReturn:
    """Turn this newly forked process into a worker process; see :class:`WorkerProcess`."""
    try:
        with suppress(ConnectionError):  # The other end was closed during a message.
            WorkerProcess(end, setup).run(num_threads, parent_id)
    except BaseException:  # This process must not return to the fork server's code.
        traceback.print_exc()
        os._exit(1)
    # Do not wait for threads that are decoding, or reading from a slow disk.
    os._exit(0)


class WorkerProcess:
    """The state of a worker process: its buffers, and the pending chunks.

    Args:
        end: The worker process's end of the socket pair.
        setup: The reader and decoder of samples, or the failure to load them, which makes all chunks fail.
    """

    def __init__(self, end: socket.socket, setup: WorkerSetup | Failure) -> None:
        self._end, self._setup = end, setup
        self._buffers = MappedBuffers()
        self._chunks: SimpleQueue[Chunk] = SimpleQueue()
        self._newest = self._cancelled = -1
        self._epoch_began = 0.0
        self._reported_bytes = 0

    def run(self, num_threads: int, parent_id: int) -> None:
        """Make chunks in threads until the other end is closed or the parent process has ended.

        Args:
            num_threads: The number of threads.
            parent_id: The parent's process ID.
        """
        send(self._end, Pong())
        ignore_pillows_warnings()
        setup = self._setup
        if isinstance(setup, Failure):
            make = partial(_fail, setup)
        else:
            make = partial(_make, ChunkBuilder(setup.reader, setup.decoder, setup.collation))
            setup.decoder.diverge()
            if setup.runs_user_code and (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(1)  # torch's own workers also use one thread.
        for _ in range(num_threads):
            threading.Thread(target=self._run_thread, args=(make,), daemon=True).start()
        for message, descriptors in receive_all(self._end, parent_id):
            self._handle(message, descriptors)

    def _handle(self, message: Any, descriptors: list[int]) -> None:
        match message:
            case list():
                for chunk in message:
                    if chunk.epoch_began > self._epoch_began:
                        self._epoch_began = chunk.epoch_began
                        if isinstance(self._setup, WorkerSetup):
                            self._setup.reader.close()  # Reopening files reveals changes between epochs.
                    self._newest = chunk.chunk_id
                    self._chunks.put(chunk)
            case Cancel():
                self._cancelled = self._newest
            case Ping():
                # This thread must never wait for the training process, which may be waiting for it. If there is no
                # room for an answer, the unread messages already show that this process is alive.
                with suppress(BlockingIOError):
                    send(self._end, Pong(), flags=socket.MSG_DONTWAIT)
            case _:
                self._buffers.update(message, descriptors)

    def _run_thread(self, make: _MakeChunk) -> None:
        try:
            self._make_chunks(make)
        except BaseException:  # Otherwise, the process would still answer, but never finish this thread's chunks.
            traceback.print_exc()
            os._exit(1)

    def _make_chunks(self, make: _MakeChunk) -> None:
        while True:
            began = time.perf_counter()
            chunk = self._chunks.get()
            # A buffer may be dropped at any time after its chunks have been canceled.
            buffer = None if chunk.buffer_id is None else self._buffers.get(chunk.buffer_id)
            if chunk.chunk_id > self._cancelled:
                self._report_memory()
                idle_s = time.perf_counter() - max(began, chunk.epoch_began)
                self._report(make(chunk, buffer, idle_s))
            del buffer  # Otherwise, the buffer would stay mapped until the next chunk arrives.

    def _report_memory(self) -> None:
        # Called between two chunks.
        num_bytes = read_private_bytes()
        if abs(num_bytes - self._reported_bytes) > self._reported_bytes // 16:
            self._reported_bytes = num_bytes
            with suppress(ConnectionError):  # The other end is closed; the next report detects this.
                send(self._end, WorkerMemory(num_bytes=num_bytes))

    def _report(self, outcome: Outcome) -> None:
        try:
            send(self._end, outcome)
        except ConnectionError:
            os._exit(0)  # The other end is closed.
        except Exception as error:  # The outcome cannot be pickled, or there is no memory for it.
            send(self._end, Failed(chunk_id=outcome.chunk_id, failure=describe_failure(error)))


def _make(builder: ChunkBuilder, chunk: Chunk, buffer: _MappedBuffer | None, idle_s: float) -> Outcome:
    try:
        rows: Rows = {}
        if buffer is not None:
            layout, memory = buffer
            rows = {column_index: column[chunk.rows] for column_index, column in layout.views(memory).items()}
        made = builder.make(chunk, rows, idle_s)
        return pack(made, rows) if builder.collates else made
    except BaseException as error:  # The training process raises the error.
        return Failed(chunk_id=chunk.chunk_id, failure=describe_failure(error))


def _fail(failure: Failure, chunk: Chunk, buffer: _MappedBuffer | None, idle_s: float) -> Outcome:
    return Failed(chunk_id=chunk.chunk_id, failure=failure)


def read_private_bytes() -> int:
    """Return the anonymous memory of this process in bytes, including that of the fork server; 0 if it is unknown.

    Buffers and files are not counted.
    """
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  # A Path would take three times as long.
            pages = file.read().split()
    except OSError:  # /proc is not mounted.
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


class ChunkBuilder:
    """A builder of chunks. Threads can share this object.

    Args:
        reader: Reads samples.
        decoder: Decodes the samples.
        collation: Makes whole batches from samples; None if a batch consists of columns.
    """

    def __init__(self, reader: Reader, decoder: FieldDecoder, collation: Collation | None = None) -> None:
        self._reader = reader
        self._decoder = decoder
        self._collation = collation

    @property
    def collates(self) -> bool:
        """Whether the builder makes whole batches."""
        return self._collation is not None

    def make(self, chunk: Chunk, rows: Rows, idle_s: float = 0.0) -> Made:
        """Make a chunk.

        Args:
            chunk: The chunk.
            rows: The destinations of fixed-size columns. A column that does not fit is returned instead.
            idle_s: The time that the thread spent waiting for the chunk, in seconds.

        Raises:
            SampleError: If a sample cannot be read or decoded.
        """
        if self._collation is not None:
            return self._collate(self._collation, chunk, idle_s)
        decoder, columns, num_images_by_decoder = self._decoder, list[Column](), Counter[DecoderName]()
        began = time.perf_counter()
        stored = self._reader.read(chunk.samples, decoder.stored_fields, decoder.deferred_fields)
        read_s = time.perf_counter() - began
        calls = decoder.make_calls()
        before = time.perf_counter()
        planned = decoder.plan(stored, chunk.rng_keys, calls)
        transform_s = time.perf_counter() - before
        filled = self._fill_arrays(planned, stored, rows)
        others = decoder.decode_others(planned, stored, chunk.rng_keys, calls, filled)
        for name in decoder.names:
            if name in filled:
                columns.append(None)
                continue
            if (images := planned.images.get(name)) is None:
                refuse_wide(stored, name, others[name])  # The batch holds tensors.
                columns.append(_compact(name, others[name], rows.get(len(columns))))
                continue
            if chunk.takes_tiles and (collected := images.collect(_flatten(rows.get(len(columns))))) is not None:
                tiles, names = collected
                num_images_by_decoder.update(names)
                columns.append(tiles)
                continue
            places = [rows.get(len(columns) + crop) for crop in range(len(images.crops))]
            given = [each if images.fits(crop, each) else None for crop, each in enumerate(places)]
            rendered = images.render(given)
            num_images_by_decoder.update(rendered[0].decoder_names)  # Each image is counted once.
            columns += [
                _store(name, made.images, place) if destination is None else None
                for made, destination, place in zip(rendered, given, places, strict=True)
            ]
        if calls.elapsed_s:  # Planning has included decoding for the user's transforms.
            transform_s = calls.elapsed_s
        decode_s = time.perf_counter() - began - read_s - transform_s
        times = StageTimes(
            read_s=read_s,
            transform_s=transform_s,
            python_s=calls.elapsed_s,
            decode_s=decode_s,
            idle_s=idle_s,
            began=began,
            process_id=os.getpid(),
            thread_id=threading.get_native_id(),
        )
        return Made(chunk_id=chunk.chunk_id, columns=columns, times=times, num_images_by_decoder=num_images_by_decoder)

    def _fill_arrays(self, planned: PlannedFields, stored: StoredSamples, rows: Rows) -> set[str]:
        """Copy the arrays of npy files to the buffer if they need no other step. Return the names of their fields."""
        decoder, filled, column_index = self._decoder, set[str](), 0
        needed = {*decoder.decoders, *(each.name for each in planned.followers)}
        for name in decoder.names:
            images, destination = planned.images.get(name), rows.get(column_index)
            is_array = images is None and extension_of(name) == "npy" and name not in needed
            if is_array and destination is not None and copy_arrays(stored.columns[name], destination):
                filled.add(name)
            column_index += 1 if images is None else len(images.crops)
        return filled

    def _collate(self, collation: Collation, chunk: Chunk, idle_s: float) -> Made:
        decoder, samples, num_images_by_decoder = self._decoder, list[Any](), Counter[DecoderName]()
        began = time.perf_counter()
        read_s, calls = 0.0, decoder.make_calls()
        for start in range(0, len(chunk.rng_keys), decoder.chunk_size):
            rows = slice(start, start + decoder.chunk_size)
            before = time.perf_counter()
            try:
                stored = self._reader.read(chunk.samples[rows], decoder.stored_fields, decoder.deferred_fields)
                read_s += time.perf_counter() - before
                samples += collation.decode(decoder, stored, chunk.rng_keys[rows], calls)
            except SampleError as error:
                raise error.at_row(start + error.row) from error
            except Exception as error:  # User code may raise anything; the error is re-raised.
                move_mark(error, start)
                raise
            num_images_by_decoder.update(calls.decoder_names)
            calls.decoder_names = []
        batch, collate_s = collation.collate(samples, chunk.rng_keys, chunk.valid)
        python_s = calls.elapsed_s + collate_s
        decode_s = time.perf_counter() - began - read_s - python_s
        times = StageTimes(
            read_s=read_s,
            transform_s=python_s,
            python_s=python_s,
            decode_s=decode_s,
            idle_s=idle_s,
            began=began,
            process_id=os.getpid(),
            thread_id=threading.get_native_id(),
        )
        return Made(
            chunk_id=chunk.chunk_id, columns=[], batch=batch, times=times, num_images_by_decoder=num_images_by_decoder
        )


def pack(made: Made, rows: Rows) -> Made:
    """Pickle a collation's batch without its memory, to send the batch to another process.

    Args:
        made: The batch.
        rows: The destinations of its pieces of memory, each a one-row array. A piece that does not fit is sent instead.
    """
    from shardio.loader.pickles import take_memory_out  # This import loads torch, which the collation needs anyway.

    pickled, pieces = take_memory_out(made.batch)
    columns = [_store("", [piece], rows.get(index)) for index, piece in enumerate(pieces)]
    return replace(made, batch=pickled, columns=columns)


def _flatten(rows: NDArray[Any] | None) -> NDArray[np.uint8] | None:
    """Return the memory for tiles that :func:`shardio.loader.assembly.choose_layout` laid out, uint8 [bytes]."""
    return None if rows is None else rows.reshape(-1)


def _compact(name: str, values: list[Any], destination: NDArray[Any] | None) -> Column:
    """Return a column in the form in which it is sent: labels as int64 [n]; None for arrays copied to the buffer."""
    if name in ("label", LABEL_FIELD) and None not in values:
        return np.array(values, np.int64)
    return _store(name, values, destination)


def _store(name: str, values: list[Any], destination: NDArray[Any] | None) -> Column:
    """Copy values to their rows and return None, or return the values if they do not fit."""
    if destination is None:
        return values
    stored = [as_stored(name, value) for value in values]
    if any(each is None or (each.dtype, each.shape) != (destination.dtype, destination.shape[1:]) for each in stored):
        return values
    for row, value in zip(destination, stored, strict=True):
        row[...] = value
    return None
