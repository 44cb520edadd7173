"""A host: a background process that makes chunks in some threads. It never imports torch, nor the user's script.

Started by :mod:`shardio.loader.hosts` with one end of a socket pair, over which all comes that it needs: first its
plan, then slots and chunks. It ends when the other end is closed, whatever it is doing.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import use_one_thread
from shardio.loader.maker import ChunkMaker, describe_failure
from shardio.loader.memory import Layout, map_memory
from shardio.loader.messages import Cancel, Chunk, Forget, NewSlot, Outcome, Ping, Plan, Pong, Unreadable
from shardio.loader.wire import receive, send

LOOK_AROUND_S = 1.0
"""How often a host looks whether its parent still lives: somebody else may hold the other end open."""


class Host:
    """The host's state: its slots, and the chunks that wait."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._slots: dict[int, tuple[Layout, NDArray[np.uint8]]] = {}
        self._chunks: SimpleQueue[Chunk] = SimpleQueue()
        self._newest = self._cancelled = -1
        self._epoch_began = 0.0

    def run(self, parent: int) -> None:
        """Serve until the other end is gone, or the process that has the number ``parent``."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        send(self._end, Pong())
        while True:
            if not poll.poll(1000 * LOOK_AROUND_S):
                if os.getppid() != parent:
                    return
                continue
            if (received := receive(self._end)) is None:
                return
            message, descriptors = received
            self._handle(message, descriptors)

    def _handle(self, message: Any, descriptors: list[int]) -> None:
        match message:
            case Plan():
                self._reader = message.reader
                maker = ChunkMaker(message.reader, message.decoder)
                for _ in range(message.num_threads):
                    threading.Thread(target=self._make_chunks, args=(maker,), daemon=True).start()
            case NewSlot():
                self._slots[message.slot_id] = message.layout, map_memory(descriptors[0], message.layout.num_bytes)
                os.close(descriptors[0])
            case Forget():
                for slot_id in message.slot_ids:
                    self._slots.pop(slot_id, None)
            case list():
                for chunk in message:
                    if chunk.epoch_began > self._epoch_began:
                        self._epoch_began = chunk.epoch_began
                        self._reader.close()  # Files that changed between epochs are noticed when they are opened.
                    self._newest = chunk.serial
                    self._chunks.put(chunk)
            case Cancel():
                self._cancelled = self._newest
            case Ping():
                # This thread must never wait for the training process, which may be waiting for it. And if there is no
                # room, there are signs of life enough to be read.
                with suppress(BlockingIOError):
                    send(self._end, Pong(), flags=socket.MSG_DONTWAIT)

    def _make_chunks(self, maker: ChunkMaker) -> None:
        try:
            self._make_chunks_for_ever(maker)
        except BaseException:  # A host that answers, and has a thread less, would be waited for in vain.
            traceback.print_exc()
            os._exit(1)

    def _make_chunks_for_ever(self, maker: ChunkMaker) -> None:
        while True:
            began = time.perf_counter()
            chunk = self._chunks.get()
            # A slot may be forgotten at any time, but not before its chunks are cancelled.
            slot = None if chunk.slot_id is None else self._slots.get(chunk.slot_id)
            if chunk.serial > self._cancelled:
                wait_s = time.perf_counter() - max(began, chunk.epoch_began)
                self._report(self._make(maker, chunk, slot, wait_s))
            del slot  # Or it would stay mapped until the next chunk comes.

    def _make(
        self, maker: ChunkMaker, chunk: Chunk, slot: tuple[Layout, NDArray[np.uint8]] | None, wait_s: float
    ) -> Outcome:
        try:
            if slot is None:
                return maker.make(chunk, {}, wait_s)
            layout, memory = slot
            rows = {place: column[chunk.rows] for place, column in layout.views(memory).items()}
            return maker.make(chunk, rows, wait_s)
        except BaseException as error:  # Whatever it is, the training process raises it.
            return describe_failure(chunk.serial, error)

    def _report(self, outcome: Outcome) -> None:
        if isinstance(outcome, Unreadable):  # Errors that are sent lose their causes.
            outcome = replace(outcome, traceback="".join(traceback.format_exception(outcome.error)))
        try:
            send(self._end, outcome)
        except ConnectionError:
            os._exit(0)  # The other end is gone.
        except Exception as error:  # It cannot be pickled, or there is no memory for it.
            send(self._end, describe_failure(outcome.serial, error))


def main() -> None:
    """Run a host over the descriptor, and for the process, that the command line names."""
    use_one_thread()
    with suppress(ConnectionError):  # The other end was closed while something was said to it.
        descriptor, parent = map(int, sys.argv[1:])
        Host(socket.socket(fileno=descriptor)).run(parent)
    # Threads that are decoding, or waiting for a slow disk, are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
