"""The verdict on a loader's epochs: right, wrong, or undecidable without keys."""

from __future__ import annotations

from collections.abc import Sequence

from shardio.check.causes import find_causes
from shardio.check.coverage import Coverage, name_ranks
from shardio.check.identity import ASK_FOR_KEY
from shardio.check.report import SHOWN, CoverageReport, ExpectedSamples, make_report
from shardio.check.stability import contents_change
from shardio.errors import IdentityError


def judge(
    epochs: Sequence[Coverage], expected: ExpectedSamples, *, num_judged: int | None = None, allow: bool = True
) -> list[CoverageReport]:
    """Return the report of each epoch of a loader.

    Args:
        epochs: The loader's consecutive epochs over all ranks.
        expected: The samples that each epoch should deliver.
        num_judged: The number of epochs to judge. The others only show whether contents change.
        allow: Whether to allow for the loader's own remainder policy.

    Raises:
        IdentityError: If samples are identified by their content, their number is right, and it is
            uncertain whether each arrived exactly once.
    """
    judged = epochs[:num_judged]
    reports = [judge_epoch(coverage, expected, allow=allow) for coverage in judged]
    for coverage, report in zip(judged, reports, strict=True):
        if is_by_content(coverage) and not is_surely_wrong(report):
            _demand_keys(epochs, coverage, report)
    return reports


def judge_epoch(coverage: Coverage, expected: ExpectedSamples, *, allow: bool = True) -> CoverageReport:
    """Return the report of one epoch, with its problems and likely causes."""
    report = make_report(coverage, expected.allow(coverage.allowance) if allow else expected)
    causes = find_causes(report)  # Before problems, which explain themselves, are added.
    report.problems += _find_problems(coverage, report, allow=allow)
    if not report.is_right:
        known = {epoch.cause: None for epoch in coverage.rank_epochs.values() if epoch.cause}
        report.causes = [*known, *(_unequal_ranks(coverage, report) or causes)]
    return report


def is_by_content(coverage: Coverage) -> bool:
    """Return whether any sample of an epoch is identified by its content."""
    return any(not epoch.by_keys for epoch in coverage.rank_epochs.values())


def is_surely_wrong(report: CoverageReport) -> bool:
    """Return whether an epoch is wrong by its problems or its number of samples alone."""
    expected = report.expected
    if report.problems:
        return True
    return (
        expected.num_samples is not None
        and report.num_deliveries != expected.num_samples + expected.num_repeats - expected.num_missing
    )


def _unequal_ranks(coverage: Coverage, report: CoverageReport) -> list[str]:
    """Return a cause if a rank delivered nothing, or if the ranks' samplers use different orders."""
    idle = [rank for rank in sorted(coverage.rank_epochs) if not coverage.num_delivered_by(rank)]
    if idle and coverage.num_deliveries and report.num_missing and not report.num_repeats:
        return [f"{name_ranks(idle)} delivered nothing"]
    states = {rank: epoch.sampler_state for rank, epoch in sorted(coverage.rank_epochs.items()) if epoch.sampler_state}
    if len(set(states.values())) < 2:
        return []
    described = "; ".join(f"{state} on rank {rank}" for rank, state in list(states.items())[:SHOWN])
    return [
        f"the ranks' samplers use different orders ({described}): call set_epoch with the same epoch on every rank, "
        "and use the same seed"
    ]


def _find_problems(coverage: Coverage, report: CoverageReport, *, allow: bool) -> list[str]:
    problems = []
    if len(set(coverage.allowances.values())) > 1:
        problems.append(
            "the ranks are in different epochs or orders: call set_epoch with the same epoch on every rank, "
            "and use the same seed"
        )
    allowance = coverage.allowance
    marked = [epoch.num_marked for epoch in coverage.rank_epochs.values()]
    num_marked = sum(map(int, filter(None, marked)))
    if allow and allowance is not None and marked and None not in marked and num_marked != allowance.num_marked:
        problems.append(
            f"{num_marked} samples are marked as repeats, but the remainder policy marks {allowance.num_marked}"
        )
    if report.expected.num_samples is not None:
        return problems
    num_ranks = len(coverage.rank_epochs)
    shares = {epoch.num_shares for epoch in coverage.rank_epochs.values()} - {None, num_ranks}
    if shares:
        splits = " and ".join(map(str, sorted(filter(None, shares))))
        problems.append(f"the sampler assumes a world size of {splits}, but the world size is {num_ranks}")
    for rank, epoch in sorted(coverage.rank_epochs.items()):
        num_samples, num_claimed = coverage.num_delivered_by(rank), epoch.num_claimed
        if num_claimed is not None and num_samples > num_claimed:
            is_multiple = num_claimed > 0 and num_samples % num_claimed == 0
            claim = (
                f"{num_samples // num_claimed} times the {num_claimed:,} that its loader has"
                if is_multiple
                else f"but its loader has {num_claimed:,}"
            )
            problems.append(f"rank {rank} delivered {num_samples:,} samples, {claim}")
        elif not epoch.is_whole and num_samples != num_claimed:
            batches = f"{epoch.num_batches:,} {'batch' if epoch.num_batches == 1 else 'batches'}"
            problems.append(f"rank {rank} stopped after {batches}, before the end of the epoch")
        elif num_claimed is not None and num_samples < num_claimed and not epoch.may_be_fewer:
            problems.append(f"rank {rank} delivered {num_samples:,} samples, but its loader has {num_claimed:,}")
    return problems


def _demand_keys(epochs: Sequence[Coverage], coverage: Coverage, report: CoverageReport) -> None:
    """Raise an error unless contents identify samples and show that the epoch is right."""
    by_content = [epoch for epoch in coverage.rank_epochs.values() if not epoch.by_keys]
    how = "samples are identified by their content"
    for epoch in by_content:
        if epoch.instability:
            raise IdentityError(f"{how}, which changes from read to read: {epoch.instability}. {ASK_FOR_KEY}")
    if report.num_unexpected or (report.num_missing > report.expected.num_missing and not report.num_repeats):
        raise IdentityError(
            f"{how}, but the content of {max(report.num_unexpected, 1):,} of them differs from what the dataset "
            f"itself returns (random augmentation, or padding to the longest sample of a batch?). {ASK_FOR_KEY}"
        )
    if not report.is_right:
        raise IdentityError(
            f"{report.num_repeats} {'sample has' if report.num_repeats == 1 else 'samples have'} the same content as "
            f"another one: they are either repeats or different samples with equal data. {ASK_FOR_KEY}"
        )
    if report.expected.ids is not None or all(epoch.is_stable for epoch in by_content):
        return
    changes = contents_change(epochs, report.expected.num_samples)
    if changes is None:
        raise IdentityError(f"{how}, but they could not be read twice to check that it stays the same. {ASK_FOR_KEY}")
    if changes:
        raise IdentityError(f"{how}, which changes from epoch to epoch (random augmentation?). {ASK_FOR_KEY}")
