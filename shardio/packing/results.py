"""The result of a pack, and the list of what was left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardio.images import CLIPPED_ADVICE
from shardio.packing.jpegs import JpegTally
from shardio.packing.packed_shard import RejectedSample
from shardio.packing.sources.files import FileProblem
from shardio.shards import Manifest
from shardio.storage import Location

REJECTED_NAME = "rejected.jsonl"
"""The file in a packed dataset that lists the samples that were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """The result of a pack.

    Attributes:
        manifest: The manifest that was written.
        ignored: The files of the source that do not belong to a sample.
        suffixed: The keys that end in the suffix of the file, because another image has the same name otherwise.
        num_kept: The number of samples in shards that an earlier run had finished.
        jpegs: How the JPEGs are stored.
        converted: How many images were converted, by their former format.
        clipped: How many images have gray values that are clipped when they become RGB, by their type.
        mislabelled: Images whose format does not match their suffix. They were packed anyway.
        rejected: Samples whose images cannot be decoded. They were left out.
        changed: Files that changed during the pack. Their samples were left out.
        damaged_shards: Shards that were damaged after an earlier run had finished them. They were packed again.
    """

    manifest: Manifest
    ignored: Sequence[Path] = ()
    suffixed: Sequence[str] = ()
    num_kept: int = 0
    jpegs: JpegTally = field(default_factory=JpegTally)
    converted: Counter[str] = field(default_factory=Counter)
    clipped: Counter[str] = field(default_factory=Counter)
    mislabelled: Sequence[FileProblem] = ()
    rejected: Sequence[RejectedSample] = ()
    changed: Sequence[FileProblem] = ()
    damaged_shards: Sequence[FileProblem] = ()

    def describe_clipped(self) -> str:
        """Return a message about gray images whose values are clipped."""
        types = ", ".join(f"{num_images} × {kind}" for kind, num_images in self.clipped.most_common())
        what = "gray image stores" if self.clipped.total() == 1 else "gray images store"
        return f"{self.clipped.total()} {what} other numbers than uint8 ({types}): {CLIPPED_ADVICE}"

    def describe_suffixed(self) -> str:
        """Return a message about the keys that end in a suffix."""
        return (
            f"{len(self.suffixed)} images have the same name as another, apart from the suffix: they are separate "
            f"samples, whose keys end in it, such as {self.suffixed[0]!r}. If some are the masks of others, pack "
            "them as fields of one sample, such as --fields jpg,png (fields=['jpg', 'png'])"
        )


def write_rejected(folder: Location, rejected: Sequence[RejectedSample]) -> None:
    """Write the list of rejected samples; remove it if there are none."""
    location = folder / REJECTED_NAME
    if not rejected:
        location.remove()
        return
    with location.write_whole() as file:
        for sample in sorted(rejected):
            file.write(json.dumps(sample._asdict(), ensure_ascii=False).encode(errors="surrogateescape") + b"\n")
