"""Measure how tiling changes the size of JPEGs, and which restart interval is best.

``python -m benchmarks.bench_tiling PHOTOS`` measures the sizes of unchanged photographs, of photographs re-encoded at
several qualities, and of smaller photographs. It also groups photographs by the number of MCUs in a row, and measures
file sizes and the CPU time of crops for several restart intervals (in MCUs).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import cv2
import simplejpeg
import typer

from benchmarks.peers import load_with_opencv
from benchmarks.photographs import (
    Chunk,
    Load,
    evaluation_crop,
    load_with_shardio,
    make_chunks,
    make_rows,
    random_crops,
    read_photographs,
)
from benchmarks.stages import decoded_share
from benchmarks.timing import alternate, ratios, summarize
from shardio.images import DEFAULT_MAX_PIXELS, Pixels, decode_image, tiling, use_one_thread
from shardio.images.jpeg.head import read_head
from shardio.images.tiling import reencode_jpeg, tile_jpeg, untile_jpeg
from shardio.values import count

ROW = 0
"""The number that stands for an interval as long as a row of MCUs."""

GROUPS = {(24, 32, 40): (1, 2, 4, 8, ROW), (21,): (1, 3, 7, ROW), (31,): (1, ROW)}
"""The intervals to try for each number of MCUs in a row."""


def tile_by(content: bytes, interval: int) -> bytes:
    """Tile a JPEG with an interval that divides its MCU row."""
    row_mcus = read_head(content).num_mcus[1]
    assert row_mcus % (interval or row_mcus) == 0, "the interval does not divide the row"
    with patch.object(tiling, "choose_interval", lambda *_: interval or row_mcus):
        return tile_jpeg(content)


def encode(content: bytes, *, quality: int, max_side: int | None = None) -> bytes:
    """Re-encode a photograph as most programs do: 4:2:0, with the standard's Huffman tables."""
    pixels = decode_image(content)
    height, width = pixels.shape[:2]
    if max_side is not None:
        ratio = max_side / max(height, width)
        size = round(width * ratio), round(height * ratio)
        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)  # type: ignore[assignment]  # uint8 stays uint8
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality, "RGB", "420")
    return encoded


def tell_sizes(photographs: list[bytes]) -> None:
    """Print the sizes of files before and after tiling."""
    kinds: dict[str, Callable[[bytes], bytes]] = {
        "unchanged": bytes,
        **{f"quality {quality}": partial(encode, quality=quality) for quality in (95, 90, 75, 50)},
        **{f"longer side {side}, quality 90": partial(encode, quality=90, max_side=side) for side in (250, 125)},
    }
    print("| | kB per image | tiled | tiled, against best tables alone |\n|---|---|---|---|")
    for name, make in kinds.items():
        before = [make(content) for content in photographs]
        tiled, untiled = map(tile_jpeg, before), map(untile_jpeg, before)
        before_kb, tiled_kb, untiled_kb = (mean_kb(contents) for contents in (before, tiled, untiled))
        print(f"| {name} | {before_kb:.1f} | {tiled_kb / before_kb - 1:+.1%} | {tiled_kb / untiled_kb - 1:+.1%} |")
    smaller = [reencode_jpeg(c, max_side=400, quality=90, max_pixels=DEFAULT_MAX_PIXELS) for c in photographs]
    print(f"\nRe-encoded at 400 px and quality 90, tiled: {mean_kb(smaller):.1f} kB per image.\n")


def mean_kb(contents: Iterable[bytes]) -> float:
    """Return the mean size of some files, in kB."""
    sizes = [len(content) for content in contents]
    return sum(sizes) / len(sizes) / 1000


def tell_intervals(photographs: list[bytes], intervals: tuple[int, ...], rounds: int) -> None:
    """Print the sizes and the CPU times for some intervals."""
    untiled_kb = mean_kb(map(untile_jpeg, photographs))
    files = {interval: [tile_by(content, interval) for content in photographs] for interval in intervals}
    print("| interval | bytes | pixels decoded | random crops, × OpenCV's time | evaluation crop |")
    print("|---|---|---|---|---|")
    cells: dict[int, list[str]] = {
        interval: [count(interval, "MCU") if interval else "the row", f"{mean_kb(tiled) / untiled_kb - 1:+.1%}"]
        for interval, tiled in files.items()
    }
    for transforms in (random_crops(), evaluation_crop()):
        load = load_with_shardio(transforms)
        chunks = {interval: make_chunks(tiled, transforms) for interval, tiled in files.items()}
        plain = make_chunks(photographs, transforms)
        runs = {str(interval): partial(_run, load, chunks[interval], make_rows()) for interval in intervals}
        runs["OpenCV"] = partial(_run, load_with_opencv, plain, make_rows())
        times = alternate(runs, chunks=[len(chunk.contents) for chunk in plain], rounds=rounds)
        for interval in intervals:
            if len(cells[interval]) == 2:
                cells[interval].append(f"{decoded_share(load, chunks[interval])[1]:.0%}")
            cells[interval].append(summarize(ratios(times[str(interval)], times["OpenCV"]), 3))
    for row in cells.values():
        print(f"| {' | '.join(row)} |", flush=True)


def _run(load: Load, chunks: list[Chunk], rows: Pixels, number: int) -> None:
    load(chunks[number], rows[: len(chunks[number].contents)])


def tell_rates(photographs: list[bytes], rounds: int) -> None:
    """Print the number of photographs that one thread rewrites per second."""
    rewrites: dict[str, Callable[[bytes], bytes]] = {
        "tile_jpeg": tile_jpeg,
        "untile_jpeg": untile_jpeg,
        "reencode_jpeg, 400 px at quality 90": partial(
            reencode_jpeg, max_side=400, quality=90, max_pixels=DEFAULT_MAX_PIXELS
        ),
    }
    candidates = {
        name: (lambda index, rewrite=rewrite: rewrite(photographs[index])) for name, rewrite in rewrites.items()
    }
    times = alternate(candidates, chunks=[1] * len(photographs), rounds=rounds)
    print("| | µs per image | images/s |\n|---|---|---|")
    for name, figures in times.items():
        print(f"| {name} | {summarize(figures)} | {1e6 / statistics.median(figures):,.0f} |")
    print()


def main(
    photos: Annotated[Path, typer.Argument(help="A directory of JPEGs.")],
    images: Annotated[int | None, typer.Option(min=1, help="Number of JPEGs to use (default: all).")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
) -> None:
    """Print the tables."""
    use_one_thread()
    photographs = read_photographs(photos, images)
    print(f"{len(photographs)} photographs, {rounds} rounds\n")
    tell_sizes(photographs)
    tell_rates(photographs, rounds)
    for row_mcus, intervals in GROUPS.items():
        group = [content for content in photographs if read_head(content).num_mcus[1] in row_mcus]
        print(f"**{len(group)} photographs with {' or '.join(map(str, row_mcus))} MCUs in a row**\n")
        if group:
            tell_intervals(group, intervals, rounds)
        print()


if __name__ == "__main__":
    typer.run(main)
