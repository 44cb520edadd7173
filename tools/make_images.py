"""Create a directory of synthetic photographs: ``OUT/class-00/0000.jpg`` and so on.

Each image is noise with the spectrum of natural images, so JPEG files are about as large as those of real photographs
(about 70 KB at 500x375). The amplitude falls roughly as 1 / frequency (Field, "Relations between the statistics of
natural images and the response properties of cortical cells", 1987). Each class has its own blob color and its own
stripe direction, so a small network can learn to tell the classes apart. The same seed produces the same files.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import cv2
import numpy as np
import simplejpeg
import typer
from numpy.typing import NDArray

TEXTURE_SIZE = 1024
"""The side length, in pixels, of the noise from which images are cut."""

NUM_TEXTURES = 6

SLOPE = 1.4
"""The amplitude is divided by the frequency to this power. With this value, the files are about as large as those
of real photographs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The images of one class."""

    folder: Path
    class_id: int
    num_classes: int
    num_images: int
    width: int
    height: int
    quality: int
    seed: int


@cache
def make_textures(seed: int) -> NDArray[np.float32]:
    """Return noise with the spectrum of natural images and unit variance, float32 [texture, row, column, 3]."""
    random = np.random.default_rng([seed, 0])
    frequency = np.hypot(np.fft.fftfreq(TEXTURE_SIZE)[:, None], np.fft.rfftfreq(TEXTURE_SIZE)[None])
    frequency[0, 0] = 1
    textures = []
    for _ in range(NUM_TEXTURES):
        spectrum = np.fft.rfft2(random.standard_normal((3, TEXTURE_SIZE, TEXTURE_SIZE))) / frequency**SLOPE
        noise = np.fft.irfft2(spectrum)
        # The channels of photographs are correlated: most of each channel is the common luminance.
        noise = 0.75 * noise[:1] + 0.25 * noise
        noise = (noise - noise.mean()) / noise.std()
        textures.append(noise.transpose(1, 2, 0).astype(np.float32))
    return np.stack(textures)


def make_image(job: Job, textures: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.uint8]:
    """Return one image of the job's class, uint8 [height, width, 3]."""
    top = random.integers(TEXTURE_SIZE - job.height)
    left = random.integers(TEXTURE_SIZE - job.width)
    image = textures[random.integers(len(textures)), top : top + job.height, left : left + job.width].copy()
    if random.random() < 0.5:
        image = np.ascontiguousarray(image[:, ::-1])
    image = 118 + 44 * image + random.normal(0, 14, 3).astype(np.float32)

    share = job.class_id / job.num_classes
    color = cv2.cvtColor(np.array([[[180 * share, 170, 210]]], np.uint8), cv2.COLOR_HSV2RGB)[0, 0]
    row, column = np.mgrid[: job.height, : job.width].astype(np.float32)
    angle = np.pi * share + random.normal(0, 0.08)
    period = random.uniform(26, 40)
    stripes = np.sin((np.cos(angle) * column + np.sin(angle) * row) * (2 * np.pi / period) + random.uniform(0, 7))
    for _ in range(random.integers(2, 5)):
        center = random.uniform(0.1, 0.9, 2) * (job.height, job.width)
        radius = random.uniform(0.12, 0.28) * min(job.height, job.width)
        blob = np.exp(-(((row - center[0]) ** 2 + (column - center[1]) ** 2) / (2 * radius**2)))[..., None]
        image += 0.6 * blob * (color.astype(np.float32) - 118 + 30 * stripes[..., None])
    return np.clip(image, 0, 255).astype(np.uint8)


def write_class(job: Job) -> int:
    """Write the images of one class; return their total size in bytes."""
    job.folder.mkdir(parents=True, exist_ok=True)
    textures = make_textures(job.seed)
    num_bytes = 0
    for i in range(job.num_images):
        image = make_image(job, textures, np.random.default_rng([job.seed, 1, job.class_id, i]))
        content = simplejpeg.encode_jpeg(image, quality=job.quality, colorsubsampling="420")
        (job.folder / f"{i:04d}.jpg").write_bytes(content)
        num_bytes += len(content)
    return num_bytes


def main(
    out: Annotated[Path, typer.Argument(help="Where to write the class folders.")],
    classes: Annotated[int, typer.Option(min=1, help="Number of classes.")] = 10,
    per_class: Annotated[int, typer.Option(min=1, help="Number of images per class.")] = 60,
    width: Annotated[int, typer.Option(min=16, max=TEXTURE_SIZE - 1)] = 500,
    height: Annotated[int, typer.Option(min=16, max=TEXTURE_SIZE - 1)] = 375,
    quality: Annotated[int, typer.Option(min=1, max=100, help="JPEG quality.")] = 95,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Create synthetic photographs in several classes."""
    jobs = [
        Job(
            folder=out / f"class-{class_id:02d}",
            class_id=class_id,
            num_classes=classes,
            num_images=per_class,
            width=width,
            height=height,
            quality=quality,
            seed=seed,
        )
        for class_id in range(classes)
    ]
    with ProcessPoolExecutor() as pool:
        num_bytes = sum(pool.map(write_class, jobs))
    num_images = classes * per_class
    mean_kb = num_bytes / num_images / 1000
    typer.echo(f"created {num_images} images of {classes} classes in {out}, {mean_kb:.0f} kB each on average")


if __name__ == "__main__":
    typer.run(main)
