"""Measure what crops of JPEGs cost, and how much time each step takes.

``python -m benchmarks.bench_images PHOTOS`` measures CPU time on one thread from a JPEG's bytes to a 224×224 crop in a
batch's row, for shardio and its peers: random crops (RandomResizedCrop's defaults, the same boxes for all) and
evaluation crops (shorter side to 256, then the center). All outputs are compared first.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.peers import find_peers
from benchmarks.photographs import (
    CHUNK_SIZE,
    Chunk,
    Load,
    evaluation_crop,
    load_with_shardio,
    make_chunks,
    make_rows,
    random_crops,
    read_photographs,
    without_kernel,
)
from benchmarks.stages import box_share, decoded_share, profile
from benchmarks.timing import Rounds, alternate, ratios, summarize
from shardio.images import DEFAULT_MAX_PIXELS, Pixels, use_one_thread
from shardio.images.tiling import reencode_jpeg, tile_jpeg
from shardio.transforms import Geometry

REFERENCE, UNTOUCHED, TILED, SMALLER = "OpenCV", "shardio, untouched", "shardio, tiled", "shardio, 400 px at quality 90"
UNTOUCHED_BY_LIBJPEG, TILED_BY_LIBJPEG = f"{UNTOUCHED}, by libjpeg-turbo", f"{TILED}, by libjpeg-turbo"
PILLOW, ANTIALIASED = "Pillow, antialiased", "shardio, tiled, antialiased"

CASES: dict[str, Callable[..., list[Geometry]]] = {"Random crops": random_crops, "Evaluation crop": evaluation_crop}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to make crops, and the chunks to make them from."""

    load: Load
    chunks: list[Chunk]

    def run(self, rows: Pixels, index: int) -> None:
        chunk = self.chunks[index]
        self.load(chunk, rows[: len(chunk.contents)])


def make_candidates(photographs: list[bytes], transforms: Callable[..., list[Geometry]]) -> dict[str, Candidate]:
    """Return all candidates that can run here, by name."""
    tiled = [tile_jpeg(content) for content in photographs]
    smaller = [
        reencode_jpeg(content, max_side=400, quality=90, max_pixels=DEFAULT_MAX_PIXELS) for content in photographs
    ]
    plain, antialiased = load_with_shardio(transforms()), load_with_shardio(transforms(antialias=True))
    untouched_chunks = make_chunks(photographs, transforms())
    tiled_chunks = make_chunks(tiled, transforms())
    peers, _ = find_peers()
    return {
        **{name: Candidate(load=load, chunks=untouched_chunks) for name, load in peers.items()},
        UNTOUCHED: Candidate(load=plain, chunks=untouched_chunks),
        UNTOUCHED_BY_LIBJPEG: Candidate(load=without_kernel(plain), chunks=untouched_chunks),
        TILED: Candidate(load=plain, chunks=tiled_chunks),
        TILED_BY_LIBJPEG: Candidate(load=without_kernel(plain), chunks=tiled_chunks),
        SMALLER: Candidate(load=plain, chunks=make_chunks(smaller, transforms())),
        ANTIALIASED: Candidate(load=antialiased, chunks=tiled_chunks),
    }


def make_all(candidate: Candidate) -> NDArray[np.uint8]:
    """Return all crops that a candidate makes, uint8 [images, 224, 224, 3]."""
    batches = []
    for index, chunk in enumerate(candidate.chunks):
        rows = make_rows(len(chunk.contents))
        candidate.run(rows, index)
        batches.append(rows)
    return np.concatenate(batches)


def compare(candidates: dict[str, Candidate]) -> dict[str, str]:
    """Describe how each candidate's pixels differ from OpenCV's. Exit if shardio's pixels are wrong."""
    is_halved = np.array([task.is_halved for chunk in candidates[REFERENCE].chunks for task in chunk.tasks])
    made = {name: make_all(candidate) for name, candidate in candidates.items()}
    if not np.array_equal(made[TILED], made[UNTOUCHED]):
        raise SystemExit("the pixels of tiled images differ from those of untouched images")
    if not np.array_equal(made[TILED][~is_halved], made[REFERENCE][~is_halved]):
        raise SystemExit("shardio's pixels differ from OpenCV's")
    # Pillow 13 resizes some crops vertically first and then horizontally, and rounds in between.
    difference = made[ANTIALIASED][~is_halved].astype(np.int16) - made[PILLOW][~is_halved]
    if np.abs(difference).max() > 1:
        raise SystemExit("shardio's pixels differ from Pillow's by more than 1")
    found = {}
    for name, pixels in made.items():
        distance = np.abs(pixels.astype(np.int16) - made[REFERENCE]).mean(axis=(1, 2, 3))
        num_equal = int((distance == 0).sum())
        others = f"; off by {distance[distance > 0].mean():.2f} in the rest" if num_equal < len(distance) else ""
        found[name] = f"equal in {num_equal} of {len(distance)}{others}"
    return found


