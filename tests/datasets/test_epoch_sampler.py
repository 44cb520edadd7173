"""EpochSampler, and ShardDataset in torch's loader: order, split, epochs and state."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import (
    ConcatDataset,
    DataLoader as TorchLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    Subset,
    get_worker_info,
)

import shardio
from shardio import EpochSampler, ShardDataset, ShardMapDataset, StateError
from shardio.order import Remainder
from shardio.reading import SampleReader
from tests.raising import assert_raises


@given(
    num_samples=st.integers(1, 200),
    world_size=st.integers(1, 7),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    remainder=st.sampled_from(["pad", "keep", "drop"]),
)
def test_ranks_cover_the_dataset(
    num_samples: int, world_size: int, batch_size: int, shuffle: bool, remainder: Remainder
) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "remainder": remainder}
    samples = range(num_samples)
    ranks = [EpochSampler(samples, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    indices = [list(rank) for rank in ranks]
    assert [(len(rank), list(rank)) for rank in ranks] == [(len(each), each) for each in indices]
    counts = Counter(index for rank in indices for index in rank)
    if remainder == "drop":
        assert counts.total() == num_samples - num_samples % (world_size * batch_size)
        assert max(counts.values(), default=1) == 1
    else:
        assert set(counts) == set(range(num_samples))
        assert counts.total() == num_samples + (-num_samples % world_size if remainder == "pad" else 0)


def test_frameworks_recognize_it_and_errors_say_what_it_cannot_do() -> None:
    sampler = EpochSampler(range(10), rank=1, world_size=3)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, sampler.num_samples, sampler.total_size) == (1, 3, 4, 12)
    assert (sampler.seed, sampler.shuffle, sampler.drop_last, sampler.epoch) == (0, True, False, 0)
    assert_raises(ValueError, "empty", EpochSampler, [])
    assert_raises(ValueError, r"requires shardio\.DataLoader", lambda: iter(EpochSampler(range(5), remainder="mask")))


def test_over_shards_it_gives_the_order_of_a_shard_dataset(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    choices: list[dict[str, Any]] = [{"shuffle": True, "seed": 5, "window": 4, "strata": 2}, {"shuffle": False}]
    for options in choices:
        sampler = EpochSampler(dataset, batch_size=3, rank=1, world_size=2, **options)
        streamed = ShardDataset(packed, fields="key", batch_size=3, rank=1, world_size=2, **options)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            streamed.set_epoch(epoch)
            assert [dataset[index] for index in sampler] == list(streamed)


def test_a_dataset_without_shards_is_shuffled_as_a_whole() -> None:
    firsts = [next(iter(EpochSampler(range(1000), seed=seed))) for seed in range(40)]
    assert min(firsts) < 250
    assert max(firsts) > 750


def test_its_state_resumes_after_the_samples_that_it_yielded() -> None:
    sampler, resumed = (EpochSampler(range(40), batch_size=4, seed=2, rank=0, world_size=1) for _ in range(2))
    sampler.set_epoch(3)
    before = list(islice(sampler, 12))
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (3, 12)
    resumed.load_state_dict(state)
    resumed.set_epoch(3)
    assert (sorted(before + list(resumed)), resumed.state_dict()["position"]) == (list(range(40)), 40)
    message = "samples is 40 in the state and 41 here"
    assert_raises(StateError, message, EpochSampler(range(41), seed=2).load_state_dict, state)


class Named(Dataset[int]):
    def __init__(self, digest: str, size: int) -> None:
        self.digest, self.size = digest, size

    def __len__(self) -> int:
        return self.size


def test_a_state_belongs_to_one_concatenation_of_datasets() -> None:
    one, other = Named("one", 20), Named("other", 20)
    both: Dataset[Any] = ConcatDataset([one, other])
    reversed_: Dataset[Any] = ConcatDataset([other, one])
    choices: list[Any] = [both, reversed_, ConcatDataset([one, one]), ConcatDataset([both])]
    choices += [ConcatDataset([Named("one", 19), Named("other", 21)])]
    choices += [Subset(reversed_, range(40)), Subset(both, range(40))]
    choices += [StackDataset(both), StackDataset(a=both), StackDataset(b=both)]
    samplers = [EpochSampler(dataset) for dataset in choices]
    for writer, reader in product(samplers, samplers):
        loader = shardio.DataLoader(reader.dataset, 4, sampler=reader)
        for load in (reader.load_state_dict, loader.load_state_dict):
            if reader is writer:
                load(writer.state_dict())
            else:
                assert_raises(StateError, r"dataset\.digest is", load, writer.state_dict())


def wait_for(path: Path) -> None:
    """Poll for a file that the test creates, because the worker is another process."""
    while not path.exists():
        time.sleep(0.01)


def delay(path: Path, worker_id: int) -> None:
    if worker_id == 1:
        wait_for(path)


class LateDataset(ShardDataset):
    """A dataset that, in worker 1, begins its second iteration only when a file exists."""

    path: Path
    num_iterations = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        self.num_iterations += 1
        if info is not None and info.id == 1 and self.num_iterations == 2:
            wait_for(self.path)
        return super().__iter__()


FORKED: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"}


def make_dataset(packed: Path, kind: type[ShardDataset] = ShardDataset) -> Any:
    return kind(packed, fields="key", shuffle=True, batch_size=4)


def epochs_of(packed: Path, num_epochs: int) -> list[list[str]]:
    loader = shardio.DataLoader(make_dataset(packed), batch_size=4)
    return [list(loader) for _ in range(num_epochs)]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_an_epoch_set_while_workers_start_is_that_of_the_next_iteration(
    packed: Path, tmp_path: Path, is_persistent: bool
) -> None:
    begun, dataset = tmp_path / "begun", make_dataset(packed)
    loader = TorchLoader(dataset, worker_init_fn=partial(delay, begun), persistent_workers=is_persistent, **FORKED)
    batches = iter(loader)
    dataset.set_epoch(1)
    begun.touch()
    assert [list(batches), list(loader)] == epochs_of(packed, 2)


def test_persistent_workers_follow_the_first_of_them(packed: Path, tmp_path: Path) -> None:
    dataset = make_dataset(packed, LateDataset)
    dataset.path = tmp_path / "begun"
    loader = TorchLoader(dataset, persistent_workers=True, **FORKED)
    epochs = [list(loader)]
    dataset.set_epoch(1)
    batches = iter(loader)
    first = next(batches)
    dataset.set_epoch(2)
    dataset.path.touch()
    epochs += [[first, *batches], list(loader)]
    assert epochs == epochs_of(packed, 3)


def test_a_loader_with_the_seed_of_an_earlier_one_has_its_own_epochs(packed: Path) -> None:
    dataset, found = make_dataset(packed), []
    for epoch in range(0, 4, 2):
        generator = torch.Generator().manual_seed(0)
        loader = TorchLoader(dataset, generator=generator, persistent_workers=True, **FORKED)
        for number in (epoch, epoch + 1):
            dataset.set_epoch(number)
            found.append(list(loader))
    assert found == epochs_of(packed, 4)


def test_an_interrupted_iteration_does_not_end_silently(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.datasets.ordered.SMALL_CHUNK", 0)  # Not all samples are read at once.
    dataset = ShardDataset(packed, fields="key", batch_size=4)
    iterator = iter(dataset)
    first = list(islice(iterator, 3))

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SampleReader, "read", interrupt)
        assert_raises(KeyboardInterrupt, None, list, iterator)
    for _ in range(2):
        assert_raises(RuntimeError, r"this epoch ended before its last batch \(KeyboardInterrupt\)", next, iterator)
    dataset.set_epoch(0)
    assert list(islice(iter(dataset), 3)) == first


class Clips(IterableDataset[str]):
    """A user's dataset that passes its rank to the ShardDataset inside it."""

    def __init__(self, packed: Path, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas = self.process_index, self.num_processes = rank, num_replicas
        self.inner = ShardDataset(packed, fields="key", rank=rank, world_size=num_replicas, remainder="keep")

    def __iter__(self) -> Iterator[str]:
        yield from self.inner


def test_a_dataset_that_passes_on_its_rank_splits_once(packed: Path) -> None:
    keys = [key for rank in range(2) for key in TorchLoader(Clips(packed, rank, 2), batch_size=None)]
    assert len(keys) == 21
    assert set(keys) == set(ShardDataset(packed, fields="key", rank=0, world_size=1))


@pytest.mark.parametrize(
    ("own_size", "size", "num_workers", "drop_last", "is_right"),
    [
        (None, 4, 2, False, True),  # 11 and 10 of 21 samples: 3 + 3 batches.
        (None, 6, 3, False, False),
        (None, 4, 2, True, False),
        (None, 10, 2, True, True),
        (None, 10, 0, True, True),
        (6, 6, 3, True, True),
        (5, 4, 2, False, True),
        (2, 9, 2, False, False),
    ],
)
def test_a_length_is_right_or_warned_of(
    packed: Path, own_size: int | None, size: int, num_workers: int, drop_last: bool, is_right: bool
) -> None:
    dataset = ShardDataset(packed, fields="key", batch_size=own_size)
    loader = TorchLoader(dataset, batch_size=size, num_workers=num_workers, drop_last=drop_last)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        length = len(loader)
        made = len(list(loader))
    said = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert (made == length) == is_right
    assert bool(said) != is_right
    for message in said:
        assert re.search(rf"makes {made} batches.*length is {length}.*\(batch_size={size}\)", message)
        assert ("leaves out" in message) == drop_last
