"""The order's settings. Together with the dataset and the epoch's number, they determine an epoch's order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.values import check_flag, check_integer, check_optional_integer

SHARDS_PER_WINDOW = 4
"""The default window, in shards of average size: the samples of this many shards are mixed."""

MIN_WINDOW = 4096
"""The smallest default window, in samples, for datasets of many small shards."""

MAX_LANES = 8
"""The largest default number of lanes. With SHARDS_PER_WINDOW, it limits how many shards a rank has open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings:
    """How an epoch is ordered. The order never depends on the world size, the workers or the batch size.

    Attributes:
        shuffle: Whether the epoch is shuffled. If not, position p holds sample p.
        seed: The user's seed, 0 <= seed < 2**63.
        lanes: L, the number of stretches of the tape between which positions alternate.
        window: The number of neighbouring samples of a lane that are shuffled together.
    """

    shuffle: bool
    seed: int
    lanes: int
    window: int


def choose_settings(
    shard_sizes: NDArray[np.int64],
    *,
    shuffle: bool,
    seed: int,
    lanes: int | None = None,
    window: int | None = None,
) -> OrderSettings:
    """Check the user's settings and fill in defaults, which depend on the shards alone.

    By default, a window holds the samples of four average shards, and at least 4096 samples. The number of lanes is
    the largest power of two, up to 8, that leaves at least four windows in each lane. So a small dataset has one lane,
    and a dataset that fits in one window is shuffled as a whole.

    Args:
        shard_sizes: int64 [shards], the number of samples of each shard.
        shuffle: Whether to shuffle. If not, lanes and window must not be set.
        seed: 0 <= seed < 2**63.
        lanes: The number of lanes, or None for the default.
        window: The window's length in samples, or None for the default.

    Raises:
        TypeError: If ``seed``, ``lanes`` or ``window`` is not an integer, or ``shuffle`` is not a boolean.
        ValueError: If a setting is out of range.
    """
    shuffle = check_flag("shuffle", shuffle)
    seed = check_integer("seed", seed, at_least=0, below=2**63)
    lanes, window = (
        check_optional_integer(name, value, at_least=1) for name, value in (("lanes", lanes), ("window", window))
    )
    for name, value in (("lanes", lanes), ("window", window)):
        if value is not None and not shuffle:
            raise ValueError(f"{name}={value} has no effect without shuffle=True: remove it, or set shuffle=True")
    if not shuffle:
        return OrderSettings(shuffle=False, seed=seed, lanes=1, window=1)

    num_samples, num_shards = int(shard_sizes.sum()), max(len(shard_sizes), 1)
    if window is None:
        window = max(MIN_WINDOW, SHARDS_PER_WINDOW * -(-num_samples // num_shards))
    if lanes is None:
        affordable = num_samples // (4 * window)
        lanes = min(MAX_LANES, 1 << max(affordable.bit_length() - 1, 0))
    return OrderSettings(shuffle=True, seed=seed, lanes=lanes, window=min(window, max(num_samples, 1)))
