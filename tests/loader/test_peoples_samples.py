"""Whole samples, fields and batches that people's own code makes, in shardio's worker processes and anywhere else."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import albumentations
import msgpack
import numpy as np
import pytest
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch.utils.data import default_collate

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.errors import Stage
from shardio.libraries import import_library
from shardio.loader.collate import collate_channels_last
from shardio.sample import Sample
from shardio.shards import write_shard
from shardio.storage import parse_location
from shardio.transforms import RandomResizedCrop
from tests.buffers import assert_same, buffer_of
from tests.loader.peoples_code import (
    collate_mixed,
    collate_pair,
    collate_unusual,
    decode_some,
    fail,
    mean,
    tokenize,
    transform_some,
)

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")

NUM_SAMPLES = 40


def save_npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with images, masks, captions, sounds and MessagePack; every fourth has no caption."""
    draw = np.random.default_rng(3)
    samples = []
    for number in range(NUM_SAMPLES):
        pixels = draw.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        fields = {"npy": save_npy(pixels), "mask.npy": save_npy(pixels[..., 0]), "cls": b"%d" % (number % 3)}
        fields |= {"txt": b"w " * (1 + number % 5)} if number % 4 else {}
        fields |= {"snd": draw.bytes(100), "msgpack": msgpack.packb({"id": number, 3: [number]})}
        samples.append(Sample(key=f"key{number:02}", fields=fields, origin=""))
    path = tmp_path_factory.mktemp("captioned") / "a.tar"
    write_shard(parse_location(path), samples)
    return path


def oracle(dataset: ShardMapDataset, epoch: int, collate_fn: Any = collate_channels_last) -> Iterator[Any]:
    """Yield the batches of an epoch as torch makes them of the samples."""
    dataset.set_epoch(epoch)
    sampler = EpochSampler(dataset)
    sampler.set_epoch(epoch)
    yield from torch.utils.data.DataLoader(dataset, 8, sampler=list(sampler), collate_fn=collate_fn)


def assert_batches_are_the_oracles(make: Callable[[], ShardMapDataset], collate_fn: Any = None) -> Any:
    """Compare with torch's collation of the dataset, for two epochs; return a batch that a worker process made."""
    epochs = [list(oracle(make(), epoch, collate_fn or collate_channels_last)) for epoch in range(2)]
    for num_workers in (0, 2):
        dataset = make()
        loader = (
            DataLoader(
                dataset,
                8,
                sampler=EpochSampler(dataset),
                num_workers=num_workers,
                collate_fn=collate_fn,
                prefetch_factor=4,
            )
            if num_workers
            else DataLoader(dataset, 8, sampler=EpochSampler(dataset), collate_fn=collate_fn)
        )
        assert not loader.calls_dataset
        for expected in epochs:
            got = list(loader)
            assert_same(got, expected)
    return got[0]


def test_a_tokenising_transform_sample(captioned: Path) -> None:
    def make() -> ShardMapDataset:
        return ShardMapDataset([captioned], fields=("npy", "txt", "key"), transform_sample=tokenize, missing=None)

    batch = assert_batches_are_the_oracles(make)
    assert batch["image"].shape == (8, 3, 40, 48)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert batch["tokens"].shape == (8, 2000)
    assert buffer_of(batch["image"]) == buffer_of(batch["tokens"]) is not None
    assert len(set(batch["noise"].tolist())) == 8


def test_images_are_cropped_with_their_masks_by_albumentations(captioned: Path) -> None:
    pipeline = albumentations.Compose([albumentations.RandomCrop(16, 16), albumentations.HorizontalFlip()])

    def crop(sample: dict[str, Any]) -> tuple[Any, Any]:
        both = pipeline(image=sample["npy"], mask=sample["mask.npy"])
        return both["image"], both["mask"]

    def make() -> ShardMapDataset:
        return ShardMapDataset([captioned], fields=("npy", "mask.npy"), transform_sample=crop)

    images, masks = assert_batches_are_the_oracles(make)
    assert torch.equal(images[:, 0], masks)


def test_libraries_transforms_get_what_they_take(pictures: Path) -> None:
    crop = albumentations.Compose([albumentations.RandomCrop(16, 16)])
    dataset = ShardMapDataset(pictures, fields="image", transform_sample=crop)
    assert dataset[0]["image"].shape == (3, 16, 16)
    dataset = ShardMapDataset(pictures, fields=("image", "label"), transform_sample=v2.RandomCrop(16))
    assert dataset[0]["image"].shape == (3, 16, 16)
    dataset = ShardMapDataset(pictures, fields="image", transform_sample=lambda sample: sample["image"], decode="pil")
    assert dataset[0].size == (64, 56)


