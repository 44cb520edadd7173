"""Frozen orders: epochs that a loader means to shuffle and delivers in one order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardio.check.coverage import Coverage
from shardio.check.report import Expected

MIN_SAMPLES = 10
"""Fewer samples come in one order twice by chance: 10 do once in 3.6 million times."""


def find_frozen_orders(epochs: Sequence[Coverage], expected: Expected) -> list[str]:
    """Return a verdict for each epoch with the order of an earlier one, where that is not meant.

    A loader that says it does not shuffle may repeat its order. Where it does not say, an order is taken as meant if it
    is the dataset's own.
    """
    verdicts = []
    digests = [{rank: coverage.order_digest(rank) for rank in _judged_ranks(coverage, expected)} for coverage in epochs]
    for later in range(1, len(epochs)):
        for earlier in reversed(range(later)):
            alike = [rank for rank, digest in digests[later].items() if digest == digests[earlier].get(rank)]
            if alike:
                where = "" if alike == epochs[later].ranks else f" on rank {', '.join(map(str, alike))}"
                verdicts.append(f"epochs {earlier} and {later} have the same order{where}: set_epoch is not called")
                break
    return verdicts


def _judged_ranks(coverage: Coverage, expected: Expected) -> list[int]:
    """Return the ranks of an epoch whose order should differ from the last epoch's."""
    ranks = [rank for rank in coverage.ranks if coverage.num_delivered_by(rank) >= MIN_SAMPLES]
    known = {rank: coverage.rank_epochs[rank].shuffles for rank in ranks if rank in coverage.rank_epochs}
    unsaid = [rank for rank in ranks if known.get(rank) is None]
    natural = _natural_ranks(coverage, expected) if unsaid else set()
    return [rank for rank in ranks if known.get(rank) or (rank in unsaid and rank not in natural)]


def _natural_ranks(coverage: Coverage, expected: Expected) -> set[int]:
    """Return the ranks whose batches each keep to the dataset's order; all of them where that is not known."""
    if expected.ids is None or not expected.has_order or not len(expected.ids):
        return set(coverage.ranks)
    order = np.argsort(expected.ids, kind="stable")
    natural = set()
    for rank in coverage.ranks:
        ids, batches, _ = coverage.arrays(rank)
        found = np.minimum(np.searchsorted(expected.ids, ids, sorter=order), len(order) - 1)
        falls = np.diff(order[found]) < 0
        if not (falls & (np.diff(batches) == 0)).any():
            natural.add(rank)
    return natural
