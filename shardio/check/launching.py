"""Launching: run several ranks as processes that end together.

Each rank leads its own session, as in torch's elastic launcher, so a signal also reaches its
worker processes. The first failure, Ctrl-C or SIGTERM ends all ranks, first with SIGTERM, then
with SIGKILL. Signals and exits arrive in one queue, so a signal never interrupts the launcher in
the middle of a step. The standard error of a rank goes to a file, because a full pipe would block
the rank.

Each rank is started by a command, as torchrun does, and not by :mod:`shardio.background`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from shardio.errors import ShardioError

GRACE_S = 5.0
"""The longest time between SIGTERM and SIGKILL, in seconds."""

SHOWN_BYTES = 8192
"""The number of bytes at the end of a rank's standard error that an error message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """The command of one rank.

    Attributes:
        command: The program and its arguments.
        environment: Variables to add to this process's environment.
        errors: The file for its standard error.
        failed: The file that the rank creates if it fails. It holds the time of the failure, in
            nanoseconds since 1970.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    errors: Path
    failed: Path


@dataclass(frozen=True, slots=True)
class _Exit:
    rank: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class _Signal:
    number: int


_Events = SimpleQueue[_Exit | _Signal]


def run_ranks(ranks: Sequence[RankCommand], name: str) -> None:
    """Run all ranks until they end. Their standard output goes to this process's standard error.

    Args:
        ranks: The command of each rank.
        name: The name of the program, for messages.

    Raises:
        ShardioError: If a rank fails. The message names the rank that failed first, and ends with
            its output.
        KeyboardInterrupt: After Ctrl-C, when all ranks have ended.
        SystemExit: After SIGTERM or SIGHUP, when all ranks have ended.
    """
    events: _Events = SimpleQueue()
    processes: list[subprocess.Popen[bytes]] = []
    exits: dict[int, int] = {}
    signalled = None
    with _signals_into(events):
        try:
            for number, rank in enumerate(ranks):
                processes.append(_start(rank))
                threading.Thread(target=_await, args=(number, processes[-1], events), daemon=True).start()
            while len(exits) < len(processes) and signalled is None:
                match events.get():
                    case _Signal(number=signal_number):
                        signalled = signal_number
                    case _Exit(rank=number, time_ns=when):
                        exits[number] = when
                        if processes[number].returncode:
                            break
        finally:
            # Ranks that fail from here on may fail because they are being ended.
            failed = {number for number in exits if processes[number].returncode}
            _end(processes, events)
    if signalled == signal.SIGINT:
        raise KeyboardInterrupt
    if signalled is not None:
        sys.exit(128 + signalled)
    if failed:
        raise ShardioError(_describe_first(ranks, processes, {number: exits[number] for number in failed}, name))


def _start(rank: RankCommand) -> subprocess.Popen[bytes]:
    with rank.errors.open("wb") as errors:
        return subprocess.Popen(
            rank.command,
            env={**os.environ, **rank.environment},
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=errors,
            start_new_session=True,
        )


def _await(number: int, process: subprocess.Popen[bytes], events: _Events) -> None:
    process.wait()
    events.put(_Exit(number, time.time_ns()))


def _end(processes: Sequence[subprocess.Popen[bytes]], events: _Events) -> None:
    """End all processes and those that they started. Kill them at once after a second signal."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        _send(process, signal.SIGTERM)
    while any(map(_lives, processes)) and time.monotonic() < deadline:
        with suppress(Empty):  # Poll: processes that ranks started are not children of this one.
            if isinstance(events.get(timeout=0.02), _Signal):
                break
    for process in processes:
        _send(process, signal.SIGKILL)
        process.wait()


def _lives(process: subprocess.Popen[bytes]) -> bool:
    """Return whether any process of a rank's group is alive."""
    return _send(process, 0)


def _send(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a process's group, and return whether the group has processes."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # macOS raises the latter if the last process was not reaped.
        return False
    return True


def _describe_first(
    ranks: Sequence[RankCommand], processes: Sequence[subprocess.Popen[bytes]], exits: Mapping[int, int], name: str
) -> str:
    """Describe the rank that failed first, even if one that failed as a result ended earlier."""
    times = {number: int(rank.failed.read_text()) for number, rank in enumerate(ranks) if rank.failed.exists()}
    first = min({**exits, **times}.items(), key=lambda item: item[1])[0]
    code, errors = processes[first].returncode, ranks[first].errors.read_bytes()
    by_signal = code < 0 and first not in times
    how = f"was terminated by signal {-code} ({signal.strsignal(-code)})" if by_signal else "failed"
    text = errors[-SHOWN_BYTES:].decode(errors="replace").strip()
    cut = "… " if len(errors) > SHOWN_BYTES else ""
    return f"rank {first} of {name} {how}:\n{cut}{text or 'it wrote nothing to standard error'}"


@contextmanager
def _signals_into(events: _Events) -> Iterator[None]:
    """Put signals that would end this process into a queue. Do nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Ignored signals stay ignored: nohup ignores SIGHUP.
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda caught, _frame: events.put(_Signal(caught)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
