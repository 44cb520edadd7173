"""Pack one shard: a function of its job alone, which any process on any machine with the same files can call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardio.errors import PackError
from shardio.images import holds_images
from shardio.packing.checking import find_mislabelled, why_rejected
from shardio.packing.finished import digest_file, find_finished, remove_shard
from shardio.packing.jpegs import JpegTally, Rewrite, choose_rewrite, rewrite_sample
from shardio.packing.packed_shard import PackedShard, RejectedSample
from shardio.packing.plan import PackSettings
from shardio.packing.sample_table import SourceSample
from shardio.packing.sources import FileChangedError, FileProblem, read_unchanged
from shardio.sample import Sample
from shardio.shards import LABEL_FIELD, index_location, write_shard
from shardio.storage import parse_location

OnChanged = Literal["raise", "skip"]
"""What to do with samples whose files change during the pack."""

Report = Callable[[int, int], None]
"""Receives the number of packed samples and bytes since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """A shard to pack.

    Attributes:
        number: Its number in the plan.
        path: Where to write it.
        root: The directory of the source, as a string that ends in a slash.
        samples: Its samples in order.
        settings: The settings of the pack.
        strict: Whether a mislabelled, rejected or damaged image is an error.
        on_changed: What to do with samples whose files have changed.
        earlier: The shard as an earlier run finished it; None if no run did.
    """

    number: int
    path: Path
    root: str
    samples: Sequence[SourceSample]
    settings: PackSettings
    strict: bool
    on_changed: OnChanged
    earlier: PackedShard | None


@dataclass(slots=True, kw_only=True)
class _Findings:
    """What is found while a shard is written."""

    jpegs: JpegTally = field(default_factory=JpegTally)
    mislabelled: list[FileProblem] = field(default_factory=list)
    rejected: list[RejectedSample] = field(default_factory=list)
    changed: list[FileProblem] = field(default_factory=list)


def pack_shard(job: ShardJob, report: Report) -> PackedShard:
    """Write a shard and its index, unless an earlier run finished it.

    Each file appears whole or not at all. The bytes depend only on the job.

    Raises:
        PackError: If a sample cannot be packed, or another file has the shard's name.
        FileChangedError: If a file has changed since the scan.
        OSError: If the shard cannot be written.
    """
    found = find_finished(job.path, job.samples, job.earlier)
    if isinstance(found, PackedShard):
        if job.strict:
            _refuse_problems(job.root, found.mislabelled, found.rejected, found.jpegs.damaged)
        report(len(job.samples), found.entry.num_bytes)
        return found
    tar, findings = parse_location(job.path), _Findings()
    entry, fields = write_shard(tar, _make_samples(job, findings, choose_rewrite(job.settings), report))
    if not entry.num_samples:
        remove_shard(job.path)
    return PackedShard(
        entry=entry,
        fields=fields,
        index_digest=digest_file(index_location(tar)) if entry.num_samples else "",
        jpegs=findings.jpegs,
        mislabelled=tuple(findings.mislabelled),
        rejected=tuple(findings.rejected),
        changed=tuple(findings.changed),
        damage=found or "",
    )


def _make_samples(job: ShardJob, findings: _Findings, rewrite: Rewrite, report: Report) -> Iterator[Sample]:
    """Yield the samples of a shard as they are stored, and note those that are left out."""
    for source in job.samples:
        try:
            sample = _read_files(source)
        except FileChangedError as change:
            if job.on_changed == "raise":
                raise
            findings.changed.append(change.problem)
            continue
        is_sound = not job.settings.check or _is_sound(job, source, sample, findings)
        stored = rewrite_sample(rewrite, source, sample, findings.jpegs) if is_sound else None
        if job.strict:
            _refuse_problems(job.root, findings.mislabelled, findings.rejected, findings.jpegs.damaged)
        if stored is not None:
            yield stored
        report(1, sum(map(len, sample.fields.values())))


def _is_sound(job: ShardJob, source: SourceSample, sample: Sample, findings: _Findings) -> bool:
    """Return whether a sample's images can be decoded; note it if not, or if one has the suffix of another format."""
    if (why := why_rejected(sample.fields, job.settings.max_pixels)) is not None:
        name, reason = why
        file = source.files[name].path.removeprefix(job.root)
        findings.rejected.append(RejectedSample(sample.key, file, reason))
        return False
    for name, content in sample.fields.items():
        if holds_images(name) and (found := find_mislabelled(name, content)) is not None:
            path = Path(source.files[name].path)
            what = f"has the suffix {path.suffix} but is in {found} format"
            findings.mislabelled.append(FileProblem(path, what))
    return True


def _refuse_problems(
    root: str,
    mislabelled: Sequence[FileProblem],
    rejected: Sequence[RejectedSample],
    damaged: Sequence[FileProblem],
) -> None:
    """Raise PackError if there is a problem that ``strict`` makes an error."""
    problems = [*(FileProblem(Path(root + each.file), each.reason) for each in rejected), *mislabelled, *damaged]
    if problems:
        path, what = problems[0]
        raise PackError(f"{path} {what}: rename, repair or remove the file, or omit --strict (strict=True)")


def _read_files(sample: SourceSample) -> Sample:
    files = {name: read_unchanged(file) for name, file in sample.files.items()}
    if sample.label is not None:
        files[LABEL_FIELD] = b"%d" % sample.label
    return Sample(key=sample.key, fields=dict(sorted(files.items())), origin=sample.key)
