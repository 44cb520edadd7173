"""Common faults of loaders are found and their causes named. Right loaders pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

import shardio
from shardio import CoverageError, EpochSampler, ShardDataset, ShardMapDataset
from shardio.check import assert_exactly_once
from tests.sources import write_images

N = 96


class Numbers(IterableDataset[int]):
    """Yields numbers, split over workers and ranks or not."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, by_worker: bool = True, num_samples: int = N) -> None:
        self.rank, self.world_size, self.by_worker, self.num_samples = rank, world_size, by_worker, num_samples

    def __iter__(self) -> Iterator[int]:
        numbers = range(self.rank, self.num_samples, self.world_size)
        info = get_worker_info()
        return iter(numbers if info is None or not self.by_worker else numbers[info.id :: info.num_workers])


class ShardsOfTen(IterableDataset[int]):
    """Gives each worker whole shards of ten, and drops the shards that do not divide by the workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        for shard in range(worker, 10 // num_workers * num_workers, num_workers):
            yield from range(shard * 10, shard * 10 + 10)


def ranks_of(world_size: int, num_workers: int, **options: Any) -> tuple[DataLoader[int], ...]:
    split = options.pop("by_rank", True)
    return tuple(
        DataLoader(
            Numbers(rank=rank if split else 0, world_size=world_size if split else 1, **options),
            batch_size=8,
            num_workers=num_workers,
        )
        for rank in range(world_size)
    )


def fault(loader: Any, expected: Any, **options: Any) -> str:
    with pytest.raises(CoverageError) as caught:
        assert_exactly_once(loader, expected, **options)
    return str(caught.value)


def test_no_worker_split() -> None:
    message = fault(ranks_of(1, 4, by_worker=False), range(N))
    assert f"{N} samples: 0 delivered once, {N} more than once, 0 never, 0 unexpected" in message
    assert f"each of 4 workers delivered all {N} samples: the dataset ignores get_worker_info" in message
    assert "repeated: 0, delivered 4 times: rank 0 worker 0 batch 0, rank 0 worker 1 batch 1" in message


def test_no_worker_split_is_found_without_knowing_the_keys() -> None:
    assert "ignores get_worker_info" in fault(ranks_of(1, 3, by_worker=False)[0], None)


def test_no_rank_split() -> None:
    message = fault(ranks_of(2, 2, by_rank=False), range(N))
    assert f"ranks 0 and 1 delivered the same {N} samples: the loader has no DistributedSampler" in message
    assert "get_worker_info" not in message


def test_neither_worker_nor_rank_split() -> None:
    message = fault(ranks_of(3, 2, by_rank=False, by_worker=False), range(N))
    assert f"each of 2 workers of rank 0 delivered all {N} samples: the dataset ignores get_worker_info" in message
    assert f"ranks 0, 1 and 2 delivered the same {N} samples" in message


@pytest.mark.parametrize("batch_size", [5, 6, 7])
@pytest.mark.parametrize("first", [0, 80])
def test_shards_that_do_not_divide_by_the_workers(batch_size: int, first: int) -> None:
    """Two of ten shards are never read, wherever they are in the dataset's order."""
    order = [*range(first, 100), *range(first)]
    message = fault(DataLoader(ShardsOfTen(), batch_size=batch_size, num_workers=4), order)
    assert "the 20 missing samples are more than drop_last leaves out, and form one contiguous run: perhaps" in message


def test_drop_last_in_each_worker() -> None:
    loader = DataLoader(Numbers(num_samples=90), batch_size=8, num_workers=2, drop_last=True)
    assert "10 of 90 samples are missing: drop_last is set, or a loop ends one batch early" in fault(loader, range(90))


def test_padding_by_repeating() -> None:
    class Cycling(Numbers):
        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()
            yield from range(4)

    message = fault(DataLoader(Cycling(), batch_size=10, num_workers=0), range(N))
    assert "all repeats (4) are in the last batch of a rank or worker: the loader pads" in message


def test_the_padding_of_a_distributed_sampler() -> None:
    dataset: Any = range(N + 1)
    loaders = tuple(
        DataLoader(dataset, batch_size=7, sampler=DistributedSampler(dataset, 4, rank, shuffle=True))
        for rank in range(4)
    )
    message = fault(loaders, range(N + 1))
    assert "3 more than once" in message
    assert "all repeats (3) are in the last batch of a rank or worker: the loader pads" in message


def test_the_padding_of_shardio_names_the_policies_that_do_not_pad(tars: Path) -> None:
    loaders = tuple(
        shardio.DataLoader(ShardDataset(tars, fields="key", shuffle=True, rank=rank, world_size=5), batch_size=4)
        for rank in range(5)
    )
    assert "use remainder='keep' or 'mask'" in fault(loaders, keys_of(tars))


def test_a_missing_set_epoch() -> None:
    dataset: Any = range(N)
    samplers: list[DistributedSampler[int]] = [DistributedSampler(dataset, 2, rank, shuffle=True) for rank in range(2)]
    loaders = tuple(DataLoader(dataset, batch_size=8, sampler=sampler) for sampler in samplers)

    def set_epoch(epoch: int) -> None:
        for sampler in samplers:
            sampler.set_epoch(epoch)

    message = fault(loaders, range(N), epochs=2)
    assert message.startswith("epochs 0 and 1 have the same order: set_epoch is not called")
    assert_exactly_once(loaders, range(N), epochs=3, set_epoch=set_epoch)


