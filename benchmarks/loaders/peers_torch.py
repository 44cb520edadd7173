"""torch's DataLoader over files: worker processes decode, and batches arrive through shared memory."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.loaders.crops import Use, use_one_thread, use_opencv, use_pillow, use_simplejpeg
from benchmarks.loaders.files import list_files
from benchmarks.loaders.job import SHORTER_SIDE, TARGET, Crop, Epochs, Job


class Files(Dataset[Any]):
    """Files that are decoded one by one."""

    def __init__(self, root: Path, crop: Crop, use: Use) -> None:
        self.files = list_files(root)
        self.crop = crop
        self.use = use

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        image = np.empty((TARGET, TARGET, 3), np.uint8)
        self.use(Path(path).read_bytes(), self.crop, image)
        return torch.from_numpy(image), label


def make_opencv(job: Job) -> Epochs:
    """Return torch's DataLoader, which decodes with OpenCV, as many tuned programs do."""
    return _make(Files(job.data, job.crop, use_opencv), job)


def make_simplejpeg(job: Job) -> Epochs:
    """Return torch's DataLoader, which decodes with simplejpeg."""
    return _make(Files(job.data, job.crop, use_simplejpeg), job)


def make_pillow(job: Job) -> Epochs:
    """Return torch's DataLoader, which decodes with Pillow."""
    return _make(Files(job.data, job.crop, use_pillow), job)


def make_torchvision(job: Job) -> Epochs:
    """Return torch's DataLoader with torchvision's ImageFolder and transforms, as in its reference scripts."""
    datasets: Any = importlib.import_module("torchvision.datasets")
    v2: Any = importlib.import_module("torchvision.transforms.v2")
    if job.crop == "train":
        steps = [v2.RandomResizedCrop(TARGET), v2.RandomHorizontalFlip()]
    else:
        steps = [v2.Resize(SHORTER_SIDE), v2.CenterCrop(TARGET)]
    return _make(datasets.ImageFolder(job.data, v2.Compose([*steps, v2.PILToTensor()])), job)


def _make(dataset: Dataset[Any], job: Job) -> Epochs:
    return DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        worker_init_fn=use_one_thread,
        persistent_workers=job.is_persistent,
        prefetch_factor=4,
    )
