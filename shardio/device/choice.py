"""The choice of a device: which one is best, and whether torch can use it."""

from __future__ import annotations

import torch


def choose_device(name: str | torch.device | None = None, *, num_ranks: int = 1) -> torch.device:
    """Return a device by name, or the best available device: CUDA, then MPS, then the CPU.

    Args:
        name: A device that torch knows, such as ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; None for
            the best available.
        num_ranks: The number of ranks that train together. Several ranks cannot share an MPS
            device.

    Raises:
        ValueError: If torch does not know the device or cannot use it.
    """
    if name is None:
        if _is_available("cuda"):
            return torch.device("cuda")
        return torch.device("mps" if num_ranks == 1 and _is_available("mps") else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, such as 'cuda' or 'cpu', got {name!r}") from error
    if not _is_available(device.type):
        raise ValueError(
            f"device {str(name)!r} is not available, because torch finds no {device.type.upper()} device: use 'cpu', "
            "or omit device to use the best available one"
        )
    return device


def _is_available(device_type: str) -> bool:
    """Ask torch about this type alone: to ask about CUDA takes time and may print warnings."""
    match device_type:
        case "cuda":
            return torch.cuda.is_available()
        case "mps":
            return torch.backends.mps.is_available()
        case _:
            return True
