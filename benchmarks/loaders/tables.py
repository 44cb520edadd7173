"""Present the results as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.loaders.registry import PIXELS_CHANGED, PIXELS_KEPT, PIXELS_SMALL, SMALL
from benchmarks.loaders.rounds import Result
from benchmarks.timing import ratios, summarize

Column = tuple[str, Callable[[Result], str]]


def make_tables(case: str, results: Sequence[Result]) -> str:
    """Return the tables of a case, and a list of candidates that were not measured."""
    measured = [result for result in results if result.rounds and not result.problem]
    parts = []
    if case in ("train", "eval", "small"):
        for stored in (PIXELS_KEPT, PIXELS_CHANGED, PIXELS_SMALL, SMALL):
            group = [result for result in measured if result.candidate.stored == stored]
            if group:
                parts.append(f"**{case}: {stored}**\n\n" + _throughput_table(group))
        if measured:
            others = [cores for result in measured for cores in result.figures("others_cores")]
            parts.append(f"CPUs that other programs used at the same time: {summarize(others, 2)}.")
    elif measured:
        names = list(measured[0].rounds[0])
        columns = [(_HEADS[name], _figure(name, *_DIGITS[name])) for name in names]
        parts.append(f"**{case}**\n\n" + _table(measured, columns))
    problems = [f"- {result.candidate.title}: {result.reason}" for result in results if result.problem]
    if problems:
        parts.append(f"{case}, not measured:\n\n" + "\n".join(problems))
    return "\n\n".join(parts) + "\n"


def find_reference(results: Sequence[Result]) -> Result | None:
    """Return the peer with the fastest median."""
    peers = [result for result in results if result.candidate.is_peer]
    return max(peers, key=_median_speed, default=None)


def sort_by_speed(results: Sequence[Result]) -> list[Result]:
    """Return the results, fastest first."""
    return sorted(results, key=_median_speed, reverse=True)


def _throughput_table(results: Sequence[Result]) -> str:
    reference = find_reference(results)

    def compare(result: Result) -> str:
        if reference is None:
            return ""
        speeds, others = result.figures("samples_per_s"), reference.figures("samples_per_s")
        return summarize(ratios(speeds, others), 2)

    head = "ratio to the fastest peer" + ("" if reference is None else f", {reference.candidate.title}")
    columns = [
        ("samples/s", _figure("samples_per_s")),
        (head, compare),
        ("CPU, µs per sample", _figure("cpu_us", 1 if results[0].candidate.stored == SMALL else 0)),
        ("memory, MB", _figure("peak_mb")),
    ]
    return _table(sort_by_speed(results), columns)


def _figure(name: str, digits: int = 0, factor: float = 1) -> Callable[[Result], str]:
    return lambda result: summarize([factor * figure for figure in result.figures(name)], digits)


_HEADS = {
    "cold_ms": "first batch of a new loader, ms",
    "second_epoch_ms": "first batch of the next epoch, ms",
    "epoch_1_us": "CPU in the first epoch, µs per sample",
    "epoch_2_us": "in the second epoch",
    "epoch_3_us": "in the third epoch",
    "training_process_us": "CPU of the training process, µs per sample",
    "python_pace": "pace of other Python code",
    "added_mb": "memory added, MB",
    "epoch_2_mb": "memory after 2 epochs, MB",
    "epoch_50_mb": "memory after 50 epochs, MB",
}
_DIGITS = {
    **dict.fromkeys(_HEADS, (0,)),
    "training_process_us": (1,),
    "python_pace": (2,),
    "epoch_2_mb": (1,),
    "epoch_50_mb": (1,),
}


def _table(results: Sequence[Result], columns: Sequence[Column]) -> str:
    lines = ["| | " + " | ".join(head for head, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for result in results:
        title = f"**{result.candidate.title}**" if result.candidate.is_shardio else result.candidate.title
        lines.append(f"| {title} | " + " | ".join(cell(result) for _, cell in columns) + " |")
    return "\n".join(lines)


def _median_speed(result: Result) -> float:
    return statistics.median(result.figures("samples_per_s"))
