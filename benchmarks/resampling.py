"""Measure how far resized pixels are from those of a filter that averages over all pixels.

``python -m benchmarks.resampling PHOTOS`` measures shardio's resize with and without antialiasing (off by default),
and OpenCV's INTER_LINEAR after a full decode. The reference is Pillow's bilinear filter, which antialiases as
torchvision does. The benchmark also writes the worst crop of synthetic images as a picture: shardio's crop, Pillow's,
and the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import cv2
import numpy as np
import PIL.Image
import simplejpeg
import typer
from numpy.typing import NDArray

from benchmarks.photographs import (
    Task,
    draw_plan,
    evaluation_crop,
    make_rng_keys,
    make_tasks,
    random_crops,
    read_photographs,
)
from shardio.images import Pixels, decode_image, open_image, render_chunk
from shardio.transforms import Geometry
from tools.make_images import Job, make_image, make_textures

FAR = 8
"""The difference above which a value, from 0 to 255, is far off."""

AMPLIFIED = 4
"""The factor by which the picture amplifies the difference."""

OURS, ANTIALIASED, OPENCV = "shardio", "shardio, antialias=True", "OpenCV, full decode"

Transforms = Callable[[bool], list[Geometry]]
"""A function that returns the transforms, given whether to antialias."""

Choose = Callable[[Task], bool]
"""A function that returns whether to measure a crop."""


def _crops(size: int) -> Transforms:
    return lambda antialias: random_crops(size=size, antialias=antialias)


CASES: dict[str, tuple[Transforms, Choose]] = {
    "random crops resized to 224, one or both sides less than halved": (_crops(224), lambda task: not task.is_halved),
    "random crops resized to 224, both sides at least halved": (_crops(224), lambda task: task.is_halved),
    "evaluation crop": (lambda antialias: evaluation_crop(antialias=antialias), lambda task: True),
    "random crops resized to 112, one or both sides less than halved": (_crops(112), lambda task: not task.is_halved),
    "random crops resized to 112, both sides at least halved": (_crops(112), lambda task: task.is_halved),
    "random crops resized to 96, both sides at least halved": (_crops(96), lambda task: task.is_halved),
}
"""The transforms of each case, and the function that chooses the crops to measure."""


def make_crops(contents: Sequence[bytes], transforms: Transforms, choose: Choose) -> dict[str, list[Pixels]]:
    """Return the chosen crops of each method. Pillow's crops are last."""
    pictures = [open_image(content) for content in contents]
    sizes = np.array([picture.size for picture in pictures], dtype=np.int64)
    rng_keys = make_rng_keys(len(contents))
    plan = draw_plan(transforms(False), sizes, rng_keys)
    tasks = make_tasks(plan)
    chosen = [i for i, task in enumerate(tasks) if choose(task)]
    whole = {i: decode_image(contents[i]) for i in chosen}
    ours = render_chunk(pictures, plan).images
    antialiased = render_chunk(pictures, draw_plan(transforms(True), sizes, rng_keys)).images
    return {
        OURS: [ours[i] for i in chosen],
        ANTIALIASED: [antialiased[i] for i in chosen],
        OPENCV: [_resize(whole[i], tasks[i], antialias=False) for i in chosen],
        "Pillow": [_resize(whole[i], tasks[i], antialias=True) for i in chosen],
    }


def _resize(pixels: Pixels, task: Task, *, antialias: bool) -> Pixels:
    (top, left, height, width), (new_height, new_width), window = task
    part = pixels[top : top + height, left : left + width]
    if antialias:
        image = PIL.Image.fromarray(part).resize((new_width, new_height), PIL.Image.Resampling.BILINEAR)
        resized = np.asarray(image)
    else:
        resized = np.asarray(cv2.resize(part, (new_width, new_height), interpolation=cv2.INTER_LINEAR))
    return resized[window[0] : window[0] + window[2], window[1] : window[1] + window[3]]


