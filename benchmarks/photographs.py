"""The photographs that image benchmarks work on, and what is to be made of them: the same for everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from shardio.images import CropPlan, Pixels, Sizes, decode_chunk, open_image
from shardio.order import Words, derive_rng_key, make_rng_key
from shardio.transforms import CenterCrop, Geometry, RandomResizedCrop, Resize

CHUNK_SIZE = 64
"""Images that are decoded by one call."""

TARGET = 224
"""Pixels of a crop's side."""

SHORTER_SIDE = 256
"""Pixels that the evaluation crop resizes an image's shorter side to."""


class Task(NamedTuple):
    """What is to be made of an image, in plain numbers for the peers: take the box, resize it, take the window."""

    box: tuple[int, int, int, int]
    size: tuple[int, int]
    window: tuple[int, int, int, int]

    @property
    def scale(self) -> int:
        """How many times smaller a JPEG is decoded for it: the box stays at least as large as its new size."""
        fits = (s for s in (8, 4, 2) if self.box[2] >= s * self.size[0] and self.box[3] >= s * self.size[1])
        return next(fits, 1)

    @property
    def is_windowed(self) -> bool:
        """Whether the window is less than the resized box."""
        return self.window != (0, 0, *self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some encoded images, a random key for each, and their tasks."""

    contents: list[bytes]
    rng_keys: Words
    tasks: list[Task]


Load = Callable[[Chunk, Pixels], None]
"""Make of a chunk's images what their tasks say, in the rows of a batch, uint8 [n, 224, 224, 3]."""


def read_photographs(directory: Path, number: int | None = None) -> list[bytes]:
    """Return the JPEGs below a directory; or ``number`` of them, evenly spread, and again from the first if need be."""
    paths = sorted(path for path in directory.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    if not paths:
        raise SystemExit(f"there are no JPEGs below {directory}")
    if number is not None:
        paths = [paths[i * len(paths) // number % len(paths)] for i in range(number)]
    return [path.read_bytes() for path in paths]


def random_crops(*, antialias: bool = False, size: int = TARGET) -> list[Geometry]:
    """Return the transforms of training: a random part of the image."""
    return [RandomResizedCrop(size, antialias=antialias)]


def evaluation_crop(*, antialias: bool = False) -> list[Geometry]:
    """Return the transforms of evaluation: the centre of the resized image."""
    return [Resize(SHORTER_SIDE, antialias=antialias), CenterCrop(TARGET)]


def draw_plans(transforms: Sequence[Geometry], sizes: Sizes, rng_keys: Words) -> CropPlan:
    """Return what some transforms make of images of these sizes."""
    plans = CropPlan.whole(sizes)
    for transform in transforms:
        plans = transform.extend(plans, transform.draw(plans.output_size, rng_keys))
    return plans


def make_chunks(contents: Sequence[bytes], transforms: Sequence[Geometry]) -> list[Chunk]:
    """Return chunks of images, with their tasks drawn; the keys depend on the images' places alone."""
    rng_keys = make_keys(len(contents))
    chunks = []
    for start in range(0, len(contents), CHUNK_SIZE):
        part = slice(start, start + CHUNK_SIZE)
        sizes = np.array([open_image(content).size for content in contents[part]], dtype=np.int64)
        plans = draw_plans(transforms, sizes, rng_keys[part])
        chunks.append(Chunk(contents=list(contents[part]), rng_keys=rng_keys[part], tasks=make_tasks(plans)))
    return chunks


def make_keys(number: int) -> Words:
    """Return random keys for some images, the same each time."""
    return derive_rng_key(make_rng_key(0, "photos"), np.arange(number, dtype=np.uint64))


def make_tasks(plans: CropPlan) -> list[Task]:
    """Return plans in plain numbers, a task for each image."""
    rows = zip(plans.box.tolist(), plans.size.tolist(), plans.window.tolist(), strict=True)
    return [Task(tuple(box), tuple(size), tuple(window)) for box, size, window in rows]


def load_with_shardio(transforms: Sequence[Geometry]) -> Load:
    """Return shardio's way: it draws its parameters itself, within the time that is measured."""

    def load(chunk: Chunk, rows: Pixels) -> None:
        pictures = [open_image(content) for content in chunk.contents]
        sizes = np.array([picture.size for picture in pictures], dtype=np.int64)
        decode_chunk(pictures, draw_plans(transforms, sizes, chunk.rng_keys), rows)

    return load


def without_kernel(load: Load) -> Load:
    """Return the same way where there is no kernel."""

    def load_by_libjpeg(chunk: Chunk, rows: Pixels) -> None:
        with patch("shardio.images.by_kernel.find_kernel", lambda: None):
            load(chunk, rows)

    return load_by_libjpeg


def make_rows(number: int = CHUNK_SIZE) -> Pixels:
    """Return the rows of a new batch."""
    return np.zeros((number, TARGET, TARGET, 3), np.uint8)
