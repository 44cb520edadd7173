"""Verdicts: from what a report counted to what has likely gone wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from shardio.check.coverage import Coverage, SourceTotals
    from shardio.check.report import CoverageReport, Expected


def find_causes(report: CoverageReport) -> list[str]:
    """Return the likely causes of what is wrong, most telling first; nothing if nothing is wrong."""
    if report.is_right:
        return []
    if report.num_repeats > report.expected.num_repeats:
        return [*_same_workers(report), *_same_ranks(report)] or _padding(report)
    return _losses(report) if report.num_missing > report.expected.num_missing else []


def _same_workers(report: CoverageReport) -> list[str]:
    by_rank: defaultdict[int, list[SourceTotals]] = defaultdict(list)
    for (rank, worker), totals in report.totals.items():
        if worker >= 0:
            by_rank[rank].append(totals)
    alike = {
        rank: workers
        for rank, workers in by_rank.items()
        if len(workers) > 1 and len({worker.signature for worker in workers}) == 1
    }
    if not alike:
        return []
    rank, workers = next(iter(alike.items()))
    number = workers[0].num_samples
    all_ = "all " if number == report.expected.number else "the same "
    where = f" of rank {rank}" if len(by_rank) > 1 else ""
    who = f"each of {len(workers)} workers{where}"
    return [f"{who} delivered {all_}{number:,} samples: the dataset ignores get_worker_info"]


def _same_ranks(report: CoverageReport) -> list[str]:
    sums: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for (rank, _), totals in report.totals.items():
        number, id_sum, id_xor = totals.signature
        sums[rank] = [sums[rank][0] + number, (sums[rank][1] + id_sum) % 2**64, sums[rank][2] ^ id_xor]
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, signature in sums.items():
        groups[tuple(signature)].append(rank)
    return [
        f"ranks {_join(ranks)} delivered the same {_distinct(report, ranks[0]):,} samples: "
        "no DistributedSampler or rank split (in WebDataset: no nodesplitter)"
        for ranks in groups.values()
        if len(ranks) > 1
    ]


def _distinct(report: CoverageReport, rank: int) -> int:
    """Return how many different samples a rank delivered, taking workers that delivered the same for one."""
    return sum({t.signature: t.num_samples for (r, _), t in report.totals.items() if r == rank}.values())


def _padding(report: CoverageReport) -> list[str]:
    if report.num_late_repeats < report.num_repeats or report.num_missing:
        return []
    return [
        f"all repeats ({report.num_repeats:,}) lie in the last batch of a rank or worker: the loader pads them to "
        "equal lengths (shardio's remainder='pad', instead of which take 'keep' or 'mask'; DistributedSampler without "
        "drop_last; or a .repeat() that is cut)"
    ]


def _losses(report: CoverageReport) -> list[str]:
    missing, number = report.num_missing - report.expected.num_missing, report.expected.number or 0
    places = report.missing_places
    is_tail = len(places) > 0 and places[0] == number - len(places)
    num_runs = int((np.diff(places) > 1).sum()) + 1 if len(places) else 0
    if _batches_could_be_lost(report, missing):
        what = f"the last {missing:,} of {number:,}" if is_tail else f"{missing:,} of {number:,}, a few batches' ends,"
        return [f"{what} are missing: drop_last, or a loop that ends a batch early"]
    if num_runs and len(places) >= 2 * num_runs:
        runs = "one run" if num_runs == 1 else f"{num_runs} runs"
        return [
            f"the {missing:,} missing samples are {runs} of neighbours, and more than drop_last leaves out: whole "
            "shards, as where shards do not divide by the workers or ranks and the rest is dropped"
        ]
    return []


def _batches_could_be_lost(report: CoverageReport, missing: int) -> bool:
    """Say whether one lost batch explains the loss, or drop_last, by which each source loses less than a batch."""
    sources = report.totals.values()
    batch = max((totals.largest_batch for totals in sources), default=0)
    all_full = all(totals.num_samples % batch == 0 for totals in sources)
    return missing <= batch or (all_full and missing <= (batch - 1) * len(sources))


def find_frozen_orders(epochs: Sequence[Coverage], expected: Expected) -> list[str]:
    """Return a verdict for each epoch whose order is that of the epoch before, and not the dataset's own."""
    natural = None if expected.ids is None else xxhash.xxh3_64_hexdigest(expected.ids.tobytes())
    orders = [{rank: coverage.order_digest(rank) for rank in coverage.ranks} for coverage in epochs]
    return [
        f"epochs {epoch} and {epoch + 1} have the same order: set_epoch is not called"
        for epoch, (one, other) in enumerate(pairwise(orders))
        if one and one == other and natural not in one.values()
    ]


def _join(ranks: list[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
