"""The hosts, as the training process has them: started, given chunks, listened to, replaced when they die."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardio.loader.memory import Layout
from shardio.loader.messages import Cancel, Chunk, Forget, NewSlot, Outcome, Ping, Plan, Pong
from shardio.loader.wire import make_pair, receive, send

MAX_LONE_HOSTS = 4
"""Up to so many threads have a process each. Beside each other in one they wait for the GIL, a tenth of the time."""

THREADS_PER_HOST = 2
"""Threads of a process where there are more: each process takes 25 MB of its own."""

PATIENCE_S = 5.0
"""How long all hosts may be silent before they are asked for a sign of life, and how long one may take to answer."""

STARTUP_PATIENCE_S = 120.0
"""How long a host may take to start: a disk that is cold or far away is no reason to give it up."""

CLOSE_S = 5.0
"""How long a host may take to end before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A host died, and was replaced. All chunks that were submitted before and not answered must be submitted again.

    Attributes:
        cause: How, for people.
        at_work: The serials of the chunks that it was making.
    """

    cause: str
    at_work: tuple[int, ...]


class _Host:
    """One host: its process, this end of the socket pair, and the serials of what it has not answered."""

    def __init__(self, plan: Plan) -> None:
        self.num_threads = plan.num_threads
        self.waiting: dict[int, None] = {}  # In the order in which they were given to it.
        self.is_ready = False
        self.asked_at: float | None = None
        self.end, theirs = make_pair()
        try:
            self.process = _start_process(theirs.fileno())
        except BaseException:
            self.end.close()
            raise
        finally:
            theirs.close()
        self.end.setblocking(False)
        send(self.end, plan)

    @property
    def load(self) -> float:
        return len(self.waiting) / self.num_threads

    def wait(self) -> None:
        """Wait until it has ended by itself, after its end was closed; not for ever."""
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> str:
        """Kill it if it lives, wait until nobody writes to its slots any more, and say how it ended."""
        self.process.kill()
        code = self.process.wait()
        self.end.close()
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"host process {self.process.pid} {ended}"


class HostPool:
    """The hosts of one loader. They end when it is closed, or when nobody refers to it any more.

    Args:
        plan: What they are to do; ``num_threads`` is that of all of them together.
    """

    def __init__(self, plan: Plan) -> None:
        _watch_forks()
        self._plan = plan
        self._hosts: list[_Host] = []
        self._deaths: list[Death] = []
        self._finalizer = weakref.finalize(self, _close_all, self._hosts, os.getpid())
        _pools.add(self)
        for num_threads in divide_threads(plan.num_threads):
            self._hosts.append(_Host(replace(plan, num_threads=num_threads)))

    @property
    def num_threads(self) -> int:
        """How many chunks are made at a time."""
        return self._plan.num_threads

    def announce(self, slot_id: int, layout: Layout, descriptor: int) -> None:
        """Tell all hosts of a new slot."""
        self._tell_all(NewSlot(slot_id=slot_id, layout=layout), [descriptor])

    def forget(self, slot_ids: tuple[int, ...]) -> None:
        """Tell all hosts of slots that no further chunk will name."""
        self._tell_all(Forget(slot_ids=slot_ids))

    def submit(self, chunks: Iterable[Chunk]) -> None:
        """Have chunks made, each by the host that has the least to do; none if there is a death to be received."""
        if self._deaths:
            return
        shares: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            number = min(range(len(self._hosts)), key=lambda number: self._hosts[number].load)
            self._hosts[number].waiting[chunk.serial] = None
            shares.setdefault(number, []).append(chunk)
        for number, share in shares.items():
            if not self._deaths:
                self._tell(self._hosts[number], share)

    def cancel(self) -> None:
        """Want nothing any more of what was submitted."""
        self._tell_all(Cancel())
        for host in self._hosts:
            host.waiting.clear()

    def receive(self, timeout_s: float | None) -> list[Outcome | Death]:
        """Wait for news; return none after ``timeout_s``, or after some seconds in which hosts were looked after."""
        poll = select.poll()
        hosts = {host.end.fileno(): host for host in self._hosts}
        for descriptor in hosts:
            poll.register(descriptor, select.POLLIN)
        wait_s = 0.0 if self._deaths else PATIENCE_S if timeout_s is None else min(timeout_s, PATIENCE_S)
        ready = poll.poll(1000 * wait_s)
        news: list[Outcome | Death] = []
        for descriptor, _ in ready:
            news += self._listen(hosts[descriptor])
        if not ready and wait_s:
            self._look_after()
        news += self._deaths
        self._deaths = []
        return news

    def close(self) -> None:
        """End all hosts."""
        self._finalizer()

    def leave_to_parent(self) -> None:
        """In a forked child: keep no end open, or the hosts would outlive the parent."""
        for host in self._hosts:
            host.end.close()
            host.process.returncode = 0  # It is not this process's child: nothing is to be waited for.

    def _listen(self, host: _Host) -> list[Outcome]:
        news: list[Outcome] = []
        while True:
            try:
                received = receive(host.end)
            except BlockingIOError:
                return news
            if received is None:
                self._replace(host, "")
                return news
            message, _ = received
            host.asked_at, host.is_ready = None, True
            if not isinstance(message, Pong) and message.serial in host.waiting:  # Else nobody wants it any more.
                del host.waiting[message.serial]
                news.append(message)

    def _look_after(self) -> None:
        """Ask hosts that owe something for a sign of life, and give up those that were asked and gave none."""
        now = time.monotonic()
        for host in list(self._hosts):
            patience_s = PATIENCE_S if host.is_ready else STARTUP_PATIENCE_S
            if not host.waiting:
                continue
            if host.asked_at is None:
                host.asked_at = now
                self._tell(host, Ping())
            elif now - host.asked_at >= patience_s:
                self._replace(host, f"it gave no sign of life for {patience_s:.0f} s and was given up: ")

    def _tell_all(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        for host in list(self._hosts):
            self._tell(host, message, descriptors)

    def _tell(self, host: _Host, message: Any, descriptors: Sequence[int] = ()) -> None:
        try:
            send(host.end, message, descriptors)
        except BlockingIOError:
            self._replace(host, "it did not read what it was told and was given up: ")
        except (BrokenPipeError, ConnectionResetError):
            self._replace(host, "")

    def _replace(self, host: _Host, why: str) -> None:
        at_work = tuple(list(host.waiting)[: host.num_threads])
        cause = why + host.kill()
        self._hosts[self._hosts.index(host)] = _Host(replace(self._plan, num_threads=host.num_threads))
        self._deaths.append(Death(cause=cause, at_work=at_work))
        self.cancel()


def divide_threads(num_threads: int) -> list[int]:
    """Return how many threads each host has."""
    num_hosts = max(min(num_threads, MAX_LONE_HOSTS), -(-num_threads // THREADS_PER_HOST))
    return [num_threads // num_hosts + (number < num_threads % num_hosts) for number in range(num_hosts)]


def _start_process(descriptor: int) -> subprocess.Popen[bytes]:
    package = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package), *filter(None, sys.path)]),
        "PYTHONSAFEPATH": "1",  # Files in the working directory must not stand in for modules.
        "OPENBLAS_NUM_THREADS": "1",  # numpy would start a thread for each core, and use none of them.
    }
    return subprocess.Popen(
        [sys.executable, "-m", "shardio.loader.host", str(descriptor), str(os.getpid())],
        pass_fds=[descriptor],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the training process, which closes its hosts.
    )


def _close_all(hosts: list[_Host], process_id: int) -> None:
    if os.getpid() != process_id:
        return
    for host in hosts:
        host.end.close()
    for host in hosts:
        host.wait()
    hosts.clear()


_pools: weakref.WeakSet[HostPool] = weakref.WeakSet()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    for pool in list(_pools):
        pool.leave_to_parent()