def test_a_lost_last_batch() -> None:
    class Losing(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__())[:-1])

    dataset: Any = range(N)
    assert "the last 8 of 96 samples are missing: drop_last is set, or a loop ends one batch early" in fault(
        Losing(dataset, batch_size=8), range(N)
    )
    torch.manual_seed(0)
    message = fault(Losing(dataset, batch_size=8, shuffle=True), None)
    assert "8 never" in message
    assert "8 of 96 samples are missing: drop_last is set, or a loop ends one batch early" in message


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tars")
    write_images(root / "in", classes=2, per_class=24, width=8, height=8)
    shardio.pack(root / "in", root / "out", max_shard_samples=6)
    return root / "out"


def keys_of(tars: Path) -> list[str]:
    return list(ShardDataset(tars, fields="key", rank=0, world_size=1))


def no_split(shards: Any) -> Any:
    return shards


def web_loaders(tars: Path, world_size: int, num_workers: int, **options: Any) -> Iterator[DataLoader[str]]:
    """Yield WebDataset's loader of each rank, in that rank's environment."""
    paths = sorted(map(str, tars.glob("*.tar")))
    for rank in range(world_size):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        dataset = webdataset.WebDataset(paths, shardshuffle=False, **options).map(itemgetter("__key__"))
        context = "fork" if num_workers else None  # A fork server, the default of Python 3.14, keeps its environment.
        yield DataLoader(dataset, batch_size=4, num_workers=num_workers, multiprocessing_context=context)


def delivered(tars: Path, world_size: int, num_workers: int, **options: Any) -> tuple[list[Any], ...]:
    return tuple([list(batch) for batch in loader] for loader in web_loaders(tars, world_size, num_workers, **options))


def test_a_webdataset_without_nodesplitter(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = delivered(tars, 2, 2, nodesplitter=no_split)
    message = fault(ranks, keys_of(tars))
    assert "ranks 0 and 1 delivered the same 48 samples" in message
    assert "in WebDataset, no nodesplitter" in message


def test_a_webdataset_whose_shards_divide_is_right(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = delivered(tars, 2, 2, nodesplitter=webdataset.split_by_node, workersplitter=webdataset.split_by_worker)
    assert_exactly_once(ranks, keys_of(tars))


def test_a_distributed_sampler_that_divides_is_right() -> None:
    dataset: Any = range(N)
    loaders = tuple(
        DataLoader(dataset, batch_size=7, sampler=DistributedSampler(dataset, 4, rank), num_workers=1)
        for rank in range(4)
    )
    assert_exactly_once(loaders, range(N))
    assert_exactly_once(loaders)


@pytest.mark.parametrize("policy", ["keep", "mask"])
def test_loaders_of_shardio_are_right(tars: Path, policy: Any) -> None:
    def valid(batch: Any) -> list[str]:
        return [key for key, is_valid in zip(*batch, strict=True) if is_valid] if policy == "mask" else batch

    datasets = [
        ShardDataset(tars, fields="key", shuffle=True, remainder=policy, rank=r, world_size=5) for r in range(5)
    ]
    loaders = tuple(shardio.DataLoader(dataset, batch_size=4) for dataset in datasets)
    assert_exactly_once(loaders, keys_of(tars), key=valid, epochs=2)
    mapped = ShardMapDataset(tars, fields="key")
    samplers = [EpochSampler(mapped, remainder=policy, rank=rank, world_size=5) for rank in range(5)]
    sampled = tuple(shardio.DataLoader(mapped, batch_size=4, sampler=sampler) for sampler in samplers)
    assert_exactly_once(sampled, keys_of(tars), key=valid, epochs=2)


def test_content_identifies_samples_that_differ(tars: Path) -> None:
    dataset = ShardMapDataset(tars, fields=("image", "label"))
    assert_exactly_once(DataLoader(dataset, batch_size=4, num_workers=2))
    doubled: Any = [*range(10), *range(10)]
    assert_exactly_once(DataLoader([torch.tensor([i, i]) for i in doubled], batch_size=4))  # type: ignore[arg-type]


def test_keys_are_required_if_content_does_not_identify_samples() -> None:
    noisy: Any = [torch.zeros(3)] * 8

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + torch.rand(len(samples), 3)

    with pytest.raises(TypeError, match="differ from one pass to the next"):
        assert_exactly_once(DataLoader(noisy, batch_size=4, collate_fn=collate))
    with pytest.raises(TypeError, match=r"samples with equal data\. To identify samples, pass key="):
        assert_exactly_once([[torch.zeros(2, 3)], [torch.zeros(2, 3)]])
    with pytest.raises(TypeError, match=r"no keys to compare with the expected keys\. To identify samples, pass key="):
        assert_exactly_once([[torch.zeros(2, 3)]], ["a", "b"])
    with pytest.raises(TypeError, match="nothing at key='id'"):
        assert_exactly_once([[torch.zeros(2, 3)]], 2, key="id")
