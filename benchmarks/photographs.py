"""The photographs of the image benchmarks, and the crops to make from them; both are the same for all candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from shardio.images import CropPlan, Pixels, Sizes, open_image, render_chunk
from shardio.order import Words, derive_rng_key, make_rng_key
from shardio.transforms import CenterCrop, Geometry, RandomResizedCrop, Resize

CHUNK_SIZE = 64
"""The number of images that one call decodes."""

TARGET = 224
"""The side length of a crop in pixels."""

SHORTER_SIDE = 256
"""The length of an image's shorter side, in pixels, after the resize for the evaluation crop."""


class Task(NamedTuple):
    """An image's crop plan, as plain numbers for the peers: cut out the box, resize it, cut out the window."""

    box: tuple[int, int, int, int]
    size: tuple[int, int]
    window: tuple[int, int, int, int]

    @property
    def is_halved(self) -> bool:
        """Whether both sides shrink to half or less."""
        return self.box[2] >= 2 * self.size[0] and self.box[3] >= 2 * self.size[1]

    @property
    def is_windowed(self) -> bool:
        """Whether the window is smaller than the resized box."""
        return self.window != (0, 0, *self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some encoded images, their rng keys and their tasks."""

    contents: list[bytes]
    rng_keys: Words
    tasks: list[Task]


Load = Callable[[Chunk, Pixels], None]
"""A function that writes the crops of a chunk into the rows of a batch, uint8 [n, 224, 224, 3]."""


def read_photographs(directory: Path, num_images: int | None = None) -> list[bytes]:
    """Return the JPEGs below a directory, or ``num_images`` of them, evenly spaced and repeated if there are fewer."""
    paths = sorted(path for path in directory.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    if not paths:
        raise SystemExit(f"there are no JPEGs below {directory}")
    if num_images is not None:
        paths = [paths[i * len(paths) // num_images % len(paths)] for i in range(num_images)]
    return [path.read_bytes() for path in paths]


def random_crops(*, antialias: bool = False, size: int = TARGET) -> list[Geometry]:
    """Return the transforms for training, which crop a random part of the image."""
    return [RandomResizedCrop(size, antialias=antialias)]


def evaluation_crop(*, antialias: bool = False) -> list[Geometry]:
    """Return the transforms for evaluation, which crop the center of the resized image."""
    return [Resize(SHORTER_SIDE, antialias=antialias), CenterCrop(TARGET)]


def draw_plan(transforms: Sequence[Geometry], sizes: Sizes, rng_keys: Words) -> CropPlan:
    """Draw the parameters of some transforms for images of these sizes."""
    plan = CropPlan.whole(sizes)
    for transform in transforms:
        plan = transform.extend(plan, transform.draw(plan.output_size, rng_keys))
    return plan


def make_chunks(contents: Sequence[bytes], transforms: Sequence[Geometry]) -> list[Chunk]:
    """Return chunks of images and their tasks. An image's rng key depends only on its index."""
    rng_keys = make_rng_keys(len(contents))
    chunks = []
    for start in range(0, len(contents), CHUNK_SIZE):
        part = slice(start, start + CHUNK_SIZE)
        sizes = np.array([open_image(content).size for content in contents[part]], dtype=np.int64)
        plan = draw_plan(transforms, sizes, rng_keys[part])
        chunks.append(Chunk(contents=list(contents[part]), rng_keys=rng_keys[part], tasks=make_tasks(plan)))
    return chunks


def make_rng_keys(num_images: int) -> Words:
    """Return an rng key for each image, the same in each run."""
    return derive_rng_key(make_rng_key(0, "photos"), np.arange(num_images, dtype=np.uint64))


def make_tasks(plan: CropPlan) -> list[Task]:
    """Return a crop plan as plain numbers, one task for each image."""
    rows = zip(plan.box.tolist(), plan.size.tolist(), plan.window.tolist(), strict=True)
    return [Task(tuple(box), tuple(size), tuple(window)) for box, size, window in rows]


def load_with_shardio(transforms: Sequence[Geometry]) -> Load:
    """Return shardio's candidate, whose measured time includes drawing the parameters."""

    def load(chunk: Chunk, rows: Pixels) -> None:
        pictures = [open_image(content) for content in chunk.contents]
        sizes = np.array([picture.size for picture in pictures], dtype=np.int64)
        render_chunk(pictures, draw_plan(transforms, sizes, chunk.rng_keys), rows)

    return load


def without_kernel(load: Load) -> Load:
    """Return a candidate that runs the given one without the kernel."""

    def load_by_libjpeg(chunk: Chunk, rows: Pixels) -> None:
        with patch("shardio.images.rendering.find_kernel", lambda: None):
            load(chunk, rows)

    return load_by_libjpeg


def make_rows(num_rows: int = CHUNK_SIZE) -> Pixels:
    """Return the rows of a new batch."""
    return np.zeros((num_rows, TARGET, TARGET, 3), np.uint8)
