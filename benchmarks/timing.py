"""CPU time of candidates that take turns, chunk by chunk, so that a noisy machine disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Rounds = list[float]
"""A figure for each round."""


def alternate(
    candidates: Mapping[str, Callable[[int], object]], *, chunks: Sequence[int], rounds: int
) -> dict[str, Rounds]:
    """Return the CPU time of the whole process in µs an image, for each candidate and round.

    In each round every candidate gets every chunk; who comes first changes from chunk to chunk. One round before
    the first is not counted.

    Args:
        candidates: By name, functions of a chunk's number.
        chunks: How many images each chunk has.
        rounds: How many times all is done.
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
    """Return a candidate's times as shares of another one's, round by round."""
    return [time_us / other for time_us, other in zip(times, reference, strict=True)]


def summarise(figures: Rounds, digits: int = 0) -> str:
    """Return the median of some rounds and their spread: ``512 (508 to 530)``."""
    median, low, high = statistics.median(figures), min(figures), max(figures)
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"
