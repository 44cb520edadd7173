"""The hosts, as the training process has them: started, given chunks, listened to, replaced when they die."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from shardio.loader.deaths import Death
from shardio.loader.memory import Layout
from shardio.loader.messages import Cancel, Chunk, Forget, NewSlot, Outcome, Ping, Plan, Pong
from shardio.loader.wire import make_pair, receive, send
from shardio.processors import count_processors

MAX_LONE_HOSTS = 4
"""Up to so many threads have a process each. Beside each other in one they wait for the GIL, a tenth of the time."""

THREADS_PER_HOST = 2
"""Threads of a process where there are more: each process takes 30 MB of its own."""

PATIENCE_S = 5.0
"""How long all hosts may be silent before they are asked for a sign of life, and how long one may take to answer."""

STARTUP_PATIENCE_S = 120.0
"""How long a host may take to start: a disk that is cold or far away is no reason to give it up."""

CLOSE_S = 5.0
"""How long hosts may take to end before they are killed."""

LAST_WORDS_S = 1.0
"""How long a host that closed its end by itself may take to end."""

_START = "import sys; sys.path[:] = eval(sys.argv.pop(1)); from shardio.loader.host import main; main()"
"""The program of a host: it finds modules where this process does, and not in the working directory."""


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
        except BaseException:  # Ctrl-C as well must not leave it open.
            self.end.close()
            raise
        finally:
            theirs.close()
        self.end.setblocking(False)
        with suppress(ConnectionError):  # It died already: whoever listens to it will notice.
            send(self.end, plan)

    @property
    def load(self) -> float:
        return len(self.waiting) / self.num_threads

    @property
    def patience_s(self) -> float:
        """How long it may give no sign of life."""
        return PATIENCE_S if self.is_ready else STARTUP_PATIENCE_S

    def tell(self, message: Any, descriptors: Sequence[int] = ()) -> bool:
        """Send it a message; return False if it reads nothing for too long.

        While its socket is full this waits. It is no deadlock that nobody reads meanwhile what the host has to say: the
        host's main thread does nothing but read, and never waits for room to write; its other threads may.
        """
        room = select.poll()
        room.register(self.end, select.POLLOUT)
        while True:
            with suppress(BlockingIOError):
                send(self.end, message, descriptors)
                return True
            if not room.poll(1000 * self.patience_s):
                return False

    def wait(self, deadline: float) -> None:
        """Wait until it has ended by itself, after its end was closed; not for ever."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self, *, is_ending: bool = False) -> str:
        """Kill it if it lives, wait until nobody writes to its slots any more, and say how it ended."""
        if is_ending:  # Its own exit code says more than that it was killed.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LAST_WORDS_S)
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
        self._dying: dict[_Host, str] = {}  # Those that cannot be talked to, and why they are given up.
        self._finalizer = weakref.finalize(self, _close_all, self._hosts, os.getpid())
        _pools[id(self)] = weakref.ref(self, partial(_pools.pop, id(self)))  # Also of pools that failed to start.
        for num_threads in divide_threads(plan.num_threads, count_processors()):
            self._hosts.append(_Host(replace(plan, num_threads=num_threads)))

    def announce(self, slot_id: int, layout: Layout, descriptor: int) -> None:
        """Tell all hosts of a new slot."""
        self._tell_all(NewSlot(slot_id=slot_id, layout=layout), [descriptor])

    def forget(self, slot_ids: tuple[int, ...]) -> None:
        """Tell all hosts of slots that no further chunk will name."""
        self._tell_all(Forget(slot_ids=slot_ids))

    def submit(self, chunks: Iterable[Chunk]) -> None:
        """Send each chunk to the host that has the least to do; none if there is a death to be received."""
        shares: dict[_Host, list[Chunk]] = {}
        for chunk in chunks:
            host = min(self._hosts, key=lambda host: host.load)
            host.waiting[chunk.serial] = None
            shares.setdefault(host, []).append(chunk)
        for host, share in shares.items():
            self._tell(host, share)

    def cancel(self) -> None:
        """Want nothing any more of what was submitted."""
        self._tell_all(Cancel())
        for host in self._hosts:
            host.waiting.clear()

    def receive(self, timeout_s: float | None) -> list[Outcome | Death]:
        """Wait for news; return none after ``timeout_s``, or after some seconds in which hosts were looked after."""
        news: list[Outcome | Death] = []
        if not self._dying:
            poll = select.poll()
            hosts = {host.end.fileno(): host for host in self._hosts}
            for descriptor in hosts:
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(1000 * (PATIENCE_S if timeout_s is None else min(timeout_s, PATIENCE_S)))
            for descriptor, _ in ready:
                news += self._listen(hosts[descriptor])
            if not ready:
                self._look_after()
        return [*news, *self._replace_dying()]

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
                self._dying[host] = ""
                return news
            message, _ = received
            host.asked_at, host.is_ready = None, True
            if not isinstance(message, Pong) and message.serial in host.waiting:  # Else nobody wants it any more.
                del host.waiting[message.serial]
                news.append(message)

    def _look_after(self) -> None:
        """Ask hosts that owe something for a sign of life, and give up those that were asked and gave none."""
        now = time.monotonic()
        for host in self._hosts:
            if not host.waiting:
                continue
            if host.asked_at is None:
                host.asked_at = now
                self._tell(host, Ping())
            elif now - host.asked_at >= host.patience_s:
                self._dying[host] = f"it gave no sign of life for {host.patience_s:.0f} s and was given up: "

    def _tell_all(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        for host in self._hosts:
            self._tell(host, message, descriptors)

    def _tell(self, host: _Host, message: Any, descriptors: Sequence[int] = ()) -> None:
        if host in self._dying:
            return
        try:
            if not host.tell(message, descriptors):
                self._dying[host] = f"it read nothing for {host.patience_s:.0f} s and was given up: "
        except ConnectionError:
            self._dying[host] = ""

    def _replace_dying(self) -> list[Death]:
        """Put others in the place of those that cannot be talked to; want nothing any more of what was submitted."""
        deaths: dict[_Host, Death] = {}
        while dying := {host: why for host, why in self._dying.items() if host not in deaths}:
            for host, why in dying.items():
                at_work = tuple(host.waiting)[: host.num_threads]
                deaths[host] = Death(cause=why + host.kill(is_ending=not why), at_work=at_work, was_ready=host.is_ready)
            self.cancel()  # By which more of them may turn out to be dead.
        for host in deaths:  # After that: new ones may die at once, too.
            plan = replace(self._plan, num_threads=host.num_threads)
            self._hosts[self._hosts.index(host)] = _Host(plan)
            del self._dying[host]
        if not deaths:
            return []
        # One for all of them: whoever hears of a death submits all again, and by the next the serials were others.
        return [
            Death(
                cause="; ".join(death.cause for death in deaths.values()),
                at_work=tuple(serial for death in deaths.values() for serial in death.at_work),
                was_ready=any(death.was_ready for death in deaths.values()),
                num_hosts=len(deaths),
            )
        ]


def divide_threads(num_threads: int, num_processors: int) -> list[int]:
    """Return how many threads each host has; no more hosts than processors, for more would win nothing."""
    wanted = max(min(num_threads, MAX_LONE_HOSTS), -(-num_threads // THREADS_PER_HOST))
    num_hosts = min(wanted, num_processors)
    return [num_threads // num_hosts + (number < num_threads % num_hosts) for number in range(num_hosts)]


def _start_process(descriptor: int) -> subprocess.Popen[bytes]:
    path = _absolute_module_path()
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy would start a thread for each core, for nothing.
    return subprocess.Popen(
        [sys.executable, "-c", _START, repr(path), str(descriptor), str(os.getpid())],
        pass_fds=[descriptor],
        env=environment,
        cwd="/",  # Readers hold absolute paths, and this process's directory may be gone.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the training process, which closes its hosts.
    )


def _absolute_module_path() -> list[str]:
    """Return where this process finds modules; nothing relative to a working directory that is gone."""
    path = [str(entry) for entry in sys.path] + [str(Path(__file__).parents[2])]
    try:
        return list(map(os.path.abspath, path))
    except FileNotFoundError:
        return list(filter(os.path.isabs, path))


def _close_all(hosts: list[_Host], process_id: int) -> None:
    if os.getpid() != process_id:
        return
    for host in hosts:
        with suppress(OSError):  # It has died.
            host.end.shutdown(socket.SHUT_RDWR)  # Closing alone tells it nothing while another process has a copy.
        host.end.close()
    deadline = time.monotonic() + CLOSE_S
    for host in hosts:
        host.wait(deadline)
    hosts.clear()


_pools: dict[int, weakref.ref[HostPool]] = {}


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    for reference in list(_pools.values()):  # At once: other threads may make pools meanwhile.
        if (pool := reference()) is not None:
            pool.leave_to_parent()
