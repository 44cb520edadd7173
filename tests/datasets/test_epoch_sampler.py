"""EpochSampler gives map-style datasets the order, the split and the state of the design's §5."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, StackDataset, Subset

import shardio
from shardio import EpochSampler, ShardDataset, ShardMapDataset, StateError
from shardio.order import Remainder


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
    ranks = [
        EpochSampler(
            range(num_samples),
            batch_size=batch_size,
            shuffle=shuffle,
            remainder=remainder,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    indices = [list(rank) for rank in ranks]
    assert [len(rank) for rank in ranks] == [len(rank) for rank in indices]
    counts = Counter(index for rank in indices for index in rank)
    if remainder == "drop":
        assert counts.total() == num_samples - num_samples % (world_size * batch_size)
        assert max(counts.values(), default=1) == 1
    else:
        assert set(counts) == set(range(num_samples))
        assert counts.total() == num_samples + (-num_samples % world_size if remainder == "pad" else 0)


def test_frameworks_recognise_it() -> None:
    sampler = EpochSampler(range(10), rank=1, world_size=3)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, sampler.num_samples, sampler.total_size) == (1, 3, 4, 12)
    assert (sampler.seed, sampler.shuffle, sampler.drop_last, sampler.epoch) == (0, True, False, 0)


def test_over_shards_it_gives_the_order_of_a_shard_dataset(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    choices: list[dict[str, Any]] = [{"shuffle": True, "seed": 5, "lanes": 2, "window": 4}, {"shuffle": False}]
    for options in choices:
        sampler = EpochSampler(dataset, batch_size=3, rank=1, world_size=2, **options)
        streamed = ShardDataset(packed, fields="key", batch_size=3, rank=1, world_size=2, **options)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            streamed.set_epoch(epoch)
            assert [dataset[index] for index in sampler] == list(streamed)


def test_without_set_epoch_an_epoch_is_repeated_as_in_torch() -> None:
    sampler = EpochSampler(range(50))
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert sorted(first) == sorted(second := list(sampler))
    assert second != first


def test_a_dataset_without_shards_is_shuffled_as_a_whole() -> None:
    firsts = [next(iter(EpochSampler(range(10_000), seed=seed))) for seed in range(40)]
    assert min(firsts) < 2500
    assert max(firsts) > 7500


def test_its_state_resumes_after_the_samples_that_it_yielded() -> None:
    def make(**options: Any) -> EpochSampler:
        return EpochSampler(range(40), batch_size=4, seed=2, rank=0, world_size=1, **options)

    sampler = make()
    sampler.set_epoch(3)
    iterator = iter(sampler)
    before = [next(iterator) for _ in range(12)]
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (3, 12)
    resumed = make()
    resumed.load_state_dict(state)
    resumed.set_epoch(3)
    assert sorted(before + list(resumed)) == list(range(40))
    assert resumed.state_dict()["position"] == 40
    with pytest.raises(StateError, match="samples is 40 in the state and 41 here"):
        EpochSampler(range(41), seed=2).load_state_dict(state)


class Named(Dataset[int]):
    """A dataset with its own identity."""

    def __init__(self, digest: str, size: int) -> None:
        self.digest, self.size = digest, size

    def __len__(self) -> int:
        return self.size


def test_a_state_belongs_to_one_concatenation_of_datasets() -> None:
    one, other = Named("one", 20), Named("other", 20)
    choices: list[Any] = [
        ConcatDataset([one, other]),
        ConcatDataset([other, one]),
        ConcatDataset([one, one]),
        ConcatDataset([Named("one", 19), Named("other", 21)]),
        ConcatDataset([ConcatDataset([one, other])]),
        Subset(ConcatDataset([other, one]), range(40)),
        Subset(ConcatDataset([one, other]), range(40)),
        StackDataset(ConcatDataset([one, other])),
        StackDataset(a=ConcatDataset([one, other])),
        StackDataset(b=ConcatDataset([one, other])),
    ]
    samplers = [EpochSampler(dataset) for dataset in choices]
    for writer in samplers:
        for reader in samplers:
            loader = shardio.DataLoader(reader.dataset, 4, sampler=reader)
            for load in (reader.load_state_dict, loader.load_state_dict):
                if reader is writer:
                    load(writer.state_dict())
                else:
                    with pytest.raises(StateError, match=r"dataset\.digest is"):
                        load(writer.state_dict())


@pytest.mark.parametrize("is_subset", [False, True])
def test_states_of_concatenations_that_earlier_versions_wrote_are_accepted(is_subset: bool) -> None:
    joined: Any = ConcatDataset([Named("one", 20), Named("other", 20)])
    if is_subset:
        joined = Subset(joined, range(30))
    sampler = EpochSampler(joined)
    state = sampler.state_dict()
    # What version 1 of the state held: the identity of the indices alone, or none.
    indices = np.arange(30, dtype=np.int64).tobytes()
    old = xxhash.xxh3_128_hexdigest(indices) if is_subset else ""
    state |= {"epoch": 2, "position": 8, "dataset": {**state["dataset"], "digest": old}}
    sampler.load_state_dict(state)
    assert sampler.epoch == 2
    assert len(list(sampler)) == len(joined) - 8
    assert sampler.state_dict()["dataset"]["digest"] not in ("", old)
    with pytest.raises(StateError, match=r"dataset\.digest is"):
        EpochSampler(Named("one", len(joined))).load_state_dict(state)


def test_mask_requires_shardios_loader() -> None:
    with pytest.raises(ValueError, match=r"requires shardio\.DataLoader"):
        iter(EpochSampler(range(5), remainder="mask"))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        EpochSampler([])


def test_in_torchs_loader_every_sample_comes_once(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    sampler = EpochSampler(dataset)
    keys = [key for batch in DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2) for key in batch]
    assert sorted(keys) == sorted(dataset[i] for i in range(21))
