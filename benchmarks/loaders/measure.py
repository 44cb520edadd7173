"""Measure the CPU time and memory of a process and its descendants, from Linux's ``/proc``.

A process belongs to the tree if it descends from the measured process, or is in the session that the measured process
leads. Helper processes whose parent has exited are therefore also counted.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


class _Process(NamedTuple):
    parent: int
    session: int
    cpu_s: float


def find_tree(root: int) -> dict[int, _Process]:
    """Return the processes of the tree by process id, including ``root``."""
    processes = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (process := _read_process(entry)) is not None:
            processes[int(entry.name)] = process
    members = {number for number, process in processes.items() if root in (number, process.session)}
    while found := {n for n, process in processes.items() if process.parent in members} - members:
        members |= found
    return {number: processes[number] for number in members}


def measure_cpu_s(root: int) -> float:
    """Return the CPU time that a process tree has used, including that of ended processes that were waited for."""
    return sum(process.cpu_s for process in find_tree(root).values())


def measure_pss(root: int) -> int:
    """Return the memory of a process tree in bytes: its proportional set size, which counts each shared page once."""
    return sum(_read_pss(number) for number in find_tree(root))


class PeakMemory:
    """A thread that samples a tree's memory while the context is open.

    Attributes:
        peak: The peak memory in bytes.
    """

    def __init__(self, root: int, interval_s: float = 0.2) -> None:
        self.peak = 0
        self._root, self._interval_s = root, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def sample(self) -> None:
        """Take a sample."""
        self.peak = max(self.peak, measure_pss(self._root))

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self.sample()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.sample()


class Times(NamedTuple):
    """Wall-clock time, CPU time of this process's tree, and CPU time of the whole machine, in seconds."""

    wall_s: float
    cpu_s: float
    machine_cpu_s: float


class Stopwatch:
    """A stopwatch that starts when it is created."""

    def __init__(self) -> None:
        self._start = self._read()

    def stop(self) -> Times:
        """Return the times since the stopwatch was created."""
        return Times(*(now - before for now, before in zip(self._read(), self._start, strict=True)))

    @staticmethod
    def _read() -> Times:
        fields = (PROC / "stat").read_text().split(maxsplit=9)[1:9]
        user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, fields)
        ticks = user + nice + system + interrupts + soft_interrupts + stolen
        return Times(time.perf_counter(), measure_cpu_s(os.getpid()), ticks / TICKS_PER_S)


def _read_process(entry: Path) -> _Process | None:
    try:
        text = (entry / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None  # The process has ended.
    fields = text.rpartition(")")[2].split()  # After the name, which may contain spaces: state, parent, …
    ticks = sum(int(field) for field in fields[11:15])  # utime, stime, and those of children that were waited for
    return _Process(parent=int(fields[1]), session=int(fields[3]), cpu_s=ticks / TICKS_PER_S)


def _read_pss(number: int) -> int:
    try:
        lines = (PROC / str(number) / "smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0  # The process has ended.
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
