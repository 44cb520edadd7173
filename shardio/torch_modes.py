"""Torch's modes that a caller may have set, and that tensors of shardio's own must not follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


def own_tensors() -> AbstractContextManager[None]:
    """Return a context in which tensors are ordinary ones in the CPU's memory, whatever modes the caller set.

    ``torch.set_default_device("cuda")`` would put the loader's seeds and batches on a device, where neither numpy nor
    worker processes reach them. What is made under ``torch.inference_mode()`` can never be changed outside of it.
    """
    import torch
    from torch.overrides import _get_current_function_mode_stack  # Default devices are such modes.

    has_modes = torch.is_inference_mode_enabled() or _get_current_function_mode_stack()
    return _outside_of_modes() if has_modes else nullcontext()


def outside_of_inference_mode() -> AbstractContextManager[None]:
    """Return a context in which tensors are ordinary ones, on whichever device is the caller's default."""
    import torch

    return _outside_of_inference_mode() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _outside_of_modes() -> Iterator[None]:
    import torch

    with torch.device("cpu"), outside_of_inference_mode():
        yield


@contextmanager
def _outside_of_inference_mode() -> Iterator[None]:
    import torch

    with torch.inference_mode(mode=False), torch.no_grad():  # Gradients stay off, as in inference mode.
        yield
