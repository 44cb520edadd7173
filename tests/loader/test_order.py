"""The loader's batches: exact, in a reproducible order, for any number of workers, and equal to those of torch."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader as TorchLoader, Subset

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset, StateError
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.processes import forkserver_context

CROP = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])


def batches_of(loader: Any) -> list[list[Any]]:
    """Return the batches as plain values that can be compared."""
    return [[part.tolist() if isinstance(part, torch.Tensor) else list(part) for part in batch] for batch in loader]


def make_dataset(packed: Path, **options: Any) -> ShardDataset:
    return ShardDataset(packed, fields=("image", "label", "key"), shuffle=True, transform=CROP, **options)


def test_batches_do_not_depend_on_the_workers_or_the_loader(packed: Path) -> None:
    expected = batches_of(DataLoader(make_dataset(packed), batch_size=4))
    assert len(expected) == 6
    for num_workers in (1, 3):
        assert batches_of(DataLoader(make_dataset(packed), batch_size=4, num_workers=num_workers)) == expected
        dataset = make_dataset(packed, batch_size=4)
        assert batches_of(TorchLoader(dataset, batch_size=4, num_workers=num_workers)) == expected


def test_batches_do_not_depend_on_how_workers_start(packed: Path) -> None:
    """By a fork, or as here in processes that receive a pickled dataset."""
    expected = batches_of(DataLoader(make_dataset(packed), batch_size=4))
    context = forkserver_context()
    loader = DataLoader(make_dataset(packed), batch_size=4, num_workers=2, multiprocessing_context=context)
    assert batches_of(loader) == expected


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


def test_in_torchs_loader_images_are_contiguous_as_usual(packed: Path) -> None:
    pictures, _ = next(iter(TorchLoader(ShardDataset(packed, transform=CROP), batch_size=4)))
    assert pictures.is_contiguous()


def test_a_bare_field_makes_a_bare_batch(packed: Path) -> None:
    assert next(iter(DataLoader(ShardDataset(packed, fields="label"), batch_size=3))).shape == (3,)
    assert len(next(iter(DataLoader(ShardDataset(packed, fields="key"), batch_size=3)))) == 3


def test_images_of_different_sizes_are_refused_with_a_remedy(packed: Path) -> None:
    sizes = iter([(8, 8), (9, 8)] * 20)
    dataset = ShardDataset(packed, transform=lambda image: image[: (size := next(sizes))[0], : size[1]])
    with pytest.raises(ValueError, match=r"differ in size.*RandomResizedCrop"):
        next(iter(DataLoader(dataset, batch_size=4)))


@pytest.mark.parametrize("persistent", [False, True])
def test_every_iter_is_the_next_epoch(packed: Path, persistent: bool) -> None:
    loader = DataLoader(make_dataset(packed), batch_size=4, num_workers=1, persistent_workers=persistent)
    epochs = [batches_of(loader) for _ in range(3 if persistent else 2)]
    for epoch, expected in enumerate(epochs):
        dataset = make_dataset(packed)
        dataset.set_epoch(epoch)
        assert batches_of(DataLoader(dataset, batch_size=4)) == expected
    assert len({str(epoch) for epoch in epochs}) == len(epochs)


def test_set_epoch_of_loader_or_dataset_sets_the_epoch(packed: Path) -> None:
    dataset = make_dataset(packed)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True)
    epochs = [batches_of(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert batches_of(loader) == epochs[1]
    dataset.set_epoch(0)
    assert batches_of(loader) == epochs[0]
    assert batches_of(loader) == epochs[1]


def test_set_epoch_reaches_persistent_workers_of_torchs_loader(packed: Path) -> None:
    dataset = make_dataset(packed, batch_size=4)
    loader = TorchLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    expected = [batches_of(DataLoader(make_dataset(packed), batch_size=4))]
    again = DataLoader(make_dataset(packed), batch_size=4)
    again.set_epoch(1)
    expected.append(batches_of(again))
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


def test_batch_size_none_gives_single_samples(packed: Path) -> None:
    loader = DataLoader(ShardDataset(packed, fields=("key", "label")), batch_size=None, num_workers=2)
    samples = list(loader)
    assert len(samples) == len(loader) == 21
    assert [key for key, _ in samples] == list(ShardDataset(packed, fields="key"))


def test_any_other_dataset_is_loaded_as_by_torch() -> None:
    for options in ({"shuffle": False}, {"batch_size": 3, "drop_last": True}, {"batch_size": 4, "num_workers": 2}):
        assert batches_of([[b] for b in DataLoader(range(10), **options)]) == batches_of(
            [[b] for b in TorchLoader(range(10), **options)]  # type: ignore[arg-type]  # a range is a dataset, too
        )


def test_the_arguments_are_torchs_and_some_of_shardios(packed: Path) -> None:
    loader = DataLoader(make_dataset(packed), batch_size=4, num_workers=1, prefetch_factor=3)
    names = [name for name in inspect.signature(DataLoader.__init__).parameters if name != "self"]
    expected = [name for name in inspect.signature(TorchLoader.__init__).parameters if name != "self"]
    own = ["worker_method", "snapshot_every_n_steps", "on_error", "on_error_in", "quarantine"]
    assert names == [*expected, *own, "check_duplicates", "device"]
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (4, 1, 3)


def test_a_users_collate_function_is_used(packed: Path) -> None:
    dataset = ShardDataset(packed, fields="key")
    assert list(DataLoader(dataset, batch_size=4, collate_fn=len, num_workers=1)) == [4, 4, 4, 4, 4, 1]


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


def test_subsets_of_shardios_datasets_are_repeatable_and_channels_last(packed: Path) -> None:
    subset = Subset(ShardMapDataset(packed, transform=CROP), list(range(0, 21, 2)))

    def make() -> DataLoader:
        return DataLoader(subset, batch_size=4, sampler=EpochSampler(subset))

    assert batches_of(make()) == batches_of(make())
    assert next(iter(make()))[0].is_contiguous(memory_format=torch.channels_last)
    other = Subset(subset.dataset, list(range(11)))
    with pytest.raises(StateError, match="digest"):
        DataLoader(other, batch_size=4, sampler=EpochSampler(other)).load_state_dict(make().state_dict())


def test_a_samplers_own_set_epoch_is_called_for_other_datasets() -> None:
    sampler = EpochSampler(range(10))
    batch_sampler = BatchSampler(sampler, 5, drop_last=False)
    DataLoader(range(10), batch_sampler=batch_sampler).set_epoch(4)
    assert sampler.epoch == 4
