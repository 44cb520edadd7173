"""Whatever torch's DataLoader reads on itself can be overridden by a subclass, with the same effect as in torch.

The lists of what it reads are held against the source of the installed torch.
"""

from __future__ import annotations

import ast
import inspect
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data.dataloader as torchs
from torch.utils.data import IterableDataset

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset

HOOKS = {
    "__class__",
    "__initialized",
    "__multiprocessing_context",
    "_IterableDataset_len_called",
    "_auto_collation",
    "_dataset_kind",
    "_get_iterator",
    "_index_sampler",
    "_iterator",
    "check_worker_number_rationality",
    "multiprocessing_context",
}
"""Methods, properties and private attributes that torch's DataLoader, or its iterators, read on a loader."""


def start(_: int) -> None:
    """Do nothing in a worker."""


def count(samples: Any) -> tuple[str, Any]:
    """Mark what is collated."""
    return "collated", samples


ATTRIBUTES: dict[str, Any] = {
    "dataset": list(range(10, 22)),
    "num_workers": 2,
    "prefetch_factor": 1,
    "pin_memory": False,
    "pin_memory_device": "",
    "timeout": 30.0,
    "worker_init_fn": start,
    "in_order": True,
    "batch_size": 5,
    "drop_last": True,
    "sampler": range(3),
    "batch_sampler": [[5, 1], [0]],
    "generator": torch.Generator(),
    "collate_fn": count,
    "persistent_workers": False,
}
"""Public attributes that they read, and values that they have later than the constructor set them."""


def read_on(tree: ast.AST, name: str) -> set[str]:
    """Return the attributes of a variable that a piece of code reads."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        and isinstance(node.ctx, ast.Load)
    }


def test_the_lists_name_all_that_torch_reads_on_a_loader() -> None:
    found = set[str]()
    for node in ast.parse(inspect.getsource(torchs)).body:
        if isinstance(node, ast.ClassDef) and node.name == "DataLoader":
            found |= read_on(node, "self")
        elif isinstance(node, ast.ClassDef):
            found |= read_on(node, "loader")
    assert found - {"_reset"} == HOOKS | set(ATTRIBUTES), "torch reads something else: honour it, then list it"


def override(base: Any, name: str, value: Any) -> tuple[Any, list[str]]:
    """Return a subclass in which an attribute has another value than was set, and the list of its readings."""
    readings = list[str]()

    def read(loader: Any) -> Any:
        if not loader.__dict__.get("_is_made"):
            return loader.__dict__.get(f"_given_{name}")
        readings.append(name)
        return value

    def write(loader: Any, given: Any) -> None:
        loader.__dict__[f"_given_{name}"] = given

    class Overridden(base):  # type: ignore[misc]  # any loader
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.__dict__["_is_made"] = True

    setattr(Overridden, name, property(read, write))
    return Overridden, readings


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_are_read_where_torch_reads_them(name: str) -> None:
    def run(base: Any) -> tuple[str, bool]:
        loader_class, readings = override(base, name, ATTRIBUTES[name])
        batches = list(loader_class(range(12), batch_size=4, num_workers=1))
        return str(batches), bool(readings)

    expected, got = run(torchs.DataLoader), run(DataLoader)
    assert got[0] == expected[0]
    assert got[1], "it was not read"


class Shown:
    """Yields what a function makes of an iterator's batches, as libraries for graphs and point clouds do."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Shown:
        return self

    def __next__(self) -> Any:
        return "shown", next(self.iterator)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)


