"""People's own transforms run in shardio's worker processes, and give what they give anywhere else, bit for bit."""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch.utils.data import Subset

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.libraries import import_library
from shardio.loader.collate import collate_channels_last
from shardio.transforms import Compose, MultiCrop, RandomHorizontalFlip, RandomResizedCrop
from tests.buffers import assert_same, buffer_of, pack_pictures
from tests.processes import run_python

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")

Pixels = NDArray[np.uint8]


def as_floats() -> Callable[[Pixels], Any]:
    return lambda image: image[:40, :40].astype(np.float32) / 255


def draw_from_all() -> Callable[[Pixels], Any]:
    def transform(image: Pixels) -> Any:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # as people do
        return np.array([*drawn, float(image.mean())])

    return transform


def import_torch_late() -> Callable[[Pixels], Any]:
    """Return a function whose worker process does not know torch before the first call. It changes its input."""

    def transform(image: Pixels) -> Any:
        import torch

        image[:] //= 2
        return np.array([float(torch.rand(())), float(image.mean())])

    return transform


def hidden_albumentations() -> Callable[[Pixels], Any]:
    pipeline = albumentations.Compose([albumentations.RandomCrop(32, 32), albumentations.ColorJitter(p=1)])
    return lambda image: pipeline(image=image)["image"]


CASES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "a lambda after a crop": lambda: (Compose([RandomResizedCrop(48), as_floats(), np.negative]), {}),
    "a function before a flip": lambda: (Compose([lambda image: image[:30, :40], RandomHorizontalFlip()]), {}),
    "all global generators": lambda: (draw_from_all(), {}),
    "a late import of torch": lambda: (Compose([RandomResizedCrop(16), import_torch_late()]), {}),
    "one channel": lambda: (lambda image: np.ascontiguousarray(image[:20, :24, :1]), {}),
    "four channels": lambda: (lambda image: np.dstack([image, image[..., 0]])[:20, :24], {}),
    "tensors of images": lambda: (lambda image: torch.from_numpy(image[:30, :30].copy()).permute(2, 0, 1), {}),
    "tensors of halves": lambda: (lambda image: torch.from_numpy(image[:30, :30].copy()).half(), {}),
    "what numpy has no dtype for": lambda: (lambda image: torch.from_numpy(image[:9, :9].copy()).bfloat16(), {}),
    "dicts": lambda: (lambda image: {"pixels": image[:8, :8].copy(), "mean": float(image.mean())}, {}),
    "torchvision on tensors": lambda: (
        v2.Compose([v2.RandomResizedCrop(32), v2.ColorJitter(0.5), v2.ToDtype(torch.float32, scale=True)]),
        {},
    ),
    "torchvision on Pillow images": lambda: (
        v2.Compose([v2.RandomResizedCrop(32), v2.RandomRotation(20), v2.PILToTensor()]),
        {"decode": "pil"},
    ),
    "Albumentations": lambda: (
        albumentations.Compose([albumentations.RandomResizedCrop((32, 32)), albumentations.HorizontalFlip()], seed=1),
        {},
    ),
    "Albumentations in a function": lambda: (hidden_albumentations(), {}),
    "several crops": lambda: (MultiCrop([RandomResizedCrop(32), Compose([RandomResizedCrop(48), as_floats()])]), {}),
}
IN_BUFFERS = {
    *("a lambda after a crop", "a function before a flip", "tensors of images", "tensors of halves"),
    *("torchvision on tensors", "torchvision on Pillow images", "Albumentations", "Albumentations in a function"),
}


@pytest.fixture(scope="module")
def few_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for three batches, the last of which is short."""
    return pack_pictures(tmp_path_factory.mktemp("few"), num_samples=20)


def oracle(dataset: ShardMapDataset, epoch: int) -> Iterator[Any]:
    """Yield the batches of an epoch as torch makes them of the samples."""
    dataset.set_epoch(epoch)
    sampler = EpochSampler(dataset)
    sampler.set_epoch(epoch)
    loader = torch.utils.data.DataLoader(dataset, 8, sampler=list(sampler), collate_fn=collate_channels_last)
    yield from loader


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_the_dataset_itself(few_pictures: Path, name: str) -> None:
    transform, settings = CASES[name]()
    dataset = ShardMapDataset(few_pictures, fields=("image", "key"), transform=transform, **settings)
    epochs = [list(oracle(dataset, epoch)) for epoch in range(2)]
    for num_workers in (0, 2):
        dataset = ShardMapDataset(few_pictures, fields=("image", "key"), transform=transform, **settings)
        options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        loader = DataLoader(dataset, 8, sampler=EpochSampler(dataset), **options)
        assert not loader.calls_dataset
        for expected in epochs:
            got = list(loader)
            assert_same(got, expected)
            if num_workers and name in IN_BUFFERS:
                assert buffer_of(got[-1][0]) is not None


def test_settings_that_change_between_epochs_apply(pictures: Path) -> None:
    """Also those of a transform that is replaced by shardio's."""
    crop = albumentations.RandomResizedCrop((32, 32))
    dataset = ShardMapDataset(pictures, fields="image", transform=albumentations.Compose([crop]))
    for num_workers in (0, 1):
        loader = DataLoader(dataset, 8, num_workers=num_workers)
        for side in (32, 24):
            crop.size = (side, side)
            assert next(iter(loader)).shape == (8, 3, side, side)


