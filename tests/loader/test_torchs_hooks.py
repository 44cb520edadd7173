"""A subclass can override every attribute that torch's DataLoader reads on itself, with the same effect as in torch.

A test compares the lists of these attributes with the source of the installed torch. Users may use any other name for
their own attributes.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
import torch.utils.data.dataloader as torchs
from torch.utils.data import DataLoader as TorchLoader

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset
from shardio.loader.extension import Extension, find_extension
from tests.loader.programs import Shares

HOOKS = {"__class__", "__initialized", "__multiprocessing_context", "_IterableDataset_len_called", "_auto_collation"}
HOOKS |= {"_dataset_kind", "_get_iterator", "_index_sampler", "_iterator"}
HOOKS |= {"check_worker_number_rationality", "multiprocessing_context"}
"""The methods, properties and private attributes that torch's DataLoader or its iterators read on a loader."""


def count(samples: Any) -> tuple[str, Any]:
    return "collated", samples


ATTRIBUTES: dict[str, Any] = {
    "dataset": list(range(10, 22)),
    "num_workers": 2,
    "prefetch_factor": 1,
    "pin_memory": False,
    "pin_memory_device": "",
    "timeout": 30.0,
    "worker_init_fn": id,
    "in_order": True,
    "batch_size": 5,
    "drop_last": True,
    "sampler": range(3),
    "batch_sampler": [[5, 1], [0]],
    "generator": torch.Generator(),
    "collate_fn": count,
    "persistent_workers": False,
}
"""The public attributes that torch's DataLoader or its iterators read, with values to set after construction."""

RARE = ("pin_memory", "pin_memory_device", "timeout", "in_order", "drop_last", "generator", "prefetch_factor")

PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}


def test_the_lists_name_all_that_torch_reads_on_a_loader() -> None:
    found = set[str]()
    for node in ast.parse(inspect.getsource(torchs)).body:
        if isinstance(node, ast.ClassDef):
            loader = "self" if node.name == "DataLoader" else "loader"
            reads = (
                each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)
            )
            found |= {each.attr for each in reads if isinstance(each.value, ast.Name) and each.value.id == loader}
    assert found - {"_reset"} == HOOKS | set(ATTRIBUTES), "torch reads other attributes: support them, then list them"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in ATTRIBUTES]
)
def test_attributes_are_read_where_torch_reads_them(name: str) -> None:
    def run(base: Any) -> tuple[str, bool]:
        readings, given = list[str](), list[Any]()

        def read(loader: Any) -> Any:
            if not is_made:
                return given[-1] if given else None
            readings.append(name)
            return ATTRIBUTES[name]

        is_made = False
        overridden = type("Overridden", (base,), {name: property(read, lambda loader, value: given.append(value))})
        loader = overridden(range(12), batch_size=4, num_workers=1)
        is_made = True
        return str(list(loader)), bool(readings)

    expected, got = run(torchs.DataLoader), run(DataLoader)
    assert got[0] == expected[0]
    assert got[1], "the attribute was not read"


