"""Pack a source: scan it, plan the shards, write them, and write the manifest last."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardio.errors import PackError
from shardio.packing import destination
from shardio.packing.executors.choosing import Engine, PackExecutor, choose_executor
from shardio.packing.journal import open_journal
from shardio.packing.jpegs import JpegTally, choose_rewrite, describe_jpegs, sum_tallies
from shardio.packing.packed_shard import PackedShard, RejectedSample
from shardio.packing.plan import PackPlan, PackSettings, make_plan
from shardio.packing.progress import PackProgress
from shardio.packing.shard_job import OnChanged, ShardJob
from shardio.packing.sources.choosing import scan_source
from shardio.packing.sources.files import FileChangedError, FileProblem, explain_changes
from shardio.packing.sources.layouts import refuse_urls
from shardio.packing.sources.source import SourceOptions, SourceScan, SourceTable
from shardio.shards import Manifest
from shardio.storage import absolute_path, parse_location

REJECTED_NAME = "rejected.jsonl"
"""The file in a packed dataset that lists the samples that were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """The result of a pack.

    Attributes:
        manifest: The manifest that was written.
        scan: The contents of the source.
        num_kept: The number of samples in shards that an earlier run had finished.
        jpegs: How the JPEGs are stored.
        mislabelled: Images whose format does not match their suffix. They were packed anyway.
        rejected: Samples whose images cannot be decoded. They were left out.
        changed: Files that changed during the pack. Their samples were left out.
        damaged_shards: Shards that were damaged after an earlier run had finished them. They were packed again.
    """

    manifest: Manifest
    scan: SourceScan
    num_kept: int
    jpegs: JpegTally
    mislabelled: list[FileProblem]
    rejected: list[RejectedSample]
    changed: list[FileProblem]
    damaged_shards: list[FileProblem]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a pack runs. Nothing of it affects the output, except what happens to samples with problems.

    Attributes:
        strict: Whether an image that would be rejected, or whose format does not match its suffix, is an error.
        on_changed: What to do with a sample whose files change during the pack.
        num_workers: The number of worker processes; None to choose it.
        engine: Where to pack.
        ray_address: The address of the Ray cluster; None to start Ray on this machine.
    """

    strict: bool = False
    on_changed: OnChanged = "raise"
    num_workers: int | None = None
    engine: Engine = "processes"
    ray_address: str | None = None


def pack_source(
    src: Path,
    dst: Path,
    settings: PackSettings,
    source: SourceOptions | None = None,
    run: RunOptions | None = None,
    progress: PackProgress | None = None,
) -> PackResult:
    """Pack as :func:`~shardio.packing.pack` does, report to ``progress``, and return the manifest with details."""
    source, run = source or SourceOptions(), run or RunOptions()
    progress = progress or PackProgress()
    choose_rewrite(settings)  # It raises an error if packages are missing.
    refuse_urls(src, dst)
    if run.engine == "ray":  # Its tasks run in other directories.
        src, dst = absolute_path(src), absolute_path(dst)
    destination.check_destination(src, dst)
    scan = scan_source(src, dst, source)
    plan = make_plan(scan.samples, scan.classes, settings)
    execute = choose_executor(run.engine, run.num_workers, len(plan), scan.samples.num_bytes, settings, run.ray_address)
    with destination.locked(src, dst), destination.begun(dst, plan):
        progress.planned(len(scan.samples), scan.samples.num_bytes)
        jobs = partial(
            ShardJob, root=scan.samples.root, settings=settings, strict=run.strict, on_changed=run.on_changed
        )
        try:
            shards = _write_shards(dst, scan.samples, plan, jobs, execute, progress)
        except FileChangedError as change:
            raise explain_changes(change, scan.samples.find_changes(), dst) from change
        rejected = [sample for shard in shards for sample in shard.rejected]
        manifest = _make_manifest(shards, scan, settings)
        if not manifest.num_samples:
            raise PackError(_explain_nothing_left(src, rejected))
        _write_rejected(dst, rejected)
        destination.finish(dst, manifest)
    return PackResult(
        manifest=manifest,
        scan=scan,
        num_kept=sum(shard.entry.num_samples for shard in shards if shard.was_kept),
        jpegs=sum_tallies([shard.jpegs for shard in shards]),
        mislabelled=sorted(problem for shard in shards for problem in shard.mislabelled),
        rejected=sorted(rejected),
        changed=sorted(problem for shard in shards for problem in shard.changed),
        damaged_shards=[FileProblem(dst / shard.entry.name, shard.damage) for shard in shards if shard.damage],
    )


def _write_shards(
    dst: Path,
    samples: SourceTable,
    plan: PackPlan,
    make_job: Callable[..., ShardJob],
    execute: PackExecutor,
    progress: PackProgress,
) -> list[PackedShard]:
    """Write the shards of a plan, and record each one when it is finished; return them in manifest order."""
    with open_journal(dst) as journal:
        jobs = (
            make_job(
                number=number,
                path=dst / shard.name,
                samples=samples.take(shard.rows),
                earlier=journal.finished.get(shard.name),
            )
            for number, shard in enumerate(plan)
        )
        shards = dict[int, PackedShard]()
        try:
            with closing(execute(jobs, progress)) as packed:
                for number, shard in packed:
                    shards[number] = shard
                    if not shard.was_kept:
                        journal.add(shard)
        except OSError as error:
            raise PackError(
                f"packing into {dst} failed: {error}. {len(shards)} of {len(plan)} shards are finished and kept. Fix "
                "the cause (if the disk is full, free some space) and rerun the same command to resume"
            ) from error
        return [shards[number] for number in range(len(plan))]


def _write_rejected(dst: Path, rejected: Sequence[RejectedSample]) -> None:
    """Write the list of rejected samples; remove it if there are none."""
    location = parse_location(dst / REJECTED_NAME)
    if not rejected:
        location.remove()
        return
    with location.write_whole() as file:
        for sample in sorted(rejected):
            file.write(json.dumps(sample._asdict(), ensure_ascii=False).encode(errors="surrogateescape") + b"\n")


def _explain_nothing_left(src: Path, rejected: Sequence[RejectedSample]) -> str:
    if rejected:
        more = f" (there are {len(rejected)} such images)" if len(rejected) > 1 else ""
        return f"{src} holds no images that can be packed: {src / rejected[0].file} {rejected[0].reason}{more}"
    return f"all samples of {src} changed during the pack: pack again when nothing is writing to the source"


def _make_manifest(shards: Sequence[PackedShard], scan: SourceScan, settings: PackSettings) -> Manifest:
    return Manifest(
        shards=tuple(shard.entry for shard in shards if shard.entry.num_samples),
        fields=tuple(sorted({field for shard in shards for field in shard.fields})),
        classes=scan.classes,
        pack={
            "max_shard_size": settings.max_shard_size,
            "max_shard_samples": settings.max_shard_samples,
            "shuffle_seed": settings.shuffle_seed,
            **describe_jpegs(settings, sum_tallies([shard.jpegs for shard in shards])),
        },
    )
