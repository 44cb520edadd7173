"""Measure what the Python code around the decoder costs, and how many images/s it allows in one process.

``python -m benchmarks.bench_overhead PHOTOS`` randomly crops and flips photographs, both untouched and tiled. The
kernel is disabled, and functions that do nothing replace libjpeg, the resize and the flip. The remaining code holds the
GIL most of the time, so it limits the speed of one process with any number of threads. The goal is 60 µs per image. The
replacement decoder still raises the errors that the real decoder raises for the same bytes, because catching them is
part of the cost.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import cv2
import simplejpeg
import typer

from benchmarks.photographs import (
    Chunk,
    Load,
    load_with_shardio,
    make_chunks,
    make_rows,
    random_crops,
    read_photographs,
    without_kernel,
)
from benchmarks.timing import Rounds, alternate, summarize
from shardio.images import Pixels, use_one_thread
from shardio.images.tiling import tile_jpeg
from shardio.transforms import RandomHorizontalFlip

GOAL_US = 60
NUM_THREADS = 2


@contextmanager
def nothing_done(load: Load, chunks: list[Chunk]) -> Iterator[None]:
    """Replace simplejpeg and OpenCV with functions that do nothing but raise the errors that these chunks cause."""
    decode, errors = simplejpeg.decode_jpeg, dict[tuple[int, ...], str]()

    def record(content: bytes, *, buffer: Pixels, **options: int) -> Any:
        try:
            return decode(content, buffer=buffer, **options)
        except ValueError as error:
            errors[(len(content), *buffer.shape)] = str(error)
            raise

    def pretend(content: bytes, *, buffer: Pixels, **options: int) -> Any:
        if (error := errors.get((len(content), *buffer.shape))) is not None:
            raise ValueError(error)
        return buffer

    with patch.object(simplejpeg, "decode_jpeg", record):
        _load_all(load, chunks)
    with (
        patch.object(simplejpeg, "decode_jpeg", pretend),
        patch.object(cv2, "resize", lambda image, size, *, dst, interpolation: dst),
        patch.object(cv2, "warpAffine", lambda image, matrix, size, *, dst, **_: dst),
        patch.object(cv2, "flip", lambda image, code, *, dst: dst),
    ):
        yield


def _load_one(load: Load, chunks: list[Chunk], rows: Pixels, index: int) -> None:
    load(chunks[index], rows[: len(chunks[index].contents)])


def _load_all(load: Load, chunks: list[Chunk]) -> None:
    rows = make_rows()
    for index in range(len(chunks)):
        _load_one(load, chunks, rows, index)


def time_threads(load: Load, chunks: list[Chunk], rounds: int) -> Rounds:
    """Return the wall-clock time, in µs per image, of several threads that each load all chunks."""
    times = []
    for _ in range(rounds):
        threads = [threading.Thread(target=_load_all, args=(load, chunks)) for _ in range(NUM_THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        num_images = NUM_THREADS * sum(len(chunk.contents) for chunk in chunks)
        times.append(1e6 * (time.perf_counter() - start) / num_images)
    return times


def print_row(name: str, times: Rounds) -> None:
    """Print a row of the table."""
    median = statistics.median(times)
    print(f"| {name} | {summarize(times, 1)} | {1e6 / median:,.0f} | {median / GOAL_US:.2f} |", flush=True)


def main(
    photos: Annotated[Path, typer.Argument(help="A directory of JPEGs.")],
    rounds: Annotated[int, typer.Option(min=1)] = 15,
) -> None:
    """Print the table."""
    use_one_thread()
    photographs = read_photographs(photos)
    kinds = {"untouched": photographs, "tiled": [tile_jpeg(content) for content in photographs]}
    load = without_kernel(load_with_shardio([*random_crops(), RandomHorizontalFlip()]))
    print(f"{len(photographs)} photographs, {rounds} rounds; goal: {GOAL_US} µs per image\n")
    print("| | µs per image | images/s | of the goal |\n|---|---|---|---|")
    for kind, contents in kinds.items():
        chunks = make_chunks(contents, random_crops())
        with nothing_done(load, chunks):
            run = {kind: partial(_load_one, load, chunks, make_rows())}
            lengths = [len(chunk.contents) for chunk in chunks]
            print_row(f"{kind}, CPU time of one thread", alternate(run, chunks=lengths, rounds=rounds)[kind])
            print_row(f"{kind}, {NUM_THREADS} threads, wall-clock time", time_threads(load, chunks, rounds))


if __name__ == "__main__":
    typer.run(main)
