"""shardio's datasets in the order of torch's samplers: torch's batches, repeatable transforms, and exact states."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.loader.batches import collate_channels_last
from shardio.transforms import CenterCrop, RandomResizedCrop
from tests.buffers import assert_same
from tests.loader.programs import Point, as_list, describe, stack_first


def make(packed: Path, **options: Any) -> DataLoader:
    return DataLoader(ShardMapDataset(packed, fields="key"), **options)


def test_a_generator_decides_on_the_order(packed: Path) -> None:
    def epochs(seed: int) -> list[list[list[str]]]:
        loader = make(packed, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))
        return [list(loader), list(loader)]

    assert epochs(1) == epochs(1) != epochs(2)
    assert epochs(1)[0] != epochs(1)[1]


def crops(images: Path, *, num_workers: int, epoch: int | None, sampler: Any, seed: int = 0) -> torch.Tensor:
    folder = ImageFolder(images, transform=RandomResizedCrop(16))
    if epoch is not None:
        folder.set_epoch(epoch, seed=5)
    torch.manual_seed(seed)
    loader = DataLoader(folder, batch_size=4, sampler=sampler, num_workers=num_workers)
    return torch.cat([pictures for pictures, _ in loader])


def test_crops_do_not_depend_on_workers_and_follow_torchs_seed(images: Path) -> None:
    one = crops(images, num_workers=0, epoch=None, sampler=SequentialSampler(range(21)))
    assert torch.equal(one, crops(images, num_workers=1, epoch=None, sampler=SequentialSampler(range(21))))
    assert not torch.equal(one, crops(images, num_workers=0, epoch=None, sampler=SequentialSampler(range(21)), seed=1))
    folder = ImageFolder(images, transform=RandomResizedCrop(16))
    loader = DataLoader(folder, 21, num_workers=1, persistent_workers=True)
    assert len({pictures.numpy().tobytes() for _ in range(3) for pictures, _ in loader}) == 3, "epochs differ"
    repeated = crops(images, num_workers=1, epoch=None, sampler=[2] * 9)
    assert len({picture.numpy().tobytes() for picture in repeated}) == 9


def test_where_the_epoch_is_known_the_first_draw_is_that_of_the_order_and_repeats_differ(images: Path) -> None:
    plain = crops(images, num_workers=0, epoch=1, sampler=SequentialSampler(range(21)))
    sampler = [2, 7, 2, 2, 7, 0, 2, 2, 1, 2]
    drawn = crops(images, num_workers=1, epoch=1, sampler=sampler)
    assert torch.equal(drawn[[0, 1, 5, 8]], plain[[2, 7, 0, 1]])
    assert len({picture.numpy().tobytes() for picture in drawn}) == len(sampler)
    assert torch.equal(drawn, crops(images, num_workers=0, epoch=1, sampler=sampler))


@pytest.mark.parametrize(("num_workers", "place"), [(0, 0), (0, 1), (1, 1)])
def test_an_empty_batch_from_the_sampler_is_an_error(packed: Path, num_workers: int, place: int) -> None:
    lists = [[1, 2], [3]]
    lists.insert(place, [])
    batches = iter(make(packed, batch_sampler=lists, num_workers=num_workers))
    for expected in lists[:place]:
        assert len(next(batches)) == len(expected)
    with pytest.raises(IndexError, match="the batch sampler yielded an empty batch"):
        next(batches)


N = 21
WHOLE: dict[str, dict[str, Any]] = {
    "none": {},
    "shuffle": {"shuffle": True},
    "RandomSampler": {"sampler": RandomSampler(range(N))},
    "BatchSampler": {"batch_sampler": BatchSampler(SequentialSampler(range(N)), 4, drop_last=False)},
    "no batches": {"batch_size": None},
}
SHARED: dict[str, dict[str, Any]] = {
    "EpochSampler": {"sampler": EpochSampler(range(N))},
    "DistributedSampler": {"sampler": DistributedSampler(range(N), num_replicas=2, rank=0)},  # type: ignore[arg-type]  # a range is a dataset
    "own": {"sampler": range(0, N, 2)},
    "own batches": {"batch_sampler": [[0, 2], [4]]},
}


@pytest.mark.parametrize("name", [*WHOLE, *SHARED])
def test_ranks_that_all_get_all_samples_are_warned_of(packed: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    loaders = [DataLoader(each, **{**WHOLE, **SHARED}[name]) for each in (dataset, Subset(dataset, range(N)))]
    own = DataLoader(range(N), **{**WHOLE, **SHARED}[name])
    assert [len(list(loader)) for loader in loaders] == [len(loader) for loader in loaders]  # One rank: no warning.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(list(own)) == len(own)
    for loader in loaders:
        if name in SHARED:
            assert len(list(loader)) == len(loader)
        else:
            with pytest.warns(RuntimeWarning, match=r"each of 2 ranks gets all 21.*EpochSampler.*DistributedSampler"):
                list(loader)


def test_a_loader_that_is_refused_leaves_its_sampler_as_it_was(packed: Path) -> None:
    dataset = ShardMapDataset(packed)
    for sampler, options in (
        (EpochSampler(range(5)), {}),  # Over another dataset.
        (EpochSampler(dataset), {"batch_size": None, "on_error": "skip"}),
        (EpochSampler(dataset), {"on_error": "skip", "quarantine": packed}),
        (EpochSampler(dataset, remainder="keep"), {"drop_last": True}),
    ):
        with pytest.raises(ValueError, match=r"created over|on_error='skip'|quarantine|drop_last=True"):
            DataLoader(dataset, sampler=sampler, **options)
        assert not sampler.has_loader
    DataLoader(dataset, sampler=sampler)
    assert sampler.has_loader


NUM_BATCHES = 6


class Stateful(Sampler[int]):
    """A sampler that says where it is, and begins at 3 in each epoch but the first."""

    def __init__(self) -> None:
        self.number = 0

    def __len__(self) -> int:
        return 21

    def __iter__(self) -> Iterator[int]:
        while self.number < 21:
            self.number += 1
            yield self.number - 1
        self.number = 3

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


SAMPLERS: dict[str, Any] = {
    "torch's": lambda dataset: {"shuffle": True},
    "a generator": lambda dataset: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "repeats": lambda dataset: {"sampler": WeightedRandomSampler([1.0] * 21, 21)},
    "distributed": lambda dataset: {"sampler": DistributedSampler(dataset, num_replicas=1, rank=0)},
    "a state": lambda dataset: {"sampler": Stateful()},
    "sampler's generator": lambda dataset: {
        "sampler": RandomSampler(dataset, generator=torch.Generator().manual_seed(6))
    },
}


class Run:
    """A training run: two epochs and the batches that it receives."""

    def __init__(self, packed: Path, sampler: str, *, sets_epoch: bool, **workers: Any) -> None:
        torch.manual_seed(11)
        self.dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(16))
        self.loader: Any = DataLoader(self.dataset, 4, **SAMPLERS[sampler](self.dataset), **workers)
        self.sets_epoch = sets_epoch

    def receive(self, first_epoch: int = 0) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        for epoch in range(first_epoch, 3):
            if self.sets_epoch:
                self.dataset.set_epoch(epoch)
            for batch in self.loader:
                yield epoch, batch, json.loads(json.dumps(self.loader.state_dict()))


@pytest.mark.parametrize("sets_epoch", [False, True])
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(packed: Path, sampler: str, sets_epoch: bool) -> None:
    received = list(Run(packed, sampler, sets_epoch=sets_epoch).receive())
    batches = [batch for _, batch, _ in received]
    for stop in (1, NUM_BATCHES, NUM_BATCHES + 3):
        epoch, _, state = received[stop - 1]
        resumed = Run(packed, sampler, sets_epoch=sets_epoch)
        torch.manual_seed(99)  # A state does not depend on the generators of the process that loads it.
        resumed.loader.load_state_dict(state)
        assert_same([batch for _, batch, _ in resumed.receive(epoch)], batches[stop:])


def test_workers_change_nothing(packed: Path) -> None:
    workers = {"num_workers": 1, "persistent_workers": True}
    received = list(Run(packed, "torch's", sets_epoch=False, **workers).receive())
    for stop in (2, NUM_BATCHES, NUM_BATCHES + 1):
        epoch, _, state = received[stop - 1]
        resumed = Run(packed, "torch's", sets_epoch=False, **workers)
        resumed.loader.load_state_dict(state)
        assert_same([batch for _, batch, _ in resumed.receive(epoch)], [batch for _, batch, _ in received[stop:]])
    epoch, _, state = received[1]
    other = Run(packed, "torch's", sets_epoch=False)
    other.loader.load_state_dict(state)
    first = [batch for number, batch, _ in other.receive() if number == 0]
    assert_same(first, [batch for number, batch, _ in received[2:] if number == 0])


def test_a_prefetchers_state_is_that_of_the_batch_that_was_received(packed: Path) -> None:
    whole = [keys for _, keys in Run(packed, "torch's", sets_epoch=False, num_workers=1).loader]
    prefetcher = DevicePrefetcher(Run(packed, "torch's", sets_epoch=False, num_workers=1).loader, "cpu")
    for number, _ in enumerate(prefetcher, start=1):
        resumed = Run(packed, "torch's", sets_epoch=False).loader
        resumed.load_state_dict(prefetcher.state_dict())
        assert [keys for _, keys in resumed] == whole[number:]


_FIELDS: list[Any] = [("image", "label", "key"), ("key", "label"), ("image",), "image", "label", "key"]


def _named(sample: Any) -> Any:
    return Point(x=torch.tensor(sample["image"])[:, ::2], y=[sample["label"], {"label": str(sample["label"])}])


def _described(sample: Any) -> Any:
    return {"image": torch.tensor(sample["image"]), "pair": (str(sample["label"]), sample["label"])}


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Callable[[Path, Path], Any], dict[str, Any], dict[str, Any]]:
    """Draw a function that makes a dataset, the loader's arguments, and how many workers there are."""
    transform_sample = draw(st.sampled_from([None, None, _named, _described]))
    kind = draw(st.sampled_from(["shards", "folder", "subset", "concatenated", "iterable"]))
    fields = ("image", "label") if transform_sample or kind == "folder" else draw(st.sampled_from(_FIELDS))
    chosen: dict[str, Any] = {"transform_sample": transform_sample, **({} if kind == "folder" else {"fields": fields})}
    if "image" in fields:
        chosen["transform"] = CenterCrop(16)

    def make(images: Path, packed: Path) -> Any:
        if kind == "folder":
            return ImageFolder(images, **chosen)
        if kind == "iterable":
            return ShardDataset(packed, shuffle=True, seed=3, **chosen)
        dataset = ShardMapDataset(packed, **chosen)
        if kind == "concatenated":
            return ConcatDataset([dataset, dataset])
        return Subset(dataset, range(1, 20, 2)) if kind == "subset" else dataset

    passed: dict[str, Any] = {"batch_size": draw(st.sampled_from([None, 1, 4, 30]))}
    if passed["batch_size"] is not None:
        passed["drop_last"] = draw(st.booleans())
        passed["collate_fn"] = draw(st.sampled_from([None, as_list, stack_first]))
    if kind != "iterable":
        passed["sampler"] = draw(st.sampled_from([None, range(7), "random"]))
    return make, passed, {"num_workers": draw(st.sampled_from([0, 0, 0, 1]))}


@given(arguments())
@settings(max_examples=settings().max_examples // 5)  # Some start worker processes.
def test_batches_are_those_of_torch(
    images: Path, packed: Path, drawn: tuple[Any, dict[str, Any], dict[str, Any]]
) -> None:
    make, passed, workers = drawn

    def run(loader_class: Any, **more: Any) -> list[Any]:
        dataset = make(images, packed)
        options = {**passed, **more}
        if options.get("sampler") == "random":
            options["sampler"] = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
        loader = loader_class(dataset, **options)
        return [list(loader) for _ in range(1 if isinstance(dataset, ShardDataset) else 2)]  # Its order is shardio's.

    own = {} if passed["batch_size"] is None or passed["collate_fn"] else {"collate_fn": collate_channels_last}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of epochs without batches.
        expected, got = run(torch.utils.data.DataLoader, **own), run(DataLoader, **workers)
    assert describe(got) == describe(expected)
