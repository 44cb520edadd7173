"""torch's Subsets of shardio's datasets take the fast path, with the same batches as from torch's workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.loader.executors.choice import fallback_reason
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.worker_processes import batches_of
from tests.loader.torchs_workers import TORCHS, keys_of, two_epochs_of

CROP = Compose([RandomResizedCrop(48), RandomHorizontalFlip()])

CHOSEN = random.Random(4).sample(range(21), 13)

SUBSETS: dict[str, Callable[[Any], Subset[Any]]] = {
    "list": lambda dataset: Subset(dataset, CHOSEN),
    "range": lambda dataset: Subset(dataset, range(20, 2, -2)),
    "tensor": lambda dataset: Subset(dataset, torch.tensor(CHOSEN)),  # type: ignore[arg-type]  # Users give these.
    "array": lambda dataset: Subset(dataset, np.array(CHOSEN, np.int32)),  # type: ignore[arg-type]  # And these.
    "negative": lambda dataset: Subset(dataset, [number - 21 for number in CHOSEN]),
    "repeated": lambda dataset: Subset(dataset, [5, 5, *CHOSEN, 5]),
    "nested": lambda dataset: Subset(Subset(Subset(dataset, range(1, 21)), CHOSEN[::-1][4:]), [-1, 3, 0, 7, 5]),
    "split": lambda dataset: random_split(dataset, [0.7, 0.3], torch.Generator().manual_seed(1))[0],
}

subsets = pytest.mark.parametrize("take", SUBSETS.values(), ids=SUBSETS)
workers = pytest.mark.parametrize("num_workers", [0, 1])


def make_map(packed: Path) -> ShardMapDataset:
    return ShardMapDataset(packed, fields=("image", "label", "key"), transform=CROP)


@pytest.mark.parametrize(
    ("kind", "name", "num_workers"),
    [*((kind, name, 0) for kind in ("map", "folder") for name in SUBSETS), ("map", "nested", 1)],
)
def test_fast_path_and_torch_give_the_same_batches(
    packed: Path, images: Path, kind: str, name: str, num_workers: int
) -> None:
    subset = SUBSETS[name](make_map(packed) if kind == "map" else ImageFolder(images, transform=CROP))
    for rank in range(1 if num_workers else 2):
        found = []
        for options in ({}, TORCHS):
            sampler = EpochSampler(subset, seed=3, remainder="mask", rank=rank, world_size=2)
            loader = DataLoader(
                subset,
                batch_size=4,
                sampler=sampler,
                num_workers=num_workers,
                persistent_workers=num_workers > 0,
                **options,
            )
            assert loader.calls_dataset == (options is TORCHS)
            found.append(two_epochs_of(loader))
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]


@subsets
def test_samples_are_those_that_torch_finds_and_look_as_in_the_whole_dataset(
    packed: Path, take: Callable[[Any], Subset[Any]]
) -> None:
    dataset = make_map(packed)
    subset = take(dataset)
    expected = [subset[number][2] for number in range(len(subset))]
    whole = DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset, seed=3))
    looks = {key: image for images, _, keys in whole for image, key in zip(images, keys, strict=True)}
    loader = DataLoader(subset, batch_size=4, sampler=EpochSampler(subset, seed=3))
    found = [(key, image) for images, _, keys in loader for image, key in zip(images, keys, strict=True)]
    assert sorted(key for key, _ in found) == sorted(expected)
    assert all(torch.equal(image, looks[key]) for key, image in found)
    assert loader.stats().num_samples == len(subset)


@workers
def test_images_are_in_channels_last_memory(packed: Path, num_workers: int) -> None:
    nested = SUBSETS["nested"](make_map(packed))
    pictures, *_ = next(iter(DataLoader(nested, batch_size=4, num_workers=num_workers)))
    assert pictures.is_contiguous(memory_format=torch.channels_last)


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda subset: {"batch_size": 4},
    "shuffle": lambda subset: {"batch_size": 4, "shuffle": True},
    "random": lambda subset: {"batch_size": 5, "sampler": RandomSampler(subset), "drop_last": True},
    "batches": lambda subset: {"batch_sampler": BatchSampler(RandomSampler(subset), 3, drop_last=False)},
    "lists": lambda subset: {"batch_sampler": [[1], [3, 2], [-1]]},
}


@pytest.mark.parametrize(
    ("taken", "sampled", "num_workers"),
    [
        *((name, "shuffle", 0) for name in SUBSETS),
        *(("nested", name, 0) for name in SAMPLERS if name != "shuffle"),
        ("nested", "lists", 1),
    ],
)
def test_torchs_samplers_give_the_batches_of_torchs_loader(
    packed: Path, taken: str, sampled: str, num_workers: int
) -> None:
    dataset = make_map(packed)
    dataset.set_epoch(1, seed=5)  # Otherwise torch draws the crops of its workers.
    subset, sampler = SUBSETS[taken](dataset), SAMPLERS[sampled]
    torch.manual_seed(3)
    expected = batches_of(TorchLoader(subset, **sampler(subset)))
    torch.manual_seed(3)
    loader = DataLoader(subset, num_workers=num_workers, **sampler(subset))
    assert batches_of(loader) == expected
    assert len(loader) == len(expected)
    assert not loader.calls_dataset


@workers
def test_what_a_sampler_repeats_gets_another_crop(packed: Path, num_workers: int) -> None:
    dataset = make_map(packed)
    dataset.set_epoch(1)
    subset = Subset(dataset, [7, 3])
    for known in (True, False):
        if not known:
            subset = Subset(make_map(packed), [7, 3])
        loader = DataLoader(subset, batch_size=3, sampler=[0, 1, 0, 0, 1, 0], num_workers=num_workers)
        crops = torch.cat([pictures for pictures, *_ in loader])
        assert len({crop.numpy().tobytes() for crop in crops}) == 6


@pytest.mark.parametrize(("before", "after"), [({}, {}), ({}, TORCHS), (TORCHS, {})])
def test_either_executor_resumes_an_epoch(packed: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    subset = SUBSETS["split"](make_map(packed))

    def make(**options: Any) -> DataLoader:
        return DataLoader(subset, batch_size=3, sampler=EpochSampler(subset), **{"num_workers": 1, **options})

    expected = batches_of(make(num_workers=0))
    loader, resumed = make(**before), make(**after)
    begun = batches_of(islice(loader, 2))
    resumed.load_state_dict(loader.state_dict())
    assert begun + batches_of(resumed) == expected


@workers
def test_indices_that_change_between_epochs_are_followed(packed: Path, num_workers: int) -> None:
    """As in torch's workers, which start for each epoch; here they may persist."""
    subset, other = Subset(make_map(packed), [1, 2, 3]), make_map(packed)
    loader = DataLoader(subset, batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
    names = [other[number][2] for number in range(21)]
    assert keys_of(loader) == [[names[1], names[2]], [names[3]]]
    subset.indices = [4, 5]
    assert keys_of(loader) == [[names[4], names[5]]]
    subset.dataset = Subset(other, range(20, -1, -1))
    assert keys_of(loader) == [[names[16], names[15]]]


@pytest.mark.parametrize("options", [{}, TORCHS])
@workers
def test_an_index_outside_of_the_dataset_is_an_error(packed: Path, options: Any, num_workers: int) -> None:
    subset = Subset(make_map(packed), [1, 21])
    loader = DataLoader(subset, sampler=EpochSampler(subset, shuffle=False), num_workers=num_workers, **options)
    with pytest.raises(IndexError, match="index 21 is out of range for a dataset of 21 samples"):
        list(loader)


class Reversed(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return super().__getitems__([len(self) - 1 - index for index in indices])


def test_torchs_workers_read_a_subclass_of_subset(packed: Path) -> None:
    dataset = make_map(packed)
    outer: Any
    for outer in (Reversed(dataset, CHOSEN), Subset(Reversed(dataset, CHOSEN), range(13))):
        loader = DataLoader(outer, batch_size=4, sampler=EpochSampler(outer, shuffle=False))
        assert loader.calls_dataset
        expected = [dataset[number][2] for number in CHOSEN[::-1]]
        assert [key for keys in keys_of(loader) for key in keys] == expected


class Doubled(ShardMapDataset):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [(key * 2,) for _, _, key in super().__getitems__(indices)]


def test_the_reason_says_what_the_subset_is_of(packed: Path) -> None:
    tensors = Subset(Subset(TensorDataset(torch.zeros(5)), [1, 2]), [0])
    doubled = Subset(Doubled(packed, fields=("image", "label", "key")), [1, 2])
    streamed = Subset(ShardDataset(packed), [1, 2])
    for dataset, what in (
        (tensors, "the dataset is a Subset of a Subset of a TensorDataset"),
        (doubled, "the dataset is a Subset of a Doubled, which overrides __getitems__"),
        (streamed, "the dataset is a Subset of a ShardDataset"),
    ):
        assert f"{what}, but shardio's own code reads only" in str(fallback_reason(DataLoader(dataset)))
    ((names,),) = DataLoader(doubled, batch_size=2, sampler=EpochSampler(doubled, shuffle=False))
    assert list(names) == [make_map(packed)[number][2] * 2 for number in (1, 2)]


def test_a_sampler_cannot_leave_the_subset(packed: Path) -> None:
    subset = Subset(make_map(packed), CHOSEN)
    with pytest.raises(IndexError, match="index 13 is out of range for a dataset of 13 samples"):
        list(DataLoader(subset, sampler=SequentialSampler(range(14))))


class Labelled(ImageFolder):
    """A dataset that chooses its samples when it is made, as people do."""

    names = "a member of its own"

    def __init__(self, root: Path, label: int, **options: Any) -> None:
        super().__init__(root, **options)
        self.samples = [(path, number) for path, number in self.samples if number == label]


def test_shardios_worker_processes_read_subclasses_that_only_choose(images: Path) -> None:
    folder = Labelled(images, 1, transform=CenterCrop(16))
    loader = DataLoader(folder, 4, num_workers=1)
    assert not loader.calls_dataset
    labels = torch.cat([labels for _, labels in loader])
    assert labels.tolist() == [1] * len(folder.samples)
