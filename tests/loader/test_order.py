"""The batches: exact, in a reproducible order for any number of workers, or in that of overrides, and as in torch."""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, DataLoader as TorchLoader, Sampler, Subset
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
from shardio.check.recording import resumes
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.worker_processes import batches_of
from tests.processes import forkserver_context

CROP = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])


def make_dataset(packed: Path, **options: Any) -> ShardDataset:
    return ShardDataset(packed, fields=("image", "label", "key"), shuffle=True, transform=CROP, **options)


def test_batches_do_not_depend_on_the_workers_how_they_start_or_the_loader(packed: Path) -> None:
    """Workers start by a fork, or in processes that receive a pickled dataset."""
    expected = batches_of(DataLoader(make_dataset(packed), batch_size=4))
    assert len(expected) == 6
    context = forkserver_context()
    for options in ({"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "multiprocessing_context": context}):
        assert batches_of(DataLoader(make_dataset(packed), batch_size=4, **options)) == expected
    for num_workers in (0, 3):
        dataset = make_dataset(packed, batch_size=4)
        assert batches_of(TorchLoader(dataset, batch_size=4, num_workers=num_workers)) == expected


def test_images_are_uint8_in_channels_last_memory(packed: Path, images: Path) -> None:
    datasets = [
        ShardDataset(packed, transform=CROP),
        ShardMapDataset(packed, transform=CROP),
        ImageFolder(images, transform=CROP),
    ]
    for dataset, num_workers in [(datasets[0], 1), *((dataset, 0) for dataset in datasets)]:
        pictures, labels = next(iter(DataLoader(dataset, batch_size=4, num_workers=num_workers)))
        assert (pictures.shape, pictures.dtype) == ((4, 3, 16, 16), torch.uint8)
        assert pictures.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
    pictures, _ = next(iter(TorchLoader(datasets[0], batch_size=4)))  # type: ignore[arg-type]  # a dataset
    assert pictures.is_contiguous(), "as usual in torch's loader"


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
    assert batches_of(loader) == epochs[1]
    dataset.set_epoch(0)
    assert batches_of(loader) == epochs[0]
    assert batches_of(loader) == epochs[1]


def test_set_epoch_reaches_persistent_workers_of_torchs_loader(packed: Path) -> None:
    dataset = make_dataset(packed, batch_size=4)
    loader = TorchLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    expected = [batches_of(ours := DataLoader(make_dataset(packed), batch_size=4)), batches_of(ours)]
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        assert batches_of(loader) == expected[epoch]


def test_two_loaders_over_one_dataset_and_nested_iterators_do_not_interfere(packed: Path) -> None:
    dataset = make_dataset(packed)
    loader, other = (DataLoader(dataset, batch_size=4, num_workers=1) for _ in range(2))
    expected = batches_of(DataLoader(make_dataset(packed), batch_size=4))
    outer = iter(loader)
    first = list(islice(outer, 2))
    inner = batches_of(loader)
    aside = batches_of(other)
    assert batches_of([*first, *outer]) == expected == aside
    assert inner != expected


def test_drop_last_means_the_remainder_is_dropped(packed: Path) -> None:
    loader = DataLoader(make_dataset(packed), batch_size=4, drop_last=True)
    batches = list(loader)
    assert len(loader) == len(batches) == 5
    assert all(len(keys) == 4 for _, _, keys in batches)
    sampler = EpochSampler(range(21), shuffle=False)
    assert batches_of([[b] for b in DataLoader(range(21), batch_size=4, sampler=sampler, drop_last=True)]) == [
        [list(range(i, i + 4))] for i in range(0, 20, 4)
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_mask_marks_exactly_the_repeats(packed: Path, shuffle: bool) -> None:
    keys, num_valid = [], 0
    for rank in range(4):
        dataset = ShardDataset(packed, fields="key", shuffle=shuffle, remainder="mask", rank=rank, world_size=4)
        loader = DataLoader(dataset, batch_size=4, num_workers=rank // 3)  # The last rank has a repeat.
        by_number = ShardMapDataset(packed, fields="key")
        sampler = EpochSampler(by_number, shuffle=shuffle, remainder="mask", rank=rank, world_size=4)
        for (names, valid), (other, other_valid) in zip(
            loader, DataLoader(by_number, batch_size=4, sampler=sampler), strict=True
        ):
            assert valid.dtype == torch.bool
            assert list(names) == list(other)
            assert torch.equal(valid, other_valid)
            keys += [name for name, is_valid in zip(names, valid, strict=True) if is_valid]
            num_valid += len(names)
    assert len(keys) == len(set(keys)) == 21
    assert num_valid == 24


def test_batch_size_none_gives_single_samples_and_collate_fn_what_it_returns(packed: Path) -> None:
    loader = DataLoader(ShardDataset(packed, fields=("key", "label")), batch_size=None, num_workers=2)
    samples = list(loader)
    assert len(samples) == len(loader) == 21
    assert [key for key, _ in samples] == list(ShardDataset(packed, fields="key"))
    assert list(DataLoader(ShardDataset(packed, fields="key"), 4, collate_fn=len, num_workers=1)) == [4, 4, 4, 4, 4, 1]
    assert next(iter(DataLoader(ShardDataset(packed, fields="label"), batch_size=3))).shape == (3,)


def test_the_arguments_are_torchs_and_some_of_shardios(packed: Path) -> None:
    loader = DataLoader(make_dataset(packed), batch_size=4, num_workers=1, prefetch_factor=3)
    names = [name for name in inspect.signature(DataLoader.__init__).parameters if name != "self"]
    expected = [name for name in inspect.signature(TorchLoader.__init__).parameters if name != "self"]
    own = ["worker_method", "snapshot_every_n_steps", "on_error", "on_error_in", "quarantine"]
    assert names == [*expected, *own, "check_duplicates", "device"]
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (4, 1, 3)


@pytest.mark.parametrize(
    ("dataset_options", "loader_options", "words"),
    [
        ({}, {"shuffle": True}, r"pass shuffle=True to ShardDataset"),
        ({"batch_size": 8}, {"batch_size": 4}, r"has batch_size=8, but the loader has batch_size=4"),
        ({"remainder": "mask"}, {"drop_last": True, "batch_size": 4}, r"contradict each other"),
        ({}, {"in_order": False}, r"in_order=False"),
    ],
)
def test_contradictions_are_refused(
    packed: Path, dataset_options: dict[str, Any], loader_options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        DataLoader(make_dataset(packed, **dataset_options), **loader_options)


@pytest.mark.parametrize(("prefetch", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("2", TypeError)])
def test_prefetch_factor_is_a_positive_integer(packed: Path, prefetch: Any, error: type[Exception]) -> None:
    datasets: list[Any] = [make_dataset(packed), range(5)]
    for dataset in datasets:
        with pytest.raises(error, match="prefetch_factor must be"):
            DataLoader(dataset, num_workers=1, prefetch_factor=prefetch)


def test_an_error_in_a_worker_names_the_sample(packed: Path, tmp_path: Path) -> None:
    copied = tmp_path / "packed"
    shutil.copytree(packed, copied)
    dataset = ShardDataset(copied, fields="image")
    tar = copied / "shard-000000.tar"
    tar.write_bytes(tar.read_bytes().replace(b"\xff\xd8\xff", b"\xff\xd8\x00"))
    with pytest.raises(SampleError, match=r"sample class-\d/name-\d+ in .*shard-000000.tar at byte \d+ is damaged"):
        next(iter(DataLoader(dataset, batch_size=4, num_workers=1)))


def test_persistent_workers_serve_one_iterator_at_a_time(packed: Path) -> None:
    loader = DataLoader(make_dataset(packed), batch_size=4, num_workers=1, persistent_workers=True)
    outer = iter(loader)
    next(outer)
    assert len(list(loader)) == 6
    with pytest.raises(RuntimeError, match="ended when the loader was iterated again"):
        next(outer)


class Skipping(ShardDataset):
    """Yields fewer samples than its order has."""

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), 9)


class Doubling(ShardDataset):
    """Changes each sample, but not their number."""

    def __iter__(self) -> Iterator[Any]:
        return (key * 2 for key in super().__iter__())


def test_a_subclass_may_change_samples_but_not_their_number(packed: Path) -> None:
    doubled = DataLoader(Doubling(packed, fields="key", shuffle=True), batch_size=4, num_workers=2)
    keys = [
        key for batch in DataLoader(ShardDataset(packed, fields="key", shuffle=True), batch_size=4) for key in batch
    ]
    assert [key for batch in doubled for key in batch] == [key * 2 for key in keys]
    assert doubled.state_dict()["position"] == 21
    with pytest.raises(RuntimeError, match="the epoch had 3 batches instead of 6"):
        list(DataLoader(Skipping(packed, fields="key"), batch_size=4))


def test_map_style_crops_are_pure_and_loaders_do_not_interfere(images: Path) -> None:
    folder = ImageFolder(images, transform=CROP)

    def make() -> DataLoader:
        return DataLoader(folder, batch_size=4, sampler=EpochSampler(folder, seed=3), num_workers=1)

    expected = [batches_of(loader := make()), batches_of(loader)]
    assert expected[0] != expected[1]
    one, other = make(), make()
    ahead = iter(one)
    first = next(ahead)
    other.set_epoch(1)
    assert batches_of(other) == expected[1]
    assert batches_of([first, *ahead]) == expected[0]
    # torch's own loader knows no epoch, whatever ran before: torch draws the crops, and they differ.
    assert batches_of(TorchLoader(folder, batch_size=21)) != batches_of(TorchLoader(folder, batch_size=21))


def test_a_samplers_own_set_epoch_is_called_for_other_datasets() -> None:
    sampler = EpochSampler(range(10))
    batch_sampler = BatchSampler(sampler, 5, drop_last=False)
    DataLoader(range(10), batch_sampler=batch_sampler).set_epoch(4)
    assert sampler.epoch == 4


class Backwards(EpochSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


class FirstFive(EpochSampler):
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


class Unmeasured(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2, 0, 4])


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_needs_no_length(images: Path, drop_last: bool) -> None:
    folder = ImageFolder(images, transform=RandomResizedCrop(8))
    for dataset in (range(5), folder):
        batches = list(DataLoader(dataset, batch_size=2, sampler=Unmeasured(), drop_last=drop_last))
        assert len(batches) == 3 - drop_last


class Reversed(EpochSampler):
    """A sampler that overrides the order has no state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_all_samples - 1, -1, -1))


def test_whether_an_epoch_continues_is_known_without_a_state(images: Path) -> None:
    folder = ImageFolder(images, transform=RandomResizedCrop(8))
    loader = DataLoader(folder, batch_size=7, sampler=Reversed(folder))
    assert resumes(loader, 2) is True
    assert resumes(loader, 3) is None


def test_two_labels_of_one_sample_are_not_compared(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "weather").joinpath("class-0").rename(tmp_path / "weather/fog")
    pair = torch.utils.data.StackDataset(ImageFolder(images), ImageFolder(tmp_path / "weather"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader(pair)
    assert caught == []
