"""Run a script's loader in one process per rank, as torchrun does.

Each rank leads its own session, as in torch's elastic launcher, so a signal also reaches its worker processes. The
first failure, Ctrl-C or SIGTERM ends all ranks, first with SIGTERM, then with SIGKILL. Signals and exits arrive in one
queue, so a signal never interrupts the launcher in the middle of a step. The standard error of a rank goes to a file,
because a full pipe would block the rank. Each rank is started by a command, as in torchrun, not by
:mod:`shardio.process`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from shardio.check.coverage import Coverage
from shardio.check.exactly_once import needs_second_look
from shardio.check.recorder import Recording, merge_recordings, write_recording
from shardio.check.recording import record
from shardio.check.report import ExpectedSamples
from shardio.epochs import set_epoch
from shardio.errors import IdentityError, ShardioError
from shardio.values import load_function

GRACE_S = 5.0
"""The longest time between SIGTERM and SIGKILL, in seconds."""

SHOWN_BYTES = 8192
"""The number of bytes at the end of a rank's standard error that an error message shows."""


def record_ranks(target: str, *, world_size: int, epochs: int, key: str | None) -> list[Coverage]:
    """Build a loader in ``world_size`` processes, read it, and return the coverage of each epoch.

    If samples are identified by content, one more epoch may be read for comparison.

    Args:
        target: ``path/to/script.py:function``. The function takes no arguments and returns a loader.
        world_size: The number of processes. They get torchrun's environment variables.
        epochs: The number of epochs. Each is set on the loader, or on its samplers and datasets.
        key: The name or index of the field that holds a batch's keys; None if there is none.

    Raises:
        ShardioError: If a process fails. The message names the first one that failed, and ends with its output.
    """
    with tempfile.TemporaryDirectory(prefix="shardio-check-") as directory:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        commands = []
        for rank in range(world_size):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            name = _file_name(rank)
            commands.append(
                RankCommand(
                    command=[sys.executable, "-m", "shardio.check.rank", target, directory, str(epochs), key or ""],
                    environment={
                        **{variable: str(value) for variable, value in ranks.items()},
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                    },
                    errors=Path(directory) / f"{name}.err",
                    failed=Path(directory) / f"{name}.failed",
                )
            )
        run_ranks(commands, target)
        return merge_recordings(sorted(Path(directory).glob("*.cov")), world_size=world_size)


def run_rank(target: str, directory: str, epochs: int, key: str | None) -> None:
    """Build the loader, read it, and write the recording of this process's rank."""
    loader = load_function(target)()
    if not isinstance(loader, Iterable):
        raise IdentityError(
            f"{target} must return a loader or another iterable of batches, got {type(loader).__name__}"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recording = Recording(rank=rank, world_size=world_size)
    while len(recording.epochs) < epochs or (
        len(recording.epochs) == epochs == 1 and needs_second_look(recording.epochs, ExpectedSamples())
    ):
        set_epoch(loader, len(recording.epochs))
        coverage = Coverage()
        field = int(key) if key and key.lstrip("-").isdigit() else key or None
        record(loader, coverage, rank=rank, key=field, world_size=world_size)
        recording.epochs.append(coverage)
    write_recording(Path(directory) / f"{_file_name(rank)}.cov", recording)


def record_failure(directory: str, time_ns: int) -> None:
    """Record the time at which this process failed, so that the launcher can name the first failure."""
    (Path(directory) / f"{_file_name(int(os.environ['RANK']))}.failed").write_text(str(time_ns))


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """The command of one rank.

    Attributes:
        command: The program and its arguments.
        environment: Variables to add to this process's environment.
        errors: The file for its standard error.
        failed: The file that the rank creates if it fails. It holds the time of the failure, in nanoseconds since 1970.
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
        ShardioError: If a rank fails. The message names the rank that failed first, and ends with its output.
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
    """End all processes and their child processes. Kill all at once after a second signal."""
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
    return _send(process, 0)  # Signal 0 only tests whether the group has processes.


def _send(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a process's group, and return whether the group has processes."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # macOS raises PermissionError if the last process was not reaped.
        return False
    return True


def _describe_first(
    ranks: Sequence[RankCommand], processes: Sequence[subprocess.Popen[bytes]], exits: Mapping[int, int], name: str
) -> str:
    """Describe the rank that failed first, even if a rank that failed as a result ended earlier."""
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
