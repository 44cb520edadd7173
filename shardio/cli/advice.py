"""From the figures of an epoch to what holds it back, and what can be done about that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardio.cli.console import count

if TYPE_CHECKING:
    from shardio.loader import LoaderStats

STAGES = {
    "read": "reading bytes",
    "transform": "reading images' heads, drawing crops",
    "decode": "decoding, cropping, resizing",
    "wait": "waiting until a batch is taken",
}
"""What workers do, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How the samples are stored.

    Attributes:
        in_shards: Whether in shards, and not in class folders.
        has_images: Whether images are loaded.
        jpeg: How the shards were packed: ``copy``, ``tile`` or ``reencode``; None where that is not known.
    """

    in_shards: bool
    has_images: bool
    jpeg: Any = None


def share_out(stats: LoaderStats) -> dict[str, float]:
    """Return the seconds that workers spent on each stage, all workers together."""
    times = {"read": stats.read_s, "transform": stats.transform_s, "decode": stats.decode_s}
    return {**times, "wait": stats.idle_s} if stats.num_workers else times


def advise(stats: LoaderStats, stored: Stored, num_cores: int) -> str:
    """Say what holds an epoch back and what can be done."""
    times = share_out(stats)
    # A worker that runs is always at some stage, so what is left of the time passed before it ran.
    start_s = stats.elapsed_s - sum(times.values()) / max(stats.num_workers, 1)
    if stats.num_workers and start_s > stats.elapsed_s / 2:
        return (
            f"the epoch is too short to judge: of {stats.elapsed_s:.2f} s, about {start_s:.2f} s passed while workers "
            "started; later --epochs have them already"
        )
    longest = max(times, key=lambda stage: times[stage])
    more_workers = f"more workers, up to the {num_cores} cores" if stats.num_workers < num_cores else ""
    match longest:
        case "read":
            what, remedies = "storage", ["more workers, which read more at a time", _faster_storage(stored)]
        case "transform":
            what, remedies = "reading images' heads and drawing crops, the images being small,", [more_workers]
        case "decode":
            what, remedies = "decoding", [more_workers, _less_to_decode(stored)]
        case _:
            what, remedies = "handing batches over", ["a larger --batch-size"]
    remedy = ", or ".join(filter(None, remedies)) or "there are as many workers as cores"
    who = count(stats.num_workers, "worker") if stats.num_workers else "no workers"
    return f"{who} on {count(num_cores, 'core')}: {what} is the bottleneck: {remedy}"


def _faster_storage(stored: Stored) -> str:
    return "a local disk, or larger shards" if stored.in_shards else "a local disk, or shards (shardio pack)"


def _less_to_decode(stored: Stored) -> str:
    if not stored.has_images:
        return ""
    if stored.jpeg == "reencode":
        return "smaller images (pack with a smaller --max-side)"
    if stored.jpeg == "tile":
        return "smaller images (pack --jpeg reencode --max-side 400)"
    return "less to decode (pack --jpeg tile, or --jpeg reencode --max-side 400)"
