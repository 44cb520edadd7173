"""The likely causes of the repeats and losses in a report."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from shardio.check.coverage import WorkerTotals, name_ranks
from shardio.check.report import CoverageReport


def find_causes(report: CoverageReport) -> list[str]:
    """Return the likely causes of a wrong report, most specific first; [] if it is right."""
    if report.is_right:
        return []
    if not report.num_deliveries:
        return [
            "no samples arrived: the iterator is exhausted, the dataset is empty, or drop_last leaves out all samples"
        ]
    if found := _other_key_type(report):
        return found
    if report.num_repeats > report.expected.num_repeats:
        found = [*_same_workers(report), *_same_ranks(report)] or _same_batches(report) or _padding(report)
        found = found or [*_overlaps(report), *_equal_keys(report)]
        # Some contents may repeat by chance: a random flip may give the same result twice.
        return found or (_multiples(report) if report.num_unexpected else [])
    if report.num_unexpected:
        return _multiples(report)
    if report.num_missing > report.expected.num_missing:
        return _left_over(report) or _losses(report)
    return []


def _other_key_type(report: CoverageReport) -> list[str]:
    """Return a cause if unexpected keys have the same text as missing ones, such as 1 and "1"."""
    if not report.num_unexpected or not set(report.unexpected) & set(report.missing):
        return []
    return [
        "the delivered keys and the expected keys have different types, such as '1' and 1: convert one "
        "to the type of the other"
    ]


def _same_workers(report: CoverageReport) -> list[str]:
    by_rank: defaultdict[int, list[WorkerTotals]] = defaultdict(list)
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
    num_samples = workers[0].num_samples
    which = "all" if num_samples == report.expected.num_samples else "the same"
    where = f" of rank {rank}" if len(by_rank) > 1 else ""
    return [
        f"each of {len(workers)} workers{where} delivered {which} {num_samples:,} samples: the dataset ignores "
        "get_worker_info"
    ]


def _same_ranks(report: CoverageReport) -> list[str]:
    sums: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for (rank, _), totals in report.totals.items():
        num_samples, id_sum, id_xor = totals.signature
        sums[rank] = [sums[rank][0] + num_samples, (sums[rank][1] + id_sum) % 2**64, sums[rank][2] ^ id_xor]
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, signature in sums.items():
        groups[tuple(signature)].append(rank)
    return [
        f"{name_ranks(ranks)} delivered the same {_num_distinct(report, ranks[0]):,} samples: the loader "
        "has no DistributedSampler or other split by rank (in WebDataset, no nodesplitter)"
        for ranks in groups.values()
        if len(ranks) > 1
    ]


def _num_samples_by_rank(report: CoverageReport) -> Counter[int]:
    counts = Counter[int]()
    for (rank, _), totals in report.totals.items():
        counts[rank] += totals.num_samples
    return counts


def _num_distinct(report: CoverageReport, rank: int) -> int:
    """Return the number of distinct samples of a rank, counting identical workers once."""
    return sum({t.signature: t.num_samples for (r, _), t in report.totals.items() if r == rank}.values())


def _padding(report: CoverageReport) -> list[str]:
    """Return a cause if the loader seems to pad.

    Each repeat is then in a last batch, and repeats a sample of the first batches or of that
    batch.
    """
    if report.num_late_repeats < report.num_repeats or report.num_missing:
        return []
    # Padding makes lengths equal.
    by_worker = {totals.num_samples for totals in report.totals.values()}
    if (report.num_rank_repeats and len(set(_num_samples_by_rank(report).values())) > 1) or (
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
        f"all repeats ({report.num_repeats:,}) are in the last batch of a rank or worker: the loader pads to equal "
        "lengths. With shardio, use remainder='keep' or 'mask'. Otherwise, look for a truncated .repeat(), "
        "or for a DistributedSampler without drop_last"
    ]


def _same_batches(report: CoverageReport) -> list[str]:
    """Return a cause if all repeats are in the same two batches and fill one of them."""
    places = {tuple((delivery.rank, delivery.batch) for delivery in found) for found in report.repeated.values()}
    sizes = {size for totals in report.totals.values() for size in (totals.largest_batch, totals.last_batch_size)}
    if len(places) != 1 or report.num_repeats < 2 or report.num_repeats not in sizes:
        return []
    (pairs,) = places
    if len(pairs) != 2 or pairs[0] == pairs[1]:
        return []
    (rank, first), (other, second) = pairs
    return [
        f"batch {first} of rank {rank} and batch {second} of rank {other} hold the same samples: a batch was "
        "delivered twice"
    ]


def _overlaps(report: CoverageReport) -> list[str]:
    """Return a cause that depends on whether workers or ranks share the repeated samples."""
    is_missing = report.num_missing > report.expected.num_missing
    if report.num_own_repeats:
        if report.num_own_repeats >= 3 and is_missing and not report.num_unexpected:
            return [
                "some samples repeat while others are missing: they are sampled with replacement, or the dataset "
                "returns the wrong sample for an index"
            ]
        if not is_missing and report.num_late_repeats == report.num_repeats:
            return ["all repeats are in the workers' last batches: their shares probably overlap at the ends"]
        return []
    shared = [("workers", report.num_worker_repeats), ("ranks", report.num_rank_repeats)]
    if is_missing and report.num_rank_repeats:
        names = " and ".join(name for name, num_repeats in shared if num_repeats)
        return [
            f"{names} repeat each other's samples and miss others, but never repeat their own: they are in different "
            "epochs or use different shuffle seeds. Call set_epoch with the same epoch on every rank, and use "
            "the same seed"
        ]
    if is_missing:
        return [
            "workers repeat each other's samples and miss others, but never repeat their own: each shuffles with its "
            "own seed before it takes its share (torch seeds every worker differently)"
        ]
    # Without expected samples, missing ones are not detected, so seeds may also be the cause.
    more = " and that all shuffle with the same seed" if report.expected.num_samples is None else ""
    return [
        f"the shares of {name} overlap by {num_repeats:,} {'sample' if num_repeats == 1 else 'samples'}: check where "
        f"each share ends{more}"
        for name, num_repeats in shared
        if num_repeats
    ]


def _equal_keys(report: CoverageReport) -> list[str]:
    """Return a cause if the number of deliveries is right but the number of different keys is not."""
    expected = report.expected
    if expected.ids is not None or report.num_deliveries != expected.num_samples:
        return []
    return ["perhaps the keys are not unique: the same name can occur in several classes or shards"]


def _multiples(report: CoverageReport) -> list[str]:
    """Return a cause if too many samples arrived and only their expected number is known."""
    num_samples = report.expected.num_samples
    if report.expected.ids is not None or not num_samples:
        return []
    times, rest = divmod(report.num_deliveries, num_samples)
    if rest or times < 2:
        return [f"{report.num_deliveries:,} samples arrived, but {num_samples:,} were expected"]
    return [
        f"{report.num_deliveries:,} samples arrived, {times} times the expected {num_samples:,}: each sample is "
        f"delivered {times} times, with different keys or content, or the expected number is too low"
    ]


def _left_over(report: CoverageReport) -> list[str]:
    """Return a cause if shares are equal and the remainder of the division is missing."""
    num_missing, num_samples = report.num_missing - report.expected.num_missing, report.expected.num_samples or 0
    by_worker = {f"{rank} {worker}": totals.num_samples for (rank, worker), totals in report.totals.items()}
    for name, counts in ("ranks", _num_samples_by_rank(report)), ("workers", by_worker):
        num_shares = len(counts)
        if num_shares > 1 and len(set(counts.values())) == 1 and num_missing == num_samples % num_shares:
            return [
                f"each of {num_shares} {name} delivered {num_samples // num_shares:,} of {num_samples:,} samples, and "
                f"none delivered the remaining {num_missing:,}: shares are rounded down, or a sampler uses drop_last"
            ]
    return []


def _losses(report: CoverageReport) -> list[str]:
    num_missing, num_samples = report.num_missing - report.expected.num_missing, report.expected.num_samples or 0
    missing = report.missing_indices
    if _batches_could_be_lost(report, num_missing):
        last = "the last " if len(missing) > 0 and missing[0] == num_samples - len(missing) else ""
        what = f"{last}{num_missing:,} of {num_samples:,} samples {'is' if num_missing == 1 else 'are'} missing"
        return [f"{what}: drop_last is set, or a loop ends one batch early"]
    num_runs = int((np.diff(missing) > 1).sum()) + 1 if len(missing) else 0
    if num_runs and len(missing) >= 2 * num_runs:
        runs = "one contiguous run" if num_runs == 1 else f"{num_runs} contiguous runs"
        return [
            f"the {num_missing:,} missing samples are more than drop_last leaves out, and form {runs}: perhaps a loop "
            "or a Subset ends early, or whole shards are missing because their number is not a multiple of the number "
            "of workers or ranks"
        ]
    return []


def _batches_could_be_lost(report: CoverageReport, num_missing: int) -> bool:
    """Return whether one lost batch or drop_last explains the missing samples.

    With drop_last, each worker loses less than a batch.
    """
    totals = report.totals.values()
    batch_size = max((each.largest_batch for each in totals), default=0)
    all_full = all(each.num_samples % batch_size == 0 for each in totals)
    return num_missing <= batch_size or (all_full and num_missing <= (batch_size - 1) * len(totals))
