"""The feeds: ways to bring a source's batches to the device, with shardio, torch and timm.

Every feed yields normalized images, bfloat16 [n, 3, 224, 224] in channels_last memory, and labels, int64 [n], both on
the device. Images are copied to the device as uint8.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.device.networks import NUM_CLASSES
from benchmarks.loaders.job import TARGET
from shardio.device import DevicePrefetcher
from shardio.device.tiles import ImagePreparation

RESIDENT, RESIDENT_UINT8, SHARDIO, TORCH, TIMM = "resident", "resident-uint8", "shardio", "torch", "timm"
TITLES = {
    RESIDENT: "(a) already on the device, prepared",
    RESIDENT_UINT8: "already on the device, uint8, prepared in each step",
    SHARDIO: "(b) shardio: DevicePrefetcher",
    TORCH: "(c) torch: pin_memory, non_blocking",
    TIMM: "(d) timm: PrefetchLoader",
}
ON_DEVICE = "shardio-on-device"
ALONE = {
    SHARDIO: "shardio's loader alone",
    ON_DEVICE: "shardio's loader with DevicePrefetcher, alone",
    TORCH: "torch's loader alone",
}
NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NUM_RESIDENT = 4
"""The number of batches that candidate (a) keeps on the device."""

TOLERANCE = 0.05
"""The maximum difference between prepared values: bfloat16 has 8 bits of precision, and timm normalizes in bfloat16."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images and labels."""


class BufferLikeLoader:
    """An endless loader whose batches are in memory like shardio's buffers: a few blocks in rotation, without decoding.

    Args:
        num_buffers: The number of blocks.
        batch_size: The number of images in each block. Images are random, uint8 [n, 3, 224, 224], channels_last.
    """

    def __init__(self, num_buffers: int, batch_size: int) -> None:
        random, shape = np.random.default_rng(0), (batch_size, TARGET, TARGET, 3)
        self._num_bytes, self._shape = int(np.prod(shape)), shape
        self._buffers: list[NDArray[np.uint8]] = []
        self._is_watched = False
        for _ in range(num_buffers):
            buffer = np.frombuffer(mmap.mmap(-1, self._num_bytes + 8 * batch_size), np.uint8)
            buffer[: self._num_bytes] = random.integers(0, 256, self._num_bytes, dtype=np.uint8)
            buffer[self._num_bytes :].view(np.int64)[:] = random.integers(0, NUM_CLASSES, batch_size)
            self._buffers.append(buffer)

    @contextmanager
    def watch_memory(self, callback: Callable[[NDArray[np.uint8]], None], *, num_held: int) -> Iterator[None]:
        """Pass the memory to a callback, as shardio's loader does. Nothing ever overwrites it."""
        if not self._is_watched:
            for buffer in self._buffers:
                callback(buffer)
        self._is_watched = True
        yield

    def batches(self) -> list[Batch]:
        """Return one batch per block, as views of the memory."""
        return [
            (
                torch.from_numpy(buffer[: self._num_bytes].reshape(self._shape)).permute(0, 3, 1, 2),
                torch.from_numpy(buffer[self._num_bytes :].view(np.int64)),
            )
            for buffer in self._buffers
        ]

    def __iter__(self) -> Iterator[Batch]:
        return cycle(self.batches())


class Planes:
    """A loader that yields images [n, height, width, 3] as views [n, 3, height, width]."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self.loader:
            yield images.permute(0, 3, 1, 2), labels


class CopyBeforeStep:
    """A loader that copies each batch from pinned memory right before its step, without waiting, as most scripts do."""

    def __init__(self, loader: Iterable[Batch], device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._prepare = make_preparation(device)

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self.loader:
            there = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            yield self._prepare(there[0]), there[1]


class Resident:
    """An endless loader of a few batches in rotation. If given, ``prepare`` is applied to each batch's images."""

    def __init__(self, batches: Sequence[Batch], prepare: ImagePreparation | None = None) -> None:
        self.batches, self.prepare = batches, prepare

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in cycle(self.batches):
            yield (self.prepare(images) if self.prepare else images), labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of batches.

    Attributes:
        name: ``memory`` or ``photographs``.
        for_shardio: The loader that candidate (b) wraps.
        for_others: The loader that candidates (c) and (d) wrap. On CUDA, its batches are in pinned memory.
        decodes: Whether the batches are decoded.
    """

    name: str
    for_shardio: Iterable[Batch]
    for_others: Iterable[Batch]
    decodes: bool


def open_memory(num_buffers: int, batch_size: int, device: torch.device) -> Source:
    """Return batches in memory. Batches for candidates (c) and (d) are pinned in advance: the best case for them."""
    loader = BufferLikeLoader(num_buffers, batch_size)
    others = loader.batches()
    if device.type == "cuda":
        others = [(images.pin_memory(), labels.pin_memory()) for images, labels in others]
    return Source(name="memory", for_shardio=loader, for_others=Resident(others), decodes=False)


def make_feeds(source: Source, device: torch.device) -> tuple[dict[str, Iterable[Batch]], dict[str, str]]:
    """Return all feeds by name, and for each feed that could not be created, the reason."""
    prepare, problems = make_preparation(device), dict[str, str]()
    prefetcher = DevicePrefetcher(source.for_shardio, device, normalize=NORMALIZE, dtype=torch.bfloat16)
    there = [(images.to(device), labels.to(device)) for images, labels in islice(source.for_shardio, NUM_RESIDENT)]
    feeds: dict[str, Iterable[Batch]] = {
        RESIDENT: Resident([(prepare(images), labels) for images, labels in there]),
        RESIDENT_UINT8: Resident(there, prepare),
        SHARDIO: prefetcher,
        TORCH: CopyBeforeStep(source.for_others, device),
    }
    try:
        timm: Any = importlib.import_module("timm.data.loader")
        feeds[TIMM] = timm.PrefetchLoader(source.for_others, *NORMALIZE, device=device, img_dtype=torch.bfloat16)
    except Exception as error:  # timm may raise any error if torchvision was built for a different torch version.
        problems[TIMM] = f"timm cannot be imported: {error}"
    return feeds, problems


def make_preparation(device: torch.device) -> ImagePreparation:
    """Return an ImagePreparation that prepares images on the device."""
    return ImagePreparation(device, NORMALIZE, torch.bfloat16, channels_last=True)


def check_feed(feed: Iterable[Batch], source: Source, device: torch.device, batch_size: int) -> None:
    """Raise ValueError unless a feed yields batches in the common format, with equal values if nothing is decoded."""
    images, labels = next(iter(feed))
    is_right = (
        (images.shape, images.dtype, images.device.type)
        == ((batch_size, 3, TARGET, TARGET), torch.bfloat16, device.type)
        and images.is_contiguous(memory_format=torch.channels_last)
        and (labels.shape, labels.dtype, labels.device.type) == ((batch_size,), torch.int64, device.type)
        and bool(images.isfinite().all())
        and float(images.float().std()) > 0.1  # More than one color.
    )
    if not is_right:
        raise ValueError(f"wrong batch: {images.shape}, {images.dtype}, {images.stride()}, {labels}")
    if not source.decodes:
        expected, expected_labels = next(iter(source.for_others))
        mean, std = (torch.tensor(figures, dtype=torch.float64).reshape(3, 1, 1) for figures in NORMALIZE)
        apart = ((expected[:8].double() / 255 - mean) / std - images[:8].cpu().double()).abs().max()
        if apart > TOLERANCE or not torch.equal(labels.cpu(), expected_labels):
            raise ValueError(f"labels differ, or pixels differ by up to {apart:.3f}")
