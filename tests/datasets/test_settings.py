"""Settings, class names, indices and overridden methods apply no matter how the samples are read."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import ConcatDataset, DataLoader as TorchLoader, Dataset, Subset, default_collate

import shardio
from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset, StreamDataset
from shardio.decoding.codecs import choose_decoder
from shardio.sample import count_classes, warn_of_other_classes
from shardio.train import TrainConfig, train
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop, Resize
from tests.raising import assert_raises
from tests.sources import encode, write_images


def test_fixed_settings_can_be_read_and_copied_and_not_set(packed: Path, images: Path) -> None:
    order: dict[str, Any] = {"seed": 7, "shuffle": True, "window": 6, "strata": 2, "rank": 1, "world_size": 3}
    of_folder: dict[str, Any] = {"decode": "pil", "orientation": "apply", "max_pixels": 5000}
    of_map: dict[str, Any] = {"fields": ("image", "key"), "decode": "pil", "orientation": "apply", "trusted": True}
    of_shards: dict[str, Any] = {"verify": "off", "max_pixels": 5000, **order, **of_map}
    for subject, settings in (
        (ShardDataset(packed, **of_shards), of_shards),
        (ShardMapDataset(packed, **of_map), of_map),
        (ImageFolder(images, **of_folder), of_folder),
        (EpochSampler(ShardMapDataset(packed), **order), order),
    ):
        for other in (subject, copy.copy(subject), pickle.loads(pickle.dumps(subject))):
            assert {name: getattr(other, name) for name in settings} == settings
        for name, value in [*settings.items(), *([] if settings is order else [("target_transform", int)])]:
            assert_raises(AttributeError, r"no setter|can't set", setattr, subject, name, value)


@pytest.mark.parametrize("kind", [ShardDataset, ShardMapDataset, ImageFolder, EpochSampler, StreamDataset])
def test_every_argument_is_documented_and_errors_name_the_class(kind: type) -> None:
    described = re.sub(r"\n {8}", " ", inspect.getdoc(vars(kind)["__init__"]) or "")
    for name in inspect.signature(kind).parameters:
        assert re.search(rf"^ {{4}}{name}: [A-Z`].+[.]$", described, re.MULTILINE), name
    message = rf"^{kind.__name__}\.__init__\(\) got an unexpected keyword argument 'color'"
    assert_raises(TypeError, message, kind, "source", color="blue")


@pytest.mark.parametrize("flag", ["False", "", 2, None, 0.0, [], np.array([True, False])], ids=repr)
def test_a_flag_is_not_a_string(packed: Path, flag: Any) -> None:
    dataset: Any = ShardMapDataset(packed)
    for name, make, source in (
        ("shuffle", ShardDataset, packed),
        ("trusted", ShardDataset, packed),
        ("shuffle", EpochSampler, dataset),
        ("drop_last", DataLoader, dataset),
        ("shuffle", DataLoader, dataset),
    ):
        value = [] if make is DataLoader and flag is None else flag  # A loader accepts shuffle=None.
        assert_raises(TypeError, f"{name} must be True or False, got", make, source, **{name: value})
    for truth in (True, 1, np.True_, torch.tensor(True)):
        assert ShardDataset(packed, shuffle=truth).shuffle is True  # type: ignore[arg-type]  # any library's value
        assert EpochSampler(range(3), shuffle=truth).state_dict()["order"]["shuffle"] is True  # type: ignore[arg-type]


NO_INTEGERS: list[Any] = [1.7, 1.0, "3", None, np.float64(2), torch.tensor(1.0), slice(1, 3), [1, 2], np.arange(2)]


@pytest.mark.parametrize("index", NO_INTEGERS, ids=repr)
def test_an_index_that_is_not_an_integer_is_refused(packed: Path, images: Path, index: Any) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    for get, given in (
        (dataset.__getitem__, index),
        (dataset.__getitems__, [0, index]),
        (ImageFolder(images).__getitem__, index),
        (EpochSampler, Subset(dataset, [0, index])),
        (list, DataLoader(dataset, batch_size=2, sampler=[0, index])),
        (list, DataLoader(dataset, batch_sampler=[[0, index]])),
        (list, DataLoader(Subset(dataset, [0, index]), batch_size=2)),
        (list, DataLoader(Subset(Subset(dataset, [0, index]), [1]), batch_size=2)),
        (list, DataLoader(dataset, batch_size=2, sampler=[0, index], worker_init_fn=print)),
        (list, TorchLoader(dataset, batch_size=2, sampler=[0, index])),
    ):
        assert_raises(TypeError, "index must be an integer, got", get, given)


def test_any_librarys_integers_and_arrays_of_any_width_are_indices(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    for index in (np.int32(5), np.uint8(5), torch.tensor(5), -16, np.int8(-16)):
        assert dataset[index] == dataset[5]  # type: ignore[index]  # users give these
        for subject, sampler in ((dataset, [index]), (Subset(dataset, [index]), [0])):  # type: ignore[list-item]
            assert list(DataLoader(subject, sampler=sampler)) == [[dataset[5]]]
    for kind in (np.uint8, np.int16, np.uint64, np.int64):
        numbers = np.array([4, 20, 0], kind)
        expected = [dataset[number] for number in (4, 20, 0)]
        for indices in (numbers, torch.from_numpy(numbers)):
            assert list(next(iter(DataLoader(dataset, batch_sampler=[indices])))) == expected
            subset = Subset(dataset, indices)  # type: ignore[arg-type]  # users give these
            assert list(next(iter(DataLoader(subset, batch_size=3)))) == expected


def test_huge_integers_are_out_of_range_and_truth_values_are_not_indices(packed: Path) -> None:
    dataset = ShardMapDataset(packed)
    for index in (2**63, 2**64 + 1, -(2**70)):
        assert_raises(IndexError, "is out of range for a dataset of 21 samples", dataset.__getitem__, index)
    for mask in ([True], [True, False], np.array([True, False]), torch.tensor([True, False])):
        assert_raises(TypeError, "an index must be an integer, got", list, DataLoader(dataset, batch_sampler=[mask]))


CLASSES = ["ant", "class-2", "class-1", "class-0"]
KINDS: dict[str, Any] = {"folder": ImageFolder, "shards": ShardDataset, "map": ShardMapDataset}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("classes")
    write_images(root / "in", classes=3, per_class=4)
    shutil.rmtree(root / "in" / "class-1")
    shardio.pack(root / "in", root / "out", max_shard_samples=3)
    return {"folder": root / "in", "shards": root / "out", "map": root / "out"}


def read(dataset: Any, **options: Any) -> list[tuple[str, ...]]:
    """For each sample in order, return the sum of its pixels, which identifies it, and its other values."""
    loader = shardio.DataLoader(dataset, batch_size=3, **options)
    return [
        (str(each[0].sum().item()), *map(str, (value for value in each[1:])))
        for images, *others in loader
        for each in zip(images, *(o.tolist() if isinstance(o, torch.Tensor) else o for o in others), strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in KINDS), ("map", {"num_workers": 1}), ("folder", {"collate_fn": default_collate})],
)
def test_labels_alone_follow_the_list(sources: dict[str, Path], kind: str, options: dict[str, Any]) -> None:
    plain = KINDS[kind](sources[kind])
    dataset = KINDS[kind](sources[kind], classes=CLASSES)
    assert (plain.classes, dataset.classes, dataset.digest) == (["class-0", "class-2"], CLASSES, plain.digest)
    number = {"0": "3", "1": "1"}  # Old labels → new labels.
    assert read(dataset, **options) == [(pixels, number[label]) for pixels, label in read(plain)]
    if kind != "folder":  # The error for a stored label that belongs to no class names the sample.
        decode = choose_decoder("cls", dataset.decoder)
        assert decode is not None
        for content in (b"2", b"-1"):
            assert_raises(ValueError, "outside the dataset's 2 classes", decode, content)


def test_a_shuffled_order_stays_and_so_do_the_fields_as_they_are_stored(sources: dict[str, Path]) -> None:
    options: dict[str, Any] = {"fields": ("image", "key", "label", "cls"), "shuffle": True}
    plain = read(ShardDataset(sources["shards"], **options))
    found = read(ShardDataset(sources["shards"], classes=CLASSES, **options))
    assert [row[:2] for row in found] == [row[:2] for row in plain]
    assert {row[2:] for row in found} == {("3", "3"), ("1", "1")}


def test_another_dataset_may_provide_the_list(sources: dict[str, Path], images: Path) -> None:
    for whole in (ImageFolder(images), Subset(ImageFolder(images), [0]), shardio.DataLoader(ImageFolder(images))):
        part = ShardMapDataset(sources["map"], classes=whole)  # type: ignore[arg-type]  # wrappers of a dataset with classes
        assert part.classes == ["class-0", "class-1", "class-2"]
        assert {part[number][1] for number in range(len(part))} == {0, 2}
    assert ImageFolder(sources["folder"], classes=part).class_to_idx["class-2"] == 2


@pytest.mark.parametrize(
    ("classes", "error", "words"),
    [
        (["class-0", "class-1"], ValueError, r"not among the given ones \(class-0, class-1\): class-2\."),
        ("class-0", TypeError, "a list of names or a dataset with classes"),
        (3, TypeError, "a list of names"),
        ([0, 1], TypeError, "a list of names"),
        ([], ValueError, "classes is empty"),
        (["a", "class-0", "a"], ValueError, "must not repeat a name, got a more"),
        (2 * list("abcdefg"), ValueError, "must not repeat a name, got a, b, c, d, e and 2 more more than once"),
    ],
)
def test_what_is_no_list_of_all_classes_is_refused(
    sources: dict[str, Path], classes: Any, error: type[Exception], words: str
) -> None:
    for kind, make in KINDS.items():
        where = f"{re.escape(str(sources[kind]))} has classes that are " if "class-2" in words else ""
        assert_raises(error, where + words, make, sources[kind], classes=classes)


def test_a_dataset_without_class_names_cannot_follow_any(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.jpg").write_bytes(encode(1))
    (tmp_path / "flat" / "1.cls").write_text("1")
    shardio.pack(tmp_path / "flat", tmp_path / "out")
    assert_raises(ValueError, r"out has no class names", ShardDataset, tmp_path / "out", classes=CLASSES)


def test_datasets_that_disagree_are_warned_of_where_they_meet(sources: dict[str, Path], images: Path) -> None:
    whole = ImageFolder(images, transform=Resize((8, 8)))
    part = ShardMapDataset(sources["map"], transform=Resize((8, 8)))
    words = "label 1 is 'class-1' in the ImageFolder with 3 classes and 'class-2' in the ShardMapDataset with 2 classes"
    with pytest.warns(UserWarning, match=words) as caught:
        shardio.DataLoader(ConcatDataset([Subset(whole, [0, 1]), part]))
    assert caught[0].filename == __file__
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3))
    config = TrainConfig(epochs=1, precision="fp32", device="cpu")
    loader = shardio.DataLoader(whole, batch_size=8)
    with pytest.warns(UserWarning, match=words) as caught:
        train(model, loader, config, val_loader=shardio.DevicePrefetcher(shardio.DataLoader(part, batch_size=8), "cpu"))
    assert caught[0].filename == __file__


class Unnamed(Dataset[int]):
    """A user's dataset whose attributes do not have the same meanings as in shardio's datasets."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.decoder(index)

    @property
    def classes(self) -> list[str]:
        raise NotImplementedError("no names here")  # A user's property may raise an error.

    def decoder(self, index: int) -> int:
        return index


