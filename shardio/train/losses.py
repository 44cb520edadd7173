"""Losses that stay on the device until they are asked for, and are checked then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardio.errors import NonFiniteLossError
from shardio.train.ranks import gather, sum_over_ranks

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
            NonFiniteLossError: If one is not finite. The message names its step and its samples.
        """
        noted, self._noted = self._noted, []
        values = (
            torch.stack([one.loss.float() for one in noted]).cpu().double() if noted else torch.zeros(0, device="cpu")
        )
        sizes = torch.tensor([one.num_samples for one in noted], dtype=torch.float64, device="cpu")
        total, num_samples = sum_over_ranks(torch.stack([(values * sizes).sum(), sizes.sum()])).tolist()
        if not math.isfinite(total):
            raise _name_the_first(noted, values.tolist())
        return total / max(num_samples, 1), int(num_samples)


def _name_the_first(noted: Sequence[_Noted], values: Sequence[float]) -> NonFiniteLossError:
    """Return the error for the first loss of all ranks that is not finite: through it, others' become so, too."""
    own = next(
        ((one.step, value, one.keys) for one, value in zip(noted, values, strict=True) if not math.isfinite(value)),
        None,
    )
    found = [(first, rank) for rank, first in enumerate(gather(own)) if first is not None]
    (step, value, keys), rank = min(found, key=lambda one: one[0][0])
    where = f" on rank {rank}" if len(found) > 1 or rank else ""
    return NonFiniteLossError(f"the loss of step {step}{where} is {value}, {_name(keys)}", step=step, keys=keys)


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
