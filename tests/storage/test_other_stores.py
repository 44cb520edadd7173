"""Datasets in a store that is neither local nor an object store, and has no cache, are read like local datasets."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardio
from shardio import DataLoader, ImageFolder, SampleError, ShardDataset, ShardMapDataset, StreamDataset
from shardio.storage import Location
from shardio.storage.local import LocalStore
from tests.mirror_store import MirrorStore
from tests.sources import write_images

Mirrored = Callable[[Path], Location]

DATASETS: dict[str, Callable[[Any], Any]] = {
    "shards": lambda source: ShardDataset(source, fields=("image", "key"), shuffle=True),
    "map": lambda source: ShardMapDataset(source, fields=("image", "key")),
    "stream": lambda source: StreamDataset(f"{source}/shard-{{000000..000004}}.tar", fields=("image", "key")),
}


def assert_same_batches(ours: Any, theirs: Any, num_workers: int) -> None:
    loaders = (DataLoader(each, batch_size=4, num_workers=num_workers) for each in (ours, theirs))
    for (images, others), (expected, their_others) in zip(*loaders, strict=True):
        assert torch.equal(images, expected)
        assert list(others) == list(their_others)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
def test_packed_samples_are_the_local_ones(packed: Path, mirrored: Mirrored, make: Any, num_workers: int) -> None:
    url = str(mirrored(packed))
    assert_same_batches(make(url), make(packed), num_workers)
    with shardio.open(url) as ours, shardio.open(packed) as theirs:
        assert dict(ours) == dict(theirs)
    assert shardio.verify(url) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_class_folders_are_the_local_ones(images: Path, mirrored: Mirrored, num_workers: int, tmp_path: Path) -> None:
    url = str(mirrored(images))
    ours, theirs = ImageFolder(url, listing=tmp_path / "listing.json"), ImageFolder(images)
    assert (ours.root, ours.classes, ours.digest) == (url, theirs.classes, theirs.digest)
    assert list(ours.samples) == [(str(mirrored(Path(path))), label) for path, label in theirs.samples]
    kept = ImageFolder(url, listing=tmp_path / "listing.json")
    for dataset in (ours, kept, pickle.loads(pickle.dumps(ours))):
        assert_same_batches(dataset, theirs, num_workers)


def test_a_lost_image_is_a_bad_sample_but_a_failing_store_is_not(
    mirrored: Mirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path)
    data = ImageFolder(str(mirrored(tmp_path)))
    path = data.samples[3][0]
    Path(path.removeprefix("mirror://")).unlink()
    with pytest.raises(SampleError, match=rf"the image {path} cannot be read: .*No such file") as caught:
        data.__getitems__([0, 3])
    assert caught.value.row == 1

    def refuse(store: MirrorStore, key: str) -> bytes:
        raise PermissionError(13, "the password is wrong", key)

    monkeypatch.setattr(MirrorStore, "read_whole", refuse)
    with pytest.raises(PermissionError, match="the password is wrong"):
        data[0]
    monkeypatch.setattr(LocalStore, "read_whole", refuse)
    with pytest.raises(SampleError, match="the password is wrong"):
        ImageFolder(tmp_path)[0]
