"""The number of processors that this process may use. No other module counts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_processors() -> int:
    """Return how many processors this process may use, at least 1.

    The limits are the affinity mask and the CPU quotas, rounded up, of the process's control group and its ancestors.
    A container with a quota of 2 CPUs sees all processors of its machine but gets the time of only 2.
    """
    if hasattr(os, "process_cpu_count"):  # Python 3.13 or later. It also reads PYTHON_CPU_COUNT.
        available = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    return min([available, *(max(1, -(-quota // period)) for quota, period in _quotas(Path("/")))])


def _quotas(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (quota, period) of this process's control groups, in microseconds.

    The formats are documented in cgroups(7), and in Linux's ``admin-guide/cgroup-v2`` (cpu.max) and
    ``scheduler/sched-bwc`` (cpu.cfs_quota_us). A container often sees its own group as the root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # Not Linux.
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = PurePosixPath(name.lstrip("/"))
        for folder in dict.fromkeys([group, *group.parents]):
            text = _read(mount / folder, ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",))
            if len(values := [word for word in text.split() if word.isdigit()]) == 2:  # Neither "max" nor -1.
                yield int(values[0]), int(values[1])


def _read(folder: Path, names: tuple[str, ...]) -> str:
    try:
        return " ".join((folder / name).read_text() for name in names)
    except OSError:  # Control groups may be invisible.
        return ""
