"""assert_exactly_once: the question that a test asks of a loader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import numpy as np

from shardio.check.causes import find_frozen_orders
from shardio.check.coverage import Coverage
from shardio.check.identity import Ids, Key, content_ids, key_ids, keys_in
from shardio.check.recording import HasWorkers, record
from shardio.check.report import Expected, make_report
from shardio.errors import CoverageError


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
            DataLoader's dataset is read once without workers to learn what it holds; of other loaders only
            repeats are judged.
        key: Where a batch has its keys: a function of the batch, a field's name, a place in the tuple. Without
            it, a batch of strings or integers is its own keys, and other samples are known by their content.
        epochs: How many epochs.
        set_epoch: Called before each epoch with its number, as the training script would.

    Raises:
        CoverageError: An AssertionError that names the samples that were repeated, lost or unexpected, the
            ranks and workers that delivered them, and the likely cause.
        TypeError: If samples cannot be told apart by their content, and a key is needed.
    """
    loaders = loader if isinstance(loader, tuple) else (loader,)
    wanted = _make_expected(loaders, expected, key)
    found = []
    for epoch in range(epochs):
        if set_epoch is not None:
            set_epoch(epoch)
        coverage = Coverage()
        have_keys = [record(one, coverage, rank=rank, key=key) for rank, one in enumerate(loaders)]
        if not all(have_keys) and expected is not None and not isinstance(expected, int):
            raise TypeError("the batches carry no keys that could be compared with the expected ones: give key=")
        report = make_report(coverage, wanted)
        if not all(have_keys) and wanted.ids is None and report.num_repeats:
            raise TypeError(
                f"{report.num_repeats} samples have the content of another, which may be repeats or equal data: "
                "give key=, by which samples are told apart"
            )
        report.raise_if_wrong()
        found.append(coverage)
    if causes := find_frozen_orders(found, wanted):
        raise CoverageError("\n".join(causes))


def _make_expected(
    loaders: tuple[Iterable[Any], ...], expected: Collection[Hashable] | int | None, key: Key
) -> Expected:
    if isinstance(expected, int):
        return Expected(ids=None, number=expected)
    if expected is not None:
        return Expected.of_keys(expected)
    first = loaders[0]
    # Of several ranks only a map-style dataset is the same on all: an iterable one may split itself.
    if not isinstance(first, HasWorkers) or (len(loaders) > 1 and not _is_map_style(first.dataset)):
        return Expected(ids=None, number=None)
    ids, names = _read_alone(first, key)
    if not names and not np.array_equal(ids, _read_alone(first, key)[0]):
        raise TypeError(
            "the samples' contents differ from one pass to the next (random augmentation?), so they cannot be known by "
            "them: give key="
        )
    return Expected(ids=ids, number=len(ids), names=names)


def _read_alone(loader: HasWorkers, key: Key) -> tuple[Ids, dict[int, Hashable]]:
    """Read a loader's dataset in this process, without its workers and its sampler; return identities and names."""
    dataset = loader.dataset
    samples = (dataset[i] for i in range(len(dataset))) if _is_map_style(dataset) else iter(dataset)
    ids, names = [np.empty(0, np.uint64)], dict[int, Hashable]()
    for sample in samples:
        batch = loader.collate_fn([sample])
        keys = keys_in(batch, key)
        ids.append(content_ids(batch) if keys is None else key_ids(keys))
        names.update(zip(ids[-1].tolist(), keys or (), strict=False))
    return np.concatenate(ids), names


def _is_map_style(dataset: Any) -> bool:
    import torch.utils.data

    return not isinstance(dataset, torch.utils.data.IterableDataset)
