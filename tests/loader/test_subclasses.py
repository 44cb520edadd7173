"""A subclass of the loader, or a program, uses any name that torch's loader leaves free, as with torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import DataLoader as TorchLoader

from shardio import DataLoader, DevicePrefetcher, ShardDataset, ShardMapDataset
from shardio.loader.extension import Extension, find_extension

KEPT = {"_shardio", "_is_accelerate_prepared"}
"""The only names that are not free: shardio's own, and one that Accelerate sets."""

ARGUMENTS: dict[str, Any] = {
    "worker_method": "thread",
    "snapshot_every_n_steps": 3,
    "on_error": "skip",
    "on_error_in": ("read",),
    "quarantine": "log.jsonl",
    "check_duplicates": True,
    "device": "cpu",
}
"""The arguments that torch's loader does not have, and values that are not the defaults."""


def free_names() -> list[str]:
    """Return all names that shardio's code uses for a loader, and torch's does not."""
    extension = find_extension(DataLoader(range(3)))
    names = {*dir(DataLoader), *dir(Extension), *vars(extension), *ARGUMENTS, "shuffle", "stats"} - set(
        dir(TorchLoader)
    )
    return sorted(name for name in names - KEPT if not name.startswith("__"))


def setting(base: Any, value: Any, *, is_late: bool) -> Any:
    """Return a subclass that sets all free names, before or after the constructor of its base class."""

    class Loader(base):  # type: ignore[misc]  # any loader
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if not is_late:
                self.set_all()
            super().__init__(*arguments, **options)
            if is_late:
                self.set_all()

        def set_all(self) -> None:
            for name in free_names():
                setattr(self, name, value)

    return Loader


def defining(base: Any) -> Any:
    """Return a subclass that has a method of each private name that is free."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("shardio called a method of the user's")

    return type("Loader", (base,), {name: refuse for name in free_names() if name.startswith("_")})


MAKERS: dict[str, Callable[[Any], Any]] = {
    "set before": lambda base: setting(base, {"mean": 0}, is_late=False),
    "set after": lambda base: setting(base, {"mean": 0}, is_late=True),
    "none": lambda base: setting(base, None, is_late=True),
    "methods": defining,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_name_of_shardios_is_free(packed: Path, make: Callable[[Any], Any]) -> None:
    datasets: list[Any] = [list(range(12)), ShardMapDataset(packed, fields=("key", "label"))]
    for dataset in datasets:
        several: list[dict[str, Any]] = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
        for options in several:
            loader, expected = (base(dataset, 4, **options) for base in (make(DataLoader), TorchLoader))
            for _ in range(2):
                assert str(list(loader)) == str(list(expected))
            assert len(loader) == len(iter(loader)) == len(expected)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_with_shardios_order_and_arguments_too(packed: Path, make: Callable[[Any], Any]) -> None:
    def run(base: Any) -> list[Any]:
        dataset = ShardDataset(packed, fields="key", shuffle=True)
        loader = base(dataset, 4, num_workers=1, device="cpu", check_duplicates=True)
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
    """Return the attributes that frameworks read to re-create a loader."""
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


@pytest.mark.parametrize("shuffle", [None, False, True])
def test_the_attributes_are_torchs(shuffle: bool | None) -> None:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": shuffle, "num_workers": 1, "drop_last": True}
    bases: list[Any] = [TorchLoader, DataLoader]
    expected, loader = (base(range(6), **options) for base in bases)
    assert public(loader).keys() == public(expected).keys()
    assert vars(loader).keys() - vars(expected).keys() == {"_shardio"}


def test_arguments_of_shardios_are_attributes_if_they_were_passed(tmp_path: Path) -> None:
    arguments = {**ARGUMENTS, "quarantine": tmp_path / "log.jsonl"}
    loader = DataLoader(range(6), 2, num_workers=1, **arguments)
    assert {name: value for name, value in public(loader).items() if name in ARGUMENTS} == arguments


@pytest.mark.parametrize("base", [TorchLoader, DataLoader])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_is_recreated_from_its_attributes_and_another_batch_sampler(base: Any, shuffle: bool) -> None:
    """As PyTorch-Ignite's deterministic engine does."""
    loader = base(
        range(6), batch_size=2, shuffle=shuffle, **({} if base is TorchLoader else {"worker_method": "thread"})
    )
    others = {"batch_size", "sampler", "drop_last", "batch_sampler", "dataset_kind"}
    kept = {name: value for name, value in public(loader).items() if name not in others}
    again = type(loader)(**kept, batch_sampler=[[4, 2], [1]])
    assert [batch.tolist() for batch in again] == [[4, 2], [1]]
    assert public(again).keys() == public(loader).keys()


class Remembering(DataLoader[Any]):
    """A loader that is copied in its own way."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.parametrize("kind", [DataLoader, Remembering])
@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle"])
def test_a_copy_has_epochs_of_its_own(packed: Path, kind: Any, how: str) -> None:
    def make(loader: Any) -> Any:
        return pickle.loads(pickle.dumps(loader)) if how == "pickle" else getattr(copy, how)(loader)

    loader = kind(ShardDataset(packed, fields="key", shuffle=True), 4, device="cpu")
    epochs = [list(loader) for _ in range(2)]
    other = make(loader)
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
