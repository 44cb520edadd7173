"""Pack a source: scan it, plan the shards, write them, and write the manifest last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from shardio.errors import PackError
from shardio.packing import destination
from shardio.packing.destination import UnfinishedDataset
from shardio.packing.executors.choosing import Engine, PackExecutor, choose_executor
from shardio.packing.folders.choosing import choose_folder
from shardio.packing.folders.folder import DatasetFolder
from shardio.packing.jpegs import choose_rewrite, describe_jpegs, sum_tallies
from shardio.packing.packed_shard import PackedShard, RejectedSample
from shardio.packing.parts import Parts
from shardio.packing.plan import PackPlan, PackSettings, make_plan
from shardio.packing.progress import PackProgress
from shardio.packing.results import PackResult, write_rejected
from shardio.packing.shard_job import OnChanged, ShardJob
from shardio.packing.sources.choosing import scan_source
from shardio.packing.sources.files import FileChangedError, FileProblem, explain_changes
from shardio.packing.sources.layouts import refuse_url
from shardio.packing.sources.selection import divide
from shardio.packing.sources.source import SourceOptions, SourceScan, SourceTable
from shardio.shards import Manifest, hash_key
from shardio.storage import Location, RemoteAccess, absolute_path, parse_location


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a pack runs. Nothing of it affects the output, except what happens to samples with problems.

    Attributes:
        strict: Whether an image that would be rejected, or whose format does not match its suffix, is an error.
        on_changed: What to do with a sample whose files change during the pack.
        num_workers: The number of worker processes; None to choose it.
        engine: Where to pack.
        ray_address: The address of the Ray cluster; None to start Ray on this machine.
        access: How an object store is reached that the dataset is written to; None for the settings of the environment.
    """

    strict: bool = False
    on_changed: OnChanged = "raise"
    num_workers: int | None = None
    engine: Engine = "processes"
    ray_address: str | None = None
    access: RemoteAccess | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A dataset to write: its folder, its samples, and its shards."""

    folder: DatasetFolder
    scan: SourceScan
    plan: PackPlan


def pack_source(
    src: Path,
    dst: Path,
    settings: PackSettings,
    source: SourceOptions | None = None,
    run: RunOptions | None = None,
    progress: PackProgress | None = None,
) -> PackResult:
    """Pack as :func:`~shardio.packing.pack` does, report to ``progress``, and return the manifest with details."""
    out = parse_location(dst, None if run is None else run.access)
    (result,) = _pack(src, out, [out], settings, source, run, progress, lambda scan: [scan])
    return result


def pack_parts(
    src: Path,
    out: Path,
    parts: Parts,
    settings: PackSettings,
    source: SourceOptions | None = None,
    run: RunOptions | None = None,
    progress: PackProgress | None = None,
) -> dict[str, PackResult]:
    """Pack a source as :func:`pack_source` does, divided into several datasets by a hash of each sample's key.

    All of them have the class names of the whole source. Samples stay in their parts when others are added to the
    source.

    Args:
        src: The source.
        out: The directory of the new datasets.
        parts: The fraction and the name of each dataset.
        settings: The settings of each pack.
        source: How to read the source.
        run: How the packs run.
        progress: Receives reports.

    Returns:
        The result for each part, by name. The first one has the ignored files of the whole source, and its keys that
        end in suffixes.

    Raises:
        PackError: If a part would have no samples, or for the same reasons as :func:`~shardio.packing.pack`.
    """

    def divide_scan(scan: SourceScan) -> list[SourceScan]:
        numbers = parts.assign(np.fromiter(map(hash_key, scan.samples.keys), np.uint64, len(scan.samples)))
        parts.refuse_empty(np.bincount(numbers, minlength=len(parts.names)).tolist(), str(src))
        selections = divide(scan.samples, numbers, len(parts.names))
        return [
            replace(scan, samples=each) if number == 0 else SourceScan(samples=each, classes=scan.classes)
            for number, each in enumerate(selections)
        ]

    home = parse_location(out, None if run is None else run.access)
    dsts = [home / name for name in parts.names]
    results = _pack(src, home, dsts, settings, source, run, progress, divide_scan)
    return dict(zip(parts.names, results, strict=True))


def _pack(
    src: Path,
    out: Location,
    dsts: Sequence[Location],
    settings: PackSettings,
    source: SourceOptions | None,
    run: RunOptions | None,
    progress: PackProgress | None,
    divide_scan: Callable[[SourceScan], Sequence[SourceScan]],
) -> list[PackResult]:
    """Scan a source, divide it over some datasets in or at ``out``, and write them."""
    source, run, progress = source or SourceOptions(), run or RunOptions(), progress or PackProgress()
    choose_rewrite(settings)  # It raises an error if packages are missing.
    refuse_url(src, out)
    if run.engine == "ray":  # Its tasks run in other directories.
        src = absolute_path(src)
    folders = [choose_folder(dst) for dst in dsts]
    are_ending = destination.are_ending(folders)
    for folder in () if are_ending else folders:
        destination.check_destination(src, folder)
    scans = divide_scan(scan_source(src, out, source))
    targets = [
        _Target(folder=folder, scan=scan, plan=make_plan(scan.samples, scan.classes, settings))
        for folder, scan in zip(folders, scans, strict=True)
    ]
    if are_ending:
        manifests = destination.end({target.folder: target.plan for target in targets})
        return [_ended(scan, manifest) for scan, manifest in zip(scans, manifests, strict=True)]
    with ExitStack() as stack:
        unfinished = list[UnfinishedDataset]()
        for target in targets:
            stack.enter_context(destination.locked(src, target.folder))
            unfinished.append(stack.enter_context(destination.begun(target.folder, target.plan)))
        progress.planned(sum(len(scan.samples) for scan in scans), sum(scan.samples.num_bytes for scan in scans))
        results = [_write_dataset(src, target, settings, run, progress) for target in targets]
        destination.finish({each: result.manifest for each, result in zip(unfinished, results, strict=True)})
    return results


def _ended(scan: SourceScan, manifest: Manifest) -> PackResult:
    """Return the result for a dataset that an earlier run had written completely."""
    return PackResult(manifest=manifest, ignored=scan.ignored, suffixed=scan.suffixed, num_kept=manifest.num_samples)


def _write_dataset(
    src: Path, target: _Target, settings: PackSettings, run: RunOptions, progress: PackProgress
) -> PackResult:
    """Write the shards of a dataset, and return the result, whose manifest is not written yet."""
    folder, samples, plan = target.folder, target.scan.samples, target.plan
    execute = choose_executor(run.engine, run.num_workers, len(plan), samples.num_bytes, settings, run.ray_address)
    jobs = partial(ShardJob, root=samples.root, settings=settings, strict=run.strict, on_changed=run.on_changed)
    try:
        shards = _write_shards(folder, samples, plan, jobs, execute, progress)
    except FileChangedError as change:
        raise explain_changes(change, samples.find_changes(), folder.location) from change
    rejected = sorted(sample for shard in shards for sample in shard.rejected)
    manifest = _make_manifest(shards, target.scan, settings)
    if not manifest.num_samples:
        raise PackError(_explain_nothing_left(src, samples.root, rejected))
    write_rejected(folder.location, rejected)
    return PackResult(
        manifest=manifest,
        ignored=target.scan.ignored,
        suffixed=target.scan.suffixed,
        num_kept=sum(shard.entry.num_samples for shard in shards if shard.was_kept),
        jpegs=sum_tallies([shard.jpegs for shard in shards]),
        converted=sum((shard.converted for shard in shards), Counter()),
        clipped=sum((shard.clipped for shard in shards), Counter()),
        mislabelled=sorted(problem for shard in shards for problem in shard.mislabelled),
        rejected=rejected,
        changed=sorted(problem for shard in shards for problem in shard.changed),
        damaged_shards=[
            FileProblem(folder.location / shard.entry.name, shard.damage) for shard in shards if shard.damage
        ],
    )


def _write_shards(
    folder: DatasetFolder,
    samples: SourceTable,
    plan: PackPlan,
    make_job: Callable[..., ShardJob],
    execute: PackExecutor,
    progress: PackProgress,
) -> list[PackedShard]:
    """Write the shards of a plan, and record each one when it is finished; return them in manifest order."""
    with folder.open_journal() as journal:
        jobs = (
            make_job(
                number=number,
                folder=folder,
                name=shard.name,
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
                f"packing into {folder.location} failed: {error}. {len(shards)} of {len(plan)} shards are finished and "
                "kept. Fix the cause (if the disk is full, free some space) and rerun the same command to resume"
            ) from error
        return [shards[number] for number in range(len(plan))]


def _explain_nothing_left(src: Path, root: str, rejected: Sequence[RejectedSample]) -> str:
    if rejected:
        more = f" (there are {len(rejected)} such images)" if len(rejected) > 1 else ""
        return f"{src} holds no images that can be packed: {root}{rejected[0].file} {rejected[0].reason}{more}"
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
