"""The report of an epoch: delivered and expected samples, and the likely causes of differences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import xor

import numpy as np
from numpy.typing import NDArray

from shardio.check.coverage import (
    NUM_PARTS,
    Allowance,
    Coverage,
    Delivery,
    Ids,
    SortedDeliveries,
    WorkerTotals,
    key_ids,
    name_ranks,
)
from shardio.errors import CoverageError
from shardio.values import count

SHOWN = 10
"""The maximum number of samples that a report names for each kind of problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSamples:
    """The samples that an epoch should deliver.

    Attributes:
        ids: The identities of the samples, uint64 [n], in the dataset's order. A sample may occur several times. None
            if unknown.
        num_samples: The number of samples; None if unknown.
        names: The samples' keys, by identity.
        num_repeats: The number of extra deliveries that the remainder policy requires (``pad``), spread evenly over
            the samples.
        num_missing: The number of samples that the remainder policy leaves out (``drop``).
        policy_ids: The sorted identities of the samples that the policy repeats or leaves out, uint64 [n]; None if
            unknown.
        digest: The digest of the dataset, if ``ids`` holds all of its samples in order.
    """

    ids: Ids | None = None
    num_samples: int | None = None
    names: dict[int, Hashable] = field(default_factory=dict)
    num_repeats: int = 0
    num_missing: int = 0
    policy_ids: Ids | None = None
    digest: str = ""

    @classmethod
    def of_keys(cls, keys: Iterable[Hashable], *, num_repeats: int = 0, num_missing: int = 0) -> ExpectedSamples:
        """Return the expected samples with these keys."""
        keys = list(keys)
        ids = key_ids(keys)
        names = dict(zip(ids.tolist(), keys, strict=True))
        return cls(ids=ids, num_samples=len(keys), names=names, num_repeats=num_repeats, num_missing=num_missing)

    def allow(self, allowance: Allowance | None) -> ExpectedSamples:
        """Return a copy that allows for a remainder policy's repeats and omissions.

        If the number of samples is unknown, the copy uses the number from the loader's order.
        """
        if allowance is None:
            return self
        policy_ids = None
        if self.ids is not None and allowance.samples is not None and self.digest and self.digest == allowance.digest:
            policy_ids = np.sort(self.ids[list(allowance.samples)])
        return replace(
            self,
            num_samples=allowance.num_samples if self.num_samples is None else self.num_samples,
            num_repeats=allowance.num_repeats,
            num_missing=allowance.num_missing,
            policy_ids=policy_ids,
        )


