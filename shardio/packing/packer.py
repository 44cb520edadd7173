"""Pack a directory: scan it, plan the shards, write them, and write the manifest last."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardio.classes import Classes, check_classes
from shardio.errors import PackError
from shardio.images import describe_other_images
from shardio.packing import destination
from shardio.packing.executors import Engine, PackExecutor, choose_executor
from shardio.packing.journal import open_journal
from shardio.packing.jpegs import JpegTally, choose_rewrite, describe_jpegs, sum_tallies
from shardio.packing.label_files import LabelFile, check_label_file
from shardio.packing.layouts import Layout, refuse_urls
from shardio.packing.packed_shard import PackedShard, RejectedSample
from shardio.packing.plan import JpegMode, PackPlan, PackSettings, make_plan
from shardio.packing.progress import PackProgress
from shardio.packing.sample_table import SampleTable
from shardio.packing.scan import SourceScan, scan_directory
from shardio.packing.shard_job import OnChanged, ShardJob
from shardio.packing.sizes import parse_size
from shardio.packing.sources import FileChangedError, FileProblem, explain_changes
from shardio.shards import Manifest
from shardio.storage import absolute_path, make_path, parse_location
from shardio.values import check_choice, check_optional_integer

REJECTED_NAME = "rejected.jsonl"
"""The file in a packed dataset that lists the samples that were left out."""

DEFAULT_SHARD_SIZE = 256 * 2**20
"""256 MiB."""

logger = logging.getLogger(__name__)


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


def pack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    max_shard_samples: int | None = None,
    shuffle_seed: int | None = 0,
    rename_dots: bool = False,
    strict: bool = False,
    check: bool = True,
    jpeg: JpegMode = "copy",
    max_side: int | None = None,
    quality: int | None = None,
    max_pixels: int | None = None,
    num_workers: int | None = None,
    layout: Layout = "auto",
    classes: Classes | None = None,
    labels: str | os.PathLike[str] | None = None,
    key_column: str | None = None,
    label_column: str | None = None,
    on_changed: OnChanged = "raise",
    engine: Engine = "processes",
    ray_address: str | None = None,
) -> Manifest:
    """Pack a directory of images into tar shards.

    ``src/class/…/name.jpg`` becomes the members ``class/…/name.jpg`` and ``class/…/name.cls`` of a shard. Files
    with the same stem become further fields of the sample. Image bytes are copied unchanged unless ``jpeg`` says
    otherwise. The same input and settings give the same bytes. Repeat the same call to resume an interrupted pack: it
    keeps finished shards that are unchanged, and packs damaged ones again.

    Args:
        src: The directory: class folders with images, or a flat directory of images.
        dst: A new or empty directory, or that of an interrupted pack to resume.
        max_shard_size: The maximum size of a shard, in bytes or as text such as ``"256MiB"``. Only a shard with a
            single sample may exceed it. If JPEGs are rewritten, the limit applies to the sizes of the original files.
        max_shard_samples: The maximum number of samples in a shard.
        shuffle_seed: The seed of the packing order, which mixes the classes; None packs in the order of the keys.
        rename_dots: Whether to replace each dot in a file's stem with an underscore.
        strict: Whether to raise an error for an image that would be rejected, or whose format does not match its
            suffix.
        check: Whether to decode each image first. Samples with an image that cannot be decoded are then left out, and
            listed in ``dst/rejected.jsonl``. Without the check, all files are packed as they are, at full speed.
        jpeg: ``copy`` stores JPEGs unchanged. ``tile`` rewrites them losslessly so that crops decode faster; JPEGs
            that cannot be tiled are stored unchanged. ``reencode`` decodes each JPEG and stores it upright, tiled and,
            with ``max_side``, smaller.
        max_side: With ``reencode``, the maximum length of an image's longer side in pixels.
        quality: With ``reencode``, the JPEG quality, 1 to 100; by default, 90.
        max_pixels: Images with more pixels are rejected; by default, Pillow's limit for decompression bombs.
        num_workers: The number of worker processes; 1 for none. Each writes one shard at a time. The number does not
            affect the output.
        layout: ``auto`` accepts class folders or a flat directory, and refuses a source that looks different: one
            with splits, or with images and masks. ``classes`` makes each folder a class, whatever its name. ``flat``
            makes no classes. ``pairs`` turns matching files into fields of one sample: ``images/a.jpg`` and
            ``masks/a.png`` become its fields ``jpg`` and ``masks.png``; in one folder, ``a.jpg`` and ``a.mask.png``
            become ``jpg`` and ``mask.png``.
        classes: The class names that define the labels, or a dataset or manifest that has class names. For validation
            data, pass those of the training data. By default, the sorted names of the class folders.
        labels: A CSV, JSON Lines or Parquet file that labels the images, instead of class folders. Labels are class
            names, or integers. Each image needs one; rows for other images are allowed.
        key_column: The column of ``labels`` with keys (``cats/0001``) or paths (``cats/0001.jpg``) below ``src``; by
            default, the first of two columns.
        label_column: The column of ``labels`` with the labels; by default, the second of two columns.
        on_changed: What to do with a sample whose files change or become unreadable during the pack. ``raise`` stops
            with an error that names the files; ``skip`` leaves the sample out.
        engine: ``processes`` packs on this machine. ``ray`` packs on a Ray cluster, one task for each shard; all its
            machines must see ``src`` and ``dst`` under these paths.
        ray_address: The address of the cluster; by default, Ray is started on this machine.

    Returns:
        The manifest of the packed dataset.

    Raises:
        PackError: If the source cannot be packed or changes during the pack, or the destination
            holds anything but an interrupted run of this pack.
        TypeError: If ``classes`` is neither a list of names nor something that has class names, or if an argument that
            must be an integer is not one.
        ValueError: If a setting is out of range.
    """
    check_choice("layout", layout, Layout)
    check_choice("on_changed", on_changed, OnChanged)
    check_choice("engine", engine, Engine)
    num_workers = check_optional_integer("num_workers", num_workers, at_least=1)
    settings = PackSettings(
        max_shard_size=parse_size("max_shard_size", max_shard_size),
        max_shard_samples=max_shard_samples,
        shuffle_seed=shuffle_seed,
        jpeg=jpeg,
        max_side=max_side,
        quality=quality,
        max_pixels=max_pixels,
        check=check,
    )
    result = pack_directory(
        make_path(src),
        make_path(dst),
        settings,
        layout=layout,
        classes=None if classes is None else check_classes(classes),
        labels=check_label_file(labels, key_column, label_column),
        on_changed=on_changed,
        rename_dots=rename_dots,
        strict=strict,
        num_workers=num_workers,
        engine=engine,
        ray_address=ray_address,
    )
    for problem in result.mislabelled:
        logger.warning("%s %s: packed anyway", problem.path, problem.what)
    for sample in result.rejected:
        logger.warning("%s %s: left out", Path(src, sample.file), sample.reason)
    if left_out := describe_other_images(result.scan.ignored):
        logger.warning("%s: %s", src, left_out)
    for problem in result.changed:
        logger.warning("%s %s: its sample was left out", problem.path, problem.what)
    for problem in result.damaged_shards:
        logger.warning("%s %s: packed again", problem.path, problem.what)
    for problem in result.jpegs.damaged:
        logger.warning("%s %s: packed unchanged", problem.path, problem.what)
    return result.manifest


def pack_directory(
    src: Path,
    dst: Path,
    settings: PackSettings,
    *,
    layout: Layout = "auto",
    classes: Sequence[str] | None = None,
    labels: LabelFile | None = None,
    on_changed: OnChanged = "raise",
    rename_dots: bool = False,
    strict: bool = False,
    num_workers: int | None = None,
    engine: Engine = "processes",
    ray_address: str | None = None,
    progress: PackProgress | None = None,
) -> PackResult:
    """Pack as :func:`pack` does, report to ``progress``, and return the manifest with details."""
    progress = progress or PackProgress()
    choose_rewrite(settings)  # It raises an error if packages are missing.
    refuse_urls(src, dst)
    if engine == "ray":  # Its tasks run in other directories.
        src, dst = absolute_path(src), absolute_path(dst)
    destination.check_destination(src, dst)
    scan = scan_directory(src, dst, layout=layout, rename_dots=rename_dots, classes=classes, labels=labels)
    plan = make_plan(scan.samples, scan.classes, settings)
    execute = choose_executor(engine, num_workers, len(plan), scan.samples.num_bytes, settings, ray_address)
    with destination.locked(src, dst), destination.begun(dst, plan):
        progress.planned(len(scan.samples), scan.samples.num_bytes)
        jobs = partial(ShardJob, root=scan.samples.root, settings=settings, strict=strict, on_changed=on_changed)
        try:
            shards = _write_shards(dst, scan.samples, plan, jobs, execute, progress)
        except FileChangedError as change:
            raise explain_changes(change, scan.samples.files(), dst) from change
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
    samples: SampleTable,
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
