"""With torch's samplers, Subset and ConcatDataset, loaders give the same batches as torch's and have exact states."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader as TorchLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.loader.batches import collate_channels_last
from shardio.loader.choice import fallback_reason
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.buffers import assert_same
from tests.faults.worker_processes import batches_of
from tests.loader.programs import CALLING, Point, Stateful, as_list, describe, keys_of, stack_first


def crops(images: Path, num_workers: int, sampler: Any, epoch: int | None = None, seed: int = 0) -> torch.Tensor:
    folder = ImageFolder(images, transform=RandomResizedCrop(16))
    if epoch is not None:
        folder.set_epoch(epoch, seed=5)
    torch.manual_seed(seed)
    loader = DataLoader(folder, batch_size=4, sampler=sampler, num_workers=num_workers)
    return torch.cat([pictures for pictures, _ in loader])


def test_crops_do_not_depend_on_workers_and_follow_torchs_seed_or_the_epoch_if_it_is_known(images: Path) -> None:
    one = crops(images, 0, range(21))
    assert torch.equal(one, crops(images, 1, range(21)))
    assert not torch.equal(one, crops(images, 0, range(21), seed=1))
    folder = ImageFolder(images, transform=RandomResizedCrop(16))
    loader = DataLoader(folder, 21, num_workers=1, persistent_workers=True)
    assert len({pictures.numpy().tobytes() for _ in range(3) for pictures, _ in loader}) == 3, "epochs differ"
    repeated = crops(images, 1, [2] * 9)
    assert len({picture.numpy().tobytes() for picture in repeated}) == 9

    plain = crops(images, 0, range(21), epoch=1)
    sampler = [2, 7, 2, 2, 7, 0, 2, 2, 1, 2]
    drawn = crops(images, 1, sampler, epoch=1)
    assert torch.equal(drawn[[0, 1, 5, 8]], plain[[2, 7, 0, 1]])
    assert len({picture.numpy().tobytes() for picture in drawn}) == len(sampler)
    assert torch.equal(drawn, crops(images, 0, sampler, epoch=1))


@pytest.mark.parametrize(("num_workers", "place"), [(0, 0), (0, 1), (1, 1)])
def test_an_empty_batch_from_the_sampler_is_an_error(packed: Path, num_workers: int, place: int) -> None:
    lists = [[1, 2], [3]]
    dataset = ShardMapDataset(packed, fields="key")
    batches = iter(DataLoader(dataset, batch_sampler=[*lists[:place], [], [3]], num_workers=num_workers))
    assert [len(next(batches)) for _ in lists[:place]] == [2] * place
    with pytest.raises(IndexError, match="the batch sampler yielded an empty batch"):
        next(batches)


WHOLE: dict[str, Any] = {
    "none": {},
    "shuffle": {"shuffle": True},
    "RandomSampler": {"sampler": RandomSampler(range(21))},
    "BatchSampler": {"batch_sampler": BatchSampler(SequentialSampler(range(21)), 4, drop_last=False)},
    "no batches": {"batch_size": None},
}
SHARED: dict[str, Any] = {
    "EpochSampler": {"sampler": EpochSampler(range(21))},
    "DistributedSampler": {"sampler": DistributedSampler(range(21), num_replicas=2, rank=0)},  # type: ignore[arg-type]  # a range is a dataset
    "own": {"sampler": range(0, 21, 2)},
    "own batches": {"batch_sampler": [[0, 2], [4]]},
}


@pytest.mark.parametrize("name", [*WHOLE, *SHARED])
def test_ranks_that_all_get_all_samples_are_warned_of(packed: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    dataset, options = ShardMapDataset(packed, fields="key"), {**WHOLE, **SHARED}[name]
    loaders = [DataLoader(each, **options) for each in (dataset, Subset(dataset, range(21)))]
    own = DataLoader(range(21), **options)
    assert [len(list(loader)) for loader in loaders] == [len(loader) for loader in loaders]  # One rank: no warning.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for loader in (own, *loaders) if name in SHARED else (own,):
        assert len(list(loader)) == len(loader)
    for loader in loaders if name in WHOLE else ():
        with pytest.warns(RuntimeWarning, match=r"each of 2 ranks gets all 21.*EpochSampler.*DistributedSampler"):
            list(loader)


def test_a_loader_that_is_refused_leaves_its_sampler_as_it_was(packed: Path) -> None:
    dataset = ShardMapDataset(packed)
    for sampler, options in (
        (EpochSampler(range(5)), {}),  # For a different dataset.
        (EpochSampler(dataset), {"batch_size": None, "on_error": "skip"}),
        (EpochSampler(dataset), {"on_error": "skip", "quarantine": packed}),
        (EpochSampler(dataset, remainder="keep"), {"drop_last": True}),
    ):
        with pytest.raises(ValueError, match=r"created for|on_error='skip'|quarantine|drop_last=True"):
            DataLoader(dataset, sampler=sampler, **options)
        assert not sampler.has_loader
    DataLoader(dataset, sampler=sampler)
    assert sampler.has_loader


NUM_BATCHES = 6


SAMPLERS: dict[str, Any] = {
    "torch's": lambda dataset: {"shuffle": True},
    "a generator": lambda dataset: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "repeats": lambda dataset: {"sampler": WeightedRandomSampler([1.0] * 21, 21)},
    "distributed": lambda dataset: {"sampler": DistributedSampler(dataset, num_replicas=1, rank=0)},
    "a state": lambda dataset: {"sampler": Stateful(21)},
    "own generator": lambda dataset: {"sampler": RandomSampler(dataset, generator=torch.Generator().manual_seed(6))},
}


class Run:
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


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        *((sampler, {"sets_epoch": sets_epoch}) for sampler in SAMPLERS for sets_epoch in (False, True)),
        ("torch's", {"sets_epoch": False, "num_workers": 1, "persistent_workers": True}),
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(packed: Path, sampler: str, options: dict[str, Any]) -> None:
    received = list(Run(packed, sampler, **options).receive())
    batches = [batch for _, batch, _ in received]
    for stop in (1, NUM_BATCHES, NUM_BATCHES + 3):
        epoch, _, state = received[stop - 1]
        resumed = Run(packed, sampler, **options)
        torch.manual_seed(99)  # The loading process's generator has no effect.
        resumed.loader.load_state_dict(state)
        assert_same([batch for _, batch, _ in resumed.receive(epoch)], batches[stop:])


_FIELDS: list[Any] = [("image", "label", "key"), ("key", "label"), ("image",), "image", "label", "key"]


def _named(sample: Any) -> Any:
    return Point(x=torch.tensor(sample["image"])[:, ::2], y=[sample["label"], {"label": str(sample["label"])}])


def _described(sample: Any) -> Any:
    return {"image": torch.tensor(sample["image"]), "pair": (str(sample["label"]), sample["label"])}


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Callable[[Path, Path], Any], dict[str, Any], dict[str, Any]]:
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
@settings(max_examples=settings().max_examples // 5)  # Some examples start worker processes.
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
        return [list(loader) for _ in range(1 if isinstance(dataset, ShardDataset) else 2)]  # The order is shardio's.

    own = {} if passed["batch_size"] is None or passed["collate_fn"] else {"collate_fn": collate_channels_last}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Some epochs have no batches.
        expected, got = run(torch.utils.data.DataLoader, **own), run(DataLoader, **workers)
    assert describe(got) == describe(expected)


CHOSEN = random.Random(4).sample(range(21), 13)

SUBSETS: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda shards, _: Subset(shards, CHOSEN),
    "range": lambda _, folder: Subset(folder, range(20, 2, -2)),
    "tensor": lambda shards, _: Subset(shards, torch.tensor(CHOSEN)),  # type: ignore[arg-type]  # users pass tensors
    "array": lambda _, folder: Subset(folder, np.array(CHOSEN, np.int32)),  # type: ignore[arg-type]  # users pass arrays
    "negative": lambda shards, _: Subset(shards, [number - 21 for number in CHOSEN]),
    "repeated": lambda shards, _: Subset(shards, [5, 5, *CHOSEN, 5]),
    "nested": lambda shards, _: Subset(Subset(Subset(shards, range(1, 21)), CHOSEN[::-1][4:]), [-1, 3, 0, 7, 5]),
    "split": lambda _, folder: random_split(folder, [0.7, 0.3], torch.Generator().manual_seed(1))[0],
}
CONCATENATED: dict[str, Callable[[Any, Any], Any]] = {
    "both": lambda shards, folder: ConcatDataset([shards, folder]),
    "one": lambda _, folder: ConcatDataset([folder]),
    "again": lambda shards, folder: ConcatDataset([folder, shards, folder]),
    "of subsets": lambda shards, folder: ConcatDataset([Subset(shards, [3, -1]), Subset(folder, range(9, 2, -1))]),
    "in a subset": lambda shards, folder: Subset(ConcatDataset([shards, folder]), [40, 0, 20, 21, 22]),
    "in another": lambda shards, folder: ConcatDataset([Subset(ConcatDataset([shards, folder]), [30, 1]), folder]),
    "with an empty part": lambda shards, folder: ConcatDataset([Subset(shards, []), folder]),
}
WRAPPED = {**SUBSETS, **CONCATENATED}
SETTINGS = [*((name, 0) for name in WRAPPED), ("nested", 1), ("in another", 1)]

workers = pytest.mark.parametrize("num_workers", [0, 1])


def make_crop() -> Compose:
    return Compose([RandomResizedCrop(48), RandomHorizontalFlip()])


def make_map(packed: Path) -> ShardMapDataset:
    return ShardMapDataset(packed, fields=("image", "label", "key"), transform=make_crop())


def make_parts(packed: Path, images: Path, make_transform: Callable[[], Any] = make_crop) -> list[Any]:
    return [ShardMapDataset(packed, transform=make_transform()), ImageFolder(images, transform=make_transform())]


@pytest.mark.parametrize(("name", "num_workers"), SETTINGS)
def test_called_datasets_give_the_batches_of_the_fast_path(
    packed: Path, images: Path, name: str, num_workers: int
) -> None:
    dataset, found = WRAPPED[name](*make_parts(packed, images)), []
    for options in ({}, CALLING):
        sampler = EpochSampler(dataset, seed=3, remainder="mask", rank=num_workers, world_size=2)
        of_workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        loader = DataLoader(dataset, batch_size=4, sampler=sampler, **of_workers, **options)
        assert loader.calls_dataset == (options is CALLING)
        first = batches_of(loader)
        loader.set_epoch(4)
        found.append((first, batches_of(loader), loader.state_dict(), len(loader)))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


BATCHED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shuffle": lambda dataset: {"batch_size": 4, "shuffle": True},
    "sequential": lambda dataset: {"batch_size": 4},
    "generator": lambda dataset: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "random": lambda dataset: {"batch_size": 5, "sampler": RandomSampler(dataset), "drop_last": True},
    "batches": lambda dataset: {"batch_sampler": BatchSampler(RandomSampler(dataset), 3, drop_last=False)},
    "lists": lambda dataset: {"batch_sampler": [[1], [3, 2], [-1]]},
    "weighted": lambda dataset: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * len(dataset), 30)},
}


@pytest.mark.parametrize(
    ("taken", "sampled", "num_workers"),
    [
        *((name, "shuffle", 0) for name in WRAPPED),
        *(("nested", name, 0) for name in BATCHED if name != "shuffle"),
        ("nested", "lists", 1),
    ]
    + [("in another", name, 0) for name in ("lists", "weighted")],
)
def test_torchs_samplers_give_the_batches_of_torchs_loader(
    packed: Path, images: Path, taken: str, sampled: str, num_workers: int
) -> None:
    crop_alike = taken in CONCATENATED or sampled == "weighted"  # Random crops of repeated samples differ.
    parts = make_parts(packed, images, (lambda: CenterCrop(40)) if crop_alike else make_crop)
    for part in parts:
        part.set_epoch(1, seed=5)  # Without an epoch, torch's generator would draw the crops.
    dataset, sampler = WRAPPED[taken](*parts), BATCHED[sampled]
    torch.manual_seed(3)
    expected = batches_of(TorchLoader(dataset, **sampler(dataset)))
    torch.manual_seed(3)
    loader = DataLoader(dataset, num_workers=num_workers, **sampler(dataset))
    found = list(loader)
    assert found[0][0].is_contiguous(memory_format=torch.channels_last)
    assert batches_of(found) == expected
    assert len(loader) == len(expected)
    assert not loader.calls_dataset
    assert loader.stats().num_samples == sum(len(labels) for _, labels in found)


def test_samples_look_as_in_the_whole_dataset_but_differ_where_they_are_concatenated_again(
    packed: Path, images: Path
) -> None:
    dataset = make_map(packed)
    whole = DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset, seed=3))
    looks = {key: image for images, _, keys in whole for image, key in zip(images, keys, strict=True)}
    for name in ("list", "tensor", "negative", "repeated", "nested"):
        subset = SUBSETS[name](dataset, None)
        loader = DataLoader(subset, batch_size=4, sampler=EpochSampler(subset, seed=3))
        found = [(key, image) for images, _, keys in loader for image, key in zip(images, keys, strict=True)]
        assert sorted(key for key, _ in found) == sorted(subset[number][2] for number in range(len(subset)))
        assert all(torch.equal(image, looks[key]) for key, image in found)
    twice = ConcatDataset[Any]([dataset, dataset])
    ((pictures, labels, _),) = DataLoader(twice, batch_size=42, sampler=EpochSampler(twice, shuffle=False))
    assert torch.equal(labels[:21], labels[21:])
    assert all(not torch.equal(one, other) for one, other in zip(pictures[:21], pictures[21:], strict=True))


@pytest.mark.parametrize(("before", "after"), [({}, CALLING), (CALLING, {})])
def test_either_executor_resumes_an_epoch(packed: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    subset = Subset(make_map(packed), CHOSEN)

    def make(**options: Any) -> DataLoader:
        return DataLoader(subset, batch_size=3, sampler=EpochSampler(subset), **options)

    loader, resumed = make(**before), make(**after)
    begun = batches_of(islice(loader, 2))
    resumed.load_state_dict(loader.state_dict())
    assert begun + batches_of(resumed) == batches_of(make())


@workers
def test_indices_that_change_between_epochs_are_followed(packed: Path, num_workers: int) -> None:
    subset, other = Subset(make_map(packed), [1, 2, 3]), make_map(packed)
    loader = DataLoader(subset, batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
    names = [other[number][2] for number in range(21)]
    assert keys_of(loader) == [[names[1], names[2]], [names[3]]]
    subset.indices = [4, 5]
    assert keys_of(loader) == [[names[4], names[5]]]
    subset.dataset = Subset(other, range(20, -1, -1))
    assert keys_of(loader) == [[names[16], names[15]]]


@pytest.mark.parametrize(("options", "num_workers"), [({}, 0), ({}, 1), (CALLING, 1)])
def test_an_index_outside_of_the_dataset_is_an_error(packed: Path, options: Any, num_workers: int) -> None:
    subset = Subset(make_map(packed), [1, 21])
    loader = DataLoader(subset, sampler=EpochSampler(subset, shuffle=False), num_workers=num_workers, **options)
    with pytest.raises(IndexError, match="index 21 is out of range for a dataset of 21 samples"):
        list(loader)
    with pytest.raises(IndexError, match="index 13 is out of range for a dataset of 13 samples"):
        list(DataLoader(Subset(make_map(packed), CHOSEN), sampler=SequentialSampler(range(14))))


class Reversed(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return super().__getitems__([len(self) - 1 - index for index in indices])


def test_a_subclass_of_subset_is_called(packed: Path) -> None:
    dataset = make_map(packed)
    outer: Any
    for outer in (Reversed(dataset, CHOSEN), Subset(Reversed(dataset, CHOSEN), range(13))):
        loader = DataLoader(outer, batch_size=4, sampler=EpochSampler(outer, shuffle=False))
        assert loader.calls_dataset
        expected = [dataset[number][2] for number in CHOSEN[::-1]]
        assert [key for keys in keys_of(loader) for key in keys] == expected


def test_the_reason_says_what_is_not_read_as_one_and_why(packed: Path) -> None:
    def make(**options: Any) -> ShardMapDataset:
        return ShardMapDataset(packed, **{"fields": ("image", "key"), "transform": CenterCrop(8), **options})

    def override(name: str, method: str, function: Any) -> Any:
        return type(name, (ShardMapDataset,), {method: function})(packed)

    (later := make()).set_epoch(3)
    tensors, wider = TensorDataset(torch.zeros(5)), make(transform=CenterCrop(9))
    doubled = Subset(override("Doubled", "__getitems__", lambda *_: [("one",), ("other",)]), [1, 2])
    others = {
        "its dataset 1 is a TensorDataset,": tensors,
        "its dataset 1 is a Subset of a Marked, which overrides __getitem__,": Subset(
            override("Marked", "__getitem__", ShardMapDataset.__getitem__), [1]
        ),
        "its dataset 1 is a ConcatDataset,": ConcatDataset([make(), wider]),
        "its datasets 0 and 1 differ in transform,": wider,
        "its datasets 0 and 1 differ in fields,": make(fields=("image", "label")),
        "its datasets 0 and 1 differ in seed_transforms,": make(seed_transforms=False),
        "its datasets 0 and 1 differ in their epoch (see set_epoch),": later,
    }
    subjects: dict[str, Any] = {
        "a Subset of a Subset of a TensorDataset,": Subset(Subset(tensors, [1, 2]), [0]),
        "a Subset of a Doubled, which overrides __getitems__,": doubled,
        "a Subset of a ShardDataset,": Subset(ShardDataset(packed), [1, 2]),
        **{f"a ConcatDataset: {why}": ConcatDataset([make(), other]) for why, other in others.items()},
        "a Subset of a ConcatDataset: its datasets 0 and 1 differ in transform,": Subset(
            ConcatDataset([make(), wider]), [1]
        ),
    }
    for what, dataset in subjects.items():
        reason = str(fallback_reason(DataLoader(dataset)))
        assert f"the dataset is {what} but shardio's own code reads only" in reason
    assert list(DataLoader(doubled, batch_size=2, sampler=EpochSampler(doubled))) == [[("one", "other")]]


def test_a_transform_or_an_epoch_that_one_part_gets_is_used(packed: Path, images: Path) -> None:
    parts = make_parts(packed, images, lambda: CenterCrop(40))
    both = ConcatDataset[Any]([parts[0], Subset(parts[1], range(21))])
    loader = DataLoader(both, batch_size=21, num_workers=1, persistent_workers=True)
    for changed, sizes, is_torchs in [((), [40, 40], False), ((1,), [40, 16], True), ((0,), [16, 16], False)]:
        for part in changed:
            parts[part].transform = CenterCrop(16)
        assert loader.calls_dataset == is_torchs
        assert [pictures.shape[-1] for pictures, _ in loader] == sizes
    parts, found = make_parts(packed, images), []
    loader = DataLoader(ConcatDataset(parts), batch_size=8)
    for epoch in (1, 2, 1):
        for part in parts:
            part.set_epoch(epoch)
        found.append(batches_of(loader))
    assert found[0] == found[2] != found[1]


@workers
def test_an_error_names_the_sample(packed: Path, images: Path, tmp_path: Path, num_workers: int) -> None:
    shards, folder = make_parts(packed, images, lambda: CenterCrop(8))
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    folder.samples[13] = (str(tmp_path / "bad.jpg"), 1)
    with pytest.raises(SampleError, match=r"the image of sample .*bad.jpg in .* cannot be decoded") as caught:
        list(DataLoader(ConcatDataset[Any]([shards, folder]), batch_size=30, num_workers=num_workers))
    assert caught.value.key == str(tmp_path / "bad.jpg")


class Labeled(ImageFolder):
    names = "a member of its own"

    def __init__(self, root: Path, label: int, **options: Any) -> None:
        super().__init__(root, **options)
        self.samples = [(path, number) for path, number in self.samples if number == label]


def test_shardios_worker_processes_read_subclasses_that_only_choose(images: Path) -> None:
    folder = Labeled(images, 1, transform=CenterCrop(16))
    loader = DataLoader(folder, 4, num_workers=1)
    assert not loader.calls_dataset
    labels = torch.cat([labels for _, labels in loader])
    assert labels.tolist() == [1] * len(folder.samples)
