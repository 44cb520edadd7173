"""A ``collate_fn`` in its own module, which worker processes import faster than a module that imports a framework."""

from __future__ import annotations

from typing import Any

import torch


def collate(samples: list[tuple[int, str]]) -> dict[str, Any]:
    labels, keys = zip(*samples, strict=True)
    return {"labels": torch.tensor(labels), "numbers": torch.tensor([number_of(key) for key in keys])}


def number_of(key: str) -> int:
    """Return the number of a key such as ``class-2/name-003``. Trainer can gather only numbers from ranks."""
    return int("".join(filter(str.isdigit, key)))
