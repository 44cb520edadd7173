"""assert_exactly_once: the question that a test asks of a loader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import numpy as np

from shardio.check.claims import HasWorkers, collates_columns, is_batching, is_map_style, numbers_of, splits
from shardio.check.coverage import Coverage
from shardio.check.frozen import find_frozen_orders
from shardio.check.identity import Ids, Key, content_ids, key_ids, keys_in
from shardio.check.recording import record
from shardio.check.report import Expected
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
    """Fail unless each epoch of a loader delivers every sample exactly once.

    >>> assert_exactly_once([["a", "b"], ["c"]], expected=["a", "b", "c"])
    >>> assert_exactly_once([["a", "b"], ["b"]], expected=["a", "b"])
    Traceback (most recent call last):
    shardio.errors.CoverageError: 2 samples: 1 came once, 1 more than once, 0 never, 0 unexpected
      repeated: b came 2 times: rank 0 batch 0, rank 0 batch 1
      likely cause: all repeats (1) lie in the last batch of a rank or worker: the loader pads them to equal lengths \
(shardio's remainder='pad', instead of which take 'keep' or 'mask'; DistributedSampler without drop_last; or a \
.repeat() that is cut)

    Args:
        loader: Any iterable of batches, once for each epoch; or a tuple of them, one a rank.
        expected: The keys that an epoch should hold, in the dataset's order, or their number. Without it, a
            DataLoader's dataset is read once without workers to learn what it holds; of other loaders repeats are
            judged, and the number of samples where the loader says it.
        key: Where a batch has its keys: a function of the batch, a field's name, a place in the tuple. Without
            it, a batch of strings or integers is its own keys, and other samples are known by their content, where that
            is seen to be the same each time.
        epochs: How many epochs. Where samples are known by content, one more may be read to compare with.
        set_epoch: Called before each epoch with its number, as the training script would.

    Raises:
        CoverageError: An AssertionError that names the samples that were repeated, lost or unexpected, the
            ranks and workers that delivered them, and the likely cause.
        IdentityError: A TypeError: samples cannot be identified by their content (random augmentation, equal data), and
            a key is needed.
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
            raise IdentityError("the batches carry no keys that could be compared with the expected ones: give key=")
        if expected is None and wanted.number and not coverage.num_deliveries and isinstance(loaders[0], HasWorkers):
            _refuse_one_pass(wanted.number, len(_read_alone(loaders[0], key)[0]))
        report = judge_epoch(coverage, wanted, allow=False)
        if not is_by_content(coverage) or is_surely_wrong(report):
            report.raise_if_wrong()
        if not is_stable:
            raise IdentityError(
                "the samples' contents differ from one pass to the next (random augmentation?), so they cannot be "
                "known by them: give key="
            )
    if epochs == 1 and needs_second_look(found, wanted):
        read_epoch()
    for report in judge(found, wanted, num_judged=epochs, allow=False):
        report.raise_if_wrong()
    if causes := find_frozen_orders(found[:epochs]):
        raise CoverageError("\n".join(causes))


def needs_second_look(epochs: list[Coverage], expected: Expected) -> bool:
    """Return whether another epoch must show that contents stay the same, for want of anything else that does."""
    ranks = [epoch for coverage in epochs for epoch in coverage.rank_epochs.values() if not epoch.by_keys]
    return bool(ranks) and expected.ids is None and any(not one.is_stable and not one.instability for one in ranks)


def _make_expected(
    loaders: tuple[Iterable[Any], ...], expected: Collection[Hashable] | int | None, key: Key
) -> tuple[Expected, bool]:
    """Return what each epoch should deliver, and whether the samples' contents were not seen to change."""
    if isinstance(expected, int | np.integer):
        return Expected(ids=None, number=int(expected)), True
    if expected is not None:
        return Expected.of_keys(expected), True
    first = loaders[0]
    # Of several ranks the dataset is known to be the same on all only where a sampler splits it.
    if not isinstance(first, HasWorkers) or (len(loaders) > 1 and not splits(first)):
        return Expected(ids=None, number=None), True
    ids, names = _read_alone(first, key)
    if not len(ids) and not is_map_style(first):
        return Expected(ids=None, number=None), True
    if not names:
        again = _read_alone(first, key)[0]
        _refuse_one_pass(len(ids), len(again))
        if not np.array_equal(np.sort(ids), np.sort(again)):
            return Expected(ids=None, number=len(ids)), False
    return Expected(ids=ids, number=len(ids), names=names), True


def _refuse_one_pass(num_samples: int, num_again: int) -> None:
    if num_samples and not num_again:
        raise IdentityError(
            f"the dataset was read alone to learn what it holds ({num_samples:,} samples), and then held nothing: an "
            "iterator can be read only once. Give expected=, or a dataset whose __iter__ begins again"
        )


def _read_alone(loader: HasWorkers, key: Key) -> tuple[Ids, dict[int, Hashable]]:
    """Read a loader's dataset in this process, without its workers and its sampler; return identities and names."""
    dataset = loader.dataset
    numbers = (numbers_of(loader) or range(len(dataset))) if is_map_style(loader) else None
    samples = iter(dataset) if numbers is None else (dataset[number] for number in numbers)
    ids, names = [np.empty(0, np.uint64)], dict[int, Hashable]()
    for sample in samples:
        batch = loader.collate_fn([sample] if is_batching(loader) else sample)
        keys = keys_in(batch, key)
        ids.append(content_ids(batch, is_collated=collates_columns(loader)) if keys is None else key_ids(keys))
        names.update(zip(ids[-1].tolist(), keys or (), strict=False))
    return np.concatenate(ids), names
