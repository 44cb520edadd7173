"""The report: what an epoch delivered, compared with what it should have delivered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardio.check.allowance import Allowance
from shardio.check.coverage import NUM_PARTS, Coverage, Delivery, SortedDeliveries, WorkerTotals
from shardio.check.identity import Ids, key_ids
from shardio.errors import CoverageError

SHOWN = 10
"""The number of samples of each kind that a report names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSamples:
    """The samples that an epoch should deliver.

    Attributes:
        ids: The identities of the samples, uint64 [n], in the dataset's order. A sample may occur
            several times. None if unknown.
        num_samples: The number of samples; None if unknown.
        names: The samples' keys, by identity.
        num_repeats: The number of extra deliveries that the remainder policy requires (``pad``),
            spread evenly over the samples.
        num_missing: The number of samples that the remainder policy leaves out (``drop``).
        policy_ids: The sorted identities of the samples that the policy repeats or leaves out,
            uint64 [n]; None if unknown.
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

        If the number of samples is unknown, the copy takes the number that the loader's order has.
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
    """A comparison of what an epoch delivered with what it should have delivered.

    ``str(report)`` is a summary for humans.

    Attributes:
        expected: The samples that the epoch should have delivered.
        num_deliveries: The number of samples that arrived, including repeats.
        num_once: The number of samples that arrived as often as expected.
        num_repeated: The number of samples that arrived more often than expected.
        num_repeats: The number of surplus deliveries of these samples.
        num_missing: The number of missing deliveries.
        num_unexpected: The number of unexpected samples. If only the number of samples is known,
            the surplus over that number.
        num_late_repeats: The number of repeats in the last batch of their worker.
        num_rank_repeats: The number of repeats across ranks.
        num_worker_repeats: The number of repeats across workers of the same rank.
        num_own_repeats: The number of repeats within a worker, or within a rank if workers are
            unknown.
        most_surplus: The largest number of surplus deliveries of one sample.
        repeated: The first repeated samples, with all their deliveries.
        unexpected: The first unexpected samples, with all their deliveries.
        missing: The first missing samples.
        missing_indices: The indices of the missing samples in ``expected.ids``, int64 [n].
        totals: What each (rank, worker) delivered: the number of samples, a signature of them, and the sizes of
            batches.
        problems: Problems of the epoch as a whole, as text.
        causes: The likely causes, as text. Only :func:`shardio.check.judge` finds them.
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
        # An empty epoch is right only if it is known to be empty.
        has_samples = self.num_deliveries > 0 or expected.num_samples in (0, expected.num_missing)
        num_samples = self.num_deliveries if expected.num_samples is None else expected.num_samples
        # Padding cycles through the epoch, so two samples' numbers of deliveries differ by at most one.
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
        repeats = f" ({_count(self.num_repeats, 'repeat')}, {expected.num_repeats} required by the remainder policy)"
        left_out = f" ({expected.num_missing} left out by the remainder policy)"
        num_samples = self.num_deliveries - self.num_repeats if expected.num_samples is None else expected.num_samples
        head = (
            f"{_count(num_samples, 'sample')}: {self.num_once} delivered once, {self.num_repeated} more than once"
            f"{repeats if expected.num_repeats else ''}, {self.num_missing} never"
            f"{left_out if expected.num_missing else ''}, {self.num_unexpected} unexpected"
        )
        if self.is_right:
            return head
        lines = [head]
        for title, deliveries in ("repeated", self.repeated), ("unexpected", self.unexpected):
            for name, found in deliveries.items():
                times = _count(len(found), "time")
                lines.append(f"  {title}: {name}, delivered {times}: {', '.join(map(str, found[:SHOWN]))}")
        lines += [f"  missing: {name}" for name in self.missing]
        lines += [f"  wrong: {problem}" for problem in self.problems]
        lines += [f"  likely cause: {cause}" for cause in self.causes]
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """Raise a CoverageError with this report unless the epoch is right."""
        if not self.is_right:
            raise CoverageError(str(self))


def make_report(coverage: Coverage, expected: ExpectedSamples) -> CoverageReport:
    """Compare what an epoch delivered with what it should have delivered."""
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
    """Count the repeats across ranks, across workers of a rank, and within a worker."""
    ids, sources = deliveries.ids[is_repeated], deliveries.source_ids[is_repeated]
    ranks = np.array([rank for rank, _ in deliveries.sources])[sources]
    num_samples, num_by_rank, num_by_source = (
        len(np.unique(np.rec.fromarrays(columns))) for columns in ([ids], [ids, ranks], [ids, sources])
    )
    report.num_rank_repeats += num_by_rank - num_samples
    report.num_worker_repeats += num_by_source - num_by_rank
    report.num_own_repeats += len(ids) - num_by_source


def _add_policy(report: CoverageReport, repeats: Ids, missing: Ids) -> None:
    """Compare the repeated or omitted samples with those that the remainder policy selects."""
    expected = report.expected
    if (report.num_repeats, report.num_missing) != (expected.num_repeats, expected.num_missing):
        return
    if expected.policy_ids is not None:
        found, what = (repeats, "repeated") if expected.num_repeats else (missing, "left out")
        if not np.array_equal(np.sort(found), expected.policy_ids):
            report.problems.append(f"the samples that were {what} are not the ones that the remainder policy selects")
    elif report.num_late_repeats < expected.num_repeats < (expected.num_samples or 0):
        early = _count(expected.num_repeats - report.num_late_repeats, "repeat")
        report.problems.append(f"the remainder policy puts repeats in the last batches, but {early} came earlier")


def _look_up(ids: Ids, table: Ids, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the counts of ``ids`` in a sorted table; 0 for those that are not in the table."""
    if not len(table):
        return np.zeros(len(ids), dtype=np.int64)
    found = np.minimum(np.searchsorted(table, ids), len(table) - 1)
    return np.where(table[found] == ids, counts[found], 0)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _name(identity: int, names: dict[int, Hashable]) -> str:
    return str(names.get(identity, f"the sample with hash {identity:016x}"))
