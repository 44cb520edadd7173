"""Render random crops of photographs, and compare their pixels with those of a full decode.

Each chunk holds several photographs, some of them tiled or turned by EXIF, with one or more crops of each. The kernel
renders all crops of a chunk together where possible. The campaign compares the crops with those of simplejpeg, OpenCV
and Pillow. It also compares the kernel's crops with those that the stages of a device render.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import simplejpeg
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from shardio.images import CropPlan, JpegPicture, PlannedCrop, Resampling, open_image, render_crops
from shardio.images.jpeg import Box
from shardio.images.tiled import collect_tiles
from shardio.images.tiling import NotTileable, tile_jpeg
from shardio.kernel import require_functions
from tests.images import naive
from tests.images.crop_laws import random_boxes
from tests.images.pictures import TURNS, Array, exif_of
from tests.images.tiled_laws import decode_tiles

CHUNK = 8
"""The number of photographs that are rendered together."""

LARGEST = 300
"""The maximum length of a resized crop's sides, in pixels."""

SUFFIXES = {".jpg", ".jpeg"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Photograph:
    """A photograph to crop.

    Attributes:
        name: The photograph's name in messages.
        picture: The opened file.
        pixels: The full decode of the file, upright.
    """

    name: str
    picture: JpegPicture
    pixels: Array


def main(
    photos: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder with JPEGs.")],
    crops: Annotated[int, typer.Option(min=1, help="Number of crops.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the crops.")] = 0,
) -> None:
    """Compare random crops with full decodes that are cropped and resized by the libraries."""
    paths = sorted(path for path in photos.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise typer.BadParameter(f"no JPEG in {photos}", param_hint="--photos")
    random, decoders, num_done, began = np.random.default_rng(seed), Counter[str](), 0, time.monotonic()
    for _ in track(range(-(-crops // CHUNK)), description="chunks", console=Console(stderr=True), transient=True):
        chosen = [open_photograph(paths[i], random) for i in random.integers(0, len(paths), CHUNK).tolist()]
        num_crops = int(random.choice((1, 1, 2, 5)))
        decoders += check_crops(chosen, num_crops, random)
        num_done += CHUNK * num_crops
        if num_done >= crops:
            break
    counts = ", ".join(f"{count} by {name}" for name, count in sorted(decoders.items()))
    print(f"in {time.monotonic() - began:.0f} s, {num_done} crops of {len(paths)} photographs are correct ({counts})")


def open_photograph(path: Path, random: np.random.Generator) -> Photograph:
    """Tile or turn a photograph at random, or do both or neither; then open it."""
    content = path.read_bytes()
    if random.random() < 0.5:
        with suppress(NotTileable):
            content = tile_jpeg(content)
    pixels, turn = np.asarray(simplejpeg.decode_jpeg(content)), int(random.choice((1, 1, *TURNS)))
    exif = exif_of(turn).tobytes()
    content = content[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + content[2:]
    picture = open_image(content, orientation="apply")
    assert isinstance(picture, JpegPicture), f"{path} is not a JPEG"
    return Photograph(name=f"{path.name}, turn {turn}", picture=picture, pixels=TURNS[turn](pixels))


def check_crops(photographs: list[Photograph], num_crops: int, random: np.random.Generator) -> Counter[str]:
    """Render crops of some photographs together.

    Returns: The number of crops that each decoder rendered.

    Raises:
        AssertionError: If a crop has wrong pixels.
    """
    pictures = [photograph.picture for photograph in photographs]
    planned = [PlannedCrop(pictures, _draw_plan(photographs, random)) for _ in range(num_crops)]
    decoders, images = Counter[str](), list[list[Array]]()
    for crop, rendered in zip(planned, render_crops(planned, [None] * num_crops), strict=True):
        decoders.update(rendered.decoder_names)
        for row, (photograph, found) in enumerate(zip(photographs, rendered.images, strict=True)):
            if not np.array_equal(found, _render(photograph.pixels, crop.plan, row)):
                raise AssertionError(f"{photograph.name}: wrong pixels with {crop.plan.take(np.array([row]))}")
        images.append(rendered.images)
    collected = collect_tiles(planned)
    assert collected is not None, "all crops have the same size"
    chunk, names = collected
    assert chunk.memory is not None, "the chunk is new"
    staged, is_damaged = decode_tiles(
        require_functions(), chunk.memory[: chunk.num_bytes], chunk.num_images, chunk.sizes
    )
    assert not is_damaged.any(), "no file is damaged"
    for crops, found_by_stages in zip(images, staged, strict=True):
        for photograph, found, by_stages in zip(photographs, crops, found_by_stages, strict=True):
            if not np.array_equal(found, by_stages):
                raise AssertionError(f"{photograph.name}: the stages of a device render different pixels")
    decoders["the stages of a device"] += names.count("device") * num_crops
    return decoders


def _draw_plan(photographs: list[Photograph], random: np.random.Generator) -> CropPlan:
    """Draw a crop of each photograph. All crops have the same size."""
    n, resampling = len(photographs), random.choice(get_args(Resampling))
    height, width = random.integers(1, LARGEST, 2).tolist()
    boxes = [random_boxes(*photograph.picture.size, 1, random)[0] for photograph in photographs]
    sizes = np.array([(height, width)] * n)
    windows = np.concatenate([np.zeros((n, 2), np.int64), sizes], axis=1)
    if random.random() < 0.3:  # Draw windows that differ from the resized boxes, and may extend beyond them.
        sizes = random.integers(1, LARGEST, (n, 2))
        windows[:, :2] = random.integers(-20, np.maximum(sizes, 1))
    elif random.random() < 0.1:  # Do not resize.
        sizes = np.array(boxes)[:, 2:]
    flips: NDArray[np.bool_] = random.random(n) < 0.5
    return CropPlan(box=np.array(boxes), size=sizes, window=windows, flip=flips, resampling=resampling)


def _render(pixels: Array, plan: CropPlan, row: int) -> Array:
    box = naive.crop(pixels, Box(*plan.box[row].tolist()))
    resized = naive.resize(box, *plan.size[row].tolist(), resampling=plan.resampling)
    window = naive.crop(resized, Box(*plan.window[row].tolist()))
    return window[:, ::-1] if plan.flip[row] else window


if __name__ == "__main__":
    typer.run(main)
