"""Unreadable samples in torch's workers: the policies and the batches are those of the fast path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.transforms import Compose, RandomResizedCrop
from tests.faults.damage import warns_of_bad_samples

CROP = Compose([RandomResizedCrop(48)])


def identity(image: Any) -> Any:
    return image


USERS = Compose([RandomResizedCrop(48), identity])
"""The same, but with a callable of the user's, so that torch's workers run."""


@pytest.fixture(scope="module")
def damaged(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples of conftest.py; in the second shard, the 2nd and the 4th are not images any more."""
    copy = tmp_path_factory.mktemp("damaged") / "packed"
    shutil.copytree(packed, copy)
    tar = copy / "shard-000001.tar"
    pieces = tar.read_bytes().split(b"\xff\xd8\xff")
    tar.write_bytes(
        b"\xff\xd8\xff".join(pieces[:2])
        + b"\0\0\0"
        + pieces[2]
        + b"\xff\xd8\xff"
        + pieces[3]
        + b"\0\0\0"
        + pieces[4]
        + b"\xff\xd8\xff"
        + pieces[5]
    )
    return copy


def make(source: Path, kind: str, transform: Any, **options: Any) -> DataLoader:
    if kind == "shards":
        dataset: Any = ShardDataset(
            source, fields=("image", "key"), shuffle=True, remainder="mask", transform=transform
        )
        return DataLoader(dataset, batch_size=7, **options)
    dataset = ShardMapDataset(source, fields=("image", "key"), transform=transform)
    if kind == "subset":
        dataset = Subset(dataset, list(range(21)))
    sampler = EpochSampler(dataset, seed=1, remainder="mask")
    return DataLoader(dataset, batch_size=7, sampler=sampler, **options)


def keys_of(loader: DataLoader) -> list[tuple[tuple[str, ...], list[bool]]]:
    batches = [(tuple(keys), valid.tolist()) for images, keys, valid in loader if len(images) == len(keys)]
    assert len(batches) == 3
    return batches


@pytest.mark.parametrize(
    ("kind", "on_error", "num_workers"),
    [
        *((kind, on_error, 0) for kind in ("shards", "map", "subset") for on_error in ("replace", "skip")),
        ("shards", "replace", 1),
        ("map", "skip", 1),
    ],
)
def test_policies_are_those_of_the_fast_path(
    damaged: Path, packed: Path, tmp_path: Path, kind: str, on_error: str, num_workers: int
) -> None:
    options = {"on_error": on_error, "num_workers": num_workers}
    with warns_of_bad_samples(2 if on_error == "skip" else None):
        users = keys_of(make(damaged, kind, USERS, quarantine=tmp_path / "users", **options))
    with warns_of_bad_samples(2 if on_error == "skip" else None):
        assert users == keys_of(make(damaged, kind, CROP, quarantine=tmp_path / "ours", **options))
    lines = [sorted((tmp_path / name).read_text().splitlines()) for name in ("users", "ours")]
    assert lines[0] == lines[1]
    whole = keys_of(make(packed, kind, CROP))
    entries = [json.loads(line) for line in (tmp_path / "users").read_text().splitlines()]
    bad = {entry["key"] for entry in entries}
    assert len(bad) == 2
    assert {entry["action"] for entry in entries} == {"replaced" if on_error == "replace" else "skipped"}
    assert all("shard-000001.tar at byte" in entry["where"] for entry in entries)
    for (keys, valid), (expected, _) in zip(users, whole, strict=True):
        assert len(valid) == len(keys)
        if on_error == "skip":
            assert list(keys) == [key for key in expected if key not in bad]
        else:
            assert all(
                key == before or (before in bad and key not in bad) for key, before in zip(keys, expected, strict=True)
            )


def test_by_default_the_sample_is_named(damaged: Path) -> None:
    with pytest.raises(SampleError, match=r"shard-000001\.tar at byte \d+ is damaged"):
        list(make(damaged, "shards", USERS, num_workers=1))


@pytest.mark.parametrize("kind", ["shards", "map", "subset"])
def test_the_same_replacement_gets_the_same_crop(damaged: Path, tmp_path: Path, kind: str) -> None:
    options = {"on_error": "replace", "quarantine": tmp_path / "quarantine"}
    users, ours = (make(damaged, kind, transform, **options) for transform in (USERS, CROP))
    with warns_of_bad_samples():
        assert all(torch.equal(one[0], other[0]) for one, other in zip(users, ours, strict=True))


@pytest.mark.parametrize("kind", ["shards", "map"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epochs_bad_samples_are_counted(damaged: Path, tmp_path: Path, kind: str, num_workers: int) -> None:
    quarantine = tmp_path / "quarantine"
    loader = make(
        damaged,
        kind,
        USERS,
        on_error="skip",
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        quarantine=quarantine,
    )
    for epoch in range(3):
        with warns_of_bad_samples(2, epoch):
            keys_of(loader)
    epochs = [json.loads(line)["epoch"] for line in quarantine.read_text().splitlines()]
    assert sorted(epochs) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_error_of_an_empty_batch_names_its_samples(damaged: Path, tmp_path: Path, num_workers: int) -> None:
    dataset = ShardDataset(damaged, fields=("image", "key"), transform=USERS)
    loader = DataLoader(
        dataset, batch_size=1, on_error="skip", num_workers=num_workers, quarantine=tmp_path / "quarantine"
    )
    with pytest.raises(SampleError) as error_info:
        list(loader)
    (line,) = (tmp_path / "quarantine").read_text().splitlines()[:1]
    key = json.loads(line)["key"]
    assert f"all samples of a batch were skipped ({key}), so the batch is empty" in str(error_info.value)


def test_single_samples_cannot_be_skipped(packed: Path) -> None:
    with pytest.raises(ValueError, match="batch_size=None disables batching"):
        DataLoader(ShardDataset(packed), batch_size=None, on_error="skip")
    mapped = ShardMapDataset(packed)
    DataLoader(mapped, on_error="replace", batch_size=None)
    DataLoader(mapped, on_error="skip", batch_sampler=[[1, 2], [3]])
    with pytest.raises(ValueError, match="on_error must be one of 'raise', 'replace', 'skip'"):
        DataLoader(ShardDataset(packed), on_error="ignore")  # type: ignore[arg-type]  # the test


def test_an_image_folder_continues_without_a_file(images: Path, tmp_path: Path) -> None:
    root = shutil.copytree(images, tmp_path / "images")
    folder = ImageFolder(root, transform=USERS)
    Path(folder.samples[3][0]).unlink()
    loader = DataLoader(
        folder, batch_size=7, sampler=EpochSampler(folder), on_error="skip", quarantine=tmp_path / "quarantine"
    )
    with warns_of_bad_samples(1):
        assert sum(len(labels) for _, labels in loader) == 20
    assert json.loads((tmp_path / "quarantine").read_text())["key"] == folder.samples[3][0]
