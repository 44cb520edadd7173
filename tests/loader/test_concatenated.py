"""torch's ConcatDatasets of shardio's datasets take the fast path, with the same batches as from torch's workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader as TorchLoader, Subset, TensorDataset, WeightedRandomSampler

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardMapDataset
from shardio.loader.executors.choice import fallback_reason
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.damage import Subject, warns_of_bad_samples
from tests.faults.worker_processes import batches_of
from tests.loader.torchs_workers import TORCHS, keys_of, two_epochs_of

workers = pytest.mark.parametrize("num_workers", [0, 1])


def make_transform() -> Compose:
    return Compose([RandomResizedCrop(48), RandomHorizontalFlip()])


def make_parts(packed: Path, images: Path, transform: Any = None) -> list[Any]:
    """Return a dataset of shards and one of files, with equal transforms that are not the same object."""
    return [
        ShardMapDataset(packed, transform=transform or make_transform()),
        ImageFolder(images, transform=transform or make_transform()),
    ]


WRAPPED: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda shards, folder: ConcatDataset([shards, folder]),
    "one": lambda _, folder: ConcatDataset([folder]),
    "repeated": lambda shards, folder: ConcatDataset([folder, shards, folder]),
    "of subsets": lambda shards, folder: ConcatDataset([Subset(shards, [3, -1]), Subset(folder, range(9, 2, -1))]),
    "in a subset": lambda shards, folder: Subset(ConcatDataset([shards, folder]), [40, 0, 20, 21, 22]),
    "nested": lambda shards, folder: ConcatDataset([Subset(ConcatDataset([shards, folder]), [30, 1]), folder]),
    "with an empty part": lambda shards, folder: ConcatDataset([Subset(shards, []), folder]),
}


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 0) for name in WRAPPED), ("nested", 1)])
def test_fast_path_and_torch_give_the_same_batches(packed: Path, images: Path, name: str, num_workers: int) -> None:
    dataset = WRAPPED[name](*make_parts(packed, images))
    found = []
    for options in ({}, TORCHS):
        sampler = EpochSampler(dataset, seed=3, remainder="mask", rank=0, world_size=2)
        workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, **workers, **options)
        assert loader.calls_dataset == (options is TORCHS)
        found.append(two_epochs_of(loader))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize(("name", "num_workers"), [*((name, 0) for name in WRAPPED), ("nested", 1)])
def test_samples_are_those_of_torchs_loader(packed: Path, images: Path, name: str, num_workers: int) -> None:
    dataset: Any = WRAPPED[name](*make_parts(packed, images, CenterCrop(40)))
    numbers = list(WeightedRandomSampler([1.0] * len(dataset), 30))
    loader = DataLoader(dataset, batch_size=4, sampler=numbers, num_workers=num_workers)
    assert batches_of(loader) == batches_of(TorchLoader(dataset, batch_size=4, sampler=numbers))
    assert loader.stats().num_samples == 30


def test_a_dataset_that_is_repeated_looks_different_each_time(packed: Path, images: Path) -> None:
    shards, _ = make_parts(packed, images)
    dataset = ConcatDataset[Any]([shards, shards])
    loader = DataLoader(dataset, batch_size=42, sampler=EpochSampler(dataset, shuffle=False))
    ((pictures, labels),) = loader
    assert torch.equal(labels[:21], labels[21:])
    assert all(not torch.equal(one, other) for one, other in zip(pictures[:21], pictures[21:], strict=True))


class Marked(ShardMapDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


def test_the_reason_says_why_parts_are_not_read_as_one(packed: Path) -> None:
    def make(**options: Any) -> ShardMapDataset:
        return ShardMapDataset(packed, **{"fields": ("image", "key"), "transform": CenterCrop(8), **options})

    later = make()
    later.set_epoch(3)
    others = {
        "its dataset 1 is a TensorDataset,": TensorDataset(torch.zeros(5)),
        "its dataset 1 is a Subset of a Marked, which overrides __getitem__,": Subset(Marked(packed), [1]),
        "its dataset 1 is a ConcatDataset,": ConcatDataset([make(), make(transform=CenterCrop(9))]),
        "its datasets 0 and 1 differ in transform,": make(transform=CenterCrop(9)),
        "its datasets 0 and 1 differ in fields,": make(fields=("image", "label")),
        "its datasets 0 and 1 differ in seed_transforms,": make(seed_transforms=False),
        "its datasets 0 and 1 differ in their epoch (see set_epoch),": later,
    }
    for why, other in others.items():
        reason = fallback_reason(DataLoader(ConcatDataset([make(), other])))
        assert f"the dataset is a ConcatDataset: {why} but shardio's own code reads only" in str(reason)
    reason = fallback_reason(DataLoader(Subset(ConcatDataset([make(), make(transform=CenterCrop(9))]), [1])))
    assert "the dataset is a Subset of a ConcatDataset: its datasets 0 and 1 differ in" in str(reason)


def test_a_transform_that_one_part_gets_is_used(packed: Path, images: Path) -> None:
    """Until then both have the same one, so the loader changes its executor between epochs."""
    parts = make_parts(packed, images, CenterCrop(40))
    loader = DataLoader(ConcatDataset(parts), batch_size=21, num_workers=1, persistent_workers=True)
    for changed, sizes, is_torchs in [((), [40, 40], False), ((1,), [40, 16], True), ((0,), [16, 16], False)]:
        for part in changed:
            parts[part].transform = CenterCrop(16)
        assert loader.calls_dataset == is_torchs
        assert [pictures.shape[-1] for pictures, _ in loader] == sizes


@workers
def test_the_epoch_of_the_parts_is_followed(packed: Path, images: Path, num_workers: int) -> None:
    parts = make_parts(packed, images)
    loader = DataLoader(ConcatDataset(parts), batch_size=8, num_workers=num_workers)
    found = []
    for epoch in (1, 2, 1):
        for part in parts:
            part.set_epoch(epoch)
        found.append(batches_of(loader))
    assert found[0] == found[2] != found[1]


@workers
@pytest.mark.parametrize("policy", ["replace", "skip"])
def test_both_executors_treat_bad_samples_alike(tmp_path: Path, packed: Path, policy: str, num_workers: int) -> None:
    subject = Subject(tmp_path, "map")
    damaged = ShardMapDataset(subject.tars, fields=("image", "label", "key"), transform=make_transform())
    sound = ShardMapDataset(packed, fields=("image", "label", "key"), transform=make_transform())
    dataset, found = ConcatDataset[Any]([sound, damaged]), []
    for options in ({}, TORCHS):
        loader = DataLoader(
            dataset,
            batch_size=4,
            sampler=EpochSampler(dataset, seed=2),
            num_workers=num_workers,
            on_error=policy,  # type: ignore[arg-type]  # One of the two.
            quarantine=subject.quarantine,
            **options,
        )
        with warns_of_bad_samples():
            batches = batches_of(loader)
        found.append((batches, sorted(subject.quarantine.read_text().splitlines())))
        subject.quarantine.unlink()
    assert found[0] == found[1]
    assert len(found[0][1]) >= len(subject.bad)


@workers
def test_an_error_names_the_sample(packed: Path, images: Path, tmp_path: Path, num_workers: int) -> None:
    folder = ImageFolder(images, transform=CenterCrop(8))
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    folder.samples[13] = (str(tmp_path / "bad.jpg"), 1)
    dataset = ConcatDataset[Any]([ShardMapDataset(packed, transform=CenterCrop(8)), folder])
    with pytest.raises(SampleError, match=r"the image of sample .*bad.jpg in .* cannot be decoded") as caught:
        list(DataLoader(dataset, batch_size=30, num_workers=num_workers))
    assert caught.value.key == str(tmp_path / "bad.jpg")


def test_keys_come_from_each_part(packed: Path) -> None:
    shards = ShardMapDataset(packed, fields=("image", "label", "key"), transform=CenterCrop(8))
    dataset = ConcatDataset[Any]([Subset(shards, [5, 2]), Subset(shards, [2, 7])])
    loader = DataLoader(dataset, batch_size=4, sampler=[3, 0, 2, 1])
    assert keys_of(loader) == [[shards[number][2] for number in (7, 5, 2, 2)]]
