"""Find the bottleneck in the statistics of an epoch, and suggest remedies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardio.cli.console import count

if TYPE_CHECKING:
    from shardio.loader import LoaderStats

STAGES = {
    "read": "reading bytes",
    "transform": "reading image headers, choosing crops",
    "python": "your own code",
    "decode": "decoding, cropping, resizing",
    "idle": "idle until a batch is taken",
}
"""Descriptions of the stages on which workers spend their time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFormat:
    """The format in which samples are stored.

    Attributes:
        in_shards: Whether they are in shards rather than in class folders.
        has_images: Whether images are loaded.
        formats: The formats of the images, such as ``"PNG"``, as far as they are known.
        jpeg: How the shards were packed: ``copy``, ``tile`` or ``reencode``; None if unknown.
    """

    in_shards: bool
    has_images: bool
    formats: frozenset[str] = frozenset()
    jpeg: Any = None


def stage_seconds(stats: LoaderStats) -> dict[str, float]:
    """Return the total seconds that all workers spent on each stage."""
    times = {"read": stats.read_s, "transform": stats.transform_s - stats.python_s, "decode": stats.decode_s}
    if stats.in_python:
        times["python"] = stats.python_s
    return {**times, "idle": stats.idle_s} if stats.num_workers else times


def advise(stats: LoaderStats, stored: DatasetFormat, num_processors: int, *, is_first: bool) -> str:
    """Return a sentence that names the bottleneck of an epoch and suggests remedies.

    Args:
        stats: The statistics of the epoch.
        stored: What was loaded.
        num_processors: The number of processors that this process may use.
        is_first: Whether workers started in this epoch.
    """
    times = stage_seconds(stats)
    # A running worker is always in one of the stages, so the remaining time passed before it ran.
    start_s = stats.elapsed_s - sum(times.values()) / max(stats.num_workers, 1)
    if stats.num_workers and start_s > stats.elapsed_s / 2:
        if not is_first:
            return f"this epoch ({stats.elapsed_s:.2f} s) is too short to judge: use a dataset with more samples"
        return (
            f"this epoch is too short to judge: workers took about {start_s:.2f} s of {stats.elapsed_s:.2f} s to "
            "start. They start only once: see the second epoch (--epochs 2)"
        )
    longest = max(times, key=lambda stage: times[stage])
    more_workers = (
        f"more workers (up to {num_processors}, the number of processors)" if stats.num_workers < num_processors else ""
    )
    match longest:
        case "read":
            bottleneck = "storage is the bottleneck"
            remedies = ["more workers (more reads at a time)", _faster_storage(stored)]
        case "transform":
            bottleneck = "per-image overhead is the bottleneck because the images are small"
            remedies = [more_workers]
        case "python":
            bottleneck = f"your own code is the bottleneck ({', '.join(stats.in_python)})"
            remedies = [more_workers, "less work in it"]
        case "decode":
            bottleneck = "decoding is the bottleneck"
            remedies = [more_workers, _less_to_decode(stored)]
        case _:
            bottleneck = "handing batches to the training process is the bottleneck"
            remedies = ["a larger --batch-size"]
    suggestion = ", or ".join(filter(None, remedies))
    remedy = f"try {suggestion}" if suggestion else "there are already at least as many workers as processors"
    workers = count(stats.num_workers, "worker") if stats.num_workers else "no workers"
    return f"{workers} on {count(num_processors, 'processor')}: {bottleneck}; {remedy}"


def _faster_storage(stored: DatasetFormat) -> str:
    return "a local disk, or larger shards" if stored.in_shards else "a local disk, or shards (shardio pack)"


def _less_to_decode(stored: DatasetFormat) -> str:
    if not stored.has_images:
        return ""
    if others := sorted(stored.formats - {"JPEG"}):
        return (
            f"JPEGs instead of {' and '.join(others)} (pack with --convert-to jpeg --jpeg tile, which changes pixels "
            "slightly)"
        )
    if stored.jpeg == "reencode":
        return "smaller images (pack with a smaller --max-side)"
    if stored.jpeg == "tile":
        return "smaller images (pack with --jpeg reencode --max-side 400)"
    return "images that decode faster (pack with --jpeg tile, or with --jpeg reencode --max-side 400)"