def test_decoders_of_ones_own_and_messagepack(captioned: Path) -> None:
    def make() -> ShardMapDataset:
        decoders = {"snd": lambda content: np.frombuffer(content, np.uint8) + random.randrange(100)}
        return ShardMapDataset([captioned], fields=("snd", "msgpack"), decoders=decoders)

    assert make()[7][1] == {"id": 7, 3: [7]}
    sounds, packed = assert_batches_are_the_oracles(make)
    assert sounds.shape == (8, 100)
    assert packed["id"].tolist() == packed[3][0].tolist()


def test_a_missing_field_is_an_error_or_none(captioned: Path) -> None:
    with pytest.raises(SampleError, match=r"has no field 'txt': request only fields .* or set missing=None"):
        ShardMapDataset([captioned], fields="txt")[0]
    dataset = ShardMapDataset([captioned], fields="txt", missing=None, decoders={"txt": bytes.split})
    assert [dataset[0], dataset[1]] == [None, [b"w", b"w"]]
    for num_workers in (0, 1):
        with pytest.raises(TypeError, match="sample 0 of a batch has None as a value"):
            next(iter(DataLoader(dataset, 8, num_workers=num_workers)))
    with pytest.raises(ValueError, match="missing must be 'error' or None, got 'skip'"):
        ShardMapDataset([captioned], fields="txt", missing="skip")  # type: ignore[arg-type]  # the test


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"decoders": {"flac": bytes}}, ValueError, "but fields=.* does not name it"),
        ({"decoders": {"key": bytes}}, ValueError, "which is not a stored field"),
        ({"decoders": {"txt": 3}}, TypeError, "decoders must map fields to functions"),
        ({"transform_sample": 3}, TypeError, "transform_sample must be callable, got int"),
    ],
)
def test_wrong_arguments_are_refused(captioned: Path, options: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        ShardDataset([captioned], fields=("txt", "key"), **options)


@pytest.mark.parametrize("collate_fn", [collate_pair, collate_unusual, lambda samples: None, len])
def test_a_collate_fn_of_ones_own(pictures: Path, collate_fn: Any) -> None:
    def make() -> ShardMapDataset:
        return ShardMapDataset(pictures, transform=RandomResizedCrop(48))

    batch = assert_batches_are_the_oracles(make, collate_fn)
    if collate_fn is collate_pair:
        assert buffer_of(batch.images) is not None


def test_strides_are_kept(pictures: Path) -> None:
    dataset = ShardMapDataset(pictures, transform=RandomResizedCrop(48))
    here, there = (
        next(iter(DataLoader(dataset, 8, num_workers=n, collate_fn=collate_unusual, sampler=EpochSampler(dataset))))
        for n in (0, 1)
    )
    assert [each.stride() for each in here[:1]] == [each.stride() for each in there[:1]]


def test_arrays_of_a_batch_are_not_overwritten(pictures: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        return default_collate(samples)[0].numpy()

    dataset = ShardDataset(pictures, transform=RandomResizedCrop(48), shuffle=True)
    kept = list(DataLoader(dataset, 8, num_workers=2, collate_fn=collate, prefetch_factor=2))
    dataset.set_epoch(0)
    expected = list(DataLoader(dataset, 8, collate_fn=collate))
    assert all(map(np.array_equal, kept, expected))


def test_a_collate_fn_draws_the_same_on_any_number_of_workers_and_after_a_resumption(pictures: Path) -> None:
    def make(num_workers: int) -> DataLoader:
        dataset = ShardDataset(pictures, shuffle=True, transform=RandomResizedCrop(48))
        return DataLoader(dataset, 8, num_workers=num_workers, collate_fn=collate_mixed)

    expected = list(make(0))
    assert len({batch["weight"] for batch in expected}) == len(expected)
    begun = make(2)
    iterator = iter(begun)
    got = [next(iterator) for _ in range(5)]
    resumed = make(1)
    resumed.load_state_dict(begun.state_dict())
    assert_same([*got, *resumed], expected)


def test_marks_of_repeats_reach_the_collate_fn(pictures: Path) -> None:
    for num_workers in (0, 1):
        dataset = ShardDataset(pictures, fields="key", remainder="mask", rank=0, world_size=3)
        batches = list(DataLoader(dataset, 8, num_workers=num_workers, collate_fn=list))
        assert [valid for batch in batches for _, valid in batch].count(False) == 0
        assert all(isinstance(key, str) for batch in batches for key, _ in batch)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_keeps_its_type(images: Path, num_workers: int) -> None:
    folder = ImageFolder(images, transform=RandomResizedCrop(16))
    with pytest.raises(KeyError, match="of the user"):
        next(iter(DataLoader(folder, 4, num_workers=num_workers, collate_fn=lambda samples: fail(samples))))
    folder = ImageFolder(images, transform_sample=lambda sample: fail(sample))
    with pytest.raises(KeyError, match="of the user") as error_info:
        next(iter(DataLoader(folder, 4, num_workers=num_workers)))
    said = "".join([*getattr(error_info.value, "__notes__", []), str(error_info.value.__cause__)])
    assert "while transforming sample " in said


@pytest.mark.parametrize(
    ("options", "num_workers", "takes_torch"),
    [
        ({"transform_sample": transform_some}, 0, False),
        ({"decoders": {"msgpack": decode_some}}, 2, False),
        ({"transform_sample": transform_some}, 1, True),
        ({"decoders": {"msgpack": decode_some}}, 0, True),
    ],
)
def test_samples_with_which_peoples_code_fails_are_left_out_if_they_say_so(
    captioned: Path, tmp_path: Path, options: dict[str, Any], num_workers: int, takes_torch: bool
) -> None:
    stage: Stage = "transform" if "transform_sample" in options else "decode"
    others: dict[str, Any] = {"worker_init_fn": lambda worker_id: None} if takes_torch else {}
    stages: tuple[Stage, ...] = (stage, "read")
    for covered in stages:
        dataset = ShardDataset([captioned], fields="msgpack", shuffle=True, **options)
        loader = DataLoader(
            dataset,
            8,
            num_workers=num_workers,
            on_error="skip",
            on_error_in=(covered,),
            quarantine=tmp_path / "quarantine.jsonl",
            **others,
        )
        assert loader.calls_dataset == takes_torch
        if covered == "read":
            with pytest.raises(LookupError, match="is not wanted"):
                list(loader)
            continue
        with pytest.warns(RuntimeWarning, match="unreadable samples skipped in epoch 0: 4"):
            got = torch.cat(list(loader)).tolist()
        assert sorted(got) == [number for number in range(NUM_SAMPLES) if number % 9 != 4]
        entries = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
        assert sorted(entry["key"] for entry in entries) == ["key04", "key13", "key22", "key31"]
        assert all("LookupError: number" in entry["error"] for entry in entries)


def test_stages_are_checked(captioned: Path) -> None:
    dataset = ShardDataset([captioned], fields="key")
    with pytest.raises(ValueError, match="on_error_in must be one of 'read', 'decode', 'transform'"):
        DataLoader(dataset, on_error_in=("collate",))  # type: ignore[arg-type]  # the test
    with pytest.raises(TypeError, match="on_error_in must be a tuple of stages"):
        DataLoader(dataset, on_error_in="read")  # type: ignore[arg-type]  # the test
    with pytest.raises(ValueError, match="on_error_in is empty"):
        DataLoader(dataset, on_error_in=())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_statistics_say_what_was_recognised_and_what_runs_in_python(images: Path, num_workers: int) -> None:
    pipeline = albumentations.Compose(
        [albumentations.RandomResizedCrop((16, 16)), albumentations.HorizontalFlip(), albumentations.GaussNoise()]
    )
    folder = ImageFolder(images, transform=pipeline)
    loader = DataLoader(folder, 8, num_workers=num_workers, collate_fn=default_collate)
    list(loader)
    stats = loader.stats()
    assert [each.partition("(")[0] for each in stats.recognised] == ["RandomResizedCrop", "RandomHorizontalFlip"]
    assert stats.in_python == ("GaussNoise", "default_collate")
    assert 0 < stats.python_s == stats.transform_s
    loader = DataLoader(ImageFolder(images, transform=mean), 8, num_workers=num_workers)
    list(loader)
    assert (loader.stats().recognised, loader.stats().in_python) == ((), ("mean",))
    loader = DataLoader(ImageFolder(images, transform=RandomResizedCrop(16)), 8, num_workers=num_workers)
    list(loader)
    assert (loader.stats().recognised, loader.stats().in_python, loader.stats().python_s) == ((), (), 0)


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (lambda image: np.dstack([image, image])[:20, :24], (6, 20, 24)),
        (lambda image: image[:20, :24, :1].copy(), (1, 20, 24)),
        (lambda image: image[:20, :24].transpose(2, 0, 1).copy(), (3, 20, 24)),
    ],
)
def test_arrays_of_pixels_become_channels_first_unless_they_are(
    images: Path, transform: Any, shape: tuple[int, ...]
) -> None:
    folder = ImageFolder(images, transform=transform)
    assert tuple(folder[0][0].shape) == shape
    assert next(iter(DataLoader(folder, 4)))[0].shape == (4, *shape)
