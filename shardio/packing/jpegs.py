"""How packing stores JPEGs: unchanged, tiled, or re-encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardio.errors import PackError
from shardio.images import DEFAULT_MAX_PIXELS, TooManyPixels
from shardio.images.jpeg import has_tiles
from shardio.packing.plan import PackSettings
from shardio.packing.sources.files import FileProblem
from shardio.packing.sources.source import SourceSample

TILED = "tiled"
"""The outcome of a JPEG that is stored tiled. Other outcomes say why a JPEG is stored unchanged."""

Rewrite = Callable[[bytes], tuple[bytes, str]]
"""A function from a JPEG to the bytes to store and the outcome: TILED, or a reason with details in parentheses."""

DEFAULT_QUALITY = 90

_JPEG_START = b"\xff\xd8\xff"


@dataclass(slots=True, kw_only=True)
class JpegTally:
    """Counts how the JPEGs of a shard, or of all shards, are stored.

    Attributes:
        outcomes: How many are stored ``tiled``, and how many are stored unchanged, by reason.
        num_bytes_before: The total size of the files.
        num_bytes_after: The total size of the stored JPEGs.
        damaged: The damaged files, which are stored unchanged.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    num_bytes_before: int = 0
    num_bytes_after: int = 0
    damaged: list[FileProblem] = field(default_factory=list)

    def count(self, outcome: str, before: int, after: int) -> None:
        """Count one JPEG, given its outcome and its sizes in bytes."""
        reason, _, _ = outcome.partition(" (")
        self.outcomes[reason] += 1
        self.num_bytes_before += before
        self.num_bytes_after += after

    def note_damage(self, source: SourceSample, field: str, outcome: str) -> None:
        """Note a JPEG's damage, if its outcome says that it is damaged."""
        if outcome.startswith("damaged"):
            verb = "has a" if outcome.startswith("damaged header") else "is"
            self.damaged.append(source.problem(field, f"{verb} {outcome}"))

    def dump(self) -> list[Any]:
        """Return the tally as JSON values."""
        damaged = [(str(problem.path), problem.what) for problem in self.damaged]
        return [self.outcomes, self.num_bytes_before, self.num_bytes_after, damaged]

    @classmethod
    def load(cls, values: Any) -> JpegTally:
        """Return the tally that :meth:`dump` returned.

        Raises:
            ValueError, TypeError: If ``values`` are not a tally.
        """
        outcomes, before, after, damaged = values
        return cls(
            outcomes=Counter(outcomes),
            num_bytes_before=before,
            num_bytes_after=after,
            damaged=[FileProblem(Path(path), what) for path, what in damaged],
        )


def sum_tallies(tallies: Sequence[JpegTally]) -> JpegTally:
    """Return the sum of several tallies."""
    return JpegTally(
        outcomes=sum((tally.outcomes for tally in tallies), Counter[str]()),
        num_bytes_before=sum(tally.num_bytes_before for tally in tallies),
        num_bytes_after=sum(tally.num_bytes_after for tally in tallies),
        damaged=[problem for tally in tallies for problem in tally.damaged],
    )


def describe_jpegs(settings: PackSettings, tally: JpegTally) -> dict[str, str | int | None]:
    """Return the manifest's entries about JPEGs."""
    encoding: dict[str, str | int | None] = {}
    if settings.does_encode:
        encoding = {"max_side": settings.max_side, "quality": settings.quality or DEFAULT_QUALITY}
    if settings.convert_to is not None:
        encoding["convert_to"] = settings.convert_to
    if settings.to_srgb:
        encoding["to_srgb"] = True
    return {"jpeg": settings.jpeg, **encoding, "num_tiled": tally.outcomes[TILED]}


def require_compiled_functions() -> None:
    """Load the compiled functions that rewriting JPEGs needs.

    Raises:
        PackError: If shardio was built without them for this processor, and numba is not installed.
    """
    from shardio.images.kernel import compiled_functions

    try:
        compiled_functions()
    except ImportError as error:
        raise PackError(
            "rewriting JPEGs needs compiled functions. shardio was built without them for this processor, and numba, "
            f"which could compile them, could not be imported ({error}): pip install numba"
        ) from error


def choose_rewrite(settings: PackSettings) -> Rewrite:
    """Return the function that rewrites JPEGs according to the settings.

    Raises:
        PackError: If a required package is not installed.
    """
    if settings.jpeg == "copy":
        return lambda content: (content, TILED if has_tiles(content) else "copied")
    from shardio.images.tiling import NotTileable, reencode_jpeg, tile_jpeg  # Copying does not need it.

    require_compiled_functions()
    quality, max_pixels = settings.quality or DEFAULT_QUALITY, settings.max_pixels or DEFAULT_MAX_PIXELS

    def rewrite(content: bytes) -> tuple[bytes, str]:
        try:
            if settings.jpeg == "tile":
                return tile_jpeg(content), TILED
            reencoded = reencode_jpeg(
                content,
                max_side=settings.max_side,
                quality=quality,
                max_pixels=max_pixels,
                to_srgb=settings.to_srgb,
            )
            return reencoded, TILED
        except NotTileable as error:
            return content, str(error)
        except TooManyPixels:
            return content, "more than max_pixels"
        except ValueError as error:
            return content, f"damaged ({error})"

    return rewrite


def is_jpeg(content: bytes) -> bool:
    """Return whether a content begins as a JPEG does."""
    return content.startswith(_JPEG_START)


def tiling_proves_soundness(content: bytes, max_pixels: int | None) -> bool:
    """Return whether an image needs no other check if it can be tiled, which reads every code of a JPEG.

    Args:
        content: The content of an image file.
        max_pixels: The largest permitted number of pixels; None for Pillow's limit.
    """
    from shardio.images.tiling import decodes_if_tileable

    if not is_jpeg(content):
        return False
    try:
        return decodes_if_tileable(content, max_pixels=max_pixels or DEFAULT_MAX_PIXELS)
    except ValueError:  # The check will say what is wrong with its head.
        return False
