"""Frozen orders: epochs that a loader should shuffle differently but delivers in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from shardio.check.coverage import Coverage, name_ranks
from shardio.check.identity import Ids

MIN_SAMPLES = 10
"""Fewer samples may repeat an order by chance. For 10 samples, the chance is 1 in 3.6 million."""

MAX_COMPARED = 1_000_000
"""The number of an epoch's samples that are compared to find out whether a loader shuffles."""


def find_frozen_orders(epochs: Sequence[Coverage]) -> list[str]:
    """Return a message for each epoch that wrongly repeats the order of an earlier one.

    A loader that does not report whether it shuffles may repeat its order on purpose, for example
    with a sorted sampler. It is judged only if another epoch or rank shows that it shuffles.
    """
    digests = [
        {rank: epoch.order_digest(rank) for rank in epoch.ranks if epoch.num_delivered_by(rank) >= MIN_SAMPLES}
        for epoch in epochs
    ]
    frozen: list[tuple[int, int, list[int]]] = []
    for later in range(1, len(epochs)):
        for earlier in reversed(range(later)):
            alike = [rank for rank, digest in digests[later].items() if digest == digests[earlier].get(rank)]
            if alike:
                frozen.append((earlier, later, alike))
                break
    shuffling = {rank for epoch in epochs for rank, known in epoch.rank_epochs.items() if known.shuffles}
    if frozen and any(rank not in shuffling for _, _, alike in frozen for rank in alike) and _is_shuffled(epochs):
        shuffling |= {rank for _, _, alike in frozen for rank in alike}
    return [
        f"epochs {earlier} and {later} have the same order{_where(judged, epochs[later])}: set_epoch is not called, or "
        "every epoch starts from the same seed"
        for earlier, later, alike in frozen
        if (judged := [rank for rank in alike if rank in shuffling])
    ]


def _where(ranks: list[int], epoch: Coverage) -> str:
    return "" if ranks == epoch.ranks else f" on {name_ranks(ranks)}"


def _is_shuffled(epochs: Sequence[Coverage]) -> bool:
    """Return whether any rank delivered two epochs in clearly different orders."""
    for rank in sorted({rank for epoch in epochs for rank in epoch.ranks}):
        known = [epoch.rank_epochs[rank].shuffles for epoch in epochs if rank in epoch.rank_epochs]
        if False in known:  # Batches may still arrive in another order.
            continue
        orders = {epoch.order_digest(rank): epoch for epoch in epochs}
        found = [epoch.arrays(rank)[0][:MAX_COMPARED] for epoch in orders.values()]
        if any(_differ(first, second) for first, second in combinations(found, 2)):
            return True
    return False


def _differ(first: Ids, second: Ids) -> bool:
    """Return whether many neighbours in ``first`` are not neighbours in ``second``.

    Many means at least ten, and a quarter of them. Most neighbours stay together if batches arrive
    as workers finish them, or if only shards are shuffled. Both may repeat an order by chance.
    """
    before, after = (ids[:-1] * np.uint64(3) + ids[1:] for ids in (first, second))  # uint64 [n - 1], wraps around
    num_parted = int((~np.isin(before, after)).sum())
    return num_parted >= max(MIN_SAMPLES, len(before) // 4)
