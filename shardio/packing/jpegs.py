"""What packing makes of JPEGs: leaves them as they are, tiles them, or encodes them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardio.errors import PackError
from shardio.packing.plan import PackSettings, ShardPlan
from shardio.packing.scan import Problem, SourceSample
from shardio.sample import Sample
from shardio.shards import IMAGE_FIELDS, Shard

TILED = "tiled"
"""What is counted for a JPEG that was tiled; of others the reason is counted why they were not."""

Rewrite = Callable[[bytes], bytes]
"""From a JPEG's bytes to others; raises ValueError where they are to stay as they are."""

_JPEG_START = b"\xff\xd8\xff"


@dataclass(slots=True, kw_only=True)
class JpegTally:
    """What became of the JPEGs of a pack.

    Attributes:
        outcomes: How many were ``tiled``, and how many were stored untouched, by the reason.
        num_bytes_before: The size of their files.
        num_bytes_after: The size of what was stored.
        damaged: Those stored untouched because something is wrong with them.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    num_bytes_before: int = 0
    num_bytes_after: int = 0
    damaged: list[Problem] = field(default_factory=list)

    def count(self, source: SourceSample, name: str, outcome: str, before: int, after: int) -> None:
        """Count one JPEG, the field ``name`` of a sample."""
        reason, _, _ = outcome.partition(" (")
        self.outcomes[reason] += 1
        self.num_bytes_before += before
        self.num_bytes_after += after
        if reason.startswith("damaged"):
            self.damaged.append(Problem(path=source.files[name], what=f"is {outcome}"))


def choose_rewrite(settings: PackSettings) -> Rewrite | None:
    """Return what the settings want done with a JPEG's bytes; None leaves them as they are.

    Raises:
        PackError: If what it needs is not installed.
    """
    if settings.jpeg == "copy":
        return None
    try:
        from shardio.images.tiling import reencode_jpeg, tile_jpeg
    except ImportError as error:
        raise PackError(
            f"jpeg={settings.jpeg!r} needs numba, which is not there ({error}): pip install 'shardio[tile]'"
        ) from error
    if settings.jpeg == "tile":
        return tile_jpeg
    return lambda content: reencode_jpeg(
        content, max_side=settings.max_side, quality=settings.quality, max_pixels=settings.max_pixels
    )


def sum_tallies(tallies: Sequence[JpegTally]) -> JpegTally:
    """Return one tally for all."""
    return JpegTally(
        outcomes=sum((tally.outcomes for tally in tallies), Counter[str]()),
        num_bytes_before=sum(tally.num_bytes_before for tally in tallies),
        num_bytes_after=sum(tally.num_bytes_after for tally in tallies),
        damaged=[problem for tally in tallies for problem in tally.damaged],
    )


def describe(settings: PackSettings, tally: JpegTally) -> dict[str, str | int | None]:
    """Return what a manifest says of how JPEGs were packed."""
    if settings.jpeg == "copy":
        return {"jpeg": "copy"}
    encoding = {"max_side": settings.max_side, "quality": settings.quality} if settings.jpeg == "reencode" else {}
    return {"jpeg": settings.jpeg, **encoding, "num_tiled": tally.outcomes[TILED]}


class JpegRewriter:
    """Rewrites the JPEGs of a shard's samples, and keeps a tally.

    Args:
        rewrite: What to do with a JPEG's bytes, see :func:`choose_rewrite`.
        strict: Whether a damaged JPEG is an error.
    """

    def __init__(self, rewrite: Rewrite | None, *, strict: bool) -> None:
        self.tally = JpegTally()
        self._strict = strict
        self._rewrite = rewrite

    def rewrite(self, source: SourceSample, sample: Sample) -> Sample:
        """Return a sample with its JPEG rewritten.

        Raises:
            PackError: If it is damaged and the pack is strict.
        """
        name = next((name for name in IMAGE_FIELDS if name in sample.fields), None)
        if self._rewrite is None or name is None or not sample.fields[name].startswith(_JPEG_START):
            return sample
        before = sample.fields[name]
        after, outcome = _try(self._rewrite, before)
        self.tally.count(source, name, outcome, len(before), len(after))
        if self._strict and self.tally.damaged:
            raise PackError(f"{self.tally.damaged[0].path} {self.tally.damaged[0].what}")
        return Sample(key=sample.key, fields={**sample.fields, name: after}, origin=sample.origin)

    def count_again(self, plan: ShardPlan, shard: Shard) -> None:
        """Count the JPEGs of a shard that an earlier run wrote, by what lies in it."""
        if self._rewrite is None:
            return
        from shardio.images.jpeg import has_tiles

        for number, source in enumerate(plan.samples):
            for name, content in shard.read(number, set(IMAGE_FIELDS) & source.files.keys()).fields.items():
                if content.startswith(_JPEG_START):
                    outcome = TILED if has_tiles(content) else _try(self._rewrite, content)[1]
                    self.tally.count(source, name, outcome, source.files[name].stat().st_size, len(content))


def _try(rewrite: Rewrite, content: bytes) -> tuple[bytes, str]:
    """Return the rewritten content and what is to be counted: TILED, or why it stays as it is."""
    from shardio.images.tiling import NotTileable

    try:
        return rewrite(content), TILED
    except NotTileable as error:
        return content, str(error)
    except ValueError as error:
        return content, f"damaged ({error})"