class Numbers:
    """An iterable that is not an IterableDataset."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def shown(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        def _get_iterator(self) -> Any:
            return Shown(super()._get_iterator())

    return Loader


def torchs_own(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        def _get_iterator(self) -> Any:
            workers = self.num_workers > 0
            return (torchs._MultiProcessingDataLoaderIter if workers else torchs._SingleProcessDataLoaderIter)(self)

    return Loader


def indexed(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        @property
        def _index_sampler(self) -> Any:
            return [[3, 1], [2]]

    return Loader


def uncollated(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        @property
        def _auto_collation(self) -> bool:
            return False

    return Loader


def iterated(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        def __init__(self, dataset: Any, **options: Any) -> None:
            super().__init__(Numbers(), sampler=torchs._InfiniteConstantSampler(), **options)
            self._dataset_kind = torchs._DatasetKind.Iterable

    return Loader


def checked(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        num_checks = 0

        def check_worker_number_rationality(self) -> None:
            self.num_checks += 1

        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            yield self.num_checks

    return Loader


def lengthened(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        def __len__(self) -> int:
            return 99

    return Loader


def started(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        @property
        def multiprocessing_context(self) -> Any:
            return torch.multiprocessing.get_context("fork") if self.num_workers else None

        @multiprocessing_context.setter
        def multiprocessing_context(self, context: Any) -> None:
            pass

    return Loader


def in_a_thread(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            batches = list[Any]()
            thread = threading.Thread(target=lambda: batches.extend(super(Loader, self).__iter__()))
            thread.start()
            thread.join()
            return iter(batches)

    return Loader


OVERRIDES = [shown, torchs_own, indexed, uncollated, iterated, checked, lengthened, started, in_a_thread]


@pytest.mark.parametrize("make", OVERRIDES, ids=lambda make: str(make.__name__))
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_methods_are_called_where_torch_calls_them(make: Any, options: dict[str, Any]) -> None:
    def run(base: Any) -> str:
        loader = make(base)(list(range(6)), batch_size=2, **options)
        return str([list(loader) for _ in range(2)])

    assert run(DataLoader) == run(torchs.DataLoader)


@pytest.mark.parametrize("make", [shown, torchs_own, indexed, uncollated, checked], ids=lambda make: str(make.__name__))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_of_shardios_datasets_too(packed: Path, make: Any, num_workers: int) -> None:
    dataset = ShardMapDataset(packed, fields=("key", "label"))

    def run(base: Any) -> str:
        loader = make(base)(dataset, batch_size=4, num_workers=num_workers)
        return str([list(loader) for _ in range(2)])

    assert run(DataLoader) == run(torchs.DataLoader)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_an_overridden_iterator_has_shardios_order(packed: Path, options: dict[str, Any]) -> None:
    def run(loader_class: Any) -> list[Any]:
        loader = loader_class(ShardDataset(packed, fields="key", shuffle=True), batch_size=4, **options)
        return [list(loader) for _ in range(2)]

    first, second = run(DataLoader)
    assert first != second
    assert run(shown(DataLoader)) == [[("shown", batch) for batch in epoch] for epoch in (first, second)]


def test_an_overridden_index_sampler_decides_instead_of_shardios_order(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    keys = [dataset[index] for index in range(4)]
    with caplog.at_level(logging.INFO, "shardio"):
        loader = indexed(DataLoader)(dataset, batch_size=4, sampler=EpochSampler(dataset))
        assert [list(loader) for _ in range(2)] == [[[keys[3], keys[1]], [keys[2]]]] * 2
    assert not loader.has_order
    assert "Loader overrides _index_sampler" in caplog.text


class Counted(IterableDataset[int]):
    """An iterable dataset whose length is too small."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_a_length_that_a_subclass_notes_is_compared() -> None:
    for base in (torchs.DataLoader, DataLoader):
        loader: Any = base(Counted(), batch_size=None)
        loader._IterableDataset_len_called = 5
        with pytest.warns(UserWarning, match="was reported to be 5"):
            assert list(loader) == list(range(6))


def test_a_class_that_does_not_call_the_constructor_has_torchs_iterators(caplog: pytest.LogCaptureFixture) -> None:
    class Copying(DataLoader[Any]):
        def __init__(self) -> None:
            self.__dict__.update(vars(torchs.DataLoader(range(4), 2)))  # type: ignore[arg-type]  # a range is a dataset

    with caplog.at_level(logging.INFO, "shardio"):
        assert [batch.tolist() for batch in Copying()] == [[0, 1], [2, 3]]
    assert "Copying did not call the constructor of shardio's DataLoader" in caplog.text


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_an_overridden_index_sampler_is_read_once_for_an_iterator(options: dict[str, Any]) -> None:
    def run(base: Any) -> tuple[int, list[list[int]]]:
        class Drawing(base):  # type: ignore[misc]
            num_reads = 0

            @property
            def _index_sampler(self) -> Any:
                self.num_reads += 1
                return torch.randperm(12).reshape(6, 2).tolist()

        torch.manual_seed(3)
        loader = Drawing(range(12), **options)
        batches = [batch.tolist() for batch in loader]
        return loader.num_reads, batches

    assert run(DataLoader) == run(torchs.DataLoader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_class_between_shardios_and_torchs_is_not_skipped(num_workers: int) -> None:
    class Tenfold(torchs.DataLoader):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return (10 * batch for batch in super().__iter__())

    class Both(DataLoader, Tenfold):
        pass

    kinds: list[Any] = [Both, Tenfold]
    loaders = [kind(range(5), batch_size=2, num_workers=num_workers) for kind in kinds]
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [[[0, 10], [20, 30], [40]]] * 2