class Shown:
    """An iterator that converts another iterator's batches, as in libraries for graphs and point clouds."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Shown:
        return self

    def __next__(self) -> Any:
        return "shown", next(self.iterator)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)


class Checked:
    num_checks = 0

    def check_worker_number_rationality(self) -> None:
        self.num_checks += 1

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()  # type: ignore[misc]  # that of a loader
        yield self.num_checks


class Iterated:
    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(range(7), sampler=torchs._InfiniteConstantSampler(), **options)  # type: ignore[call-arg]
        self._dataset_kind = torchs._DatasetKind.Iterable


class InAThread:
    def __iter__(self) -> Iterator[Any]:
        batches = list[Any]()
        thread = threading.Thread(target=lambda: batches.extend(super(InAThread, self).__iter__()))  # type: ignore[misc]
        thread.start()
        thread.join()
        return iter(batches)


class Showing:
    def _get_iterator(self) -> Any:
        return Shown(super()._get_iterator())  # type: ignore[misc]  # that of a loader


def _get_torchs_iterator(loader: Any) -> Any:
    iterators = torchs._SingleProcessDataLoaderIter, torchs._MultiProcessingDataLoaderIter
    return iterators[loader.num_workers > 0](loader)


def _find_context(loader: Any) -> Any:
    return torch.multiprocessing.get_context("fork") if loader.num_workers else None


OVERRIDES: dict[str, Any] = {
    "shown": Showing,
    "torch's own": {"_get_iterator": _get_torchs_iterator},
    "indexed": {"_index_sampler": property(lambda loader: [[3, 1], [2]])},
    "uncollated": {"_auto_collation": property(lambda loader: False)},
    "iterated": Iterated,
    "checked": Checked,
    "lengthened": {"__len__": lambda loader: 99},
    "started": {"multiprocessing_context": property(_find_context, lambda loader, context: None)},
    "in a thread": InAThread,
}
WITH_PROCESSES = ("shown", "torch's own", "started")
RARELY = [name for name in OVERRIDES if name not in WITH_PROCESSES]


def overriding(base: Any, name: str) -> Any:
    what = OVERRIDES[name]
    return type("Loader", (base,), what) if isinstance(what, dict) else type("Loader", (what, base), {})


@pytest.mark.parametrize(
    ("name", "is_ours", "options"),
    [
        *((name, False, {}) for name in OVERRIDES),
        *((name, False, PERSISTENT) for name in WITH_PROCESSES),
        *(pytest.param(name, False, PERSISTENT, marks=pytest.mark.slow) for name in RARELY),
        *((name, True, {}) for name in ("shown", "indexed", "uncollated", "checked")),
        *((name, True, {"num_workers": 1}) for name in ("torch's own", "shown")),
    ],
)
def test_methods_are_called_where_torch_calls_them(
    packed: Path, name: str, is_ours: bool, options: dict[str, Any]
) -> None:
    dataset: Any = ShardMapDataset(packed, fields=("key", "label")) if is_ours else list(range(6))

    def run(base: Any) -> str:
        loader = overriding(base, name)(dataset, batch_size=2, **options)
        return str([list(loader) for _ in range(2)])

    assert run(DataLoader) == run(torchs.DataLoader)


def test_an_overridden_iterator_has_shardios_order_and_an_overridden_index_sampler_decides_instead(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for options in ({}, PERSISTENT):

        def run(loader_class: Any, options: Any = options) -> list[Any]:
            loader = loader_class(ShardDataset(packed, fields="key", shuffle=True), batch_size=4, **options)
            return [list(loader) for _ in range(2)]

        first, second = run(DataLoader)
        assert first != second
        shown = [[("shown", batch) for batch in epoch] for epoch in (first, second)]
        assert run(overriding(DataLoader, "shown")) == shown
    dataset = ShardMapDataset(packed, fields="key")
    with caplog.at_level(logging.INFO, "shardio"):
        loader = overriding(DataLoader, "indexed")(dataset, batch_size=4, sampler=EpochSampler(dataset))
        assert [list(loader) for _ in range(2)] == [[[dataset[3], dataset[1]], [dataset[2]]]] * 2
    assert not loader.has_order
    assert "Loader overrides _index_sampler" in caplog.text


def test_a_length_that_a_subclass_notes_is_compared() -> None:
    counted = type("Counted", (Shares,), {"__len__": lambda dataset: 2})(lambda *_: range(6))
    for base in (torchs.DataLoader, DataLoader):
        loader: Any = base(counted, batch_size=None)
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


def test_a_class_between_shardios_and_torchs_is_not_skipped() -> None:
    class Tenfold(torchs.DataLoader):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return (10 * batch for batch in super().__iter__())

    class Both(DataLoader, Tenfold):
        pass

    kinds: list[Any] = [Both, Tenfold]
    loaders = [kind(range(5), batch_size=2) for kind in kinds]
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [[[0, 10], [20, 30], [40]]] * 2


KEPT = {"_shardio", "_is_accelerate_prepared"}
"""The only names that users may not use: shardio's own, and one that Accelerate sets."""

ARGUMENTS: dict[str, Any] = {
    "worker_method": "thread",
    "snapshot_every_n_steps": 3,
    "on_error": "skip",
    "on_error_in": ("read",),
    "quarantine": "log.jsonl",
    "check_duplicates": True,
    "device": "cpu",
}
"""The arguments that torch's loader does not have, with values that are not the defaults."""


def free_names() -> list[str]:
    """Return the names that shardio's code, but not torch's code, uses on a loader."""
    extension = find_extension(DataLoader(range(3)))
    names = {*dir(DataLoader), *dir(Extension), *vars(extension), *ARGUMENTS, "shuffle", "stats"} - {*dir(TorchLoader)}
    return sorted(name for name in names - KEPT if not name.startswith("__"))


def setting(base: Any, value: Any, *, is_late: bool) -> Any:
    """Return a subclass that sets all names in ``free_names``, before or after the base class's constructor."""

    class Loader(base):  # type: ignore[misc]  # any loader
        def __init__(self, *arguments: Any, **options: Any) -> None:
            for step in (super().__init__, self.set_all) if is_late else (self.set_all, super().__init__):
                step(*arguments, **options)

        def set_all(self, *_: Any, **__: Any) -> None:
            for name in free_names():
                setattr(self, name, value)

    return Loader


def defining(base: Any) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("shardio called a user's method")

    return type("Loader", (base,), {name: refuse for name in free_names() if name.startswith("_")})


