"""Fail a test, or stop training, if a loader repeats or loses samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, Generic, TypeVar

import numpy as np

from shardio.check.coverage import ASK_FOR_KEY, Coverage, Ids, Key, RankEpoch, content_ids, key_ids, keys_in, name_ranks
from shardio.check.recording import (
    HasWorkers,
    collates_columns,
    find_claims,
    find_marks,
    indices_of,
    is_batching,
    is_map_style,
    leave_out_marked,
    marks_repeats,
    probe_contents,
    record,
    source_of,
    splits,
)
from shardio.check.report import SHOWN, CoverageReport, ExpectedSamples, find_causes, make_report
from shardio.errors import CoverageError, IdentityError
from shardio.values import count
from shardio.world import find_world

Batch = TypeVar("Batch")

_ASK_FOR_KEY = "Pass guard(…, key=) to identify samples"


def assert_exactly_once(
    loader: Iterable[Any] | tuple[Iterable[Any], ...],
    expected: Collection[Hashable] | int | None = None,
    *,
    key: Key = None,
    epochs: int = 1,
    set_epoch: Callable[[int], object] | None = None,
) -> None:
    """Assert that each epoch of a loader delivers every sample exactly once.

    >>> assert_exactly_once([["a", "b"], ["c"]], expected=["a", "b", "c"])
    >>> assert_exactly_once([["a", "b"], ["b"]], expected=["a", "b"])
    Traceback (most recent call last):
    shardio.errors.CoverageError: 2 samples: 1 delivered once, 1 more than once, 0 never, 0 unexpected
      repeated: b, delivered 2 times: rank 0 batch 0, rank 0 batch 1
      likely cause: all repeats (1) are in the last batch of a rank or worker: the loader pads to equal lengths. With \
shardio, use remainder='keep' or 'mask'. Otherwise, look for a truncated .repeat(), or for a \
DistributedSampler without drop_last

    Args:
        loader: Any iterable of batches, or a tuple of such iterables, one per rank. Each iterable is read once
            per epoch.
        expected: The keys that each epoch should deliver, in the dataset's order, or their number. If None and
            the loader is a DataLoader, the check first reads its dataset, without workers, to determine the keys. For
            other loaders, the check finds repeats, but it finds lost samples only if the loader reports a number of
            samples.
        key: The way to find a batch's keys: a function of the batch, or the name or index of a field. If None, the
            values in a batch are its keys if they are strings or integers; otherwise, samples are identified by their
            content, which must be the same on every read.
        epochs: The number of epochs to check. If samples are identified by content, one more epoch may be read
            for comparison.
        set_epoch: A function that the check calls with the epoch's number before each epoch, as a training script does.

    Raises:
        CoverageError: If samples are repeated, lost or unexpected. The error is also an AssertionError. The message
            names the samples, the ranks and workers that delivered them, and the likely cause.
        IdentityError: If samples cannot be identified, for example because random augmentation changes their content.
            The error is also a TypeError.
    """
    loaders = loader if isinstance(loader, tuple) else (loader,)
    wanted, is_stable = _make_expected(loaders, expected, key)
    has_names = expected is not None and not isinstance(expected, int | np.integer)
    found: list[Coverage] = []

    def read_epoch() -> Coverage:
        if set_epoch is not None:
            set_epoch(len(found))
        coverage = Coverage()
        for rank, one in enumerate(loaders):
            record(one, coverage, rank=rank, key=key, world_size=len(loaders))
        found.append(coverage)
        return coverage

    for _ in range(epochs):
        coverage = read_epoch()
        if is_by_content(coverage) and has_names:
            raise IdentityError(f"the batches hold no keys to compare with the expected keys. {ASK_FOR_KEY}")
        is_empty = expected is None and not coverage.num_deliveries
        if is_empty and wanted.num_samples and isinstance(loaders[0], HasWorkers):
            _refuse_one_pass(wanted.num_samples, len(_read_alone(loaders[0], key)[0]))
        report = judge_epoch(coverage, wanted, allow=False)
        if not is_by_content(coverage) or is_surely_wrong(report):
            report.raise_if_wrong()
        if not is_stable:
            raise IdentityError(
                "the contents of samples differ from one pass to the next (random augmentation?), so they do not "
                f"identify samples. {ASK_FOR_KEY}"
            )
    if epochs == 1 and needs_second_look(found, wanted):
        read_epoch()
    for report in judge(found, wanted, num_judged=epochs, allow=False):
        report.raise_if_wrong()
    if causes := find_frozen_orders(found[:epochs]):
        raise CoverageError("\n".join(causes))


def _make_expected(
    loaders: tuple[Iterable[Any], ...], expected: Collection[Hashable] | int | None, key: Key
) -> tuple[ExpectedSamples, bool]:
    """Return the samples that each epoch should deliver, and whether their contents could be stable."""
    if isinstance(expected, int | np.integer):
        return ExpectedSamples(num_samples=int(expected)), True
    if expected is not None:
        return ExpectedSamples.of_keys(expected), True
    first = loaders[0]
    # With several ranks, only a sampler that splits the dataset shows that all ranks share one dataset.
    if not isinstance(first, HasWorkers) or (len(loaders) > 1 and not splits(first)):
        return ExpectedSamples(), True
    ids, names = _read_alone(first, key)
    if not len(ids) and not is_map_style(first):
        return ExpectedSamples(), True
    if not names:
        again = _read_alone(first, key)[0]
        _refuse_one_pass(len(ids), len(again))
        if not np.array_equal(np.sort(ids), np.sort(again)):
            return ExpectedSamples(num_samples=len(ids)), False
    return ExpectedSamples(ids=ids, num_samples=len(ids), names=names), True


def _refuse_one_pass(num_samples: int, num_again: int) -> None:
    if num_samples and not num_again:
        raise IdentityError(
            f"the dataset yielded {count(num_samples, 'sample')} on the first pass and none on a later one: an "
            "iterator can be read only once. Pass expected=, or use a dataset whose __iter__ starts over"
        )


def _read_alone(loader: HasWorkers, key: Key) -> tuple[Ids, dict[int, Hashable]]:
    """Return the identities and keys of a loader's dataset, read without workers or a sampler."""
    dataset = loader.dataset
    indices = (indices_of(loader) or range(len(dataset))) if is_map_style(loader) else None
    samples = iter(dataset) if indices is None else (dataset[index] for index in indices)
    ids, names = [np.empty(0, np.uint64)], dict[int, Hashable]()
    for sample in samples:
        batch = loader.collate_fn([sample] if is_batching(loader) else sample)
        keys = keys_in(batch, key)
        ids.append(content_ids(batch, is_collated=collates_columns(loader)) if keys is None else key_ids(keys))
        names.update(zip(ids[-1].tolist(), keys or (), strict=False))
    return np.concatenate(ids), names


