"""Measure the CPU time of candidates that take turns, chunk by chunk, so noise affects all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Rounds = list[float]
"""One figure per round."""


def alternate(
    candidates: Mapping[str, Callable[[int], object]], *, chunks: Sequence[int], rounds: int
) -> dict[str, Rounds]:
    """Return the CPU time of the whole process for each candidate and round, in µs per image.

    In each round, every candidate gets every chunk; the first candidate changes from chunk to chunk. A warm-up round,
    which is not counted, comes first.

    Args:
        candidates: Functions of a chunk's index, by name.
        chunks: The number of images in each chunk.
        rounds: The number of rounds.
    """
    names = list(candidates)
    times: dict[str, Rounds] = {name: [] for name in names}
    for round_number in range(rounds + 1):
        seconds = dict.fromkeys(names, 0.0)
        for chunk in range(len(chunks)):
            first = (round_number + chunk) % len(names)
            for name in names[first:] + names[:first]:
                start = time.process_time()
                candidates[name](chunk)
                seconds[name] += time.process_time() - start
        if round_number:
            for name in names:
                times[name].append(1e6 * seconds[name] / sum(chunks))
    return times


def ratios(times: Rounds, reference: Rounds) -> Rounds:
    """Return the ratio of a candidate's time to another candidate's in each round."""
    return [time_us / other for time_us, other in zip(times, reference, strict=True)]


def summarize(figures: Rounds, digits: int = 0) -> str:
    """Return the median of several rounds and their spread as text, such as ``512 (508 to 530)``."""
    median, low, high = statistics.median(figures), min(figures), max(figures)
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"
