"""Labels follow the user's list of class names in every kind of dataset and worker."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

import shardio
from shardio.datasets import ImageFolder, ShardDataset, ShardMapDataset
from shardio.decoding.codecs import choose_decoder
from shardio.sample import check_classes, count_classes, warn_of_other_classes
from shardio.train import TrainConfig, train
from shardio.transforms import Resize
from tests.sources import encode, write_images

CLASSES = ["ant", "class-2", "class-1", "class-0"]
KINDS: dict[str, Any] = {"folder": ImageFolder, "shards": ShardDataset, "map": ShardMapDataset}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Images of class-0 and class-2, as a folder and packed."""
    root = tmp_path_factory.mktemp("classes")
    write_images(root / "in", classes=3, per_class=4)
    for path in (root / "in" / "class-1").iterdir():
        path.unlink()
    (root / "in" / "class-1").rmdir()
    shardio.pack(root / "in", root / "out", max_shard_samples=3)
    return {"folder": root / "in", "shards": root / "out", "map": root / "out"}


def read(dataset: Any, **options: Any) -> list[tuple[str, ...]]:
    """Return what distinguishes the samples, and their labels, in order."""
    loader = shardio.DataLoader(dataset, batch_size=3, **options)
    return [
        (str(each[0].sum().item()), *map(str, (value for value in each[1:])))
        for images, *others in loader
        for each in zip(images, *(o.tolist() if isinstance(o, torch.Tensor) else o for o in others), strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 1, "collate_fn": default_collate}],
    ids=["here", "ours", "torch"],
)
def test_labels_follow_the_list_and_nothing_else_changes(
    sources: dict[str, Path], kind: str, options: dict[str, Any]
) -> None:
    plain = KINDS[kind](sources[kind])
    dataset = KINDS[kind](sources[kind], classes=CLASSES)
    assert (plain.classes, dataset.classes) == (["class-0", "class-2"], CLASSES)
    assert dataset.digest == plain.digest
    number = {"0": "3", "1": "1"}  # By the names that the labels had.
    assert read(dataset, **options) == [(pixels, number[label]) for pixels, label in read(plain)]


def test_a_shuffled_order_stays_and_so_do_the_fields_as_they_are_stored(sources: dict[str, Path]) -> None:
    options: dict[str, Any] = {"fields": ("image", "key", "label", "cls"), "shuffle": True}
    plain = read(ShardDataset(sources["shards"], **options))
    found = read(ShardDataset(sources["shards"], classes=CLASSES, **options), num_workers=1)
    assert [row[:2] for row in found] == [row[:2] for row in plain]
    assert {row[2:] for row in found} == {("3", "3"), ("1", "1")}


def test_another_dataset_may_provide_the_list(sources: dict[str, Path], images: Path) -> None:
    for whole in (ImageFolder(images), Subset(ImageFolder(images), [0]), shardio.DataLoader(ImageFolder(images))):
        part = ShardMapDataset(sources["map"], classes=whole)  # type: ignore[arg-type]  # wrappers have it within
        assert part.classes == ["class-0", "class-1", "class-2"]
        assert {part[number][1] for number in range(len(part))} == {0, 2}
    assert ImageFolder(sources["folder"], classes=part).class_to_idx["class-2"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_that_is_not_in_the_list_is_refused(sources: dict[str, Path], kind: str) -> None:
    with pytest.raises(
        ValueError,
        match=re.escape(f"{sources[kind]} has classes that are not among the given ones (class-0, class-1): class-2."),
    ):
        KINDS[kind](sources[kind], classes=["class-0", "class-1"])


@pytest.mark.parametrize(
    ("classes", "error", "words"),
    [
        ("class-0", TypeError, "a list of names or a dataset with classes"),
        (3, TypeError, "a list of names"),
        ([0, 1], TypeError, "a list of names"),
        ([], ValueError, "classes is empty"),
        (["a", "class-0", "a"], ValueError, "must not repeat a name, got a more"),
    ],
)
def test_a_value_that_is_not_a_list_of_names_is_refused(
    sources: dict[str, Path], classes: Any, error: type[Exception], words: str
) -> None:
    for kind, make in KINDS.items():
        with pytest.raises(error, match=words):
            make(sources[kind], classes=classes)


def test_a_dataset_without_class_names_cannot_follow_any(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.jpg").write_bytes(encode(1))
    (tmp_path / "flat" / "1.cls").write_text("1")
    shardio.pack(tmp_path / "flat", tmp_path / "out")
    with pytest.raises(ValueError, match=r"out has no class names"):
        ShardDataset(tmp_path / "out", classes=CLASSES)


def test_the_error_of_a_stored_label_outside_the_classes_names_the_sample(sources: dict[str, Path]) -> None:
    decode = choose_decoder("cls", ShardMapDataset(sources["map"], classes=CLASSES).decoder)
    assert decode is not None
    for content in (b"2", b"-1"):
        with pytest.raises(ValueError, match="outside the dataset's 2 classes"):
            decode(content)


def test_datasets_that_disagree_are_warned_of_where_they_are_used_together(
    sources: dict[str, Path], images: Path
) -> None:
    whole, part = (
        ImageFolder(images, transform=Resize((8, 8))),
        ShardMapDataset(sources["map"], transform=Resize((8, 8))),
    )
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
    """A user's dataset whose attributes have other meanings than shardio's."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.decoder(index)

    @property
    def classes(self) -> list[str]:
        raise NotImplementedError("no names here")  # As a user's property may: the test shows that it means nothing.

    def decoder(self, index: int) -> int:
        return index


def test_attributes_of_datasets_that_are_not_shardios_mean_nothing() -> None:
    dataset = Unnamed()
    assert list(shardio.DataLoader(dataset, sampler=shardio.EpochSampler(dataset, shuffle=False))) == [0, 1]


def test_datasets_that_agree_are_not_warned_of(sources: dict[str, Path], images: Path) -> None:
    whole = ImageFolder(images)
    follows = ImageFolder(sources["folder"], classes=whole)
    first_only = Subset(ImageFolder(images), [0])
    unknown = [object(), MagicMock(), [1, 2], Subset([1], [0]), Unnamed()]  # type: ignore[arg-type]  # a list is enough
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_other_classes(whole, follows, first_only, *unknown)
        shardio.DataLoader(ConcatDataset([whole, follows]))
    assert caught == []


def test_classes_are_counted_in_datasets_and_loaders(images: Path) -> None:
    dataset = ImageFolder(images)
    subset: Dataset[Any] = Subset(dataset, [0, 1])
    for loaded in (dataset, subset, ConcatDataset([subset, dataset]), shardio.DataLoader(subset, 2)):
        assert count_classes(loaded) == 3
    assert count_classes([1, 2]) is None


def test_a_list_of_many_classes_is_checked_at_once() -> None:
    names = [str(number) for number in range(100_000)]
    assert check_classes(names) == tuple(names)