class guard(Generic[Batch]):  # noqa: N801  # used like a function
    """Wrap a loader to raise an error when an epoch repeats a sample.

    >>> list(guard([["a", "b"], ["c"]]))
    [['a', 'b'], ['c']]
    >>> list(guard([["a", "b"], ["b"]], key=list))
    Traceback (most recent call last):
    shardio.errors.CoverageError: batch 1 repeats b, which batch 0 of this epoch delivered

    Without keys, samples are identified by their content. If random augmentation changes the content, iteration raises
    an IdentityError. To detect this, the guard reads a few samples of a map-style dataset several times before the
    first batch.

    Args:
        loader: Any iterable of batches.
        key: The way to find a batch's keys, as in :func:`shardio.check.assert_exactly_once`.
    """

    def __init__(self, loader: Iterable[Batch], *, key: Key = None) -> None:
        self.loader = loader
        self._key = key
        self._claims: RankEpoch | None = None
        self._former: set[int] = set()  # The contents of earlier epochs.

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # The attribute may not be set yet, for example during unpickling.
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the loader's next epoch.

        Raises:
            CoverageError: If a sample is repeated. The message names the sample.
            IdentityError: If samples cannot be identified without keys.
        """
        seen: dict[int, int] = {}
        by_content, num_new = False, 0
        has_marks = marks_repeats(source_of(self.loader))
        for batch_number, batch in enumerate(self.loader):
            keys = keys_in(batch, self._key)
            valid = find_marks(batch) if has_marks else None
            if keys is None:
                by_content = True
                ids = self._content_ids(batch)
                ids = ids if valid is None else ids[valid]
            else:
                ids = key_ids(keys := leave_out_marked(keys, valid))
            for row, identity in enumerate(ids.tolist()):
                if identity in seen:
                    self._refuse(batch_number, None if keys is None else keys[row], seen[identity])
                seen[identity] = batch_number
                num_new += identity not in self._former
            if by_content:
                self._check_contents(len(seen), num_new)
            yield batch
        if by_content:
            self._remember(seen)

    def _content_ids(self, batch: Batch) -> Ids:
        if self._claims is None:
            self._claims = probe_contents(source_of(self.loader), find_claims(self.loader, find_world().world_size))
            if self._claims.instability:
                raise IdentityError(
                    "samples are identified by their content, which changes from read to read: "
                    f"{self._claims.instability}. {_ASK_FOR_KEY}"
                )
        return content_ids(batch, is_collated=collates_columns(source_of(self.loader)))

    def _refuse(self, batch_number: int, key: object, earlier: int) -> None:
        if key is not None:
            message = f"batch {batch_number} repeats {key}, which batch {earlier} of this epoch delivered"
            hint = "" if self._key is not None else f". If {key} does not identify a sample, pass key="
            raise CoverageError(f"{message}{hint}")
        raise IdentityError(
            f"batch {batch_number} holds a sample with the same content as one in batch {earlier} of this epoch: it is "
            f"either a repeat or another sample with equal data. {_ASK_FOR_KEY}"
        )

    def _check_contents(self, num_seen: int, num_new: int) -> None:
        assert self._claims is not None, "_content_ids has set the claims"
        claimed, num_samples = self._claims.num_claimed, self._claims.num_dataset
        if claimed is not None and num_seen > claimed:
            raise CoverageError(
                f"this epoch delivered {count(num_seen, 'sample')}, but the loader has {claimed:,}: some were repeated "
                f"with different content. {_ASK_FOR_KEY}"
            )
        if num_samples is not None:
            self._refuse_changes(len(self._former) + num_new, num_samples)

    def _remember(self, seen: dict[int, int]) -> None:
        """Compare a complete epoch's contents with those of earlier epochs, if there is only one rank."""
        assert self._claims is not None, "_content_ids has set the claims"
        together = self._former | seen.keys()
        if self._former and self._claims.num_dataset is None and find_world().world_size == 1:
            # A resumed epoch has fewer samples than the next epoch.
            self._refuse_changes(len(together), max(len(self._former), len(seen)))
        self._former = together

    def _refuse_changes(self, num_contents: int, num_samples: int) -> None:
        if num_contents > num_samples:
            raise IdentityError(
                f"{count(num_samples, 'sample')} had {count(num_contents, 'different content')}: contents change from "
                f"one epoch to the next (random augmentation?), so repeats cannot be detected. {_ASK_FOR_KEY}"
            )