MAKERS: dict[str, Callable[[Any], Any]] = {
    "set before": lambda base: setting(base, {"mean": 0}, is_late=False),
    "set after": lambda base: setting(base, {"mean": 0}, is_late=True),
    "none": lambda base: setting(base, None, is_late=True),
    "methods": defining,
}


@pytest.mark.parametrize(
    "name", ["set after", "methods", *(pytest.param(name, marks=pytest.mark.slow) for name in ("set before", "none"))]
)
def test_every_name_of_shardios_is_free(packed: Path, name: str) -> None:
    datasets: list[Any] = [list(range(12)), ShardMapDataset(packed, fields=("key", "label"))]
    several: list[dict[str, Any]] = [{}, PERSISTENT]
    for dataset, options in itertools.product(datasets, several):
        loader, expected = (base(dataset, 4, **options) for base in (MAKERS[name](DataLoader), TorchLoader))
        for _ in range(2):
            assert str(list(loader)) == str(list(expected))
        assert len(loader) == len(iter(loader)) == len(expected)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_with_shardios_order_and_arguments_too(packed: Path, make: Callable[[Any], Any]) -> None:
    def run(base: Any) -> list[Any]:
        dataset = ShardDataset(packed, fields="key", shuffle=True)
        loader = base(dataset, 4, device="cpu", check_duplicates=True)
        return [list(loader), list(DevicePrefetcher(copy.copy(loader), "cpu"))]

    assert run(make(DataLoader)) == run(DataLoader)


def test_a_set_name_has_the_users_value() -> None:
    loader = setting(DataLoader, 5, is_late=True)(range(3))
    assert {getattr(loader, name) for name in free_names()} == {5}
    other: Any = DataLoader(range(4), 2, shuffle=True, device="cpu")
    other.shuffle = False
    other.device = other.on_error = torch.device("meta")
    assert sorted(number for batch in other for number in batch.tolist()) == [0, 1, 2, 3]


def public(loader: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


def test_the_attributes_are_torchs_and_arguments_of_shardios_if_they_were_passed(tmp_path: Path) -> None:
    for shuffle in (None, False, True):
        options: dict[str, Any] = {"batch_size": 2, "shuffle": shuffle, "num_workers": 1, "drop_last": True}
        expected: Any = TorchLoader(range(6), **options)  # type: ignore[arg-type]  # a range is a dataset
        loader: Any = DataLoader(range(6), **options)
        assert public(loader).keys() == public(expected).keys()
        assert vars(loader).keys() - vars(expected).keys() == {"_shardio"}
    arguments = {**ARGUMENTS, "quarantine": tmp_path / "log.jsonl"}
    loader = DataLoader(range(6), 2, num_workers=1, **arguments)
    assert {name: value for name, value in public(loader).items() if name in ARGUMENTS} == arguments


@pytest.mark.parametrize(("base", "options"), [(TorchLoader, {}), (DataLoader, {"worker_method": "thread"})])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_is_recreated_from_its_attributes_and_another_batch_sampler(
    base: Any, options: Any, shuffle: bool
) -> None:
    loader = base(range(6), batch_size=2, shuffle=shuffle, **options)
    others = {"batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"}
    kept = {name: value for name, value in public(loader).items() if name not in others}
    again = type(loader)(**kept, batch_sampler=[[4, 2], [1]])
    assert [batch.tolist() for batch in again] == [[4, 2], [1]]
    assert public(again).keys() == public(loader).keys()


STATE: dict[str, Any] = {"__getstate__": lambda loader: {**vars(loader)}}
STATE["__setstate__"] = lambda loader, state: loader.__dict__.update(state)
Remembering = type("Remembering", (DataLoader,), STATE)


@pytest.mark.parametrize(
    ("kind", "how"), [(DataLoader, "copy"), (DataLoader, "deepcopy"), (DataLoader, "pickle"), (Remembering, "deepcopy")]
)
def test_a_copy_has_epochs_of_its_own(packed: Path, kind: Any, how: str) -> None:
    def make(loader: Any) -> Any:
        return pickle.loads(pickle.dumps(loader)) if how == "pickle" else getattr(copy, how)(loader)

    loader = kind(ShardDataset(packed, fields="key", shuffle=True), 4, device="cpu")
    epochs = [list(loader) for _ in range(2)]
    other = make(loader)
    assert other.state_dict() == loader.state_dict()
    assert list(other) == list(loader) not in epochs
    other.sampler.set_epoch(0)
    assert list(other) == epochs[0]
    assert list(loader) not in [*epochs, list(other)]
    counted = kind(range(9), 3)
    next(iter(counted))
    resumed = make(counted)
    resumed.load_state_dict(counted.state_dict())
    assert [batch.tolist() for batch in resumed] == [[3, 4, 5], [6, 7, 8]]
    assert [batch.tolist() for batch in counted] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
