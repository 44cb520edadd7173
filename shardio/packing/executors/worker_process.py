"""A worker process of a pack: it receives jobs, and sends reports and packed shards, until the connection ends."""

from __future__ import annotations

import pickle
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from shardio.errors import PackError
from shardio.images import ignore_pillows_warnings
from shardio.packing.shard_job import ShardJob, pack_shard

REPORT_EVERY_S = 0.1
"""Seconds between reports. A report also shows that the parent process still exists."""


class _Reporter:
    """Adds up reports, and sends the sum now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
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
            self._connection.send(("report", self._num_samples, self._num_bytes))
        except OSError:
            sys.exit()
        self._num_samples = self._num_bytes = 0
        self._last = time.monotonic()


def main() -> None:
    """Pack shards until the connection ends."""
    ignore_pillows_warnings()
    with Connection(int(sys.argv[1])) as connection, suppress(EOFError, ConnectionError):
        while True:
            connection.send(_pack(connection.recv(), connection))


def _pack(job: ShardJob, connection: Connection) -> tuple[object, ...]:
    """Pack a shard; return the answer to send."""
    reporter = _Reporter(connection)
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
