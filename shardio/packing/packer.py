"""Pack a source: scan it, plan the shards, write them, and write the manifest last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from shardio.errors import PackError
from shardio.files import find_target
from shardio.packing.executors import Engine, PackExecutor, choose_executor
from shardio.packing.folders import DatasetFolder, choose_folder
from shardio.packing.plan import PackPlan, PackSettings, Parts, make_plan
from shardio.packing.preparing import PackedShard, RejectedSample, choose_rewrite, describe_jpegs, sum_tallies
from shardio.packing.shard_job import OnChanged, PackResult, ShardJob, refuse_unplanned, write_rejected
from shardio.packing.sources.choosing import scan_source
from shardio.packing.sources.files import FileChangedError, FileProblem, explain_changes
from shardio.packing.sources.layouts import refuse_url
from shardio.packing.sources.source import SourceOptions, SourceScan, SourceTable, divide
from shardio.progress import WorkProgress
from shardio.shards import MANIFEST_NAME, UNFINISHED_NAME, Manifest, hash_key, read_manifest, write_manifest
from shardio.storage import Location, RemoteAccess, absolute_path, parse_location


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedDataset:
    """A dataset that this program is writing.

    Attributes:
        folder: Its folder.
        mark: The content of the mark in the folder. A mark with other content belongs to another writer.
    """

    folder: DatasetFolder
    mark: bytes


def check_destination(src: Path, folder: DatasetFolder) -> None:
    """Refuse a destination that overlaps the source or contains anything other than an unfinished pack.

    Raises:
        PackError: If it cannot be packed into.
    """
    folder.refuse_source(src)
    names = folder.list_names()
    is_unfinished = UNFINISHED_NAME in names
    if MANIFEST_NAME in names and not is_unfinished:
        raise PackError(
            f"{folder.location} already holds a packed dataset: choose another destination or delete it first"
        )
    # A killed run may not have finished writing the mark.
    names = [name for name in names if find_target(name) != UNFINISHED_NAME]
    if names and not is_unfinished:
        raise PackError(
            f"the destination {folder.location} is not empty (it holds {names[0]}): choose an empty directory"
        )


@contextmanager
def locked(src: Path, folder: DatasetFolder) -> Iterator[None]:
    """Create the destination, lock it for this process, and check it again.

    Another pack may have finished since the first check.

    Raises:
        PackError: If the destination cannot be created or written, another process is writing to it, or it can no
            longer be packed into.
    """
    try:
        with folder.locked():
            check_destination(src, folder)
            yield
    except OSError as error:
        raise PackError(
            f"packing into {folder.location} failed: {error}. Fix the cause (if the disk is full, free some space) and "
            "rerun the same command to resume: finished shards are kept"
        ) from error


@contextmanager
def begun(folder: DatasetFolder, plan: PackPlan) -> Iterator[UnfinishedDataset]:
    """Prepare the destination to start or resume a plan. After a failure before the first finished shard, clear it.

    Raises:
        PackError: If the destination holds an unfinished pack of another plan, or a tar that is not in this plan.
    """
    folder.remove_partial()
    unfinished = UnfinishedDataset(folder=folder, mark=plan.digest.encode())
    mark = read_mark(folder)
    if mark is None:
        folder.mark(unfinished.mark)
    else:
        _refuse_other_plan(folder, mark, plan)
        refuse_unplanned(folder, plan.names)
    try:
        yield unfinished
    except Exception:  # Re-raised. Ctrl-C is not an Exception: a pack that it interrupts can be resumed.
        with suppress(OSError):  # The store may be unreachable.
            folder.remove_partial()
            if not any(name.endswith(".tar") for name in folder.list_names()):
                _unmark(folder)
        raise


def finish(manifests: Mapping[UnfinishedDataset, Manifest]) -> None:
    """Write the manifests of unfinished datasets, which makes them datasets, and remove their marks and journals.

    Raises:
        PackError: If a destination was removed or replaced meanwhile, so that shards are lost.
    """
    for unfinished, manifest in manifests.items():
        _write_manifest(unfinished, manifest)
    for unfinished in manifests:  # If this is interrupted, a later run ends it: see are_ending.
        _unmark(unfinished.folder)


def are_ending(folders: Sequence[DatasetFolder]) -> bool:
    """Return whether a pack with several destinations was interrupted after it had written all their manifests."""
    if len(folders) == 1:
        return False
    names = [folder.list_names() for folder in folders]
    are_marked = [UNFINISHED_NAME in each for each in names]
    return any(are_marked) and not all(are_marked) and all(MANIFEST_NAME in each for each in names)


def end(plans: Mapping[DatasetFolder, PackPlan]) -> list[Manifest]:
    """Finish a pack that :func:`are_ending` recognised, and return the manifests.

    Raises:
        PackError: If it was a pack of another plan.
    """
    for folder, plan in plans.items():
        if (mark := read_mark(folder)) is not None:
            _refuse_other_plan(folder, mark, plan)
    for folder in plans:
        _unmark(folder)
    return [read_manifest(folder.location / MANIFEST_NAME) for folder in plans]


def _write_manifest(unfinished: UnfinishedDataset, manifest: Manifest) -> None:
    """Write the manifest. The destination stays marked as unfinished.

    Raises:
        PackError: If the destination was removed or replaced during the pack, so that shards are lost.
    """
    where, mark = unfinished.folder.location, read_mark(unfinished.folder)
    if mark is None and _has_manifest(where, manifest):
        return  # Stores without locks admit several runs of one pack, and another run has ended first.
    if mark is None:
        raise PackError(
            f"{where} was removed during the pack: delete the directory of that name, if there is one, and pack again"
        )
    if mark != unfinished.mark:
        raise PackError(
            f"another program has begun to write to {where}, and has replaced shards of this one: choose another "
            "destination, and pack again"
        )
    write_manifest(where / MANIFEST_NAME, manifest)


def _has_manifest(where: Location, manifest: Manifest) -> bool:
    location = where / MANIFEST_NAME
    return location.exists() and read_manifest(location) == manifest


def _unmark(folder: DatasetFolder) -> None:
    (folder.location / UNFINISHED_NAME).remove()
    folder.remove_journal()


def read_mark(folder: DatasetFolder) -> bytes | None:
    """Return the content of the mark of an unfinished dataset; None if there is none."""
    try:
        return (folder.location / UNFINISHED_NAME).read_whole()
    except FileNotFoundError:
        return None


def _refuse_other_plan(folder: DatasetFolder, mark: bytes, plan: PackPlan) -> None:
    if mark != plan.digest.encode():
        raise PackError(
            f"{folder.location} holds an unfinished pack of different images or with different settings: delete "
            f"{folder.location} or choose another destination"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings for the run of a pack. They do not affect the output, except how problem samples are handled.

    Attributes:
        strict: Whether an image that would be rejected, or whose format does not match its suffix, is an error.
        on_changed: The treatment of a sample whose files change during the pack.
        num_workers: The number of worker processes; None to choose it.
        engine: The engine that packs the shards.
        ray_address: The address of the Ray cluster; None to start Ray on this machine.
        access: The access to the destination's object store; None for the settings of the environment.
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
    progress: WorkProgress | None = None,
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
    progress: WorkProgress | None = None,
) -> dict[str, PackResult]:
    """Pack a source as :func:`pack_source` does, divided into several datasets by a hash of each sample's key.

    All of them have the class names of the whole source. Samples stay in their parts when others are added to the
    source.

    Args:
        src: The source.
        out: The directory of the new datasets.
        parts: The fraction and the name of each dataset.
        settings: The settings of each pack.
        source: The options for reading the source.
        run: The settings of the run.
        progress: Receives the number of samples and their size, then the samples and bytes that are packed or kept.

    Returns:
        The result for each part, by name. The first result also has the ignored files of the whole source, and the
        source's keys that end in suffixes.

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
    progress: WorkProgress | None,
    divide_scan: Callable[[SourceScan], Sequence[SourceScan]],
) -> list[PackResult]:
    """Scan a source, divide it into one dataset for each of ``dsts``, and write them."""
    source, run, progress = source or SourceOptions(), run or RunOptions(), progress or WorkProgress()
    choose_rewrite(settings)  # It raises an error if packages are missing.
    refuse_url(src, out)
    if run.engine == "ray":  # Its tasks run in other directories.
        src = absolute_path(src)
    folders = [choose_folder(dst) for dst in dsts]
    is_ending = are_ending(folders)
    for folder in () if is_ending else folders:
        check_destination(src, folder)
    scans = divide_scan(scan_source(src, out, source))
    targets = [
        _Target(folder=folder, scan=scan, plan=make_plan(scan.samples, scan.classes, settings))
        for folder, scan in zip(folders, scans, strict=True)
    ]
    if is_ending:
        manifests = end({target.folder: target.plan for target in targets})
        return [_ended(scan, manifest) for scan, manifest in zip(scans, manifests, strict=True)]
    with ExitStack() as stack:
        unfinished = list[UnfinishedDataset]()
        for target in targets:
            stack.enter_context(locked(src, target.folder))
            unfinished.append(stack.enter_context(begun(target.folder, target.plan)))
        progress.start(sum(len(scan.samples) for scan in scans), sum(scan.samples.num_bytes for scan in scans))
        results = [_write_dataset(src, target, settings, run, progress) for target in targets]
        finish({each: result.manifest for each, result in zip(unfinished, results, strict=True)})
    return results


def _ended(scan: SourceScan, manifest: Manifest) -> PackResult:
    return PackResult(manifest=manifest, ignored=scan.ignored, suffixed=scan.suffixed, num_kept=manifest.num_samples)


def _write_dataset(
    src: Path, target: _Target, settings: PackSettings, run: RunOptions, progress: WorkProgress
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
    progress: WorkProgress,
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
