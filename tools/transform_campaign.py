"""Compare operations on pixels with torchvision and Pillow, far longer than the tests.

    python -m tools.transform_campaign operations --cases 100000 --seed 1   random images, operations and sequences
    python -m tools.transform_campaign hues                                 all 2^24 colours, each of 256 shifts

The exit code is 1 if any pixel differs.
"""

from __future__ import annotations

import time

import numpy as np
import typer

from shardio.images.editing_by_pillow import edit_by_pillow
from shardio.images.kernel.compiled import operation_records as codes
from tests.images.test_editing import as_operations, edit_by_torchvision, edit_compiled, make_image, make_steps

PLANE = np.stack(np.meshgrid(np.arange(256), np.arange(256), indexing="ij"), axis=2).astype(np.uint8)

app = typer.Typer(help=__doc__)


@app.command()
def operations(cases: int = 100_000, seed: int = 0) -> None:
    """Apply one to six operations to each of some images."""
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
    """Turn the hues of all colours by all shifts."""
    began, num_different = time.monotonic(), 0
    for shift in range(256):
        turn = as_operations([(codes.HUE, [shift], lambda image: image)])
        for blue in range(256):
            pixels = np.concatenate([PLANE, np.full((256, 256, 1), blue, np.uint8)], axis=2)
            num_different += int((edit_compiled(pixels, turn) != edit_by_pillow(pixels, turn)).any(axis=2).sum())
    _report(f"{num_different} of {1 << 32} colours and shifts differ", num_different, began)


def _report(found: str, num_different: int, began: float) -> None:
    print(f"{found}, {time.monotonic() - began:.0f} s")
    if num_different:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
