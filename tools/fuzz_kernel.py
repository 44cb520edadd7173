"""Let the JPEG kernel read damaged files with every index checked: none may lie outside of its array.

The kernel is compiled anew, with bounds checking, which takes a minute and makes it several times slower. Whether the
pixels are right is seen by ``fuzz_images.py``.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are no installed package.


def main(
    files: Annotated[int, typer.Option(min=1, help="How many files.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the first one; each has the next.")] = 0,
) -> None:
    """Draw a random window of each of many damaged files."""
    os.environ["NUMBA_BOUNDSCHECK"] = "1"  # Before numba is loaded.
    from shardio.images.kernel.chunk import decode_chunk
    from shardio.images.kernel.records import PLAN, WORKSPACE
    from tests.images.fuzz_laws import draw_file
    from tests.images.mutations import collect

    collection, began = collect(), time.monotonic()
    workspace, num_drawn = np.zeros(1, WORKSPACE)[0], 0
    for start in track(range(seed, seed + files, 4), description="files"):
        contents, draws = zip(
            *[_draw(draw_file(number, collection)) for number in range(start, start + 4)], strict=True
        )
        bounds = np.zeros(5, np.int64)
        np.cumsum([len(content) for content in contents], out=bounds[1:])
        data = np.frombuffer(b"".join([*contents, bytes(8)]), np.uint8)
        plans = np.array([tuple(draw) for draw in draws], PLAN)
        shape = random.Random(start).choices(range(1, 80), k=2)
        rows, is_done = np.zeros((4, *shape, 3), np.uint8), np.zeros(4, np.uint8)
        try:
            decode_chunk(data, bounds, plans, np.arange(4), rows, is_done, workspace)
        except IndexError as error:
            sys.exit(f"seeds {start} to {start + 3}, rows {shape}: {error}")
        num_drawn += int(is_done.sum())
    print(
        f"{files} files from seed {seed} on: no index outside of its array; {num_drawn} were drawn, "
        f"in {time.monotonic() - began:.0f} s"
    )


def _draw(made: tuple[bytes, object, random.Random]) -> tuple[bytes, list[int]]:
    """Return a file, and a plan for a part of it that may or may not be in the picture."""
    content, _, draw = made
    top, left = draw.randrange(40), draw.randrange(60)
    height, width = draw.randint(1, 80), draw.randint(1, 90)
    if draw.random() < 0.7:  # The pictures are small.
        top, left, height, width = top % 3, left % 3, 1 + height % 12, 1 + width % 20
    size = [height, width] if draw.random() < 0.3 else [draw.randint(1, 120), draw.randint(1, 120)]
    corner = [0, 0] if draw.random() < 0.5 else [draw.randint(-30, 60), draw.randint(-30, 60)]
    return content, [top, left, height, width, *size, *corner, draw.randrange(2)]


if __name__ == "__main__":
    typer.run(main)
