"""What became of one shard, as the journal of a pack keeps it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardio.packing.jpegs import JpegTally
from shardio.packing.sources.files import FileProblem
from shardio.shards import ShardEntry


class RejectedSample(NamedTuple):
    """A sample that was not packed: its key, its file's path relative to the source, and why."""

    key: str
    file: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShard:
    """A finished shard.

    Attributes:
        entry: Its entry in the manifest.
        fields: The names of its fields.
        identity: What identifies the content of its tar and its index, as their folder determines it; "" if it has no
            samples, and so no files.
        jpegs: How its JPEGs are stored.
        converted: How many images were converted, by their former format.
        clipped: How many images have gray values that are clipped when they become RGB, by their type.
        mislabelled: Images whose format does not match their suffix. They are packed anyway.
        rejected: Samples whose image cannot be decoded. They are left out.
        changed: Files that changed during the pack. Their samples are left out.
        was_kept: Whether an earlier run wrote it.
        damage: What was wrong with the shard of an earlier run, which was packed again; "" if nothing was.
    """

    entry: ShardEntry
    fields: tuple[str, ...]
    identity: str
    jpegs: JpegTally = field(default_factory=JpegTally)
    converted: Counter[str] = field(default_factory=Counter)
    clipped: Counter[str] = field(default_factory=Counter)
    mislabelled: tuple[FileProblem, ...] = ()
    rejected: tuple[RejectedSample, ...] = ()
    changed: tuple[FileProblem, ...] = ()
    was_kept: bool = False
    damage: str = ""

    def dump(self) -> dict[str, Any]:
        """Return the shard as a JSON object."""
        return {
            "entry": asdict(self.entry),
            "fields": self.fields,
            "identity": self.identity,
            "jpegs": self.jpegs.dump(),
            "converted": self.converted,
            "clipped": self.clipped,
            "mislabelled": _dump_problems(self.mislabelled),
            "rejected": self.rejected,
            "changed": _dump_problems(self.changed),
        }

    @classmethod
    def load(cls, values: dict[str, Any]) -> PackedShard:
        """Return the shard that :meth:`dump` returned.

        Raises:
            ValueError, TypeError, KeyError: If ``values`` are not a shard's.
        """
        return cls(
            entry=ShardEntry(**values["entry"]),
            fields=tuple(values["fields"]),
            identity=values["identity"],
            jpegs=JpegTally.load(values["jpegs"]),
            converted=Counter(values["converted"]),
            clipped=Counter(values["clipped"]),
            mislabelled=_load_problems(values["mislabelled"]),
            rejected=tuple(RejectedSample(*each) for each in values["rejected"]),
            changed=_load_problems(values["changed"]),
        )

    def as_kept(self) -> PackedShard:
        """Return the same shard, written by an earlier run."""
        return replace(self, was_kept=True)


def _dump_problems(problems: tuple[FileProblem, ...]) -> list[tuple[str, str]]:
    return [(str(path), what) for path, what in problems]


def _load_problems(values: list[tuple[str, str]]) -> tuple[FileProblem, ...]:
    return tuple(FileProblem(Path(path), what) for path, what in values)
