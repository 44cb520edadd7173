"""The verdict on a loader's epochs: right, wrong, or not to be decided without keys."""

from __future__ import annotations

from collections.abc import Sequence

from shardio.check.coverage import Coverage
from shardio.check.report import SHOWN, CoverageReport, Expected, make_report
from shardio.check.stability import contents_change
from shardio.errors import IdentityError


def judge(
    epochs: Sequence[Coverage], expected: Expected, *, num_judged: int | None = None, allow: bool = True
) -> list[CoverageReport]:
    """Return the report of each epoch of a loader.

    Args:
        epochs: Its epochs over all ranks, one after another.
        expected: What each should deliver.
        num_judged: How many of the epochs are judged; the others only show whether contents change.
        allow: Whether a loader's own remainder policy is allowed for.

    Raises:
        IdentityError: If samples are known by their content, their number is right, and it cannot be shown that none
            was repeated or lost.
    """
    judged = epochs[:num_judged]
    reports = [judge_epoch(coverage, expected, allow=allow) for coverage in judged]
    for coverage, report in zip(judged, reports, strict=True):
        if is_by_content(coverage) and not is_surely_wrong(report):
            _demand_keys(epochs, coverage, report)
    return reports


def judge_epoch(coverage: Coverage, expected: Expected, *, allow: bool = True) -> CoverageReport:
    """Return the report of one epoch, by its samples and by what is known of each rank."""
    report = make_report(coverage, expected.allow(coverage.allowance) if allow else expected)
    causes = report.causes  # Found while there were no problems yet, which are causes themselves.
    report.problems += _problems(coverage, report, allow=allow)
    if not report.is_right:
        own = {epoch.cause: None for epoch in coverage.rank_epochs.values() if epoch.cause}
        report.causes = [*own, *(_unequal_ranks(coverage, report) or causes)]
    return report


def is_by_content(coverage: Coverage) -> bool:
    """Return whether any sample of an epoch is known by its content alone."""
    return any(not epoch.by_keys for epoch in coverage.rank_epochs.values())


def is_surely_wrong(report: CoverageReport) -> bool:
    """Return whether an epoch is wrong whatever its samples are: by their number, or by what ranks did."""
    expected = report.expected
    if report.problems:
        return True
    return (
        expected.number is not None
        and report.num_deliveries != expected.number + expected.num_repeats - expected.num_missing
    )


def _unequal_ranks(coverage: Coverage, report: CoverageReport) -> list[str]:
    """Return a cause where one rank delivers nothing, or the ranks' samplers are not in the same order."""
    idle = [rank for rank in sorted(coverage.rank_epochs) if not coverage.num_delivered_by(rank)]
    if idle and coverage.num_deliveries and report.num_missing and not report.num_repeats:
        return [f"rank {', '.join(map(str, idle))} delivered nothing"]
    states = {rank: epoch.sampler_state for rank, epoch in sorted(coverage.rank_epochs.items()) if epoch.sampler_state}
    if len(set(states.values())) < 2:
        return []
    said = "; ".join(f"{state} on rank {rank}" for rank, state in list(states.items())[:SHOWN])
    return [
        f"the ranks' samplers are not in the same order ({said}): call set_epoch with the same number on every rank, "
        "and give all one seed"
    ]


def _problems(coverage: Coverage, report: CoverageReport, *, allow: bool) -> list[str]:
    problems = []
    if len(set(coverage.allowances.values())) > 1:
        problems.append(
            "the ranks are not in the same epoch of the same order: set_epoch or the seed differs between ranks"
        )
    allowance = coverage.allowance
    marked = [epoch.num_marked for epoch in coverage.rank_epochs.values()]
    if (
        allow
        and allowance is not None
        and marked
        and None not in marked
        and sum(map(int, filter(None, marked))) != allowance.num_marked
    ):
        num_marked = sum(map(int, filter(None, marked)))
        problems.append(
            f"{num_marked} samples are marked as repeats, and the remainder policy has {allowance.num_marked}"
        )
    if report.expected.number is not None:
        return problems
    shares = {epoch.num_shares for epoch in coverage.rank_epochs.values()} - {None, len(coverage.rank_epochs)}
    if shares:
        problems.append(
            f"the sampler splits the dataset for {', '.join(map(str, sorted(filter(None, shares))))} ranks, and there "
            f"are {len(coverage.rank_epochs)}"
        )
    for rank, epoch in sorted(coverage.rank_epochs.items()):
        number, claimed = coverage.num_delivered_by(rank), epoch.num_claimed
        if claimed is not None and number > claimed:
            times = f", {number // claimed} times as many" if claimed and number % claimed == 0 else ""
            problems.append(f"rank {rank} delivered {number:,} samples where its loader has {claimed:,}{times}")
        elif not epoch.is_whole and number != claimed:
            problems.append(f"rank {rank} stopped after {epoch.num_batches:,} batches, before the end of the epoch")
        elif claimed is not None and number < claimed and not epoch.may_be_fewer:
            problems.append(f"rank {rank} delivered {number:,} samples where its loader has {claimed:,}")
    return problems


def _demand_keys(epochs: Sequence[Coverage], coverage: Coverage, report: CoverageReport) -> None:
    """Raise unless contents are an identity, and show that the epoch is right."""
    by_content = [epoch for epoch in coverage.rank_epochs.values() if not epoch.by_keys]
    how = "samples are known by their content, which"
    for epoch in by_content:
        if epoch.instability:
            raise IdentityError(f"{how} is not the same each time: {epoch.instability}. Give key= to identify samples")
    if report.num_unexpected or (report.num_missing > report.expected.num_missing and not report.num_repeats):
        raise IdentityError(
            f"{how} in {max(report.num_unexpected, 1):,} of them is not what the dataset alone gives (augmentation, or "
            "padding to the longest of a batch): give key="
        )
    if not report.is_right:
        raise IdentityError(
            f"{report.num_repeats} samples have the content of another, which may be repeats or equal data: "
            "give key= to identify samples"
        )
    if report.expected.ids is not None or all(epoch.is_stable for epoch in by_content):
        return
    changes = contents_change(epochs, report.expected.number)
    if changes is None:
        raise IdentityError(f"{how} could not be read twice to see whether it stays the same: give key=")
    if changes:
        raise IdentityError(f"{how} is not the same in each epoch (random augmentation?): give key=")
