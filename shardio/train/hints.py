"""Hints for sizes that leave a GPU's tensor cores idle."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from shardio.train.callbacks import Callback

MULTIPLE = 8
"""Of which sizes in half precision should be: NVIDIA, "Train With Mixed Precision", "Tensor Core shape constraints"."""

MAX_NAMED = 5


class SizeHints(Callback):
    """Warns once of channels, features and batches that are no multiples of 8.

    What comes in from the images, and what goes out for the classes, is left aside: nobody can choose those.
    """

    def __init__(self) -> None:
        self._odd: list[str] | None = []

    def wrap_model(self, model: nn.Module) -> nn.Module:
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
        self._odd = [
            f"{name or type(layer).__name__} has {size} outputs"
            for name, layer in layers[:-1]
            if (size := layer.weight.shape[0]) % MULTIPLE
        ]
        return model

    def on_batch(self, batch: Any) -> None:
        if self._odd is None:
            return
        odd, self._odd = self._odd, None
        if len(batch[1]) % MULTIPLE:
            odd.insert(0, f"a batch has {len(batch[1])} samples")
        if odd:
            more = f", and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
            warnings.warn(
                f"half precision is fastest where sizes are multiples of {MULTIPLE}: "
                f"{', '.join(odd[:MAX_NAMED])}{more}",
                stacklevel=2,
            )
