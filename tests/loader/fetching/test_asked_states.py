"""A user's state_dict that cannot be called is an error only of the loader's own: batches need no state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, SequentialSampler

import shardio
from shardio import DataLoader, DevicePrefetcher, StateError
from shardio.train import in_groups
from tests.device.late_stream import prefetch_late

WORKERS: dict[str, dict[str, Any]] = {
    "caller": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_method": "thread"},
}


class Asking:
    """An object whose state has arguments, as in MosaicML's streaming."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError("nobody has these arguments")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is no state")


class Failing(Asking):
    """An object whose state is not known."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        raise LookupError("no state yet")


class Unsent(Asking):
    """An object whose state can be copied, but not pickled."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"function": lambda: None}


class Mapped(Dataset[int]):
    """A map-style dataset."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Streamed(IterableDataset[int]):
    """An iterable dataset, of which each worker yields a part."""

    def __iter__(self) -> Iterator[int]:
        info = shardio.get_worker_info() or torch.utils.data.get_worker_info()
        return iter(range(12)[slice(None) if info is None else slice(info.id, None, info.num_workers)])


class Iterated(Streamed):
    """An iterable dataset whose iterator has the state."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        numbers = super().__iter__()
        methods = {"__iter__": lambda it: it, "__next__": lambda _: next(numbers)}
        iterator: Iterator[int] = type("Numbers", (self.kind,), methods)()
        return iterator


PLACES: dict[str, Any] = {
    "dataset": lambda kind: (type("MyDataset", (kind, Mapped), {})(), {}),
    "iterable dataset": lambda kind: (type("MyDataset", (kind, Streamed), {})(), {}),
    "iterator": lambda kind: (Iterated(kind), {}),
    "sampler": lambda kind: (range(12), {"sampler": type("MySampler", (kind, SequentialSampler), {})(range(12))}),
    "batch sampler": lambda kind: (range(12), {"batch_sampler": type("MySampler", (kind, list), {})([[3, 4], [7]])}),
}
"""Where an object of a kind may be: the dataset, and arguments of the loader."""


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Asking, Failing])
@pytest.mark.parametrize("place", PLACES)
def test_a_state_that_cannot_be_asked_for_is_an_error_only_if_it_is_wanted(
    place: str, kind: type, workers: str
) -> None:
    dataset, options = PLACES[place](kind)
    expected = [batch.tolist() for batch in torch.utils.data.DataLoader(dataset, **options)]
    loader = DataLoader(dataset, **options, **WORKERS[workers])
    error = "missing 2 required positional arguments" if kind is Asking else "LookupError: no state yet"
    received = list[list[int]]()
    for batch in loader:
        received.append(batch.tolist())
        with pytest.raises(StateError, match=rf"(My\w+|Numbers)\.state_dict\(\) raised .*{error}.*takes no arguments"):
            loader.state_dict()
    assert sorted(received) == sorted(expected)
    with pytest.raises(StateError, match=error):
        loader.state_dict()
    prefetched = [batch.tolist() for batch, _ in in_groups(DevicePrefetcher(loader, "cpu"), 2)]
    assert sorted(prefetched) == sorted(expected)


@pytest.mark.parametrize("place", ["dataset", "iterable dataset", "iterator"])
def test_a_state_that_cannot_be_sent_is_an_error_only_if_it_is_wanted(place: str) -> None:
    dataset, options = PLACES[place](Unsent)
    loader = DataLoader(dataset, **options, num_workers=1)
    for number, batch in enumerate(loader):
        assert batch.tolist() == [number]
        with pytest.raises(StateError, match=r"cannot be pickled \(.*lambda.*"):
            loader.state_dict()
    assert number == 11


@pytest.mark.parametrize("is_late", [False, True])
def test_a_prefetcher_of_a_loader_whose_state_cannot_be_asked_for(is_late: bool) -> None:
    class Loader(Asking):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(5))

    prefetcher = prefetch_late(Loader(), depth=2)[0] if is_late else DevicePrefetcher(Loader(), "cpu")
    for number, batch in enumerate(prefetcher):
        assert int(batch) == number
    assert number == 4
    iterator = iter(prefetcher)
    next(iterator)
    with pytest.raises(StateError if is_late else TypeError, match="missing 2 required positional arguments"):
        prefetcher.state_dict()
