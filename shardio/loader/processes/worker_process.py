"""A worker process: a background process that makes chunks in decode threads.

It imports torch and people's code only if a transform of theirs needs that, and never runs their script.

It is forked by a fork server, and has one end of a socket pair, over which it receives slots and chunks. It ends as
soon as the other end is closed.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shardio.images import ignore_pillows_warnings
from shardio.loader.failures import Failure, describe_failure
from shardio.loader.processes.chunk_builder import ChunkBuilder, Rows, pack
from shardio.loader.processes.memory_watch import read_private_bytes
from shardio.loader.processes.messages import (
    Cancel,
    Chunk,
    Failed,
    ForgetSlots,
    NewSlot,
    Outcome,
    Ping,
    Pong,
    WorkerMemory,
    WorkerSetup,
)
from shardio.loader.processes.wire import receive_all, send
from shardio.loader.slots.memory import Layout, map_memory

_MappedSlot = tuple[Layout, NDArray[np.uint8]]
_MakeChunk = Callable[[Chunk, _MappedSlot | None, float], Outcome]


class WorkerProcess:
    """The state of a worker process: its slots, and the pending chunks.

    Args:
        end: The end of the socket pair.
        setup: Reads and decodes samples, or why that is impossible: all chunks fail then.
    """

    def __init__(self, end: socket.socket, setup: WorkerSetup | Failure) -> None:
        self._end, self._setup = end, setup
        self._slots: dict[int, _MappedSlot] = {}
        self._chunks: SimpleQueue[Chunk] = SimpleQueue()
        self._newest = self._cancelled = -1
        self._epoch_began = 0.0
        self._reported_bytes = 0

    def run(self, num_threads: int, parent_id: int) -> None:
        """Make chunks in ``num_threads`` until the other end is closed, or the process ``parent_id`` has ended."""
        send(self._end, Pong())
        ignore_pillows_warnings()
        setup = self._setup
        if isinstance(setup, Failure):
            make = partial(_fail, setup)
        else:
            make = partial(_make, ChunkBuilder(setup.reader, setup.decoder, setup.collation))
            setup.decoder.diverge()
            if setup.runs_user_code and (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(1)  # As torch's own workers do.
        for _ in range(num_threads):
            threading.Thread(target=self._run_thread, args=(make,), daemon=True).start()
        for message, descriptors in receive_all(self._end, parent_id):
            self._handle(message, descriptors)

    def _handle(self, message: Any, descriptors: list[int]) -> None:
        match message:
            case NewSlot():
                self._slots[message.slot_id] = message.layout, map_memory(descriptors[0], message.layout.num_bytes)
                os.close(descriptors[0])
            case ForgetSlots():
                for slot_id in message.slot_ids:
                    self._slots.pop(slot_id, None)
            case list():
                for chunk in message:
                    if chunk.epoch_began > self._epoch_began:
                        self._epoch_began = chunk.epoch_began
                        if isinstance(self._setup, WorkerSetup):
                            self._setup.reader.close()  # Opening files again notices those that changed between epochs.
                    self._newest = chunk.chunk_id
                    self._chunks.put(chunk)
            case Cancel():
                self._cancelled = self._newest
            case Ping():
                # This thread must never wait for the training process, which may be waiting for it. If there is no
                # room for an answer, the unread messages already show that this process is alive.
                with suppress(BlockingIOError):
                    send(self._end, Pong(), flags=socket.MSG_DONTWAIT)

    def _run_thread(self, make: _MakeChunk) -> None:
        try:
            self._make_chunks(make)
        except BaseException:  # Otherwise the process would still answer, but never finish this thread's chunks.
            traceback.print_exc()
            os._exit(1)

    def _make_chunks(self, make: _MakeChunk) -> None:
        while True:
            began = time.perf_counter()
            chunk = self._chunks.get()
            # A slot may be forgotten at any time, but not before its chunks are cancelled.
            slot = None if chunk.slot_id is None else self._slots.get(chunk.slot_id)
            if chunk.chunk_id > self._cancelled:
                self._report_memory()
                idle_s = time.perf_counter() - max(began, chunk.epoch_began)
                self._report(make(chunk, slot, idle_s))
            del slot  # Otherwise it would stay mapped until the next chunk arrives.

    def _report_memory(self) -> None:
        """Tell the training process how much memory this process takes between two chunks, if that has changed."""
        num_bytes = read_private_bytes()
        if abs(num_bytes - self._reported_bytes) > self._reported_bytes // 16:
            self._reported_bytes = num_bytes
            with suppress(ConnectionError):  # The other end is closed; the next report notices it.
                send(self._end, WorkerMemory(num_bytes=num_bytes))

    def _report(self, outcome: Outcome) -> None:
        try:
            send(self._end, outcome)
        except ConnectionError:
            os._exit(0)  # The other end is closed.
        except Exception as error:  # The outcome cannot be pickled, or there is no memory for it.
            send(self._end, Failed(chunk_id=outcome.chunk_id, failure=describe_failure(error)))


def _make(builder: ChunkBuilder, chunk: Chunk, slot: _MappedSlot | None, idle_s: float) -> Outcome:
    try:
        rows: Rows = {}
        if slot is not None:
            layout, memory = slot
            rows = {column_index: column[chunk.rows] for column_index, column in layout.views(memory).items()}
        made = builder.make(chunk, rows, idle_s)
        return pack(made, rows) if builder.collates else made
    except BaseException as error:  # The training process raises it.
        return Failed(chunk_id=chunk.chunk_id, failure=describe_failure(error))


def _fail(failure: Failure, chunk: Chunk, slot: _MappedSlot | None, idle_s: float) -> Outcome:
    return Failed(chunk_id=chunk.chunk_id, failure=failure)


def run_worker_process(end: socket.socket, setup: WorkerSetup | Failure, num_threads: int, parent_id: int) -> NoReturn:
    """Make this process, which was just forked, a worker process; see :class:`WorkerProcess`."""
    try:
        with suppress(ConnectionError):  # The other end was closed during a message.
            WorkerProcess(end, setup).run(num_threads, parent_id)
    except BaseException:  # It must not return to what the fork server was doing.
        traceback.print_exc()
        os._exit(1)
    # Do not wait for threads that are decoding, or reading from a slow disk.
    os._exit(0)
