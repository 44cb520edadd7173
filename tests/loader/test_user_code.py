"""User code runs in shardio's worker processes, with bit-identical results."""

from __future__ import annotations

import importlib
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812  # as its users write
import msgpack
import numpy as np
import pytest
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch.utils.data import Subset, default_collate

from shardio import DataLoader, EpochSampler, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.errors import Stage
from shardio.libraries import import_library
from shardio.loader.batches import collate_channels_last
from shardio.transforms import Compose, MultiCrop, RandomHorizontalFlip, RandomResizedCrop
from tests.buffers import assert_same, buffer_of, pack_pictures, save_npy
from tests.loader.programs import seed_all
from tests.loader.user_code import (
    collate_mixed,
    collate_pair,
    collate_unusual,
    decode_some,
    fail,
    mean,
    tokenize,
    transform_some,
)
from tests.processes import run_python
from tests.tars import write_tar

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")

Pixels = NDArray[np.uint8]
NUM_SAMPLES = 40
CROP = RandomResizedCrop(48)
V2 = [v2.RandomResizedCrop(32)]


@pytest.fixture(scope="module")
def few_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_pictures(tmp_path_factory.mktemp("few"), num_samples=20)


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with images, masks, captions, sounds and MessagePack data. Every fourth sample has no caption."""
    draw, members = np.random.default_rng(3), []
    for number in range(NUM_SAMPLES):
        pixels = draw.integers(0, 256, (40, 48, 3), dtype=np.uint8)
        fields = {"npy": save_npy(pixels), "mask.npy": save_npy(pixels[..., 0]), "cls": b"%d" % (number % 3)}
        fields |= {"txt": b"w " * (1 + number % 5)} if number % 4 else {}
        fields |= {"snd": draw.bytes(100), "msgpack": msgpack.packb({"id": number, 3: [number]})}
        members += [(f"key{number:02}.{name}", content) for name, content in fields.items()]
    write_tar(path := tmp_path_factory.mktemp("captioned") / "a.tar", members)
    return path


def assert_batches_are_the_oracles(make: Callable[[], ShardMapDataset], collate_fn: Any = None) -> Any:
    """Compare two epochs with torch's collation of the dataset. Return the last epoch's batches from the workers."""
    epochs = list[list[Any]]()
    for epoch in range(2):
        dataset = make()
        dataset.set_epoch(epoch)
        sampler = EpochSampler(dataset)
        sampler.set_epoch(epoch)
        options: dict[str, Any] = {"sampler": list(sampler), "collate_fn": collate_fn or collate_channels_last}
        epochs.append(list(torch.utils.data.DataLoader(dataset, 8, **options)))
    for num_workers in (0, 1):
        dataset = make()
        options = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "collate_fn": collate_fn}
        options |= {"prefetch_factor": 4} if num_workers else {}  # An epoch has few batches, which need few buffers.
        loader = DataLoader(dataset, 8, sampler=EpochSampler(dataset), **options)
        assert not loader.calls_dataset
        for expected in epochs:
            got = list(loader)
            assert_same(got, expected)
    return got


def as_floats() -> Callable[[Pixels], Any]:
    return lambda image: image[:40, :40].astype(np.float32) / 255


def draw_from_all() -> Callable[[Pixels], Any]:
    def transform(image: Pixels) -> Any:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # as users do
        return np.array([*drawn, float(image.mean())])

    return transform


def import_torch_late() -> Callable[[Pixels], Any]:
    """Return a function that imports torch on its first call, and changes its input."""

    def transform(image: Pixels) -> Any:
        import torch

        image[:] //= 2
        return np.array([float(torch.rand(())), float(image.mean())])

    return transform


def hidden_albumentations() -> Callable[[Pixels], Any]:
    pipeline = A.Compose([A.RandomCrop(32, 32), A.ColorJitter(p=1)])
    return lambda image: pipeline(image=image)["image"]


CASES: dict[str, Callable[[], Any]] = {
    "a lambda after a crop": lambda: Compose([CROP, as_floats(), np.negative]),
    "a function before a flip": lambda: Compose([lambda image: image[:30, :40], RandomHorizontalFlip()]),
    "all global generators": draw_from_all,
    "a late import of torch": lambda: Compose([RandomResizedCrop(16), import_torch_late()]),
    "one channel": lambda: lambda image: np.ascontiguousarray(image[:20, :24, :1]),
    "four channels": lambda: lambda image: np.dstack([image, image[..., 0]])[:20, :24],
    "tensors of images": lambda: lambda image: torch.from_numpy(image[:30, :30].copy()).permute(2, 0, 1),
    "tensors of halves": lambda: lambda image: torch.from_numpy(image[:30, :30].copy()).half(),
    "what numpy has no dtype for": lambda: lambda image: torch.from_numpy(image[:9, :9].copy()).bfloat16(),
    "dicts": lambda: lambda image: {"pixels": image[:8, :8].copy(), "mean": float(image.mean())},
    "v2 on tensors": lambda: v2.Compose([*V2, v2.ColorJitter(0.5), v2.ToDtype(torch.float32, scale=True)]),
    "v2 on Pillow images": lambda: v2.Compose([*V2, v2.RandomRotation(20), v2.PILToTensor()]),
    "Albumentations": lambda: A.Compose([A.RandomResizedCrop((32, 32)), A.HorizontalFlip()], seed=1),
    "Albumentations in a function": hidden_albumentations,
    "several crops": lambda: MultiCrop([RandomResizedCrop(32), Compose([CROP, as_floats()])]),
}
IN_BUFFERS = {"a lambda after a crop", "a function before a flip", "tensors of images", "tensors of halves"}
IN_BUFFERS |= {"v2 on tensors", "v2 on Pillow images", "Albumentations", "Albumentations in a function"}
RARE = {"one channel", "tensors of images", "tensors of halves", "dicts", "v2 on Pillow images", "Albumentations"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in CASES])
def test_a_transforms_batches_are_those_of_the_dataset_itself(few_pictures: Path, name: str) -> None:
    decode: Any = "pil" if "Pillow" in name else "array"
    transform = CASES[name]()  # All loaders share this object.
    *_, (images, _) = assert_batches_are_the_oracles(
        lambda: ShardMapDataset(few_pictures, fields=("image", "key"), transform=transform, decode=decode)
    )
    assert name not in IN_BUFFERS or buffer_of(images) is not None


def test_a_tokenizing_transform_sample(captioned: Path) -> None:
    options: dict[str, Any] = {"fields": ("npy", "txt", "key"), "transform_sample": tokenize, "missing": None}
    batch, *_ = assert_batches_are_the_oracles(lambda: ShardMapDataset([captioned], **options))
    assert (batch["image"].shape, batch["tokens"].shape) == ((8, 3, 40, 48), (8, 2000))
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert buffer_of(batch["image"]) == buffer_of(batch["tokens"]) is not None
    assert len(set(batch["noise"].tolist())) == 8


def test_libraries_transforms_get_what_they_take_and_crop_masks_with_images(captioned: Path, pictures: Path) -> None:
    pipeline = A.Compose([A.RandomCrop(16, 16), A.HorizontalFlip()])

    def crop(sample: dict[str, Any]) -> tuple[Any, Any]:
        both = pipeline(image=sample["npy"], mask=sample["mask.npy"])
        return both["image"], both["mask"]

    (images, masks), *_ = assert_batches_are_the_oracles(
        lambda: ShardMapDataset([captioned], fields=("npy", "mask.npy"), transform_sample=crop)
    )
    assert torch.equal(images[:, 0], masks)
    for transform in (pipeline, v2.RandomCrop(16)):
        dataset = ShardMapDataset(pictures, fields=("image", "label"), transform_sample=transform)
        assert dataset[0]["image"].shape == (3, 16, 16)
    dataset = ShardMapDataset(pictures, fields="image", transform_sample=lambda sample: sample["image"], decode="pil")
    assert dataset[0].size == (64, 56)


def test_custom_decoders_and_messagepack_and_missing_fields(captioned: Path) -> None:
    decoders = {"snd": lambda content: np.frombuffer(content, np.uint8) + random.randrange(100)}

    def make() -> ShardMapDataset:
        return ShardMapDataset([captioned], fields=("snd", "msgpack"), decoders=decoders)

    assert make()[7][1] == {"id": 7, 3: [7]}
    (sounds, packed), *_ = assert_batches_are_the_oracles(make)
    assert sounds.shape == (8, 100)
    assert packed["id"].tolist() == packed[3][0].tolist()

    with pytest.raises(SampleError, match=r"has no field 'txt': request only fields .* or set missing=None"):
        ShardMapDataset([captioned], fields="txt")[0]
    dataset = ShardMapDataset([captioned], fields="txt", missing=None, decoders={"txt": bytes.split})
    assert [dataset[0], dataset[1]] == [None, [b"w", b"w"]]
    for num_workers in (0, 1):
        with pytest.raises(TypeError, match="sample 0 of a batch has None as a value"):
            next(iter(DataLoader(dataset, 8, num_workers=num_workers)))


@pytest.mark.parametrize("collate_fn", [collate_pair, collate_unusual, lambda samples: None, len])
def test_a_custom_collate_fn(pictures: Path, collate_fn: Any) -> None:
    dataset = ShardMapDataset(pictures, transform=CROP)
    batch, *_ = assert_batches_are_the_oracles(lambda: ShardMapDataset(pictures, transform=CROP), collate_fn)
    if collate_fn is collate_pair:
        assert buffer_of(batch.images) is not None
    if collate_fn is collate_unusual:
        assert batch[0].stride() == next(iter(DataLoader(dataset, 8, collate_fn=collate_unusual)))[0].stride()


@pytest.mark.parametrize("collate_fn", [collate_mixed, pytest.param(None, marks=pytest.mark.slow)])
def test_any_number_of_workers_draws_the_same_also_after_a_resumption(pictures: Path, collate_fn: Any) -> None:
    transform = Compose([RandomResizedCrop(32), hidden_albumentations(), v2.RandomPhotometricDistort()])

    def make(num_workers: int) -> DataLoader:
        dataset = ShardDataset(pictures, shuffle=True, transform=CROP if collate_fn else transform)
        return DataLoader(dataset, 8, num_workers=num_workers, collate_fn=collate_fn)

    expected = list(make(0))
    assert collate_fn is None or len({batch["weight"] for batch in expected}) == len(expected)
    begun = make(2)
    iterator = iter(begun)
    got = [next(iterator) for _ in range(5)]
    resumed = make(1)
    resumed.load_state_dict(begun.state_dict())
    assert_same([*got, *resumed], expected)


def test_settings_that_change_between_epochs_apply(pictures: Path) -> None:
    crop = A.RandomResizedCrop((32, 32))
    dataset = ShardMapDataset(pictures, fields="image", transform=A.Compose([crop]))
    for num_workers in (0, 1):
        loader = DataLoader(dataset, 8, num_workers=num_workers)
        for side in (32, 24):
            crop.size = (side, side)
            assert next(iter(loader)).shape == (8, 3, side, side)


def test_the_generators_of_the_calling_process_stay_as_they_are_and_without_seeds_each_process_draws_others(
    pictures: Path,
) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    dataset = ShardMapDataset(pictures, fields="image", transform=draw_from_all())
    dataset.set_epoch(0)
    seed_all(1)
    expected = draw()
    seed_all(1)
    first = dataset[3]
    assert draw() == expected
    assert np.array_equal(dataset[3], first)

    pipeline = A.Compose([A.GaussNoise(p=1)], seed=1)

    def transform(image: Pixels) -> Any:
        return np.array([*draw_from_all()(image)[:3], float(pipeline(image=image)["image"].std())])

    dataset = ShardMapDataset(pictures, fields="image", transform=transform, seed_transforms=False)
    dataset.set_epoch(0)
    assert not np.array_equal(dataset[3], dataset[3])
    loader = DataLoader(Subset(dataset, [0] * 64), 32, num_workers=4, prefetch_factor=1)
    for column in torch.cat([*loader, *loader]).T:
        assert len(set(column.tolist())) == 2 * 64


def failing() -> Callable[[Any], Any]:
    """Return a function that is pickled by value, so that worker processes do not import this module."""

    def fail(image: Any) -> Any:
        raise KeyError("of the user")

    return fail


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_keeps_its_type_and_names_the_sample(pictures: Path, images: Path, num_workers: int) -> None:
    datasets: list[Any] = [
        ShardMapDataset(pictures, fields=("image", "key"), transform=Compose([RandomResizedCrop(16), failing()])),
        ImageFolder(images, transform_sample=lambda sample: fail(sample)),
    ]
    for dataset, suffix in zip(datasets, (".tar", ".jpg"), strict=True):
        with pytest.raises(KeyError, match="of the user") as caught:
            next(iter(DataLoader(dataset, 4, num_workers=num_workers)))
        said = "".join([*getattr(caught.value, "__notes__", []), str(caught.value.__cause__)])
        assert "while transforming sample " in said
        assert suffix in said
        assert not num_workers or 'raise KeyError("of the user")' in said
    folder = ImageFolder(images, transform=RandomResizedCrop(16))
    with pytest.raises(KeyError, match="of the user"):
        next(iter(DataLoader(folder, 4, num_workers=num_workers, collate_fn=lambda samples: fail(samples))))


def test_a_module_that_could_not_be_loaded_is_named_and_loaded_again_in_the_next_epoch(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = tmp_path / "mended.py", "def transform(image):\n    return image[:16, :16].copy()\n"
    path.write_text(original)
    monkeypatch.syspath_prepend(str(tmp_path))
    transform = importlib.import_module("mended").transform
    loader = DataLoader(ShardMapDataset(pictures, fields="image", transform=transform), 4, num_workers=1)
    path.write_text("raise KeyError('of the user')")
    with pytest.raises(KeyError, match="of the user") as caught:
        next(iter(loader))
    assert "while loading the dataset's transform in a worker process" in str(caught.value.__cause__)
    path.write_text(original)
    assert next(iter(loader)).shape == (4, 3, 16, 16)


def test_a_dataset_whose_transform_cannot_be_pickled_is_called(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shardio")
    lock = threading.Lock()

    def transform(image: Pixels) -> Pixels:
        with lock:
            return image[:16, :16].copy()

    folder = ImageFolder(images, transform=transform)
    loader = DataLoader(folder, 4, sampler=EpochSampler(folder), num_workers=1, multiprocessing_context="fork")
    assert loader.calls_dataset
    assert [len(batch) for batch, _ in loader] == [4, 4, 4, 4, 4, 1]
    assert "the dataset's own methods make the samples of this loader: the transform cannot be pickled" in caplog.text
    assert loader.stats().num_samples == 21


SCRIPT = """
import sys
import numpy as np
from shardio import DataLoader, ShardMapDataset

