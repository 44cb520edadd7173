"""Map-style datasets with torch's own samplers: torch's batches, and random transforms that can be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shardio import DataLoader, EpochSampler, ImageFolder, ShardMapDataset
from shardio.transforms import RandomResizedCrop


def make(packed: Path, **options: Any) -> DataLoader:
    return DataLoader(ShardMapDataset(packed, fields="key"), **options)


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (0, {"batch_size": 4, "shuffle": True}),
        (1, {"batch_size": 4, "shuffle": True}),
        (0, {"batch_size": 4, "shuffle": True, "drop_last": True}),
        (0, {"batch_size": 5, "sampler": SequentialSampler(range(21))}),
        (0, {"batch_size": 4, "sampler": SubsetRandomSampler([20, 3, 7, 1, 15])}),
        (0, {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 21, 30)}),
        (0, {"batch_sampler": BatchSampler(RandomSampler(range(21)), 4, drop_last=False)}),
        (0, {"batch_sampler": [[1], [2, 3, 4], [0] * 9, [-1]]}),
        (1, {"batch_sampler": [[1], [2, 3, 4], [0] * 9, [-1]]}),
    ],
)
def test_batches_are_those_of_torchs_loader(packed: Path, num_workers: int, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected = [list(batch) for batch in TorchLoader(ShardMapDataset(packed, fields="key"), **options)]
    torch.manual_seed(3)
    loader = make(packed, num_workers=num_workers, **options)
    assert [list(batch) for batch in loader] == expected
    assert len(loader) == len(expected)


def test_a_generator_decides_on_the_order(packed: Path) -> None:
    def epochs(seed: int) -> list[list[list[str]]]:
        loader = make(packed, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))
        return [list(loader), list(loader)]

    assert epochs(1) == epochs(1) != epochs(2)
    assert epochs(1)[0] != epochs(1)[1]


def crops(images: Path, *, num_workers: int, epoch: int | None, sampler: Any) -> torch.Tensor:
    folder = ImageFolder(images, transform=RandomResizedCrop(16))
    if epoch is not None:
        folder.set_epoch(epoch, seed=5)
    torch.manual_seed(0)
    loader = DataLoader(folder, batch_size=4, sampler=sampler, num_workers=num_workers)
    return torch.cat([pictures for pictures, _ in loader])


def test_crops_do_not_depend_on_workers_and_follow_torchs_seed(images: Path) -> None:
    one = crops(images, num_workers=0, epoch=None, sampler=SequentialSampler(range(21)))
    assert torch.equal(one, crops(images, num_workers=3, epoch=None, sampler=SequentialSampler(range(21))))
    repeated = crops(images, num_workers=1, epoch=None, sampler=[2] * 9)
    assert len({picture.numpy().tobytes() for picture in repeated}) == 9


@pytest.mark.parametrize("num_workers", [0, 1])
def test_crops_differ_from_epoch_to_epoch_and_from_seed_to_seed(images: Path, num_workers: int) -> None:
    def epochs(seed: int) -> list[bytes]:
        torch.manual_seed(seed)
        folder = ImageFolder(images, transform=RandomResizedCrop(16))
        loader = DataLoader(folder, batch_size=21, num_workers=num_workers, persistent_workers=num_workers > 0)
        return [pictures.numpy().tobytes() for _ in range(3) for pictures, _ in loader]

    assert epochs(1) == (found := epochs(1))
    assert len({*found, *epochs(2)}) == 6


def test_where_the_epoch_is_known_the_first_draw_is_that_of_the_order_and_repeats_differ(images: Path) -> None:
    plain = crops(images, num_workers=0, epoch=1, sampler=SequentialSampler(range(21)))
    sampler = [2, 7, 2, 2, 7, 0, 2, 2, 1, 2]
    drawn = crops(images, num_workers=1, epoch=1, sampler=sampler)
    assert torch.equal(drawn[[0, 1, 5, 8]], plain[[2, 7, 0, 1]])
    assert len({picture.numpy().tobytes() for picture in drawn}) == len(sampler)
    assert torch.equal(drawn, crops(images, num_workers=0, epoch=1, sampler=sampler))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("place", [0, 1])
def test_an_empty_batch_from_the_sampler_is_an_error(packed: Path, num_workers: int, place: int) -> None:
    lists = [[1, 2], [3]]
    lists.insert(place, [])
    batches = iter(make(packed, batch_sampler=lists, num_workers=num_workers))
    for expected in lists[:place]:
        assert len(next(batches)) == len(expected)
    with pytest.raises(IndexError, match="the batch sampler yielded an empty batch"):
        next(batches)


def failing_sampler() -> Iterator[list[int]]:
    yield [1, 2]
    yield [3]
    raise RuntimeError("the sampler has no more luck")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_samplers_error_follows_the_batches_that_it_yielded(packed: Path, num_workers: int) -> None:
    batches = iter(make(packed, batch_sampler=failing_sampler(), num_workers=num_workers))
    assert [len(next(batches)), len(next(batches))] == [2, 1]
    with pytest.raises(RuntimeError, match="no more luck"):
        next(batches)
    with pytest.raises(RuntimeError, match="no more luck"):  # Whatever else is asked for: batches are missing.
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