def print_speed(times: dict[str, Rounds], pixels: dict[str, str]) -> dict[str, Any]:
    """Print the table of a case, and return its figures."""
    print("| | µs per image | × OpenCV's | images/s | pixels against OpenCV's |\n|---|---|---|---|---|")
    figures = {}
    for name, rounds in times.items():
        shares = ratios(rounds, times[REFERENCE])
        print(
            f"| {name} | {summarize(rounds)} | {summarize(shares, 2)} | {1e6 / statistics.median(rounds):,.0f} | "
            f"{pixels[name]} |"
        )
        figures[name] = {"us_per_image": rounds, "of_opencv": shares}
    price = ratios(times[ANTIALIASED], times[TILED])
    against = ratios(times[ANTIALIASED], times[PILLOW])
    print(f"\nTime with antialiasing: {summarize(price, 2)} × without it, {summarize(against, 2)} × Pillow's.")
    return figures


def print_stages(candidates: dict[str, Candidate], rounds: int) -> dict[str, Any]:
    """Print the time that each stage of shardio and OpenCV takes, and return the figures."""
    names = (TILED_BY_LIBJPEG, UNTOUCHED_BY_LIBJPEG, REFERENCE)
    profiles = profile({name: (candidates[name].load, candidates[name].chunks) for name in names}, rounds)
    print(f"\n| µs per image | {' | '.join(names)} |\n|---|---|---|---|")
    for stage in next(iter(profiles.values())):
        cells = (summarize(profiles[name][stage], 1) if any(profiles[name][stage]) else "" for name in names)
        print(f"| {stage} | {' | '.join(cells)} |")
    shares = {name: decoded_share(candidates[name].load, candidates[name].chunks) for name in names[:2]}
    labels = ("share of the files' bytes that libjpeg reads", "share of the images' pixels that is decoded")
    for which, label in enumerate(labels):
        print(f"| {label} | {' | '.join(f'{shares[name][which]:.0%}' for name in shares)} | 100% |")
    share = f"{box_share(candidates[TILED].chunks):.0%}"
    print(f"| share of the images' pixels in the boxes | {share} | {share} | {share} |")
    return {"us_per_image": profiles, "decoded_share": shares}


def main(
    photos: Annotated[Path, typer.Argument(help="A directory of JPEGs.")],
    images: Annotated[int | None, typer.Option(min=1, help="Number of JPEGs to use (default: all).")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file as JSON.")] = None,
) -> None:
    """Print the tables."""
    use_one_thread()
    photographs = read_photographs(photos, images)
    num_bytes = sum(map(len, photographs)) / len(photographs)
    print(f"{len(photographs)} photographs of {num_bytes / 1000:.1f} kB, chunks of {CHUNK_SIZE}, {rounds} rounds:")
    print("median of the rounds (minimum to maximum); shares are computed per round")
    print("".join(f"{name}: not installed\n" for name in find_peers()[1]), end="")
    figures: dict[str, Any] = {}
    for case, transforms in CASES.items():
        candidates = make_candidates(photographs, transforms)
        pixels = compare(candidates)
        halved = [task.is_halved for chunk in candidates[REFERENCE].chunks for task in chunk.tasks]
        print(f"\n**{case}** ({sum(halved)} of {len(halved)} shrink to half the size or less)\n")
        runs = {name: partial(candidate.run, make_rows()) for name, candidate in candidates.items()}
        lengths = [len(chunk.contents) for chunk in candidates[REFERENCE].chunks]
        times = alternate(runs, chunks=lengths, rounds=rounds)
        figures[case] = {"speed": print_speed(times, pixels), "stages": print_stages(candidates, rounds)}
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)
