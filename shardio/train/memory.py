"""How much memory is in use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of memory in use.

    Attributes:
        allocated: What tensors hold on a GPU; elsewhere what of this process lies in memory (its resident set).
        reserved: What torch has taken from a GPU, tensors or not; elsewhere the process's address space.
    """

    allocated: int
    reserved: int


def measure_memory(device: torch.device) -> Memory | None:
    """Return the memory in use; None where nobody says."""
    if device.type == "cuda":
        return Memory(allocated=torch.cuda.memory_allocated(device), reserved=torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return Memory(allocated=torch.mps.current_allocated_memory(), reserved=torch.mps.driver_allocated_memory())
    statm = Path("/proc/self/statm")  # proc(5): sizes in pages, the address space and then the resident set.
    if not statm.exists():
        return None
    reserved, allocated = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in statm.read_text().split()[:2])
    return Memory(allocated=allocated, reserved=reserved)


@contextmanager
def memory_difference(
    name: str, device: torch.device | str = "cpu", say: Callable[[str], object] = print
) -> Iterator[None]:
    """Say by how much memory in use grew, or shrank, from the beginning of a block to its end.

    >>> with memory_difference("a large tensor"):  # doctest: +SKIP
    ...     tensor = torch.ones(2**24)
    a large tensor: allocated +64.1 MiB, reserved +64.0 MiB
    """
    device = torch.device(device)
    before = measure_memory(device)
    yield
    after = measure_memory(device)
    if before is None or after is None:
        say(f"{name}: how much memory is in use cannot be told here")
        return
    allocated, reserved = after.allocated - before.allocated, after.reserved - before.reserved
    say(f"{name}: allocated {allocated / 2**20:+.1f} MiB, reserved {reserved / 2**20:+.1f} MiB")