@dataclass(slots=True)
class CoverageReport:
    """A comparison of an epoch's deliveries with the expected ones.

    ``str(report)`` is a readable summary.

    Attributes:
        expected: The samples that the epoch should have delivered.
        num_deliveries: The number of samples that arrived, including repeats.
        num_once: The number of samples that arrived as often as expected.
        num_repeated: The number of samples that arrived more often than expected.
        num_repeats: The number of surplus deliveries of the repeated samples.
        num_missing: The number of missing deliveries.
        num_unexpected: The number of unexpected samples. If only the number of samples is known, the surplus over that
            number.
        num_late_repeats: The number of repeats that were in the last batch of a worker.
        num_rank_repeats: The number of repeats across ranks.
        num_worker_repeats: The number of repeats across workers of the same rank.
        num_own_repeats: The number of repeats within a worker, or within a rank if workers are unknown.
        most_surplus: The largest number of surplus deliveries of one sample.
        repeated: The first repeated samples, with all their deliveries.
        unexpected: The first unexpected samples, with all their deliveries.
        missing: The first missing samples.
        missing_indices: The indices of the missing samples in ``expected.ids``, int64 [n].
        totals: The totals of each (rank, worker): the number of samples, their signature, and the sizes of batches.
        problems: Problems of the epoch as a whole, as text.
        causes: The likely causes, as text. Only :func:`shardio.check.judge` sets them.
    """

    expected: ExpectedSamples
    num_deliveries: int = 0
    num_once: int = 0
    num_repeated: int = 0
    num_repeats: int = 0
    num_missing: int = 0
    num_unexpected: int = 0
    num_late_repeats: int = 0
    num_rank_repeats: int = 0
    num_worker_repeats: int = 0
    num_own_repeats: int = 0
    most_surplus: int = 0
    repeated: dict[str, list[Delivery]] = field(default_factory=dict)
    unexpected: dict[str, list[Delivery]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    missing_indices: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    totals: dict[tuple[int, int], WorkerTotals] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether each sample arrived exactly once, or as the remainder policy requires."""
        expected = self.expected
        # An empty epoch is correct only if no samples are expected.
        has_samples = self.num_deliveries > 0 or expected.num_samples in (0, expected.num_missing)
        num_samples = self.num_deliveries if expected.num_samples is None else expected.num_samples
        # Padding cycles through the epoch, so the numbers of deliveries of any two samples differ by at most one.
        most = -(-expected.num_repeats // max(num_samples, 1))
        return (
            has_samples
            and not self.problems
            and not self.num_unexpected
            and self.num_missing == expected.num_missing
            and self.num_repeats == expected.num_repeats
            and self.most_surplus <= most
        )

    @property
    def samples_by_worker(self) -> list[tuple[int, int | None, int]]:
        """Sorted tuples (rank, worker, number of samples). A worker is None if unknown."""
        return [
            (rank, None if worker < 0 else worker, totals.num_samples)
            for (rank, worker), totals in sorted(self.totals.items())
        ]

    def __str__(self) -> str:
        expected = self.expected
        repeats = f" ({count(self.num_repeats, 'repeat')}, {expected.num_repeats} required by the remainder policy)"
        not_due = f" ({expected.num_missing} left out by the remainder policy, or delivered before the run resumed)"
        num_samples = self.num_deliveries - self.num_repeats if expected.num_samples is None else expected.num_samples
        head = (
            f"{count(num_samples, 'sample')}: {self.num_once} delivered once, {self.num_repeated} more than once"
            f"{repeats if expected.num_repeats else ''}, {self.num_missing} never"
            f"{not_due if expected.num_missing else ''}, {self.num_unexpected} unexpected"
        )
        if self.is_right:
            return head
        lines = [head]
        for title, deliveries in ("repeated", self.repeated), ("unexpected", self.unexpected):
            for name, found in deliveries.items():
                times = count(len(found), "time")
                lines.append(f"  {title}: {name}, delivered {times}: {', '.join(map(str, found[:SHOWN]))}")
        lines += [f"  missing: {name}" for name in self.missing]
        lines += [f"  wrong: {problem}" for problem in self.problems]
        lines += [f"  likely cause: {cause}" for cause in self.causes]
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """Raise a CoverageError with this report unless the epoch is correct."""
        if not self.is_right:
            raise CoverageError(str(self))


def make_report(coverage: Coverage, expected: ExpectedSamples) -> CoverageReport:
    """Compare an epoch's deliveries with the expected ones."""
    report = CoverageReport(expected=expected, num_deliveries=coverage.num_deliveries, totals=coverage.totals)
    names = {**expected.names, **coverage.names}
    wrong: dict[str, list[tuple[int, str, list[Delivery]]]] = {"repeated": [], "unexpected": []}
    missing, repeats = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for number, part in enumerate(coverage.sorted_parts()):
        found, first, counts = np.unique(part.ids, return_index=True, return_counts=True)
        if expected.ids is None:
            should = np.ones(len(found), dtype=np.int64)
        else:
            wanted = expected.ids[expected.ids % np.uint64(NUM_PARTS) == np.uint64(number)]
            wanted, wanted_counts = np.unique(wanted, return_counts=True)
            should = _look_up(found, wanted, wanted_counts)
            lacking = wanted_counts - _look_up(wanted, found, counts)
            missing.append(np.repeat(wanted, np.maximum(lacking, 0)))
        surplus = np.where(should > 0, counts - should, 0).clip(min=0)
        late = np.add.reduceat(part.is_late, first).astype(np.int64) if len(found) else counts
        report.num_once += int(should[counts == should].sum())
        report.num_repeats += int(surplus.sum())
        report.num_repeated += int((surplus > 0).sum())
        report.num_unexpected += int((should == 0).sum())
        report.num_late_repeats += int(np.minimum(surplus, late).sum())
        if expected.policy_ids is not None:
            repeats.append(np.repeat(found, surplus))
        if surplus.any():
            _add_sharing(report, part, np.repeat(surplus > 0, counts))
        report.most_surplus = max(report.most_surplus, int(surplus.max(initial=0)))
        for kind, chosen in (("repeated", surplus > 0), ("unexpected", should == 0)):
            rows = np.flatnonzero(chosen)
            for i in rows[np.argsort(part.arrivals[first[rows]])[:SHOWN]].tolist():
                deliveries = part.deliveries(int(first[i]), int(first[i] + counts[i]))
                wrong[kind].append((int(part.arrivals[first[i]]), _name(int(found[i]), names), deliveries))
    for kind, rows_of_kind in wrong.items():
        shown = {name: deliveries for _, name, deliveries in sorted(rows_of_kind, key=lambda row: row[0])[:SHOWN]}
        setattr(report, kind, shown)
    _add_missing(report, np.concatenate(missing), names)
    _add_policy(report, np.concatenate(repeats), np.concatenate(missing))
    return report


def _add_missing(report: CoverageReport, missing: Ids, names: dict[int, Hashable]) -> None:
    expected = report.expected
    if expected.ids is not None:
        report.num_missing = len(missing)
        if len(missing):
            report.missing_indices = np.flatnonzero(np.isin(expected.ids, missing))
        report.missing = [_name(int(i), names) for i in expected.ids[report.missing_indices[:SHOWN]]]
    elif expected.num_samples is not None:
        surplus = report.num_deliveries - report.num_repeats - expected.num_samples
        report.num_missing, report.num_unexpected = max(0, -surplus), max(0, surplus)


def _add_sharing(report: CoverageReport, deliveries: SortedDeliveries, is_repeated: NDArray[np.bool_]) -> None:
    ids, sources = deliveries.ids[is_repeated], deliveries.source_ids[is_repeated]
    ranks = np.array([rank for rank, _ in deliveries.sources])[sources]
    num_samples, num_by_rank, num_by_source = (
        len(np.unique(np.rec.fromarrays(columns))) for columns in ([ids], [ids, ranks], [ids, sources])
    )
    report.num_rank_repeats += num_by_rank - num_samples
    report.num_worker_repeats += num_by_source - num_by_rank
    report.num_own_repeats += len(ids) - num_by_source


def _add_policy(report: CoverageReport, repeats: Ids, missing: Ids) -> None:
    expected = report.expected
    if (report.num_repeats, report.num_missing) != (expected.num_repeats, expected.num_missing):
        return
    if expected.policy_ids is not None:
        found, what = (repeats, "repeated") if expected.num_repeats else (missing, "left out")
        if not np.array_equal(np.sort(found), expected.policy_ids):
            report.problems.append(f"the samples that were {what} are not the ones that the remainder policy selects")
    elif report.num_late_repeats < expected.num_repeats < (expected.num_samples or 0):
        early = count(expected.num_repeats - report.num_late_repeats, "repeat")
        report.problems.append(f"the remainder policy puts repeats in the last batches, but {early} came earlier")


def _look_up(ids: Ids, table: Ids, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the counts of ``ids`` in a sorted table; 0 for missing ids."""
    if not len(table):
        return np.zeros(len(ids), dtype=np.int64)
    found = np.minimum(np.searchsorted(table, ids), len(table) - 1)
    return np.where(table[found] == ids, counts[found], 0)


def _name(identity: int, names: dict[int, Hashable]) -> str:
    return str(names.get(identity, f"the sample with hash {identity:016x}"))


def find_causes(report: CoverageReport) -> list[str]:
    """Return the likely causes of a report's problems, most specific first; [] if there are none."""
    if report.is_right:
        return []
    if not report.num_deliveries:
        causes = "the iterator is exhausted, the dataset is empty, or drop_last leaves out all samples"
        return [f"no samples arrived: {causes}"]
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
    if not report.num_unexpected or not set(report.unexpected) & set(report.missing):
        return []
    return [
        "the delivered keys and the expected keys have different types, such as '1' and 1: convert one "
        "to the type of the other"
    ]


def _same_workers(report: CoverageReport) -> list[str]:
    by_rank = _group_by_rank(report)
    for rank, workers in by_rank.items():
        if len(workers) > 1 and len({worker.signature for worker in workers}) == 1:
            num_samples = workers[0].num_samples
            which = "all" if num_samples == report.expected.num_samples else "the same"
            where = f" of rank {rank}" if len(by_rank) > 1 else ""
            return [
                f"each of {len(workers)} workers{where} delivered {which} {count(num_samples, 'sample')}: the dataset "
                "ignores get_worker_info"
            ]
    return []


def _same_ranks(report: CoverageReport) -> list[str]:
    groups: defaultdict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for rank, workers in _group_by_rank(report).items():
        nums, sums, xors = zip(*(worker.signature for worker in workers), strict=True)
        # Identical workers are counted once.
        num_distinct = sum({worker.signature: worker.num_samples for worker in workers}.values())
        groups[sum(nums), sum(sums) % 2**64, reduce(xor, xors)][rank] = num_distinct
    return [
        f"{name_ranks(list(ranks))} delivered the same {count(next(iter(ranks.values())), 'sample')}: the loader "
        "has no DistributedSampler or other split by rank (in WebDataset, no nodesplitter)"
        for ranks in groups.values()
        if len(ranks) > 1
    ]


def _group_by_rank(report: CoverageReport) -> dict[int, list[WorkerTotals]]:
    by_rank: defaultdict[int, list[WorkerTotals]] = defaultdict(list)
    for (rank, _), totals in report.totals.items():
        by_rank[rank].append(totals)
    return by_rank


def _num_samples_by_rank(report: CoverageReport) -> dict[int, int]:
    return {rank: sum(each.num_samples for each in found) for rank, found in _group_by_rank(report).items()}


def _padding(report: CoverageReport) -> list[str]:
    """Return a cause if the loader seems to pad the epoch.

    With padding, each repeat is in the last batch of a rank or worker, and its sample is also in one of the first
    batches or in the same batch.
    """
    if report.num_late_repeats < report.num_repeats or report.num_missing:
        return []
    by_worker = {totals.num_samples for totals in report.totals.values()}  # Padding makes lengths equal.
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
    # Without expected samples, missing samples are not detected, so seeds may also be the cause.
    more = " and that all shuffle with the same seed" if report.expected.num_samples is None else ""
    return [
        f"the shares of {name} overlap by {count(num_repeats, 'sample')}: check where each share ends{more}"
        for name, num_repeats in shared
        if num_repeats
    ]


def _equal_keys(report: CoverageReport) -> list[str]:
    expected = report.expected
    if expected.ids is not None or report.num_deliveries != expected.num_samples:
        return []
    return ["perhaps the keys are not unique: the same name can occur in several classes or shards"]


def _multiples(report: CoverageReport) -> list[str]:
    num_samples = report.expected.num_samples
    if report.expected.ids is not None or not num_samples:
        return []
    times, rest = divmod(report.num_deliveries, num_samples)
    if rest or times < 2:
        return [f"{count(report.num_deliveries, 'sample')} arrived, but {num_samples:,} were expected"]
    return [
        f"{count(report.num_deliveries, 'sample')} arrived, {times} times the expected {num_samples:,}: each sample is "
        f"delivered {times} times, with different keys or content, or the expected number is too low"
    ]


def _left_over(report: CoverageReport) -> list[str]:
    num_missing, num_samples = report.num_missing - report.expected.num_missing, report.expected.num_samples or 0
    by_worker = [totals.num_samples for totals in report.totals.values()]
    for name, counts in ("ranks", _num_samples_by_rank(report).values()), ("workers", by_worker):
        num_shares = len(counts)
        if num_shares > 1 and len(set(counts)) == 1 and num_missing == num_samples % num_shares:
            return [
                f"each of {num_shares} {name} delivered {num_samples // num_shares:,} of "
                f"{count(num_samples, 'sample')}, and none delivered the remaining {num_missing:,}: shares are rounded "
                "down, or a sampler uses drop_last"
            ]
    return []


def _losses(report: CoverageReport) -> list[str]:
    num_missing, num_samples = report.num_missing - report.expected.num_missing, report.expected.num_samples or 0
    missing = report.missing_indices
    if _batches_could_be_lost(report, num_missing):
        last = "the last " if len(missing) > 0 and missing[0] == num_samples - len(missing) else ""
        what = f"{last}{num_missing:,} of {count(num_samples, 'sample')} {'is' if num_missing == 1 else 'are'} missing"
        return [f"{what}: drop_last is set, or a loop ends one batch early"]
    num_runs = int((np.diff(missing) > 1).sum()) + 1 if len(missing) else 0
    if num_runs and len(missing) >= 2 * num_runs:
        runs = count(num_runs, "contiguous run")
        return [
            f"more samples are missing ({num_missing:,}) than drop_last leaves out, and they form {runs}: perhaps a "
            "loop or a Subset ends early, or whole shards are missing because their number is not a multiple of the "
            "number of workers or ranks"
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
