"""What packing makes of JPEGs: leaves them as they are, tiles them, or encodes them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardio.errors import PackError
from shardio.images.jpeg import has_tiles
from shardio.packing.plan import PackSettings, ShardPlan
from shardio.packing.scan import Problem, SourceSample
from shardio.sample import Sample
from shardio.shards import IMAGE_FIELDS, Shard

TILED = "tiled"
"""What is counted for a JPEG that is stored tiled; of others it is counted why they are stored as they are."""

Rewrite = Callable[[bytes], tuple[bytes, str]]
"""From a JPEG's bytes to those to store, and what has become of it: TILED, or a reason (and details in brackets)."""

_JPEG_START = b"\xff\xd8\xff"


@dataclass(slots=True, kw_only=True)
class JpegTally:
    """What became of the JPEGs of a pack.

    Attributes:
        outcomes: How many are stored ``tiled``, and how many as they were, by the reason.
        num_bytes_before: The size of their files.
        num_bytes_after: The size of what is stored.
        damaged: Those stored as they were because something is wrong with them.
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


def sum_tallies(tallies: Sequence[JpegTally]) -> JpegTally:
    """Return one tally for all."""
    return JpegTally(
        outcomes=sum((tally.outcomes for tally in tallies), Counter[str]()),
        num_bytes_before=sum(tally.num_bytes_before for tally in tallies),
        num_bytes_after=sum(tally.num_bytes_after for tally in tallies),
        damaged=[problem for tally in tallies for problem in tally.damaged],
    )


def describe(settings: PackSettings, tally: JpegTally) -> dict[str, str | int | None]:
    """Return what a manifest says of the JPEGs."""
    encoding = {"max_side": settings.max_side, "quality": settings.quality} if settings.jpeg == "reencode" else {}
    return {"jpeg": settings.jpeg, **encoding, "num_tiled": tally.outcomes[TILED]}


def choose_rewrite(settings: PackSettings) -> Rewrite:
    """Return what the settings want done with a JPEG's bytes.

    Raises:
        PackError: If what it needs is not installed.
    """
    if settings.jpeg == "copy":
        return lambda content: (content, TILED if has_tiles(content) else "copied")
    try:
        from shardio.images.tiling import NotTileable, reencode_jpeg, tile_jpeg
    except ImportError as error:
        raise PackError(
            f"jpeg={settings.jpeg!r} needs numba, which cannot be imported ({error}): pip install 'shardio[tile]'"
        ) from error

    def rewrite(content: bytes) -> tuple[bytes, str]:
        try:
            if settings.jpeg == "tile":
                return tile_jpeg(content), TILED
            tiled = reencode_jpeg(
                content, max_side=settings.max_side, quality=settings.quality, max_pixels=settings.max_pixels
            )
            return tiled, TILED
        except NotTileable as error:
            return content, str(error)
        except ValueError as error:
            return content, f"damaged ({error})"

    return rewrite


class JpegRewriter:
    """Rewrites the JPEGs of a shard's samples, and keeps a tally.

    Args:
        rewrite: What to do with a JPEG's bytes.
        strict: Whether a damaged JPEG is an error.
    """

    def __init__(self, rewrite: Rewrite, *, strict: bool) -> None:
        self.tally = JpegTally()
        self._strict = strict
        self._rewrite = rewrite

    def rewrite(self, source: SourceSample, sample: Sample) -> Sample:
        """Return a sample with its JPEG rewritten.

        Raises:
            PackError: If it is damaged and the pack is strict.
        """
        fields = dict(sample.fields)
        for name, before in sample.fields.items():
            if name in IMAGE_FIELDS and before.startswith(_JPEG_START):
                fields[name], outcome = self._rewrite(before)
                self.tally.count(source, name, outcome, len(before), len(fields[name]))
        if self._strict and self.tally.damaged:
            raise PackError(f"{self.tally.damaged[0].path} {self.tally.damaged[0].what}")
        return Sample(key=sample.key, fields=fields, origin=sample.origin)

    def count_again(self, plan: ShardPlan, shard: Shard) -> None:
        """Count the JPEGs of a shard that an earlier run wrote, by what lies in it."""
        for number, source in enumerate(plan.samples):
            for name, content in shard.read(number, set(IMAGE_FIELDS) & source.files.keys()).fields.items():
                if content.startswith(_JPEG_START):
                    outcome = TILED if has_tiles(content) else self._rewrite(content)[1]
                    self.tally.count(source, name, outcome, source.files[name].stat().st_size, len(content))
