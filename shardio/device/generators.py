"""Random numbers for transforms of batches: which transforms take a generator, and how they draw without waiting."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch

BatchTransform = Callable[..., Any]
"""A function that takes and returns a batch. If it has a parameter ``generator``, it receives a torch.Generator."""


def takes_generator(transform: BatchTransform) -> bool:
    """Return whether a transform has a parameter ``generator``."""
    if isinstance(transform, torch.nn.Module):
        transform = transform.forward  # A module's own signature is that of its hooks.
    try:
        return "generator" in inspect.signature(transform).parameters
    except ValueError:  # Functions in C may have no signature.
        return False


def call_transform(transform: BatchTransform, batch: Any, generator: torch.Generator | None) -> Any:
    """Return the transformed batch. The transform receives the generator if it takes one."""
    return transform(batch, generator=generator) if takes_generator(transform) else transform(batch)


def make_random(generator: torch.Generator) -> random.Random:
    """Return random numbers for the program, seeded from the state of a generator of any device, which advances.

    This does not wait for the device: the state of its generator is in the program's memory. Numbers that are drawn on
    the device would have to be read from it, after all the work that it has queued.
    """
    numbers = random.Random(generator.get_state().numpy().tobytes())
    torch.empty(1, device=generator.device).uniform_(generator=generator)  # The next caller gets other numbers.
    return numbers
