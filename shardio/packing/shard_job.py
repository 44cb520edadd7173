"""Pack one shard. The result depends only on the job, so any process on any machine with the same files can do it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardio.errors import FormatError, PackError, StoreError
from shardio.images import CLIPPED_ADVICE
from shardio.packing.folders import DatasetFolder
from shardio.packing.plan import PackSettings
from shardio.packing.preparing import JpegTally, PackedShard, Preparation, RejectedSample, refuse_problems
from shardio.packing.sources.files import FileChangedError, FileProblem
from shardio.packing.sources.source import SourceSample
from shardio.sample import Sample
from shardio.shards import Manifest, index_location, list_names, split_name, write_shard
from shardio.storage import Location, find_path

REJECTED_NAME = "rejected.jsonl"
"""The file in a packed dataset that lists the samples that were left out."""

OnChanged = Literal["raise", "skip"]
"""The treatment of samples whose files change during the pack."""

Report = Callable[[int, int], None]
"""Receives the numbers of samples and bytes that were packed since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """The result of a pack.

    Attributes:
        manifest: The manifest that was written.
        ignored: The files of the source that do not belong to a sample.
        suffixed: The keys that end in the file's suffix, because another image has the same name except for its suffix.
        num_kept: The number of samples in shards that an earlier run had finished.
        jpegs: The tally of the JPEGs.
        converted: The number of converted images by their former format.
        clipped: The number of images whose gray values are clipped when they become RGB, by the type of the values.
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


def find_finished(
    folder: DatasetFolder, tar: Location, samples: Sequence[SourceSample], earlier: PackedShard | None
) -> PackedShard | str | None:
    """Return the shard that an earlier run finished, if its tar and its index are unchanged.

    Args:
        folder: The folder of the dataset.
        tar: The shard's location.
        samples: The samples that it must hold.
        earlier: The journal's record of the shard; None if there is none.

    Returns:
        The shard; a description of its damage if it must be packed again; None if no run finished it.

    Raises:
        PackError: If a tar that is not part of this pack has the shard's name.
    """
    damage = None
    if earlier is not None:
        if earlier.changed:
            return None  # Samples of changed files were left out, but the files may be restored by now.
        damage = folder.find_damage(tar, earlier) if earlier.entry.num_samples else None
        if damage is None:
            return earlier.as_kept()
    _refuse_foreign(tar, samples, is_recorded=damage is not None)
    return damage


def refuse_unplanned(folder: DatasetFolder, names: Collection[str]) -> None:
    """Raise PackError if a folder holds a tar that is not one of the plan's."""
    for name in folder.list_names():
        if name.endswith(".tar") and name not in names and not name.startswith("."):
            why = f"none of the pack's {len(names)} shards has that name"
            raise PackError(_explain_foreign(folder.location / name, why))


def remove_shard(tar: Location) -> None:
    """Remove a shard that has no samples, with its index."""
    for each in tar, index_location(tar):
        each.remove()


def _refuse_foreign(tar: Location, samples: Sequence[SourceSample], *, is_recorded: bool) -> None:
    """Raise PackError if a tar holds samples that are not planned, or is unreadable and was not recorded."""
    try:
        with closing(tar.open()) as file:
            names = [split_name(name) for name in list_names(file)]
    except StoreError:  # The tar is not the cause.
        raise
    except (FormatError, OSError) as error:
        if is_recorded or _is_absent(tar, error):
            return
        raise PackError(_explain_foreign(tar, f"it is not a readable tar ({error})")) from error
    planned = {sample.key for sample in samples}
    for name in names:
        if name is None:
            raise PackError(_explain_foreign(tar, "it holds a member whose name has no key"))
        if name[0] not in planned:
            raise PackError(_explain_foreign(tar, f"this pack does not put the sample {name[0]!r} there"))


def _is_absent(tar: Location, error: Exception) -> bool:
    """Return whether an error says that nothing is at a location, not even a link that leads nowhere."""
    path = find_path(tar)
    return isinstance(error, FileNotFoundError) and (path is None or not os.path.lexists(path))


def _explain_foreign(tar: Location, why: str) -> str:
    return f"{tar} is not a shard of the unfinished pack in {tar.folder}: {why}. Move it away or delete it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """A shard to pack.

    Attributes:
        number: Its number in the plan.
        folder: The folder to write it to.
        name: Its file name.
        root: The prefix of the names of the source's files, which ends in a slash.
        samples: Its samples in order.
        settings: The settings of the pack.
        strict: Whether a mislabelled, rejected or damaged image is an error.
        on_changed: The treatment of samples whose files have changed.
        earlier: The shard that an earlier run finished; None if no run did.
    """

    number: int
    folder: DatasetFolder
    name: str
    root: str
    samples: Sequence[SourceSample]
    settings: PackSettings
    strict: bool
    on_changed: OnChanged
    earlier: PackedShard | None


def pack_shard(job: ShardJob, report: Report) -> PackedShard:
    """Write a shard and its index, unless an earlier run finished it.

    Each file appears whole or not at all. The bytes depend only on the job.

    Raises:
        PackError: If a sample cannot be packed, or another file has the shard's name.
        FileChangedError: If a file has changed since the scan.
        OSError: If the shard cannot be written.
    """
    tar = job.folder.location / job.name
    found = find_finished(job.folder, tar, job.samples, job.earlier)
    if isinstance(found, PackedShard):
        if job.strict:
            refuse_problems(job.root, found.mislabelled, found.rejected, found.jpegs.damaged)
        report(len(job.samples), found.entry.num_bytes)
        return found
    preparation = Preparation(job.settings, job.root, strict=job.strict)
    entry, fields = write_shard(tar, _make_samples(job, preparation, report))
    if not entry.num_samples:
        remove_shard(tar)
    findings = preparation.findings
    return PackedShard(
        entry=entry,
        fields=fields,
        identity=job.folder.identify(tar) if entry.num_samples else "",
        jpegs=findings.jpegs,
        converted=findings.converted,
        clipped=findings.clipped,
        mislabelled=tuple(findings.mislabelled),
        rejected=tuple(findings.rejected),
        changed=tuple(findings.changed),
        damage=found or "",
    )


def _make_samples(job: ShardJob, preparation: Preparation, report: Report) -> Iterator[Sample]:
    for source in job.samples:
        try:
            sample = source.read()
        except FileChangedError as change:
            if job.on_changed == "raise":
                raise
            preparation.findings.changed.append(change.problem)
            continue
        if (stored := preparation.prepare(source, sample)) is not None:
            yield stored
        report(1, sum(map(len, sample.fields.values())))
