"""Losses that stay on the device until they are asked for, and are checked then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardio.errors import NonFiniteLossError
from shardio.train.ranks import sum_over_ranks

MAX_KEYS = 20
"""Keys that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    """A microbatch's mean loss, on the device, and where it comes from."""

    loss: torch.Tensor
    num_samples: int
    step: int
    keys: Sequence[str] | None


class Losses:
    """Those of the latest microbatches. Reading a value waits for the device, so they are read all at once."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    def add(self, loss: torch.Tensor, batch: Any, step: int) -> None:
        """Note the mean loss of a batch's samples, in the step of this number."""
        self._noted.append(_Noted(loss=loss, num_samples=len(batch[1]), step=step, keys=_find_keys(batch)))

    def read(self) -> tuple[float, int]:
        """Return the mean loss of a sample over all ranks, and the number of their samples; forget them.

        Raises:
            NonFiniteLossError: If one of this rank's is not finite. The message names its step and its samples.
        """
        noted, self._noted = self._noted, []
        values = torch.stack([one.loss.float() for one in noted]).cpu().double() if noted else torch.zeros(0)
        for one, value in zip(noted, values.tolist(), strict=True):
            if not math.isfinite(value):
                raise NonFiniteLossError(
                    f"the loss of step {one.step} is {value}, {_name(one.keys)}", step=one.step, keys=one.keys
                )
        sizes = torch.tensor([one.num_samples for one in noted], dtype=torch.float64)
        loss, num_samples = sum_over_ranks(torch.stack([(values * sizes).sum(), sizes.sum()])).tolist()
        return loss / max(num_samples, 1), int(num_samples)


def _find_keys(batch: Any) -> Sequence[str] | None:
    """Return the keys of a batch's samples, if a field behind the labels has them."""
    for field in batch[2:]:
        if isinstance(field, (list, tuple)) and field and all(isinstance(value, str) for value in field):
            return field
    return None


def _name(keys: Sequence[str] | None) -> str:
    if keys is None:
        return "of samples unknown, since batches have no keys (the field 'key' of shardio's datasets)"
    more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
    return f"of a batch of the samples {', '.join(keys[:MAX_KEYS])}{more}"