def judge(
    epochs: Sequence[Coverage], expected: ExpectedSamples, *, num_judged: int | None = None, allow: bool = True
) -> list[CoverageReport]:
    """Return the report of each epoch of a loader.

    Args:
        epochs: The loader's consecutive epochs over all ranks.
        expected: The samples that each epoch should deliver.
        num_judged: The number of epochs to judge. Later epochs only show whether contents change.
        allow: Whether to allow for the loader's own remainder policy.

    Raises:
        IdentityError: If samples are identified by their content and their number is right, but it is uncertain whether
            each arrived exactly once.
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
    causes = find_causes(report)  # The problems added below state their own causes.
    report.problems += _find_problems(coverage, report, allow=allow)
    if not report.is_right:
        known = {epoch.cause: None for epoch in coverage.rank_epochs.values() if epoch.cause}
        report.causes = [*known, *(_unequal_ranks(coverage, report) or causes)]
    return report


def is_by_content(coverage: Coverage) -> bool:
    """Return whether any sample of an epoch is identified by its content."""
    return any(not epoch.by_keys for epoch in coverage.rank_epochs.values())


def is_surely_wrong(report: CoverageReport) -> bool:
    """Return whether an epoch's problems or its number of samples alone show that the epoch is wrong."""
    expected = report.expected
    if report.problems or expected.num_samples is None:
        return bool(report.problems)
    return report.num_deliveries != expected.num_samples + expected.num_repeats - expected.num_missing


def needs_second_look(epochs: list[Coverage], expected: ExpectedSamples) -> bool:
    """Return whether another epoch is needed to show that contents stay the same."""
    ranks = [epoch for coverage in epochs for epoch in coverage.rank_epochs.values() if not epoch.by_keys]
    return bool(ranks) and expected.ids is None and any(not one.is_stable and not one.instability for one in ranks)


def _unequal_ranks(coverage: Coverage, report: CoverageReport) -> list[str]:
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
            f"{count(num_marked, 'sample is', 'samples are')} marked as repeats, but the remainder policy marks "
            f"{allowance.num_marked}"
        )
    if report.expected.num_samples is not None:
        return problems
    num_ranks = len(coverage.rank_epochs)
    shares = {epoch.num_shares for epoch in coverage.rank_epochs.values()} - {None, num_ranks}
    if shares:
        assumed = " and ".join(map(str, sorted(filter(None, shares))))
        problems.append(f"the sampler assumes a world size of {assumed}, but the world size is {num_ranks}")
    for rank, epoch in sorted(coverage.rank_epochs.items()):
        num_samples, num_claimed = coverage.num_delivered_by(rank), epoch.num_claimed
        if num_claimed is not None and num_samples > num_claimed:
            is_multiple = num_claimed > 0 and num_samples % num_claimed == 0
            claim = (
                f"{num_samples // num_claimed} times the {num_claimed:,} that its loader has"
                if is_multiple
                else f"but its loader has {num_claimed:,}"
            )
            problems.append(f"rank {rank} delivered {count(num_samples, 'sample')}, {claim}")
        elif not epoch.is_whole and num_samples != num_claimed:
            batches = count(epoch.num_batches, "batch", "batches")
            problems.append(f"rank {rank} stopped after {batches}, before the end of the epoch")
        elif num_claimed is not None and num_samples < num_claimed and not epoch.may_be_fewer:
            problems.append(f"rank {rank} delivered {count(num_samples, 'sample')}, but its loader has {num_claimed:,}")
    return problems


