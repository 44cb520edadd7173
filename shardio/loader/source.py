"""What a delivery's batches consist of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.datasets.bad_samples import Describe
from shardio.decoding import FieldDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is delivered.

    Attributes:
        decoder: Names the fields.
        locate: Returns what a reader reads samples by, from their numbers.
        describe: Returns a sample's key and where it lies, from its number.
        epoch: The epoch, where it is known.
        check: Raises if the dataset has another transform by now.
    """

    decoder: FieldDecoder
    locate: Callable[[NDArray[np.int64]], Any]
    describe: Describe
    epoch: int | None
    check: Callable[[], None]