def test_classes_are_counted_and_datasets_that_agree_are_not_warned_of(sources: dict[str, Path], images: Path) -> None:
    whole, unnamed = ImageFolder(images), Unnamed()
    follows, part = ImageFolder(sources["folder"], classes=whole), Subset(whole, [0])
    unknown = [object(), MagicMock(), [1, 2], Subset([1], [0]), unnamed]  # type: ignore[arg-type]  # Subset accepts a list
    warn_of_other_classes(whole, follows, part, *unknown)  # A warning would be an error in these tests.
    both: Dataset[Any] = ConcatDataset([part, whole])
    assert [count_classes(loaded) for loaded in (whole, part, both, shardio.DataLoader(both, 2))] == [3] * 4
    warn_of_other_classes(ConcatDataset([whole, follows]))
    assert count_classes([1, 2]) is None
    assert list(shardio.DataLoader(unnamed, sampler=shardio.EpochSampler(unnamed, shuffle=False))) == [0, 1]


class Marked(ShardMapDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + "!"


class MarkedInBatches(ShardMapDataset):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [key + "!" for key in super().__getitems__(indices)]


class MarkedInBoth(Marked):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return list(super().__getitems__(indices))


@pytest.mark.parametrize("kind", [Marked, MarkedInBatches, MarkedInBoth])
def test_an_overridden_method_makes_all_samples(packed: Path, kind: type[ShardMapDataset]) -> None:
    plain = ShardMapDataset(packed, fields="key")
    expected = [plain[number] + "!" for number in range(4)]
    dataset = kind(packed, fields="key")
    assert [dataset[number] for number in range(4)] == dataset.__getitems__(range(4)) == expected
    for subject in (dataset, Subset(dataset, range(21))):
        loaders: list[Any] = [
            DataLoader(subject, batch_size=4),
            DataLoader(subject, batch_size=4, sampler=EpochSampler(subject, shuffle=False)),
            torch.utils.data.DataLoader(subject, batch_size=4),
        ]
        for loader in loaders:
            assert list(next(iter(loader))) == expected


class Inverted(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return 255 - image, label


def test_in_worker_processes_with_the_crops_of_the_order(images: Path, tmp_path: Path) -> None:
    crops = []
    for kind in (ImageFolder, Inverted):
        dataset = kind(images, transform=RandomResizedCrop(16))
        loader = DataLoader(dataset, batch_size=21, sampler=EpochSampler(dataset), num_workers=1)
        ((cropped, _),) = loader
        assert loader.calls_dataset == (kind is Inverted)
        crops.append(cropped)
    assert torch.equal(crops[1], 255 - crops[0])
    dataset = Inverted(shutil.copytree(images, tmp_path / "images"))
    Path(dataset.samples[3][0]).unlink()
    assert assert_raises(SampleError, None, dataset.__getitems__, range(5)).row == 3


class Darkened(RandomHorizontalFlip):
    def apply(self, image: Any, parameters: Any) -> Any:
        return super().apply(image, parameters) // 2


class Unmirrored(RandomHorizontalFlip):
    def draw(self, sizes: Any, keys: Any) -> Any:
        return np.zeros(len(sizes), np.bool_)


def test_transforms_that_override_how_they_draw_and_apply(packed: Path) -> None:
    def load(transform: Any) -> torch.Tensor:
        dataset = ShardDataset(packed, fields="image", transform=transform)
        (images,) = DataLoader(dataset, batch_size=21)
        return torch.as_tensor(images)

    plain = load(None)
    assert torch.equal(load(Compose([Darkened(p=1)])), plain.flip(-1) // 2)
    assert torch.equal(load(Unmirrored(p=1)), plain)


def test_transforms_cannot_override_what_nothing_calls() -> None:
    message = r"overrides __call__, but datasets and loaders do not call it.*Override apply\(image, parameters\)"
    with pytest.raises(TypeError, match=f"Called {message}"):

        class Called(RandomHorizontalFlip):
            def __call__(self, image: Any) -> Any:
                return super().__call__(image) // 2

    assert_raises(TypeError, f"Mixed {message}", type, "Mixed", (torch.nn.Module, RandomHorizontalFlip), {})

    with pytest.raises(TypeError, match=r"Composed overrides __call__.* Move its code to a function in the list"):

        class Composed(Compose):
            def __call__(self, image: Any) -> Any:
                return super().__call__(image) // 2