def measure(crops: list[Pixels], reference: list[Pixels]) -> str:
    """Return the mean absolute difference, the PSNR over all pixels in dB, and the share of values that are far off."""
    difference = np.stack(crops).astype(np.int16) - np.stack(reference)
    if not difference.any():
        return "0 | identical | 0"
    psnr_db = 10 * np.log10(255**2 / np.square(difference, dtype=np.int32).mean())
    absolute = np.abs(difference)
    return f"{absolute.mean():.2f} | {psnr_db:.1f} | {(absolute > FAR).mean():.1%}"


def make_zone_plate(height: int, width: int) -> Pixels:
    """Return rings whose frequency grows from the center to half a cycle per pixel at the corners."""
    row, column = np.mgrid[:height, :width].astype(np.float64)
    row, column = row - height / 2, column - width / 2
    radius = np.hypot(row, column)
    # The slope of the phase is the angular frequency, which is pi at the corners.
    phase = np.pi * radius**2 / (2 * np.hypot(height / 2, width / 2))
    gray = np.rint(127.5 + 127.5 * np.cos(phase)).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=2)


def make_synthetic(num_images: int) -> list[bytes]:
    """Return JPEGs of synthetic photographs and of zone plates, ``num_images`` of each."""
    job = Job(
        folder=Path(), class_id=3, num_classes=10, num_images=num_images, width=500, height=375, quality=95, seed=0
    )
    random = np.random.default_rng(0)
    photographs = [make_image(job, make_textures(job.seed), random) for _ in range(num_images)]
    return [simplejpeg.encode_jpeg(image, 95) for image in [*photographs, *[make_zone_plate(375, 500)] * num_images]]


def write_worst(path: Path, num_images: int = 100) -> None:
    """Write a picture of the random crop, resized to 224, that differs most from Pillow's, and print the difference."""
    crops = make_crops(make_synthetic(num_images), _crops(224), lambda task: True)
    pairs = list(zip(crops[OURS], crops["Pillow"], strict=True))
    distances = [float(_distance(*pair).mean()) for pair in pairs]
    worst = int(np.argmax(distances))
    kind = "zone plate" if worst >= num_images else "synthetic photograph"
    ours, pillow = pairs[worst]
    difference = np.minimum(AMPLIFIED * _distance(ours, pillow), 255).astype(np.uint8)
    gap = np.full((ours.shape[0], 8, 3), 255, np.uint8)
    picture = np.concatenate([ours, gap, pillow, gap, difference], axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(picture if np.ptp(picture, axis=2).any() else picture[..., 0]).save(path, optimize=True)
    print(f"\nThe worst of {2 * num_images} crops of synthetic images is a {kind}: {path}\n")
    print("| | mean difference | PSNR, dB | off by more than 8 |\n|---|---|---|---|")
    for label, part in (("synthetic photographs", slice(num_images)), ("zone plates", slice(num_images, None))):
        print(f"| {label}, shardio | {measure(crops[OURS][part], crops['Pillow'][part])} |")
    print(f"| the worst, shardio | {measure([ours], [pillow])} |")


def _distance(crop: Pixels, other: Pixels) -> NDArray[np.int16]:
    distance: NDArray[np.int16] = np.abs(crop.astype(np.int16) - other)
    return distance


def main(
    photos: Annotated[Path, typer.Argument(help="A directory of JPEGs.")],
    images: Annotated[int | None, typer.Option(min=1, help="Number of JPEGs to use (default: all).")] = None,
    picture: Annotated[Path, typer.Option(help="Write the picture of the worst crop to this file.")] = Path(
        "docs/images/resampling-worst-case.png"
    ),
) -> None:
    """Print the tables."""
    photographs = read_photographs(photos, images)
    print("| | crops | method | mean difference | PSNR, dB | off by more than 8 | equal to OpenCV's |")
    print("|---|---|---|---|---|---|---|")
    for case, (transforms, choose) in CASES.items():
        crops = make_crops(photographs, transforms, choose)
        reference = crops.pop("Pillow")
        for method, made in crops.items():
            if not made:
                continue
            num_equal = sum(np.array_equal(a, b) for a, b in zip(made, crops[OPENCV], strict=True))
            print(f"| {case} | {len(made)} | {method} | {measure(made, reference)} | {num_equal} |", flush=True)
    write_worst(picture)


if __name__ == "__main__":
    typer.run(main)
