"""Pack one shard: a function of its job alone, which any process on any machine with the same files can call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardio.packing.finished import find_finished, remove_shard
from shardio.packing.folders.folder import DatasetFolder
from shardio.packing.packed_shard import PackedShard
from shardio.packing.plan import PackSettings
from shardio.packing.preparing import Preparation, refuse_problems
from shardio.packing.sources.files import FileChangedError
from shardio.packing.sources.source import SourceSample
from shardio.sample import Sample
from shardio.shards import write_shard

OnChanged = Literal["raise", "skip"]
"""What to do with samples whose files change during the pack."""

Report = Callable[[int, int], None]
"""Receives the number of packed samples and bytes since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """A shard to pack.

    Attributes:
        number: Its number in the plan.
        folder: The folder to write it to.
        name: Its file name.
        root: What precedes the names of the source's files, as a string that ends in a slash.
        samples: Its samples in order.
        settings: The settings of the pack.
        strict: Whether a mislabelled, rejected or damaged image is an error.
        on_changed: What to do with samples whose files have changed.
        earlier: The shard as an earlier run finished it; None if no run did.
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
    """Yield the samples of a shard as they are stored."""
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
