"""Overridden orders, samplers of other datasets, and loaders without shardio's order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import BatchSampler, Subset
from torch.utils.data.datapipes.iter import IterableWrapper

from shardio import (
    DataLoader,
    EpochSampler,
    ImageFolder,
    SampleError,
    ShardDataset,
    ShardMapDataset,
    StateError,
    check,
)
from shardio.transforms import CenterCrop


class Backwards(EpochSampler):
    """Overrides the order."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


class FirstFive(EpochSampler):
    """Overrides how many samples there are."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[:5])

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("kind", [Backwards, FirstFive])
@pytest.mark.parametrize("options", [{}, {"collate_fn": list}], ids=["fast", "by torch"])
def test_an_overridden_sampler_is_a_sampler_like_any_other(packed: Path, kind: Any, options: dict[str, Any]) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    loader = DataLoader(dataset, batch_size=4, sampler=kind(dataset, rank=0, world_size=1), **options)
    torchs = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=kind(dataset), collate_fn=list)
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        torchs.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # it has it
        assert [list(batch) for batch in loader] == list(torchs)
    assert len(loader) == len(torchs)
    assert not loader.has_order


def test_the_checker_requires_no_state_of_it(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields=("label", "key"))
    check.assert_exactly_once(DataLoader(dataset, batch_size=4, sampler=Backwards(dataset)), 21, key=1)


class Shortened(ShardMapDataset):
    def __len__(self) -> int:
        return 10


def test_an_order_by_shards_is_of_all_their_samples(packed: Path) -> None:
    with pytest.raises(ValueError, match=r"the length of Shortened is 10, but its shards hold 21"):
        EpochSampler(Shortened(packed))


class Halved(ImageFolder):
    def __len__(self) -> int:
        return 10


def test_a_folder_that_overrides_its_length_is_ordered_by_that(images: Path) -> None:
    dataset = Halved(images)
    labels = [label for _, labels in DataLoader(dataset, sampler=EpochSampler(dataset)) for label in labels]
    assert len(labels) == 10


def test_a_sampler_of_another_dataset_is_refused(packed: Path, images: Path) -> None:
    dataset, folder = ShardMapDataset(packed), ImageFolder(images)
    sampler = EpochSampler(range(10))
    with pytest.raises(ValueError, match="created over 10 samples, but the loader's ShardMapDataset has 21: create"):
        DataLoader(dataset, sampler=sampler)
    with pytest.raises(ValueError, match="created over 10 samples"):
        DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    with pytest.raises(ValueError, match="created over samples other than those of the loader's ImageFolder"):
        DataLoader(folder, sampler=EpochSampler(dataset))
    first, second = Subset(dataset, range(10)), Subset(dataset, range(10, 20))
    with pytest.raises(ValueError, match="created over samples other than those of the loader's Subset"):
        DataLoader(first, sampler=EpochSampler(second))
    for sampler in (EpochSampler(ShardMapDataset(packed, fields="key")), EpochSampler(range(21))):
        DataLoader(dataset, sampler=sampler)


def test_a_dataset_that_grows_after_its_sampler_was_made_is_refused(images: Path) -> None:
    folder = ImageFolder(images)
    loader = DataLoader(folder, batch_size=7, sampler=EpochSampler(folder))
    assert len(list(loader)) == 3
    folder.samples = folder.samples * 2
    with pytest.raises(ValueError, match="created over 21 samples, but the loader's ImageFolder has 42"):
        iter(loader)


class Shouted(ShardDataset):
    """Overrides ``__iter__``, and looks at the samples."""

    def __iter__(self) -> Iterator[Any]:
        for image, key in super().__iter__():
            yield image, key.upper()


def test_an_overridden_iter_sees_no_placeholders(packed: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(packed, tmp_path / "damaged")
    tar = damaged / "shard-000001.tar"
    tar.write_bytes(tar.read_bytes().replace(b"\xff\xd8\xff", b"\0\0\0", 1))
    dataset = Shouted(damaged, fields=("image", "key"))
    with pytest.raises(SampleError, match=r"shard-000001\.tar"):
        list(DataLoader(dataset, batch_size=4))
    loader = DataLoader(dataset, batch_size=4, on_error="replace", quarantine=tmp_path / "quarantine")
    with pytest.warns(RuntimeWarning, match="unreadable samples replaced in epoch 0: 1"):
        keys = [key for _, keys in loader for key in keys]
    assert len(keys) == 21
    assert all(key == key.upper() for key in keys)
    with pytest.raises(ValueError, match=r"does not work with Shouted, which overrides __iter__: .*'replace'"):
        DataLoader(dataset, batch_size=4, on_error="skip")


def test_without_a_state_it_is_empty_and_says_so() -> None:
    loader: Any = DataLoader(IterableWrapper(range(5)))
    assert not loader.has_state
    with pytest.warns(RuntimeWarning, match="this loader has no state.*restarts the epoch"):
        assert loader.state_dict() == {}
    with pytest.warns(RuntimeWarning, match="this loader has no state"):
        loader.load_state_dict({})
    with pytest.raises(TypeError, match="a loader without a state cannot load one"):
        loader.load_state_dict({"epoch": 1})


def test_an_order_that_is_not_shardios_has_another_state(packed: Path) -> None:
    dataset = ShardMapDataset(packed)
    ordered = DataLoader(dataset, sampler=EpochSampler(dataset))
    for loader in (DataLoader(dataset), DataLoader(dataset, sampler=Backwards(dataset))):
        with pytest.raises(StateError, match="was not saved by a loader of this kind"):
            loader.load_state_dict(ordered.state_dict())
        with pytest.raises(StateError):
            ordered.load_state_dict(loader.state_dict())


def test_a_transform_set_within_a_subset_is_used(packed: Path) -> None:
    subset: Any = Subset(ShardMapDataset(packed, fields="image"), [1, 2])
    loader = DataLoader(subset, batch_size=2)
    subset.dataset.transform = CenterCrop(4)
    assert subset[0].shape == (3, 4, 4)
    assert next(iter(loader)).shape == (2, 3, 4, 4)
