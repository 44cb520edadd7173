"""Measure the CPU time of the functions that a candidate calls, by stage."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import cv2
import simplejpeg

import benchmarks.photographs
import shardio.images.opening
from benchmarks.photographs import Chunk, Load, make_rows
from benchmarks.timing import Rounds
from shardio.images import Pixels, open_image

STAGES: dict[str, Sequence[tuple[Any, str]]] = {
    "drawing crops": [(benchmarks.photographs, "draw_plan")],
    "read_head": [(shardio.images.opening, "read_head")],
    "read_tiles": [(shardio.images.opening, "read_tiles")],
    "cut_tiles, cut_rows": [(shardio.images.opening, "cut_tiles"), (shardio.images.opening, "cut_rows")],
    "libjpeg-turbo": [(simplejpeg, "decode_jpeg"), (cv2, "imdecode")],
    "cv2.resize": [(cv2, "resize")],
}
"""The functions of each stage."""

REST = "the rest"

Profile = dict[str, Rounds]
"""µs per image in each round, by stage."""


class _Stopwatch:
    """A stopwatch that adds up the CPU time of functions by stage, in seconds."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stage, functions in STAGES.items():
                for owner, name in functions:
                    stack.enter_context(patch.object(owner, name, self._timed(stage, getattr(owner, name))))
            yield

    def _timed(self, stage: str, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[stage] += time.thread_time() - start

        return timed


def profile(candidates: dict[str, tuple[Load, Sequence[Chunk]]], rounds: int) -> dict[str, Profile]:
    """Return the CPU time of each candidate by stage. The candidates take turns, after one warm-up round.

    The stopwatch itself costs less than 1 µs per stage.
    """
    profiles: dict[str, Profile] = {name: {stage: [] for stage in (*STAGES, REST)} for name in candidates}
    num_chunks = len(next(iter(candidates.values()))[1])
    rows = make_rows()
    for round_number in range(rounds + 1):
        watches = {name: _Stopwatch() for name in candidates}
        totals = dict.fromkeys(candidates, 0.0)
        for index in range(num_chunks):
            for name, (load, chunks) in candidates.items():
                chunk = chunks[index]
                with watches[name].installed():
                    start = time.thread_time()
                    load(chunk, rows[: len(chunk.contents)])
                    totals[name] += time.thread_time() - start
        if round_number:
            for name, (_, chunks) in candidates.items():
                num_images = sum(len(chunk.contents) for chunk in chunks)
                seconds = watches[name].seconds
                for stage in STAGES:
                    profiles[name][stage].append(1e6 * seconds[stage] / num_images)
                profiles[name][REST].append(1e6 * (totals[name] - sum(seconds.values())) / num_images)
    return profiles


def decoded_share(load: Load, chunks: Sequence[Chunk]) -> tuple[float, float]:
    """Return the shares of the files' bytes that simplejpeg reads, and of the images' pixels that it decodes."""
    num_bytes = num_pixels = 0
    decode = simplejpeg.decode_jpeg

    def count(content: bytes, *, buffer: Pixels, **options: int) -> Any:
        nonlocal num_bytes, num_pixels
        num_bytes += len(content)
        num_pixels += buffer.shape[0] * buffer.shape[1]
        return decode(content, buffer=buffer, **options)

    rows = make_rows()
    with patch.object(simplejpeg, "decode_jpeg", count):
        for chunk in chunks:
            load(chunk, rows[: len(chunk.contents)])
    return num_bytes / sum(len(content) for chunk in chunks for content in chunk.contents), num_pixels / _pixels(chunks)


def box_share(chunks: Sequence[Chunk]) -> float:
    """Return the share of the images' pixels that the crops need: the part of each box that its window shows."""
    needed = 0.0
    for task in (task for chunk in chunks for task in chunk.tasks):
        needed += task.box[2] * task.box[3] * (task.window[2] * task.window[3]) / (task.size[0] * task.size[1])
    return needed / _pixels(chunks)


def _pixels(chunks: Sequence[Chunk]) -> int:
    return sum(math.prod(open_image(content).size) for chunk in chunks for content in chunk.contents)
