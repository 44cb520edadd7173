"""A worker process of a pack: it receives jobs, and sends reports and packed shards, until the connection ends."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from shardio.errors import PackError
from shardio.images import ignore_pillows_warnings
from shardio.packing.shard_job import ShardJob, pack_shard

REPORT_EVERY_S = 0.1
"""Seconds between reports. A report also shows that the parent process still exists."""

ALIVE_EVERY_S = 2.0
"""Seconds between empty reports, which show that this process is not suspended."""


class _Sender:
    """Sends messages. Threads share it.

    Args:
        connection: The connection to the parent process.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: tuple[object, ...]) -> None:
        """Send a message."""
        with self._lock:
            self._connection.send(message)

    def show_life(self) -> None:
        """Send empty reports until the connection ends."""
        with suppress(OSError):
            while True:
                self.send(("report", 0, 0))
                time.sleep(ALIVE_EVERY_S)  # Only time passes between two signs of life.


class _Reporter:
    """Adds up reports, and sends the sum now and then."""

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender
        self._num_samples = self._num_bytes = 0
        self._last = time.monotonic()

    def add(self, num_samples: int, num_bytes: int) -> None:
        self._num_samples += num_samples
        self._num_bytes += num_bytes
        if time.monotonic() - self._last >= REPORT_EVERY_S:
            self.send()

    def send(self) -> None:
        """Send the sum; end this process if the parent process has ended or has closed the connection."""
        try:
            self._sender.send(("report", self._num_samples, self._num_bytes))
        except OSError:
            sys.exit()
        self._num_samples = self._num_bytes = 0
        self._last = time.monotonic()


def main() -> None:
    """Pack shards until the connection ends."""
    ignore_pillows_warnings()
    with Connection(int(sys.argv[1])) as connection, suppress(EOFError, ConnectionError):
        sender = _Sender(connection)
        threading.Thread(target=sender.show_life, daemon=True).start()
        while True:
            sender.send(_pack(connection.recv(), sender))


def _pack(job: ShardJob, sender: _Sender) -> tuple[object, ...]:
    """Pack a shard; return the answer to send."""
    reporter = _Reporter(sender)
    try:
        shard = pack_shard(job, reporter.add)
    except Exception as error:  # The parent process raises it.
        return "error", _picklable(error)
    reporter.send()
    return "packed", job.number, shard


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))  # our own bytes
    except Exception:  # Whatever prevents it, the text can be sent.
        return PackError(f"{type(error).__name__}: {error}")
    return error