print("the script runs")  # It has no guard: a worker process that ran it would start others.
SCALE = 3

class Half:
    def __init__(self, side):
        self.side = side
    def __call__(self, image):
        return shrink(image, self.side)

def shrink(image, side):
    return (image[:side, :side] // SCALE).astype(np.uint8)

dataset = ShardMapDataset(sys.argv[1], fields="image", transform=Half(20))
batch = next(iter(DataLoader(dataset, 4, num_workers=1)))
assert batch.tolist() == next(iter(DataLoader(dataset, 4))).tolist()
print(tuple(batch.shape))
"""


@pytest.mark.slow
def test_what_the_script_defines_is_sent_without_running_the_script_again(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_python(tmp_path / "script.py", pictures)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["the script runs", "(4, 3, 20, 20)"]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"missing": "skip"}, {}, ValueError, "missing must be 'error' or None, got 'skip'"),
    ({"decoders": {"flac": bytes}}, {}, ValueError, "but fields=.* does not name it"),
    ({"decoders": {"key": bytes}}, {}, ValueError, "which is not a stored field"),
    ({"decoders": {"txt": 3}}, {}, TypeError, "decoders must map fields to functions"),
    ({"transform_sample": 3}, {}, TypeError, "transform_sample must be callable, got int"),
    ({}, {"on_error_in": ("collate",)}, ValueError, "on_error_in must be one of 'read', 'decode', 'transform'"),
    ({}, {"on_error_in": "read"}, TypeError, "on_error_in must be a tuple of stages"),
    ({}, {"on_error_in": ()}, ValueError, "on_error_in is empty"),
]


def test_wrong_arguments_are_refused(captioned: Path) -> None:
    for options, of_loader, error, why in REFUSED:
        with pytest.raises(error, match=why):
            DataLoader(ShardDataset([captioned], fields=("txt", "key"), **options), **of_loader)


def test_marks_of_repeats_reach_the_collate_fn(pictures: Path) -> None:
    for num_workers in (0, 1):
        dataset = ShardDataset(pictures, fields="key", remainder="mask", rank=0, world_size=3)
        samples = [
            sample for batch in DataLoader(dataset, 8, num_workers=num_workers, collate_fn=list) for sample in batch
        ]
        assert all(isinstance(key, str) and is_valid for key, is_valid in samples)


@pytest.mark.parametrize(
    ("options", "num_workers", "is_called"),
    [
        ({"transform_sample": transform_some}, 0, False),
        ({"decoders": {"msgpack": decode_some}}, 2, False),
        ({"transform_sample": transform_some}, 1, True),
        ({"decoders": {"msgpack": decode_some}}, 0, True),
    ],
)
def test_samples_with_which_user_code_fails_are_left_out_if_they_say_so(
    captioned: Path, tmp_path: Path, options: dict[str, Any], num_workers: int, is_called: bool
) -> None:
    stage: Stage = "transform" if "transform_sample" in options else "decode"
    others: dict[str, Any] = {"worker_init_fn": lambda worker_id: None} if is_called else {}
    log = tmp_path / "quarantine.jsonl"

    def make(covered: Stage) -> DataLoader:
        dataset = ShardDataset([captioned], fields="msgpack", shuffle=True, **options)
        others.update(num_workers=num_workers, on_error_in=(covered,), quarantine=log)
        return DataLoader(dataset, 8, on_error="skip", **others)

    with pytest.warns(RuntimeWarning, match="unreadable samples skipped in epoch 0: 4"):
        got = torch.cat(list(loader := make(stage))).tolist()
    assert loader.calls_dataset == is_called
    assert sorted(got) == [number for number in range(NUM_SAMPLES) if number % 9 != 4]
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(entry["key"] for entry in entries) == ["key04", "key13", "key22", "key31"]
    assert all("LookupError: number" in entry["error"] for entry in entries)
    with pytest.raises(LookupError, match="is not wanted"):
        list(make("read"))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_statistics_say_what_was_recognized_and_what_runs_in_python(images: Path, num_workers: int) -> None:
    def find_stats(transform: Any, **options: Any) -> Any:
        loader = DataLoader(ImageFolder(images, transform=transform), 8, num_workers=num_workers, **options)
        list(loader)
        return loader.stats()

    pipeline = A.Compose([A.RandomResizedCrop((16, 16)), A.HorizontalFlip(), A.GaussNoise()])
    stats = find_stats(pipeline, collate_fn=default_collate)
    assert [each.partition("(")[0] for each in stats.recognized] == ["RandomResizedCrop", "RandomHorizontalFlip"]
    assert stats.in_python == ("GaussNoise", "default_collate")
    assert 0 < stats.python_s == stats.transform_s
    stats = find_stats(mean)
    assert (stats.recognized, stats.in_python) == ((), ("mean",))
    stats = find_stats(RandomResizedCrop(16))
    assert (stats.recognized, stats.in_python, stats.python_s) == ((), (), 0)


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (lambda image: np.dstack([image, image])[:20, :24], (6, 20, 24)),
        (lambda image: image[:20, :24, :1].copy(), (1, 20, 24)),
        (lambda image: image[:20, :24].transpose(2, 0, 1).copy(), (3, 20, 24)),
    ],
)
def test_arrays_of_pixels_become_channels_first_unless_they_are(images: Path, transform: Any, shape: Any) -> None:
    folder = ImageFolder(images, transform=transform)
    assert tuple(folder[0][0].shape) == shape
    assert next(iter(DataLoader(folder, 4)))[0].shape == (4, *shape)