def test_any_number_of_workers_draws_the_same_also_after_a_resumption(pictures: Path) -> None:
    def make(num_workers: int) -> DataLoader:
        transform = Compose([RandomResizedCrop(32), hidden_albumentations(), v2.RandomPhotometricDistort()])
        dataset = ShardDataset(pictures, fields=("image", "key"), shuffle=True, transform=transform)
        return DataLoader(dataset, 8, num_workers=num_workers)

    expected = list(make(0))
    assert_same(list(make(4)), expected)
    begun = make(2)
    iterator = iter(begun)
    got = [next(iterator) for _ in range(5)]
    resumed = make(0)
    resumed.load_state_dict(begun.state_dict())
    assert_same([*got, *resumed], expected)


def test_the_generators_of_the_calling_process_stay_as_they_are(pictures: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def seed() -> None:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    dataset = ShardMapDataset(pictures, fields="image", transform=draw_from_all())
    dataset.set_epoch(0)
    seed()
    expected = draw()
    seed()
    first = dataset[3]
    assert draw() == expected
    assert np.array_equal(dataset[3], first)


def test_without_seeds_transforms_draw_from_the_generators_as_they_are(pictures: Path) -> None:
    dataset = ShardMapDataset(pictures, fields="image", transform=draw_from_all(), seed_transforms=False)
    dataset.set_epoch(0)
    assert not np.array_equal(dataset[3], dataset[3])


def test_without_seeds_each_worker_process_draws_other_numbers(pictures: Path) -> None:
    """Although all are forked from the same process, in each epoch."""
    pipeline = albumentations.Compose([albumentations.GaussNoise(p=1)], seed=1)

    def transform(image: Pixels) -> Any:
        return np.array([*draw_from_all()(image)[:3], float(pipeline(image=image)["image"].std())])

    dataset = ShardMapDataset(pictures, fields="image", transform=transform, seed_transforms=False)
    loader = DataLoader(Subset(dataset, [0] * 64), 32, num_workers=4, prefetch_factor=1)
    for column in torch.cat([*loader, *loader]).T:
        assert len(set(column.tolist())) == 2 * 64


def failing() -> Callable[[Any], Any]:
    """Return a function that is sent by value, so that worker processes do not import this module."""

    def fail(image: Any) -> Any:
        raise KeyError("of the user")

    return fail


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_keeps_its_type_and_names_the_sample(pictures: Path, num_workers: int) -> None:
    dataset = ShardMapDataset(pictures, fields=("image", "key"), transform=Compose([RandomResizedCrop(16), failing()]))
    with pytest.raises(KeyError, match="of the user") as error_info:
        next(iter(DataLoader(dataset, 4, num_workers=num_workers)))
    said = "".join([*getattr(error_info.value, "__notes__", []), str(error_info.value.__cause__)])
    assert "while transforming sample " in said
    assert ".tar" in said
    if num_workers:
        assert 'raise KeyError("of the user")' in said


def test_a_transform_that_cannot_be_loaded_is_an_error_that_says_so(pictures: Path) -> None:
    class Unloadable:
        """It can be pickled, but not loaded again."""

        def __call__(self, image: Pixels) -> Pixels:
            return image

        def __reduce__(self) -> tuple[Any, ...]:
            return failing(), (None,)

    dataset = ShardMapDataset(pictures, fields="image", transform=Unloadable())
    with pytest.raises(KeyError, match="of the user") as error_info:
        next(iter(DataLoader(dataset, 4, num_workers=1)))
    assert "while loading the dataset's transform in a worker process" in str(error_info.value.__cause__)


def test_a_module_that_could_not_be_loaded_is_loaded_again_in_the_next_epoch(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = tmp_path / "mended.py", "def transform(image):\n    return image[:16, :16].copy()\n"
    path.write_text(original)
    monkeypatch.syspath_prepend(str(tmp_path))
    transform = importlib.import_module("mended").transform
    loader = DataLoader(ShardMapDataset(pictures, fields="image", transform=transform), 4, num_workers=1)
    path.write_text("raise KeyError('of the user')")
    with pytest.raises(KeyError, match="of the user"):
        next(iter(loader))
    path.write_text(original)
    assert next(iter(loader)).shape == (4, 3, 16, 16)


def test_a_transform_that_cannot_be_pickled_runs_in_torchs_workers(
    images: Path, caplog: pytest.LogCaptureFixture
) -> None:
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

print("the script runs")  # And has no guard: a worker process that ran it would start others.
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


def test_what_the_script_defines_is_sent_without_running_the_script_again(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run_python(tmp_path / "script.py", pictures)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["the script runs", "(4, 3, 20, 20)"]
