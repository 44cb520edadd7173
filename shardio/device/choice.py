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
    is_available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name is None:
        if is_available["cuda"]:
            return torch.device("cuda")
        return torch.device("mps" if is_available["mps"] and num_ranks == 1 else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be one that torch knows, such as 'cuda' or 'cpu', got {name!r}") from error
    if not is_available.get(device.type, True):
        raise ValueError(
            f"device {str(name)!r} is not available, because torch finds no {device.type.upper()} device: use 'cpu', "
            "or omit device to use the best available one"
        )
    return device
