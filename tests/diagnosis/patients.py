"""Loaders that were made slow on purpose, each with the cause that the doctor must name, and healthy loaders."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shardio
from shardio.libraries import import_torchvision
from shardio.transforms import RandomResizedCrop
from tests.sources import encode, write_images
from tools.make_images import Job, write_class

import_torchvision()
from torchvision import datasets, transforms  # type: ignore[import-untyped]  # noqa: E402

SIZE = 64
Patient = tuple[Any, Callable[[Any], Any], str]


def compute(seconds: float, batch: Any) -> None:
    """A training step on a device, during which the processors are free."""
    time.sleep(seconds)


FAST = partial(compute, 0.0005)


class Numbers(Dataset[Any]):
    """Samples that each take some wall time but no processor time, so results are stable on a busy machine."""

    def __init__(self, num_samples: int = 4000, seconds: float = 0.002) -> None:
        self._num_samples, self._seconds = num_samples, seconds

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return torch.full((8,), index), index % 10


class LoopTransform:
    """A transform that inverts an image pixel by pixel."""

    def __call__(self, image: Any) -> Any:
        array = np.asarray(image)
        flat = [255 - value for value in array.reshape(-1)[:20000].tolist()]
        return torch.tensor(flat)


class Files(Dataset[Any]):
    """Image files, opened by OpenCV in float32."""

    def __init__(self, folder: Path, *, size: int = SIZE) -> None:
        self._paths, self._size = sorted(folder.rglob("*.*")), size

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        image = cv2.imread(str(self._paths[index]))
        assert image is not None
        return torch.from_numpy(cv2.resize(image, (self._size, self._size))), index % 3


class Remote(Dataset[Any]):
    """Images that a server provides."""

    def __init__(self, url: str, num_samples: int) -> None:
        self._url, self._num_samples = url, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        with urlopen(f"{self._url}/{index}") as response:
            content = response.read()
        image = cv2.imdecode(np.frombuffer(content, np.uint8), 1)
        assert image is not None
        return torch.from_numpy(cv2.resize(image, (SIZE, SIZE)))


class Listed(Dataset[Any]):
    """A list of Python objects, which each worker copies."""

    def __init__(self, num_samples: int) -> None:
        self.names = [f"images/of/a/class/with/a/long/name/{number:09d}.jpg" for number in range(num_samples)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(len(self.names[index]))


def write_photographs(folder: Path) -> None:
    """Write images as large and as detailed as photographs: in smooth images, there is little to decode."""
    size = {"width": 800, "height": 600, "quality": 95}
    write_class(Job(folder=folder, class_id=0, num_classes=1, num_images=120, seed=0, **size))


def collate_slowly(samples: list[Any]) -> Any:
    rows = [[float(value) for value in image.reshape(-1).tolist()] for image, _ in samples for _ in range(20)]
    return torch.tensor(rows[::20]), torch.tensor([label for _, label in samples])


def use_many_threads(worker_id: int) -> None:
    cv2.setNumThreads(16)


def few_workers(folder: Path) -> Patient:
    return DataLoader(Numbers(), batch_size=32), FAST, "too few workers"


def many_workers(folder: Path) -> Patient:
    dataset = TensorDataset(torch.zeros(20000, 8))
    return DataLoader(dataset, batch_size=32, num_workers=12), partial(compute, 0.0), "too many workers"


def many_threads(folder: Path) -> Patient:
    write_images(folder / "large", classes=1, per_class=200, width=640, height=480)
    loader = DataLoader(Files(folder / "large", size=512), 16, num_workers=2, worker_init_fn=use_many_threads)
    return loader, FAST, "too many OpenCV threads"


def copied_dataset(folder: Path) -> Patient:
    return DataLoader(Listed(2_000_000), batch_size=32, num_workers=2), FAST, "the dataset is copied to each worker"


def crops_of(folder: Path, size: int = SIZE, batch_size: int = 16, jpeg: Any = None, **options: Any) -> Any:
    """Pack the images in ``folder / "images"``. Return a loader of random crops."""
    shardio.pack(folder / "images", folder / "packed", **({"jpeg": jpeg} if jpeg else {}))
    dataset = shardio.ShardDataset(folder / "packed", shuffle=True, transform=RandomResizedCrop(size))
    return shardio.DataLoader(dataset, batch_size, num_workers=2, **options)


def large_images(folder: Path) -> Patient:
    write_images(folder / "images", classes=2, per_class=24, width=1600, height=1200)
    return crops_of(folder, batch_size=8), FAST, "times as large as their crops"


def floats(folder: Path) -> Patient:
    write_images(folder / "images", classes=3, per_class=60, width=224, height=224)
    steps = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.2] * 3)]
    dataset = datasets.ImageFolder(str(folder / "images"), transforms.Compose(steps))
    return DataLoader(dataset, batch_size=16, num_workers=2), FAST, "ToTensor and Normalize on the CPU"


def folder_of_torchvision(folder: Path) -> Patient:
    write_images(folder / "images", classes=3, per_class=80, width=500, height=375)
    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    dataset = datasets.ImageFolder(str(folder / "images"), transforms.Compose(steps))
    return DataLoader(dataset, batch_size=16, num_workers=2, shuffle=True), FAST, "torchvision's ImageFolder"


def whole_samples(folder: Path) -> Patient:
    write_images(folder / "images", classes=3, per_class=60, width=500, height=375)
    shardio.pack(folder / "images", folder / "packed", jpeg="tile")
    crop = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)])
    options: Any = {"fields": ("image", "label"), "decode": "pil", "transform_sample": partial(crop_sample, crop)}
    loader = shardio.DataLoader(shardio.ShardDataset(folder / "packed", **options), batch_size=16, num_workers=2)
    return loader, FAST, "image transforms in transform_sample"


def crop_sample(crop: Any, sample: Any) -> Any:
    return torch.from_numpy(np.array(crop(sample["image"]))), sample["label"]


def slow_start(folder: Path) -> Patient:
    loader = DataLoader(Numbers(640, 0.0), batch_size=32, num_workers=2, multiprocessing_context="spawn")
    return loader, FAST, "a slow start to each epoch"


def sorted_samples(folder: Path) -> Patient:
    labels = torch.arange(4000) // 400
    loader = DataLoader(TensorDataset(torch.zeros(4000, 4), labels), batch_size=32, num_workers=2)
    return loader, partial(compute, 0.0), "batches are barely shuffled"


def slow_transform(folder: Path) -> Patient:
    write_images(folder / "images", classes=3, per_class=60, width=96, height=96)
    dataset = datasets.ImageFolder(str(folder / "images"), LoopTransform())
    return DataLoader(dataset, batch_size=16, num_workers=2), FAST, "LoopTransform"


def pngs(folder: Path) -> Patient:
    write_images(folder / "images", classes=3, per_class=40, width=500, height=375, suffix="png")
    return crops_of(folder, 224), FAST, "PNG images decode slowly"


class SlowHandler(http.server.BaseHTTPRequestHandler):
    content = encode(0, width=64, height=64)

    def do_GET(self) -> None:
        time.sleep(0.02)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *args: Any) -> None:
        pass


def slow_storage(folder: Path) -> Patient:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    return DataLoader(Remote(url, 1000), batch_size=16, num_workers=2), FAST, "slow storage"


def slow_collation(folder: Path) -> Patient:
    dataset = TensorDataset(torch.zeros(2000, 400), torch.arange(2000) % 7)
    return DataLoader(dataset, batch_size=16, num_workers=2, collate_fn=collate_slowly), FAST, "collate_fn"


def untiled(folder: Path) -> Patient:
    (folder / "images").mkdir()
    write_photographs(folder / "images" / "one")
    return crops_of(folder, 224), FAST, "whole JPEGs are decoded for each crop"


def healthy_tensors(folder: Path) -> Patient:
    loader = DataLoader(TensorDataset(torch.zeros(4000, 8)), batch_size=32, shuffle=True, num_workers=2)
    return loader, partial(compute, 0.2), ""


def healthy_shards(folder: Path) -> Patient:
    write_images(folder / "images", classes=3, per_class=60, width=200, height=160)
    return crops_of(folder, jpeg="tile", persistent_workers=True), partial(compute, 0.2), ""


def healthy_folder(folder: Path) -> Patient:
    write_images(folder / "images", classes=3, per_class=60, width=96, height=96)
    dataset = datasets.ImageFolder(str(folder / "images"), transforms.Compose([transforms.ToTensor()]))
    loader = DataLoader(dataset, 16, shuffle=True, num_workers=2, persistent_workers=True)
    return loader, partial(compute, 0.2), ""


SLOW = (
    *(few_workers, many_workers, many_threads, copied_dataset, large_images, floats, folder_of_torchvision),
    *(whole_samples, slow_start, sorted_samples, slow_transform, pngs, slow_storage, slow_collation, untiled),
)
STEADY = (few_workers, copied_dataset, sorted_samples, slow_transform, slow_storage, slow_collation)
"""The slow loaders whose slowness does not depend on what else runs on the machine."""

HEALTHY = (healthy_tensors, healthy_shards, healthy_folder)
