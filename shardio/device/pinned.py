"""Pinned memory, which a device can copy from while the CPU continues."""

from __future__ import annotations

import weakref
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_SMALLEST = 512


class PinnedPool:
    """Pinned buffers for reuse, because pinning memory takes much longer than copying it.

    Args:
        pin: A function that returns n bytes of pinned memory, uint8 [n].
    """

    def __init__(self, pin: Any = None) -> None:
        self._pin = pin or (lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True))
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a tensor into a buffer. Return the copy, in the same layout, and the buffer."""
        dense = torch.empty_like(tensor, device="meta")
        num_bytes = dense.numel() * dense.element_size()
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length()) if num_bytes else _SMALLEST
        buffer = self._free[size].pop() if self._free[size] else self._pin(size)
        copied = buffer[:num_bytes].view(tensor.dtype).as_strided(dense.size(), dense.stride())
        return copied.copy_(tensor), buffer

    def put_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool after its copy to the device is done."""
        self._free[len(buffer)].append(buffer)

    def clear(self) -> None:
        """Free all unused buffers."""
        self._free.clear()


@dataclass(frozen=True, slots=True)
class Registration:
    """A function that pins memory in place until it is freed, unless it is already pinned or CUDA refuses.

    CUDA may refuse because the system limits pinned memory. Batches then go through a
    :class:`PinnedPool`. Those of the same device are equal, so a loader keeps its memory for the next prefetcher.

    Args:
        device: The CUDA device that copies from the memory. Only this one gets a context.
    """

    device: torch.device

    def __call__(self, memory: NDArray[np.uint8]) -> None:
        """Pin memory, uint8 [n]."""
        address = memory.ctypes.data
        with torch.cuda.device(self.device):
            cudart = torch.cuda.cudart()
            if torch.from_numpy(memory).is_pinned():
                return
            if int(cudart.cudaHostRegister(address, memory.nbytes, 0)) == 0:
                weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
            else:
                _clear_error(self.device)


def _clear_error(device: torch.device) -> None:
    """Clear the error of the latest call of CUDA, which torch would raise after the next kernel of any code."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
