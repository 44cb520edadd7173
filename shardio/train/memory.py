"""Measurement of memory use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch


class MemoryUse(NamedTuple):
    """Memory in use, in bytes.

    Attributes:
        allocated: The memory of tensors on a GPU; on the CPU, this process's resident set.
        reserved: The memory that torch has reserved on a GPU; on the CPU, this process's address
            space.
    """

    allocated: int
    reserved: int


def measure_memory(device: torch.device) -> MemoryUse | None:
    """Return the memory in use; None if the operating system does not report it."""
    if device.type == "cuda":
        return MemoryUse(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return MemoryUse(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())
    statm = Path("/proc/self/statm")  # proc(5): the address space and the resident set, in pages.
    if not statm.exists():
        return None
    reserved, allocated = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in statm.read_text().split()[:2])
    return MemoryUse(allocated, reserved)


@contextmanager
def memory_difference(
    name: str, device: torch.device | str = "cpu", say: Callable[[str], object] = print
) -> Iterator[None]:
    """Print the change in memory use within a block.

    :class:`shardio.train.memory.MemoryUse` defines what is allocated and what is reserved.

    >>> with memory_difference("a large tensor"):  # doctest: +SKIP
    ...     tensor = torch.ones(2**24)
    a large tensor: allocated +64.1 MiB, reserved +64.0 MiB
    """
    device = torch.device(device)
    before = measure_memory(device)
    yield
    after = measure_memory(device)
    if before is None or after is None:
        say(f"{name}: memory use cannot be measured on this system")
        return
    allocated, reserved = ((new - old) / 2**20 for new, old in zip(after, before, strict=True))
    say(f"{name}: allocated {allocated:+.1f} MiB, reserved {reserved:+.1f} MiB")
