"""Causes: from what a report counted to what has likely gone wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardio.check.coverage import SourceTotals
    from shardio.check.report import CoverageReport


def find_causes(report: CoverageReport) -> list[str]:
    """Return the likely causes of what is wrong, most telling first; nothing if nothing is wrong."""
    if report.is_right:
        return []
    if not report.num_deliveries:
        return ["nothing arrived: an iterator that is used up, or an empty dataset"]
    if found := _other_kind(report):
        return found
    if report.num_repeats > report.expected.num_repeats:
        found = [*_same_workers(report), *_same_ranks(report)] or _same_batches(report) or _padding(report)
        found = found or [*_overlaps(report), *_equal_keys(report)]
        # Some of what comes again may be equal by chance, as where a random flip fell the same way.
        return found or (_multiples(report) if report.num_unexpected else [])
    if report.num_unexpected:
        return _multiples(report)
    if report.num_missing > report.expected.num_missing:
        return _left_over(report) or _losses(report)
    return []


def _other_kind(report: CoverageReport) -> list[str]:
    """Return a cause where what is unexpected reads like what is missing: 1 and "1"."""
    if not report.num_unexpected or not set(report.unexpected) & set(report.missing):
        return []
    return ["the keys that arrive read like the expected ones and are of another type, as 1 and '1' are: convert them"]


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


def _by_rank(report: CoverageReport) -> Counter[int]:
    """Return how many samples each rank delivered."""
    numbers = Counter[int]()
    for (rank, _), totals in report.totals.items():
        numbers[rank] += totals.num_samples
    return numbers


def _distinct(report: CoverageReport, rank: int) -> int:
    """Return how many different samples a rank delivered, taking workers that delivered the same for one."""
    return sum({t.signature: t.num_samples for (r, _), t in report.totals.items() if r == rank}.values())


def _padding(report: CoverageReport) -> list[str]:
    """Return a cause where each repeat lies in a last batch, and is of a sample that came first, or in that batch."""
    if report.num_late_repeats < report.num_repeats or report.num_missing:
        return []
    # Nobody pads to unequal lengths.
    by_worker = {totals.num_samples for totals in report.totals.values()}
    if (report.num_rank_repeats and len(set(_by_rank(report).values())) > 1) or (
        report.num_worker_repeats and len(by_worker) > 1
    ):
        return []
    num_workers = max(Counter(rank for rank, _ in report.totals).values())
    first_batches = num_workers + report.num_repeats // max(totals.largest_batch for totals in report.totals.values())
    for found in report.repeated.values():
        batches = sorted(delivery.batch for delivery in found)
        if batches[0] >= first_batches and batches[0] != batches[-1]:
            return []
    return [
        f"all repeats ({report.num_repeats:,}) lie in the last batch of a rank or worker: the loader pads them to "
        "equal lengths (shardio's remainder='pad', instead of which take 'keep' or 'mask'; DistributedSampler without "
        "drop_last; or a .repeat() that is cut)"
    ]


def _same_batches(report: CoverageReport) -> list[str]:
    """Return a cause where all repeats lie in the same two batches, and are the whole of one."""
    places = {tuple((delivery.rank, delivery.batch) for delivery in found) for found in report.repeated.values()}
    sizes = {size for totals in report.totals.values() for size in (totals.largest_batch, totals.last_batch_size)}
    if len(places) != 1 or report.num_repeats < 2 or report.num_repeats not in sizes:
        return []
    (pairs,) = places
    if len(pairs) != 2 or pairs[0] == pairs[1]:
        return []
    (rank, first), (other, second) = pairs
    where = f"batch {first} of rank {rank} and batch {second} of rank {other}"
    return [f"{where} hold the same samples: a batch is delivered again"]


def _overlaps(report: CoverageReport) -> list[str]:
    """Return a cause by who shares the repeated samples: workers, ranks, or nobody."""
    is_missing = report.num_missing > report.expected.num_missing
    if report.num_own_repeats:
        if report.num_own_repeats >= 3 and is_missing and not report.num_unexpected:
            return [
                "samples come again while others never come: drawn with replacement, or a wrong number is looked up"
            ]
        if not is_missing and report.num_late_repeats == report.num_repeats:
            return ["all repeats lie in a last batch, as where the shares of workers overlap at the end of one"]
        return []
    shared = [("workers", "worker", report.num_worker_repeats), ("ranks", "rank", report.num_rank_repeats)]
    who = " and ".join(name for name, _, number in shared if number)
    if is_missing and report.num_rank_repeats:
        return [
            f"{who} share samples and leave out others, and none repeats its own: they are in different epochs or "
            "shuffle by different seeds (call set_epoch with the same number on every rank, and give all one seed)"
        ]
    if is_missing:
        return [
            "workers share samples and leave out others, and none repeats its own: they shuffle by different seeds, "
            "before they take their shares (in each worker torch's seed is another one)"
        ]
    # With nothing known of what should come, it cannot be seen whether anything is left out.
    more = ", or they shuffle by different seeds" if report.expected.number is None else ""
    return [
        f"the shares of {name} overlap by {number:,}: an error where one {one}'s share ends{more}"
        for name, one, number in shared
        if number
    ]


def _equal_keys(report: CoverageReport) -> list[str]:
    """Return a cause where the number of deliveries is right and the number of different keys is not."""
    expected = report.expected
    if expected.ids is not None or report.num_deliveries != expected.number:
        return []
    return ["or keys that are not unique: the same name in several classes or shards"]


def _multiples(report: CoverageReport) -> list[str]:
    """Return a cause where only the number is known, and too many arrive."""
    number = report.expected.number
    if report.expected.ids is not None or not number:
        return []
    times, rest = divmod(report.num_deliveries, number)
    if rest or times < 2:
        return [f"{report.num_deliveries:,} samples arrive where {number:,} are expected"]
    return [f"{report.num_deliveries:,} samples arrive, {times} times the expected {number:,}: all come {times} times"]


def _left_over(report: CoverageReport) -> list[str]:
    """Return a cause where all ranks or workers got the same number, and what does not divide by them is missing."""
    missing, number = report.num_missing - report.expected.num_missing, report.expected.number or 0
    by_worker = {f"{rank} {worker}": totals.num_samples for (rank, worker), totals in report.totals.items()}
    for who, numbers in ("ranks", _by_rank(report)), ("workers", by_worker):
        count = len(numbers)
        if count > 1 and len(set(numbers.values())) == 1 and missing == number % count:
            return [
                f"each of {count} {who} delivered {number // count:,} of {number:,} samples, and nobody the "
                f"{missing:,} left over: shares by floor division, or a sampler's drop_last"
            ]
    return []


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


def _join(ranks: list[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
