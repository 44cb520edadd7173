"""Compare the speeds of shardio's and torchvision's pixel transforms: ``python -m benchmarks.bench_transforms``.

All candidates transform 64 smooth 224×224 images with some noise, on one thread, and take turns in each round. The time
includes drawing parameters.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
import typer
from PIL import Image

from shardio.images import edit_images
from shardio.libraries import import_library
from shardio.transforms import (
    AugMix,
    AutoAugment,
    ColorJitter,
    GaussianBlur,
    Normalize,
    PixelTransform,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomAutocontrast,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomInvert,
    RandomPerspective,
    RandomPosterize,
    RandomRotation,
    RandomSolarize,
    Transform,
    TrivialAugmentWide,
)

NUM_IMAGES, SIDE = 64, 224

AFFINE: dict[str, Any] = {"degrees": 15, "translate": (0.1, 0.1), "scale": (0.8, 1.2), "shear": 10}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Case(NamedTuple):
    """A shardio transform, and the same transform in torchvision.

    Attributes:
        ours: shardio's transform.
        make_theirs: A function that makes torchvision's transform, given torchvision's module v2.
        takes_pillow: Whether torchvision's transform also accepts Pillow images.
    """

    ours: Transform
    make_theirs: Callable[[Any], Any]
    takes_pillow: bool = True


CASES = {
    "ColorJitter(.4, .4, .4)": Case(ColorJitter(0.4, 0.4, 0.4), lambda v2: v2.ColorJitter(0.4, 0.4, 0.4)),
    "ColorJitter(.4, .4, .4, .1)": Case(ColorJitter(0.4, 0.4, 0.4, 0.1), lambda v2: v2.ColorJitter(0.4, 0.4, 0.4, 0.1)),
    "RandomGrayscale(1)": Case(RandomGrayscale(1), lambda v2: v2.RandomGrayscale(1)),
    "RandomSolarize(128, 1)": Case(RandomSolarize(128, 1), lambda v2: v2.RandomSolarize(128, 1)),
    "RandomPosterize(4, 1)": Case(RandomPosterize(4, 1), lambda v2: v2.RandomPosterize(4, 1)),
    "RandomInvert(1)": Case(RandomInvert(1), lambda v2: v2.RandomInvert(1)),
    "RandomAutocontrast(1)": Case(RandomAutocontrast(1), lambda v2: v2.RandomAutocontrast(1)),
    "RandomEqualize(1)": Case(RandomEqualize(1), lambda v2: v2.RandomEqualize(1)),
    "RandomAdjustSharpness(2, 1)": Case(RandomAdjustSharpness(2, 1), lambda v2: v2.RandomAdjustSharpness(2, 1)),
    "GaussianBlur(23)": Case(GaussianBlur(23), lambda v2: v2.GaussianBlur(23)),
    "GaussianBlur(23, 2.0)": Case(GaussianBlur(23, 2.0), lambda v2: v2.GaussianBlur(23, (2.0, 2.0))),
    "RandomErasing(1)": Case(RandomErasing(1), lambda v2: v2.RandomErasing(1), takes_pillow=False),
    "Normalize": Case(
        Normalize(MEAN, STD),
        lambda v2: v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]),
        takes_pillow=False,
    ),
    "RandomRotation(15)": Case(RandomRotation(15), lambda v2: v2.RandomRotation(15)),
    "RandomRotation(15, bilinear)": Case(
        RandomRotation(15, "bilinear"), lambda v2: v2.RandomRotation(15, v2.InterpolationMode.BILINEAR)
    ),
    "RandomAffine(15, (.1, .1), (.8, 1.2), 10)": Case(
        RandomAffine(**AFFINE),
        lambda v2: v2.RandomAffine(**AFFINE),
    ),
    "RandomAffine(15, (.1, .1), (.8, 1.2), 10, bilinear)": Case(
        RandomAffine(**AFFINE, interpolation="bilinear"),
        lambda v2: v2.RandomAffine(**AFFINE, interpolation=v2.InterpolationMode.BILINEAR),
    ),
    "RandomPerspective(.5, 1)": Case(RandomPerspective(0.5, 1), lambda v2: v2.RandomPerspective(0.5, 1)),
    "RandAugment()": Case(RandAugment(), lambda v2: v2.RandAugment()),
    "RandAugment(bilinear)": Case(
        RandAugment(interpolation="bilinear"), lambda v2: v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR)
    ),
    "TrivialAugmentWide()": Case(TrivialAugmentWide(), lambda v2: v2.TrivialAugmentWide()),
    "AutoAugment()": Case(AutoAugment(), lambda v2: v2.AutoAugment()),
    "AugMix()": Case(AugMix(), lambda v2: v2.AugMix()),
}


def make_images() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the images, uint8 [NUM_IMAGES, SIDE, SIDE, 3]."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (NUM_IMAGES, 7, 7, 3), np.uint8)
    smooth = np.stack([cv2.resize(one, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC) for one in coarse])
    noisy = smooth.astype(np.int64) + random.integers(-12, 13, smooth.shape)
    return noisy.clip(0, 255).astype(np.uint8)


def time_each(call: Callable[[], object]) -> float:
    """Return the time per image in µs."""
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
    print("| µs per image | torchvision, Pillow | torchvision, tensor | shardio | times as fast |")
    print("|---|---|---|---|---|")
    for name, case in CASES.items():
        theirs, copies = case.make_theirs(v2), images.copy()

        def call_ours(ours: Any = case.ours, copies: Any = copies) -> None:
            if isinstance(ours, PixelTransform):
                edit_images(copies, ours.draw(sizes, keys))
            else:
                for image in copies:
                    ours.apply(image, None)

        calls: list[Callable[[], object]] = [
            lambda theirs=theirs: [theirs(image) for image in pillow],  # type: ignore[misc]
            lambda theirs=theirs: [theirs(image) for image in tensors],  # type: ignore[misc]
            call_ours,
        ]
        times = np.full((rounds, 3), np.nan)
        for turn in range(-1, rounds):  # The first round is a warm-up.
            for candidate, call in enumerate(calls):
                if candidate or case.takes_pillow:
                    copies[:] = images
                    times[turn, candidate] = time_each(call)
        medians, low, high = np.median(times, 0), times.min(0), times.max(0)
        shown = [f"{m:.0f} ({a:.0f} to {b:.0f})" for m, a, b in zip(medians, low, high, strict=True)]
        faster = np.median(times[:, 0 if case.takes_pillow else 1] / times[:, 2])
        print(f"| {name} | {' | '.join(shown).replace('nan (nan to nan)', '')} | {faster:.1f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
