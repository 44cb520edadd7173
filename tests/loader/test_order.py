"""The order respects overridden methods, does not depend on the number of workers, and is exact in a resumed run."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, DataLoader as TorchLoader, Sampler, Subset
from torch.utils.data.datapipes.iter import IterableWrapper

from shardio import (
    DataLoader,
    DevicePrefetcher,
    EpochSampler,
    ImageFolder,
    SampleError,
    ShardDataset,
    ShardMapDataset,
    StateError,
    check,
)
from shardio.check.recording import resumes
from shardio.order import EpochCounter
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.worker_processes import batches_of
from tests.processes import forkserver_context

CROP = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])


def make_dataset(packed: Path, **options: Any) -> ShardDataset:
    return ShardDataset(packed, fields=("image", "label", "key"), shuffle=True, transform=CROP, **options)


def test_batches_do_not_depend_on_the_workers_how_they_start_or_the_loader(packed: Path) -> None:
    expected = batches_of(DataLoader(make_dataset(packed), batch_size=4))
    assert len(expected) == 6
    context = forkserver_context()
    for options in ({"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "multiprocessing_context": context}):
        assert batches_of(DataLoader(make_dataset(packed), batch_size=4, **options)) == expected
    for num_workers in (0, 3):
        dataset = make_dataset(packed, batch_size=4)
        assert batches_of(TorchLoader(dataset, batch_size=4, num_workers=num_workers)) == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_every_iter_is_the_next_epoch_or_the_one_that_is_set(packed: Path, persistent: bool) -> None:
    dataset = make_dataset(packed)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=persistent)
    epochs = [batches_of(loader) for _ in range(3 if persistent else 2)]
    for epoch, expected in enumerate(epochs):
        other = make_dataset(packed)
        other.set_epoch(epoch)
        assert batches_of(DataLoader(other, batch_size=4)) == expected
    assert len({str(epoch) for epoch in epochs}) == len(epochs)
    loader.set_epoch(1)
    next(outer := iter(loader))
    loader.set_epoch(1)
    assert batches_of(loader) == epochs[1]
    if persistent:
        with pytest.raises(RuntimeError, match="ended when the loader was iterated again"):
            next(outer)
    dataset.set_epoch(0)
    assert batches_of(loader) == epochs[0]
    assert batches_of(loader) == epochs[1]


def test_loaders_over_one_map_style_dataset_do_not_interfere(images: Path) -> None:
    folder = ImageFolder(images, transform=CROP)
    one, other = (DataLoader(folder, batch_size=4, sampler=EpochSampler(folder), num_workers=1) for _ in range(2))
    expected = [batches_of(one), batches_of(one)]
    one.set_epoch(0)
    first = next(ahead := iter(one))
    other.set_epoch(1)
    assert batches_of(other) == expected[1]
    assert batches_of([first, *ahead]) == expected[0] != expected[1]


def test_the_arguments_are_torchs_and_some_of_shardios() -> None:
    names, expected = (list(inspect.signature(each.__init__).parameters) for each in (DataLoader, TorchLoader))
    own = ["worker_method", "snapshot_every_n_steps", "on_error", "on_error_in", "quarantine"]
    assert names == [*expected, *own, "check_duplicates", "device", "decode"]


@pytest.mark.parametrize(
    ("dataset_options", "loader_options", "error", "words"),
    [
        ({}, {"shuffle": True}, ValueError, "pass shuffle=True to ShardDataset"),
        ({"batch_size": 8}, {"batch_size": 4}, ValueError, "has batch_size=8, but the loader has batch_size=4"),
        ({"remainder": "mask"}, {"drop_last": True, "batch_size": 4}, ValueError, "contradict each other"),
        ({}, {"in_order": False}, ValueError, "in_order=False"),
        *((None, {"prefetch_factor": factor}, ValueError, "prefetch_factor must be") for factor in (0, -1)),
        *(({}, {"prefetch_factor": factor}, TypeError, "prefetch_factor must be") for factor in (2.5, "2")),
    ],
)
def test_contradictions_and_wrong_arguments_are_refused(
    packed: Path, dataset_options: Any, loader_options: dict[str, Any], error: type[Exception], words: str
) -> None:
    dataset: Any = range(5) if dataset_options is None else make_dataset(packed, **dataset_options)
    with pytest.raises(error, match=words):
        DataLoader(dataset, num_workers=1, **loader_options)


def make_changing(packed: Path, change: Callable[[Iterator[Any]], Any], **options: Any) -> ShardDataset:
    """Return a dataset that passes its stream of samples through a function."""
    overrides = {"__iter__": lambda dataset: iter(change(ShardDataset.__iter__(dataset)))}
    dataset: ShardDataset = type("Changing", (ShardDataset,), overrides)(packed, **options)
    return dataset


def test_a_subclass_may_change_samples_but_not_their_number(packed: Path) -> None:
    dataset = make_changing(packed, lambda keys: (key * 2 for key in keys), fields="key", shuffle=True)
    doubled = DataLoader(dataset, batch_size=4, num_workers=2)
    keys = keys_of(DataLoader(ShardDataset(packed, fields="key", shuffle=True), batch_size=4))
    assert keys_of(doubled) == [key * 2 for key in keys]
    assert where(doubled) == (0, 21)
    with pytest.raises(RuntimeError, match="the epoch had 3 batches instead of 6"):
        list(DataLoader(make_changing(packed, lambda keys: islice(keys, 9), fields="key"), batch_size=4))


class Backwards(EpochSampler):
    length: int | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1][: self.length])

    def __len__(self) -> int:
        return self.length or super().__len__()


@pytest.mark.parametrize("kind", [Backwards, type("FirstFive", (Backwards,), {"length": 5})])
@pytest.mark.parametrize("options", [{}, {"collate_fn": list}], ids=["fast", "by torch"])
def test_an_overridden_sampler_is_a_sampler_like_any_other(packed: Path, kind: Any, options: dict[str, Any]) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    loader = DataLoader(dataset, batch_size=4, sampler=kind(dataset, rank=0, world_size=1), **options)
    torchs = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=kind(dataset), collate_fn=list)
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        torchs.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # the sampler has it
        assert [list(batch) for batch in loader] == list(torchs)
    assert len(loader) == len(torchs)
    assert not loader.has_order
    if not options:
        check.assert_exactly_once(loader, len(kind(dataset)))
        assert [resumes(loader, num_batches) for num_batches in (len(loader) - 1, len(loader))] == [True, None]


def test_an_order_by_shards_is_of_all_their_samples_and_one_of_files_is_of_their_length(
    packed: Path, images: Path
) -> None:
    ten = {"__len__": lambda dataset: 10}
    with pytest.raises(ValueError, match=r"the length of Shortened is 10, but its shards, .*, hold 21"):
        EpochSampler(type("Shortened", (ShardMapDataset,), ten)(packed))
    folder = type("Halved", (ImageFolder,), ten)(images)
    assert sum(len(labels) for _, labels in DataLoader(folder, sampler=EpochSampler(folder))) == 10


def test_a_sampler_of_another_dataset_or_of_one_that_has_grown_is_refused(packed: Path, images: Path) -> None:
    dataset, folder = ShardMapDataset(packed), ImageFolder(images)
    sampler = EpochSampler(range(10))
    with pytest.raises(ValueError, match="created for 10 samples, but the loader's ShardMapDataset has 21: create"):
        DataLoader(dataset, sampler=sampler)
    with pytest.raises(ValueError, match="created for 10 samples"):
        DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    with pytest.raises(ValueError, match="created for samples other than those of the loader's ImageFolder"):
        DataLoader(folder, sampler=EpochSampler(dataset))
    first, second = Subset(dataset, range(10)), Subset(dataset, range(10, 20))
    with pytest.raises(ValueError, match="created for samples other than those of the loader's Subset"):
        DataLoader(first, sampler=EpochSampler(second))
    for sampler in (EpochSampler(ShardMapDataset(packed, fields="key")), EpochSampler(range(21))):
        DataLoader(dataset, sampler=sampler)
    loader = DataLoader(folder, batch_size=7, sampler=EpochSampler(folder))
    assert len(list(loader)) == 3
    folder.samples = folder.samples * 2
    with pytest.raises(ValueError, match="created for 21 samples, but the loader's ImageFolder has 42"):
        iter(loader)


def test_an_overridden_iter_sees_no_placeholders(packed: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(packed, tmp_path / "damaged")
    tar = damaged / "shard-000001.tar"
    tar.write_bytes(tar.read_bytes().replace(b"\xff\xd8\xff", b"\0\0\0", 1))
    dataset = make_changing(
        damaged, lambda each: ((image, key.upper()) for image, key in each), fields=("image", "key")
    )
    with pytest.raises(SampleError, match=r"shard-000001\.tar"):
        list(DataLoader(dataset, batch_size=4, num_workers=1))
    loader = DataLoader(dataset, batch_size=4, on_error="replace", quarantine=tmp_path / "quarantine")
    with pytest.warns(RuntimeWarning, match="unreadable samples replaced in epoch 0: 1"):
        keys = [key for _, keys in loader for key in keys]
    assert len(keys) == 21
    assert all(key == key.upper() for key in keys)
    with pytest.raises(ValueError, match=r"does not work with Changing, which overrides __iter__: .*'replace'"):
        DataLoader(dataset, batch_size=4, on_error="skip")


def test_without_a_state_it_is_empty_and_says_so_and_one_of_another_order_is_refused(packed: Path) -> None:
    loader: Any = DataLoader(IterableWrapper(range(5)))
    assert not loader.has_state
    with pytest.warns(RuntimeWarning, match="this loader has no state.*restarts the epoch"):
        assert loader.state_dict() == {}
    with pytest.warns(RuntimeWarning, match="this loader has no state"):
        loader.load_state_dict({})
    with pytest.raises(TypeError, match="a loader without a state cannot load one"):
        loader.load_state_dict({"epoch": 1})
    dataset = ShardMapDataset(packed)
    ordered = DataLoader(dataset, sampler=EpochSampler(dataset))
    for other in (DataLoader(dataset), DataLoader(dataset, sampler=Backwards(dataset))):
        with pytest.raises(StateError, match="was not saved by a loader of this kind"):
            other.load_state_dict(ordered.state_dict())
        with pytest.raises(StateError):
            ordered.load_state_dict(other.state_dict())


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_needs_no_length(images: Path, drop_last: bool) -> None:
    unmeasured = type("Unmeasured", (Sampler,), {"__iter__": lambda sampler: iter([3, 1, 2, 0, 4])})
    for dataset in (range(5), ImageFolder(images, transform=RandomResizedCrop(8))):
        assert len(list(DataLoader(dataset, batch_size=2, sampler=unmeasured(), drop_last=drop_last))) == 3 - drop_last


@pytest.mark.filterwarnings("error")
def test_two_labels_of_one_sample_are_not_compared(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "weather").joinpath("class-0").rename(tmp_path / "weather/fog")
    DataLoader(torch.utils.data.StackDataset(ImageFolder(images), ImageFolder(tmp_path / "weather")))


ORDER: dict[str, Any] = {"shuffle": True, "remainder": "keep", "rank": 0, "world_size": 1}


def make_loader(packed: Path, *, batch_size: int = 4, order: Any = ORDER, **options: Any) -> DataLoader:
    return DataLoader(ShardDataset(packed, fields="key", **order), batch_size, **options)


def make_sampled(packed: Path, *, batch_size: int = 4, order: Any = ORDER, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields="key")
    return DataLoader(dataset, batch_size, sampler=EpochSampler(dataset, **order), **options)


both_kinds = pytest.mark.parametrize("make", [make_loader, make_sampled])


def keys_of(batches: Any, epoch: int | None = None) -> list[str]:
    if epoch is not None:
        batches.set_epoch(epoch)
    return [key for batch in batches for key in batch]


def where(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["position"]


def resume(make: Any, packed: Path, state: Any, **options: Any) -> Any:
    loader = make(packed, **options)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


@both_kinds
@pytest.mark.parametrize(("num_batches", "num_workers"), [(0, 0), (3, 0), (5, 0), (6, 0), (3, 1)])
def test_resumed_equals_uninterrupted(make: Any, packed: Path, num_batches: int, num_workers: int) -> None:
    uninterrupted = keys_of(make(packed))
    loader = make(packed, num_workers=num_workers)
    before = keys_of(islice(loader, num_batches))
    assert where(loader) == (0, min(4 * num_batches, 21)), "what was received is counted, not what was prefetched"
    resumed = resume(make, packed, loader.state_dict(), num_workers=num_workers)
    resumed.set_epoch(0)
    assert resumed.state_dict() == loader.state_dict()
    assert len(resumed) == len(loader) == 6
    assert before + keys_of(resumed) == uninterrupted
    if make is make_sampled:  # Frameworks that do not know the loader's epoch set epoch 0 on its sampler.
        resumed.load_state_dict(loader.state_dict())
        resumed.sampler.set_epoch(0)
        assert before + keys_of(resumed) == uninterrupted
    # The next iteration is the next epoch, even if the state is from the end of an epoch.
    assert keys_of(resumed) == keys_of(make(packed), 1)
    assert keys_of(resume(make, packed, resumed.state_dict())) == keys_of(make(packed), 2)


@both_kinds
def test_break_consumes_an_epoch_and_another_epoch_drops_the_position(make: Any, packed: Path) -> None:
    loader = make(packed, num_workers=1, persistent_workers=True)
    for _ in loader:
        break
    assert where(loader) == (0, 4)
    assert keys_of(loader) == keys_of(make(packed), 1)
    other = resume(make, packed, {**loader.state_dict(), "position": 8})
    other.set_epoch(2)
    assert where(other) == (2, 0)
    assert len(keys_of(other)) == 21
    with pytest.raises(StateError, match=r"order\.seed is 0 in the state and 1 here"):
        resume(make, packed, loader.state_dict(), order={**ORDER, "seed": 1})


@both_kinds
@pytest.mark.parametrize("num_workers", [0, 1])
def test_setting_the_next_epoch_does_not_change_the_one_in_flight(make: Any, packed: Path, num_workers: int) -> None:
    loader = make(packed, num_workers=num_workers, persistent_workers=num_workers > 0)
    iterator = iter(loader)
    keys_of(islice(iterator, 2))
    loader.set_epoch(5)
    assert where(loader) == (0, 8)
    assert keys_of(resume(make, packed, loader.state_dict())) == keys_of(iterator)
    assert where(loader) == (5, 0)
    assert keys_of(loader) == keys_of(make(packed), 5)


def test_an_epoch_is_an_integer_below_the_limit_wherever_it_is_set(packed: Path) -> None:
    mapped, loader = ShardMapDataset(packed, fields="key"), make_loader(packed)
    plain = torch.utils.data.DataLoader(mapped, sampler=EpochSampler(mapped))
    owners: list[Any] = [EpochCounter(), ShardDataset(packed), mapped, EpochSampler(mapped), loader, DataLoader(mapped)]
    owners += [make_sampled(packed), DataLoader(range(3), sampler=EpochSampler(range(3)))]
    for owner in (*owners, DevicePrefetcher(loader, "cpu"), DevicePrefetcher(plain, "cpu")):
        for epoch, error in ((1.5, TypeError), ("a", TypeError), (None, TypeError), (-1, ValueError)):
            with pytest.raises(error, match="epoch must be"):
                owner.set_epoch(epoch)
        for epoch in (2**62, 10**20):
            with pytest.raises(ValueError, match=r"epoch must be at least 0 and below 2\*\*62"):
                owner.set_epoch(epoch)
        owner.set_epoch(np.int64(2**62 - 1))
    assert len(keys_of(loader)) == len(keys_of(loader))  # The second epoch follows the largest valid epoch.
    DataLoader(range(10), batch_sampler=BatchSampler(sampler := EpochSampler(range(10)), 5, False)).set_epoch(4)
    assert sampler.epoch == 4
    with pytest.raises(StateError, match=r"epoch .* below 2\*\*62, got 1"):
        loader.load_state_dict({**loader.state_dict(), "epoch": 10**20})
    loader.set_epoch(cast(int, np.int64(3)))
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 3


@both_kinds
@pytest.mark.parametrize("is_fast", [False, True])
def test_an_epoch_that_cannot_be_started_is_not_counted(
    make: Any, is_fast: bool, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(packed) if is_fast else make(packed, worker_init_fn=id)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "position": 4})

    def fail(*_: object, **__: object) -> Any:
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        for name in ("any_dataset.Fetching", "pipeline.CallingProcess", "pipeline.WorkerProcesses"):
            patched.setattr(f"shardio.loader.{name}.start", fail)
        with pytest.raises(OSError, match="no memory"):
            iter(loader)
    assert where(loader) == (3, 4)
    assert keys_of(loader) == keys_of(make(packed), 3)[4:]
    sampler = EpochSampler(ShardMapDataset(packed))
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 4})
    with monkeypatch.context() as patched:
        patched.setenv("RANK", "1")  # Of how many?
        with pytest.raises(ValueError, match="WORLD_SIZE"):
            iter(sampler)
    assert where(sampler) == (3, 4)


def test_epochs_without_batches_are_warned_of_once_but_not_the_rest_of_an_epoch(packed: Path) -> None:
    mapped: Any = ShardMapDataset(packed)
    sampled = {"sampler": EpochSampler(mapped)}
    for dataset, options in (
        (ShardDataset(packed), {}),
        (mapped, sampled),
        (mapped, {}),
        (mapped, {"worker_init_fn": print}),
    ):
        loader = DataLoader(dataset, 22, drop_last=True, **options)
        with pytest.warns(
            RuntimeWarning, match="no batches: 21 samples cannot fill a batch on every rank \\(.* 22 samp"
        ) as warned:
            assert list(loader) == []
        assert warned[0].filename == __file__
        assert list(loader) == []  # A second warning would be an error.
    shares = [ShardDataset(packed, remainder="keep", rank=rank, world_size=22) for rank in (0, 21)]
    assert len(list(DataLoader(shares[0]))) == 1
    with pytest.warns(RuntimeWarning, match="no batches: rank 21 of 22 gets none of the 21 samples: use fewer ranks"):
        assert list(DataLoader(shares[1])) == []
    loader = DataLoader(ShardDataset(packed), batch_size=20, drop_last=True)
    next(iter(loader))
    loader.load_state_dict({**loader.state_dict(), "position": 20})
    assert list(loader) == []


def test_a_copy_of_a_dataset_keeps_the_epoch_that_was_set(packed: Path) -> None:
    dataset = ShardDataset(packed, fields="key", shuffle=True)
    dataset.set_epoch(3)
    expected = keys_of(DataLoader(ShardDataset(packed, fields="key", shuffle=True), 4), 3)
    for each in (copy.copy(dataset), copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset)), dataset):
        loader = DataLoader(each, batch_size=4)
        assert (keys_of(loader), where(loader)) == (expected, (3, 21))
