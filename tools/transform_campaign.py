"""Compare operations on pixels with torchvision and Pillow, in many more cases than the tests do.

    python -m tools.transform_campaign operations --cases 100000 --seed 1   random images, operations and sequences
    python -m tools.transform_campaign hues                                 all 2^24 colors, each with 256 shifts
    python -m tools.transform_campaign blurs --cases 20000 --seed 1         random images and Gaussian blurs

The exit code is 1 if any pixel differs. For blurs, the exit code is 1 if a pixel differs from the definition, or
differs from torchvision's by more than 1.
"""

from __future__ import annotations

import time

import numpy as np
import typer
from PIL import Image

from shardio.images.rendering import edit_by_pillow
from shardio.kernel import operations as codes
from tests.images.test_editing import (
    as_operations,
    edit_by_torchvision,
    edit_compiled,
    functional,
    make_blur,
    make_image,
    make_steps,
)

PLANE = np.stack(np.meshgrid(np.arange(256), np.arange(256), indexing="ij"), axis=2).astype(np.uint8)

app = typer.Typer(help=__doc__)


@app.command()
def operations(cases: int = 100_000, seed: int = 0) -> None:
    """Apply one to six operations to random images."""
    began, random, num_different = time.monotonic(), np.random.default_rng(seed), 0
    for case in range(cases):
        pixels = make_image(random)
        choices = list(make_steps(random).values())
        steps = [choices[i] for i in random.integers(0, len(choices), random.integers(1, 7))]
        if (edit_compiled(pixels, as_operations(steps)) != edit_by_torchvision(pixels, steps)).any():
            print(f"case {case} differs: {pixels.shape}, {[step[:2] for step in steps]}")
            num_different += 1
    _report(f"{num_different} of {cases} images differ", num_different, began)


@app.command()
def hues() -> None:
    """Shift the hue of every color by every possible amount."""
    began, num_different = time.monotonic(), 0
    for shift in range(256):
        turn = as_operations([(codes.HUE, [shift], lambda image: image)])
        for blue in range(256):
            pixels = np.concatenate([PLANE, np.full((256, 256, 1), blue, np.uint8)], axis=2)
            num_different += int((edit_compiled(pixels, turn) != edit_by_pillow(pixels, turn)).any(axis=2).sum())
    _report(f"{num_different} of {1 << 32} colors and shifts differ", num_different, began)


@app.command()
def blurs(cases: int = 20_000, seed: int = 0) -> None:
    """Blur random images, including images smaller than the blur's kernel, which torchvision rejects."""
    began, random = time.monotonic(), np.random.default_rng(seed)
    num_wrong, num_by_one, num_values = 0, 0, 0
    for _ in range(cases):
        pixels, radii = make_image(random), tuple(random.integers(0, 16, 2).tolist())
        sigmas = tuple(random.uniform(0.05, 5, 2).tolist())
        operation = make_blur(radii, sigmas)
        blurred = edit_compiled(pixels, operation)
        num_wrong += int((blurred != edit_by_pillow(pixels, operation)).any())
        if radii[0] < pixels.shape[0] and radii[1] < pixels.shape[1]:
            size = [2 * radii[1] + 1, 2 * radii[0] + 1]
            expected = np.array(functional.gaussian_blur(Image.fromarray(pixels), size, list(sigmas[::-1])))
            difference = np.abs(blurred.astype(int) - expected)
            num_wrong += int((difference > 1).any())
            num_by_one, num_values = num_by_one + int((difference == 1).sum()), num_values + difference.size
    found = f"wrong: {num_wrong} of {cases} images; {num_by_one} of {num_values} values differ by 1 from torchvision's"
    _report(found, num_wrong, began)


def _report(found: str, num_different: int, began: float) -> None:
    print(f"{found}; the run took {time.monotonic() - began:.0f} s")
    if num_different:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