def _demand_keys(epochs: Sequence[Coverage], coverage: Coverage, report: CoverageReport) -> None:
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
            f"{count(report.num_repeats, 'sample has', 'samples have')} the same content as "
            f"another sample: they are either repeats or different samples with equal data. {ASK_FOR_KEY}"
        )
    if report.expected.ids is not None or all(epoch.is_stable for epoch in by_content):
        return
    changes = contents_change(epochs, report.expected.num_samples)
    if changes is None:
        raise IdentityError(f"{how}, but they could not be read twice to check that it stays the same. {ASK_FOR_KEY}")
    if changes:
        raise IdentityError(f"{how}, which changes from epoch to epoch (random augmentation?). {ASK_FOR_KEY}")


MIN_SAMPLES = 10
"""The smallest number of samples whose order is unlikely to repeat by chance.

With 10 samples, the chance is 1 in 3.6 million.
"""

MAX_COMPARED = 1_000_000
"""The maximum number of samples of an epoch that are compared to check whether a loader shuffles."""


def find_frozen_orders(epochs: Sequence[Coverage]) -> list[str]:
    """Return a message for each epoch that wrongly repeats the order of an earlier one.

    A loader that does not report whether it shuffles may repeat its order on purpose, for example with a sorted
    sampler, so it is judged only if another epoch or rank shows that it shuffles.
    """
    digests = [
        {rank: epoch.order_digest(rank) for rank in epoch.ranks if epoch.num_delivered_by(rank) >= MIN_SAMPLES}
        for epoch in epochs
    ]
    frozen: list[tuple[int, int, list[int]]] = []
    for later in range(1, len(epochs)):
        for earlier in reversed(range(later)):
            equal = [rank for rank, digest in digests[later].items() if digest == digests[earlier].get(rank)]
            if equal:
                frozen.append((earlier, later, equal))
                break
    shuffling = {rank for epoch in epochs for rank, known in epoch.rank_epochs.items() if known.shuffles}
    if frozen and any(rank not in shuffling for _, _, equal in frozen for rank in equal) and _is_shuffled(epochs):
        shuffling |= {rank for _, _, equal in frozen for rank in equal}
    return [
        f"epochs {earlier} and {later} have the same order"
        f"{'' if judged == epochs[later].ranks else f' on {name_ranks(judged)}'}"
        ": set_epoch is not called, or every epoch starts from the same seed"
        for earlier, later, equal in frozen
        if (judged := [rank for rank in equal if rank in shuffling])
    ]


def _is_shuffled(epochs: Sequence[Coverage]) -> bool:
    for rank in sorted({rank for epoch in epochs for rank in epoch.ranks}):
        known = [epoch.rank_epochs[rank].shuffles for epoch in epochs if rank in epoch.rank_epochs]
        if False in known:  # Without shuffling, only the order in which batches arrive varies.
            continue
        orders = {epoch.order_digest(rank): epoch for epoch in epochs}
        found = [epoch.arrays(rank)[0][:MAX_COMPARED] for epoch in orders.values()]
        if any(_differ(first, second) for first, second in combinations(found, 2)):
            return True
    return False


def _differ(first: Ids, second: Ids) -> bool:
    """Return whether many neighbors in ``first`` are not neighbors in ``second``.

    "Many" means at least ten, and at least a quarter of all neighbors. Most neighbors stay together if batches arrive
    as workers finish them, or if only shards are shuffled; such orders may repeat by chance.
    """
    before, after = (ids[:-1] * np.uint64(3) + ids[1:] for ids in (first, second))  # uint64 [n - 1], wraps around
    num_parted = int((~np.isin(before, after)).sum())
    return num_parted >= max(MIN_SAMPLES, len(before) // 4)


def contents_change(epochs: Sequence[Coverage], num_samples: int | None) -> bool | None:
    """Return whether epochs contain more distinct contents than there are samples; None for fewer than two epochs.

    Args:
        epochs: The epochs of one loader, over all ranks.
        num_samples: The number of samples. If None, later epochs must not contain anything that the first epoch lacks.
    """
    contents = [np.unique(epoch.arrays()[0]) for epoch in epochs if epoch.num_deliveries]
    if len(contents) < 2:
        return None
    return len(np.unique(np.concatenate(contents))) > (len(contents[0]) if num_samples is None else num_samples)
