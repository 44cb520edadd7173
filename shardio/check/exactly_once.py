"""assert_exactly_once: fail a test if a loader repeats or loses samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import numpy as np

from shardio.check.claims import HasWorkers, collates_columns, indices_of, is_batching, is_map_style, splits
from shardio.check.coverage import Coverage
from shardio.check.frozen import find_frozen_orders
from shardio.check.identity import ASK_FOR_KEY, Ids, Key, content_ids, key_ids, keys_in
from shardio.check.recording import record
from shardio.check.report import ExpectedSamples
from shardio.check.verdict import is_by_content, is_surely_wrong, judge, judge_epoch
from shardio.errors import CoverageError, IdentityError


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
        loader: Any iterable of batches, or a tuple of them, one per rank. Each is read once per
            epoch.
        expected: The keys that each epoch should deliver, in the dataset's order, or their number.
            If None, the dataset of a DataLoader is first read without workers to determine them.
            For other loaders, the check finds repeats, but it finds lost samples only if the
            loader reports a number of samples.
        key: How to find a batch's keys: a function of the batch, or the name or index of a field.
            If None, the values of a batch of strings or integers are its keys. Other samples are
            identified by their content, which must be the same on every read.
        epochs: The number of epochs to check. If samples are identified by content, one more may
            be read for comparison.
        set_epoch: A function to call with the epoch before each epoch, as the training script
            does.

    Raises:
        CoverageError: If samples are repeated, lost or unexpected. The error is also an
            AssertionError. It names the samples, the ranks and workers that delivered them, and
            the likely cause.
        IdentityError: If samples cannot be identified, for example because random augmentation
            changes their content. The error is also a TypeError.
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
        if (
            expected is None
            and wanted.num_samples
            and not coverage.num_deliveries
            and isinstance(loaders[0], HasWorkers)
        ):
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


def needs_second_look(epochs: list[Coverage], expected: ExpectedSamples) -> bool:
    """Return whether another epoch is needed to show that contents stay the same."""
    ranks = [epoch for coverage in epochs for epoch in coverage.rank_epochs.values() if not epoch.by_keys]
    return bool(ranks) and expected.ids is None and any(not one.is_stable and not one.instability for one in ranks)


def _make_expected(
    loaders: tuple[Iterable[Any], ...], expected: Collection[Hashable] | int | None, key: Key
) -> tuple[ExpectedSamples, bool]:
    """Return what each epoch should deliver, and whether the samples' contents may be stable."""
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
            f"the dataset yielded {num_samples:,} samples on the first pass and none on a later one: an iterator can "
            "be read only once. Pass expected=, or use a dataset whose __iter__ starts over"
        )


def _read_alone(loader: HasWorkers, key: Key) -> tuple[Ids, dict[int, Hashable]]:
    """Return the identities and keys of a loader's dataset, read without workers and sampler."""
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
