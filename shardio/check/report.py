"""The report: what an epoch delivered, against what it should have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardio.check.allowance import Allowance
from shardio.check.causes import find_causes
from shardio.check.coverage import NUM_BUCKETS, Bucket, Coverage, Delivery, SourceTotals
from shardio.check.identity import Ids, key_ids
from shardio.errors import CoverageError

SHOWN = 10
"""How many samples of each kind a report names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an epoch should deliver.

    Attributes:
        ids: The identities of its samples, uint64 [n], in the dataset's order; a sample may occur several
            times. None if only their number is known.
        number: How many samples.
        names: What they are called, by identity.
        num_repeats: How many deliveries too many the remainder policy asks for (``pad``), spread evenly.
        num_missing: How many samples it leaves out (``drop``).
        policy_ids: Which samples these are, uint64 [n] sorted; None where that is not known.
        digest: Which dataset they are of, where they are all of its keys in its order.
    """

    ids: Ids | None
    number: int | None
    names: dict[int, Hashable] = field(default_factory=dict)
    num_repeats: int = 0
    num_missing: int = 0
    policy_ids: Ids | None = None
    digest: str = ""

    @classmethod
    def of_keys(cls, keys: Iterable[Hashable], *, num_repeats: int = 0, num_missing: int = 0) -> Expected:
        """Expect samples by their keys."""
        keys = list(keys)
        ids = key_ids(keys)
        names = dict(zip(ids.tolist(), keys, strict=True))
        return cls(ids=ids, number=len(keys), names=names, num_repeats=num_repeats, num_missing=num_missing)

    def allow(self, allowance: Allowance | None) -> Expected:
        """Return the same with what a remainder policy asks for, and the number of samples where it was not known."""
        if allowance is None:
            return self
        policy_ids = None
        if self.ids is not None and allowance.samples is not None and self.digest and self.digest == allowance.digest:
            policy_ids = np.sort(self.ids[list(allowance.samples)])
        return replace(
            self,
            number=allowance.num_samples if self.number is None else self.number,
            num_repeats=allowance.num_repeats,
            num_missing=allowance.num_missing,
            policy_ids=policy_ids,
        )


@dataclass(slots=True)
class CoverageReport:
    """What an epoch delivered, against what it should have. ``str`` of it is for people.

    Attributes:
        expected: What it should have delivered.
        num_deliveries: How many samples arrived.
        num_once: How many of the expected samples arrived as often as they should.
        num_repeated: How many samples arrived too often, and by how many deliveries in all (``num_repeats``).
        num_missing: How many arrivals are wanting.
        num_unexpected: How many samples arrived that were not expected; or by how many there are too many.
        num_late_repeats: How many of the surplus deliveries lie in the last batch of their source.
        num_rank_repeats: How many came to a rank after the sample had come to another one.
        num_worker_repeats: How many came from a worker after another worker of the same rank had delivered the sample.
        num_own_repeats: How many came from a worker, or to a rank, that had delivered the sample itself.
        most_surplus: By how many deliveries the worst sample arrived too often.
        repeated: The first of each, with all their deliveries.
        missing: The first of each, likewise ``unexpected``.
        missing_places: Where the missing samples lie in the expected order, int64 [n].
        totals: What each (rank, worker) delivered.
        problems: What is wrong beside the samples, in words.
        causes: What has likely gone wrong, in words.
    """

    expected: Expected
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
    missing_places: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    totals: dict[tuple[int, int], SourceTotals] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether every sample came exactly once, but for what the remainder policy says; and some came at all."""
        expected = self.expected
        # Nothing at all is right only where nothing is expected, and known to be.
        has_come = self.num_deliveries > 0 or expected.number in (0, expected.num_missing)
        number = self.num_deliveries if expected.number is None else expected.number
        # Padding goes round the epoch, so that no sample comes more than once more often than another.
        most = -(-expected.num_repeats // max(number, 1))
        return (
            has_come
            and not self.problems
            and not self.num_unexpected
            and self.num_missing == expected.num_missing
            and self.num_repeats == expected.num_repeats
            and self.most_surplus <= most
        )

    @property
    def sources(self) -> list[tuple[int, int | None, int]]:
        """How many samples each worker delivered: sorted (rank, worker, number); worker None where it is not known."""
        return [
            (rank, None if worker < 0 else worker, totals.num_samples)
            for (rank, worker), totals in sorted(self.totals.items())
        ]

    def __str__(self) -> str:
        expected = self.expected
        noun = "repeat" if self.num_repeats == 1 else "repeats"
        repeats = f" ({self.num_repeats} {noun}, {expected.num_repeats} by the remainder policy)"
        left_out = f" ({expected.num_missing} left out by the remainder policy)"
        number = self.num_deliveries - self.num_repeats if expected.number is None else expected.number
        head = (
            f"{number} samples: {self.num_once} came once, {self.num_repeated} more than once"
            f"{repeats if expected.num_repeats else ''}, {self.num_missing} never"
            f"{left_out if expected.num_missing else ''}, {self.num_unexpected} unexpected"
        )
        if self.is_right:
            return head
        lines = [head]
        for title, deliveries in ("repeated", self.repeated), ("unexpected", self.unexpected):
            for name, found in deliveries.items():
                lines.append(f"  {title}: {name} came {len(found)} times: {', '.join(map(str, found[:SHOWN]))}")
        lines += [f"  missing: {name}" for name in self.missing]
        lines += [f"  wrong: {problem}" for problem in self.problems]
        lines += [f"  likely cause: {cause}" for cause in self.causes]
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """Raise a CoverageError with this report unless the coverage is right."""
        if not self.is_right:
            raise CoverageError(str(self))


def make_report(coverage: Coverage, expected: Expected) -> CoverageReport:
    """Compare what was delivered with what should have been."""
    report = CoverageReport(expected=expected, num_deliveries=coverage.num_deliveries, totals=coverage.totals)
    names = {**expected.names, **coverage.names}
    wrong: dict[str, list[tuple[int, str, list[Delivery]]]] = {"repeated": [], "unexpected": []}
    missing, repeats = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for number, bucket in coverage.buckets():
        found, first, counts = np.unique(bucket.ids, return_index=True, return_counts=True)
        if expected.ids is None:
            should = np.ones(len(found), dtype=np.int64)
        else:
            wanted = expected.ids[expected.ids % np.uint64(NUM_BUCKETS) == np.uint64(number)]
            wanted, wanted_counts = np.unique(wanted, return_counts=True)
            should = _look_up(found, wanted, wanted_counts)
            lacking = wanted_counts - _look_up(wanted, found, counts)
            missing.append(np.repeat(wanted, np.maximum(lacking, 0)))
        surplus = np.where(should > 0, counts - should, 0).clip(min=0)
        late = np.add.reduceat(bucket.is_late, first).astype(np.int64) if len(found) else counts
        report.num_once += int(should[counts == should].sum())
        report.num_repeats += int(surplus.sum())
        report.num_repeated += int((surplus > 0).sum())
        report.num_unexpected += int((should == 0).sum())
        report.num_late_repeats += int(np.minimum(surplus, late).sum())
        if expected.policy_ids is not None:
            repeats.append(np.repeat(found, surplus))
        if surplus.any():
            _add_sharing(report, bucket, np.repeat(surplus > 0, counts))
        report.most_surplus = max(report.most_surplus, int(surplus.max(initial=0)))
        for kind, chosen in (("repeated", surplus > 0), ("unexpected", should == 0)):
            rows = np.flatnonzero(chosen)
            for i in rows[np.argsort(bucket.arrivals[first[rows]])[:SHOWN]].tolist():
                deliveries = bucket.deliveries(int(first[i]), int(first[i] + counts[i]))
                wrong[kind].append((int(bucket.arrivals[first[i]]), _name(int(found[i]), names), deliveries))
    for kind, rows_of_kind in wrong.items():
        shown = {name: deliveries for _, name, deliveries in sorted(rows_of_kind, key=lambda row: row[0])[:SHOWN]}
        setattr(report, kind, shown)
    _add_missing(report, np.concatenate(missing), names)
    _add_policy(report, np.concatenate(repeats), np.concatenate(missing))
    report.causes = find_causes(report)
    return report


def _add_missing(report: CoverageReport, missing: Ids, names: dict[int, Hashable]) -> None:
    expected = report.expected
    if expected.ids is not None:
        report.num_missing = len(missing)
        report.missing_places = (
            np.flatnonzero(np.isin(expected.ids, missing)) if len(missing) else report.missing_places
        )
        report.missing = [_name(int(i), names) for i in expected.ids[report.missing_places[:SHOWN]]]
    elif expected.number is not None:
        surplus = report.num_deliveries - report.num_repeats - expected.number
        report.num_missing, report.num_unexpected = max(0, -surplus), max(0, surplus)


def _add_sharing(report: CoverageReport, bucket: Bucket, is_repeated: NDArray[np.bool_]) -> None:
    """Count repeats by who delivered the sample before: another rank, another worker of the rank, or the same one."""
    ids, sources = bucket.ids[is_repeated], bucket.source_ids[is_repeated]
    ranks = np.array([rank for rank, _ in bucket.sources])[sources]
    num_samples, num_by_rank, num_by_source = (
        len(np.unique(np.rec.fromarrays(columns))) for columns in ([ids], [ids, ranks], [ids, sources])
    )
    report.num_rank_repeats += num_by_rank - num_samples
    report.num_worker_repeats += num_by_source - num_by_rank
    report.num_own_repeats += len(ids) - num_by_source


def _add_policy(report: CoverageReport, repeats: Ids, missing: Ids) -> None:
    """Hold what was repeated or left out against what the remainder policy says."""
    expected = report.expected
    if (report.num_repeats, report.num_missing) != (expected.num_repeats, expected.num_missing):
        return
    if expected.policy_ids is not None:
        found, what = (repeats, "repeated") if expected.num_repeats else (missing, "left out")
        if not np.array_equal(np.sort(found), expected.policy_ids):
            report.problems.append(f"the samples that were {what} are not those that the remainder policy names")
    elif report.num_late_repeats < expected.num_repeats < (expected.number or 0):
        report.problems.append(
            f"{expected.num_repeats - report.num_late_repeats} repeats do not lie in a last batch, where the "
            f"remainder policy "
            "has them"
        )


def _look_up(ids: Ids, table: Ids, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the count of each of ``ids`` in a sorted table; 0 where it is not there."""
    if not len(table):
        return np.zeros(len(ids), dtype=np.int64)
    place = np.minimum(np.searchsorted(table, ids), len(table) - 1)
    return np.where(table[place] == ids, counts[place], 0)


def _name(identity: int, names: dict[int, Hashable]) -> str:
    return str(names.get(identity, f"the sample with hash {identity:016x}"))
