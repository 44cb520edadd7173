"""Time transforms of pixels beside torchvision's: ``python -m benchmarks.bench_transforms``.

One thread, 64 smooth images of 224×224 with some noise. All candidates take turns in each round. The time includes the
drawing of parameters.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import torch
import typer
from PIL import Image

from shardio.images import edit_images
from shardio.models import import_library
from shardio.transforms import (
    AutoAugment,
    ColorJitter,
    PixelTransform,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPerspective,
    RandomPosterize,
    RandomRotation,
    RandomSolarize,
    TrivialAugmentWide,
)

NUM_IMAGES, SIDE = 64, 224

AFFINE = (15, (0.1, 0.1), (0.8, 1.2), 10)
AFFINE_ARGUMENTS = dict(zip(("degrees", "translate", "scale", "shear"), AFFINE, strict=True))
BILINEAR = Image.Resampling.BILINEAR

TRANSFORMS: dict[str, tuple[PixelTransform, str, dict[str, Any]]] = {
    "ColorJitter(.4, .4, .4)": (ColorJitter(0.4, 0.4, 0.4), "ColorJitter", dict(zip("bcs", [0.4] * 3, strict=True))),
    "ColorJitter(.4, .4, .4, .1)": (
        ColorJitter(0.4, 0.4, 0.4, 0.1),
        "ColorJitter",
        dict(zip("bcsh", [0.4, 0.4, 0.4, 0.1], strict=True)),
    ),
    "RandomGrayscale(1)": (RandomGrayscale(1), "RandomGrayscale", {"p": 1}),
    "RandomSolarize(128, 1)": (RandomSolarize(128, 1), "RandomSolarize", {"threshold": 128, "p": 1}),
    "RandomPosterize(4, 1)": (RandomPosterize(4, 1), "RandomPosterize", {"bits": 4, "p": 1}),
    "RandomInvert(1)": (RandomInvert(1), "RandomInvert", {"p": 1}),
    "RandomAutocontrast(1)": (RandomAutocontrast(1), "RandomAutocontrast", {"p": 1}),
    "RandomEqualize(1)": (RandomEqualize(1), "RandomEqualize", {"p": 1}),
    "RandomAdjustSharpness(2, 1)": (
        RandomAdjustSharpness(2, 1),
        "RandomAdjustSharpness",
        {"sharpness_factor": 2, "p": 1},
    ),
    "RandomRotation(15)": (RandomRotation(15), "RandomRotation", {"degrees": 15}),
    "RandomRotation(15, bilinear)": (
        RandomRotation(15, "bilinear"),
        "RandomRotation",
        {"degrees": 15, "interpolation": BILINEAR},
    ),
    "RandomAffine(15, (.1, .1), (.8, 1.2), 10)": (RandomAffine(*AFFINE), "RandomAffine", AFFINE_ARGUMENTS),
    "RandomAffine(15, (.1, .1), (.8, 1.2), 10, bilinear)": (
        RandomAffine(*AFFINE, interpolation="bilinear"),
        "RandomAffine",
        {**AFFINE_ARGUMENTS, "interpolation": BILINEAR},
    ),
    "RandomPerspective(.5, 1)": (RandomPerspective(0.5, 1), "RandomPerspective", {"p": 1}),
    "RandAugment()": (RandAugment(), "RandAugment", {}),
    "RandAugment(bilinear)": (RandAugment(interpolation="bilinear"), "RandAugment", {"interpolation": BILINEAR}),
    "TrivialAugmentWide()": (TrivialAugmentWide(), "TrivialAugmentWide", {}),
    "AutoAugment()": (AutoAugment(), "AutoAugment", {}),
}
"""Ours, and torchvision's name and arguments. The arguments of ColorJitter are named after their first letters."""

_FULL_NAMES = {"b": "brightness", "c": "contrast", "s": "saturation", "h": "hue"}


def make_images() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return uint8 [NUM_IMAGES, SIDE, SIDE, 3]."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (NUM_IMAGES, 7, 7, 3), np.uint8)
    smooth = np.stack([cv2.resize(one, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC) for one in coarse])
    noisy = smooth.astype(np.int64) + random.integers(-12, 13, smooth.shape)
    return noisy.clip(0, 255).astype(np.uint8)


def time_each(call: Callable[[], object]) -> float:
    """Return the time for each image in µs."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) / NUM_IMAGES * 1e6


def main(rounds: int = 7) -> None:
    """Print the medians, and the lowest and highest values."""
    torch.set_num_threads(1)
    import_library("torchvision")
    v2: Any = importlib.import_module("torchvision.transforms.v2")
    images = make_images()
    pillow = [Image.fromarray(image) for image in images]
    tensors = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images]
    keys = np.random.default_rng(1).integers(0, 2**63, NUM_IMAGES, dtype=np.uint64)
    sizes = np.full((NUM_IMAGES, 2), SIDE)
    print("| µs an image | torchvision, Pillow | torchvision, tensor | shardio | times faster than Pillow |")
    print("|---|---|---|---|---|")
    for name, (ours, their_name, arguments) in TRANSFORMS.items():
        theirs = getattr(v2, their_name)(**{_FULL_NAMES.get(key, key): value for key, value in arguments.items()})
        copies = images.copy()
        calls: list[Callable[[], object]] = [
            lambda theirs=theirs: [theirs(image) for image in pillow],  # type: ignore[misc]
            lambda theirs=theirs: [theirs(image) for image in tensors],  # type: ignore[misc]
            lambda ours=ours, copies=copies: edit_images(copies, ours.draw(sizes, keys)),  # type: ignore[misc]
        ]
        times = np.empty((rounds, 3))
        for turn in range(-1, rounds):  # The first round only warms up.
            for candidate, call in enumerate(calls):
                copies[:] = images
                times[turn, candidate] = time_each(call)
        medians, low, high = np.median(times, 0), times.min(0), times.max(0)
        shown = [f"{m:.0f} ({a:.0f} to {b:.0f})" for m, a, b in zip(medians, low, high, strict=True)]
        print(f"| {name} | {' | '.join(shown)} | {np.median(times[:, 0] / times[:, 2]):.1f} |")


if __name__ == "__main__":
    typer.run(main)
