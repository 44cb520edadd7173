"""How much memory slots may take."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SHARE = 0.5
"""The share of the available memory that the slots of one loader may take: the user's program needs some, too."""

_CGROUP = Path("/sys/fs/cgroup")


def find_available_bytes() -> int:
    """Return how much memory this process can still get, in bytes, by the machine and its container."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")] or free
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # There is no such group, or it has no limit.
            free.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
    return max(min(free), 0)


def find_num_slots(num_bytes: int, num_wanted: int) -> int:
    """Return how many slots there is memory for, at most as many as wanted.

    Args:
        num_bytes: The size of a slot.
        num_wanted: How many the loader wants to fill at a time.

    Raises:
        MemoryError: If there is no memory for two: one for the user, and one to fill.
    """
    available = find_available_bytes()
    num_slots = int(available * SHARE) // max(num_bytes, 1)
    if num_slots < 2 and 2 * num_bytes > available:
        raise MemoryError(
            f"two batches of {num_bytes / 1e6:,.0f} MB do not fit into the {available / 1e6:,.0f} MB of memory that "
            "are available: use a smaller batch_size, return smaller samples, or give the container more memory "
            "(docker run --memory)"
        )
    return max(min(num_slots, num_wanted), 2)
