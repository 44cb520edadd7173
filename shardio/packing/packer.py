"""Packing: scan, plan, write each shard, and the manifest last."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardio.classes import Classes, check_classes
from shardio.errors import PackError
from shardio.images import describe_other_images
from shardio.packing import destination
from shardio.packing.finished import Written
from shardio.packing.jpegs import JpegTally, choose_rewrite, describe, sum_tallies
from shardio.packing.layouts import Layout, refuse_urls
from shardio.packing.plan import JpegMode, PackSettings, make_plan
from shardio.packing.scan import Scan, scan_directory
from shardio.packing.shard_writer import OnChanged, PackProgress, ShardWriter
from shardio.packing.sources import FileChangedError, Problem, explain_changes
from shardio.shards import Manifest
from shardio.storage import make_path
from shardio.values import check_choice, check_optional_integer

DEFAULT_SHARD_SIZE = 256 * 2**20
"""256 MiB."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a pack did: the manifest that it wrote, what it found in the source, and what was there already.

    Attributes:
        num_kept: The samples of shards that an earlier run had finished.
        jpegs: What became of the JPEGs.
        changed: Files that changed while they were packed; their samples were left out.
        damaged_shards: Shards that an earlier run had finished and that were damaged since; they were packed again.
    """

    manifest: Manifest
    scan: Scan
    num_kept: int
    jpegs: JpegTally
    changed: list[Problem]
    damaged_shards: list[Problem]


def pack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    max_shard_samples: int | None = None,
    shuffle_seed: int | None = 0,
    rename_dots: bool = False,
    strict: bool = False,
    jpeg: JpegMode = "copy",
    max_side: int | None = None,
    quality: int | None = None,
    max_pixels: int | None = None,
    num_workers: int | None = None,
    layout: Layout = "auto",
    classes: Classes | None = None,
    on_changed: OnChanged = "raise",
) -> Manifest:
    """Pack a directory of images into tar shards.

    ``src/class/…/name.jpg`` becomes the members ``class/…/name.jpg`` and ``class/…/name.cls`` of a shard; files
    with the same stem become further fields of the sample. Image bytes are copied untouched, unless ``jpeg`` says
    otherwise. The same input and settings give the same bytes. The same call resumes an interrupted pack: it keeps the
    finished shards whose contents are still those that were written, and packs damaged ones again.

    Args:
        src: The directory: class folders with images, or a flat directory of images.
        dst: A directory that is empty or not there yet.
        max_shard_size: A shard's size in bytes that is not exceeded, unless by a single sample: of the files that
            go into it, where JPEGs are rewritten.
        max_shard_samples: A shard's number of samples at the most.
        shuffle_seed: Of the packing order, by which classes are mixed; None packs in the order of the keys.
        rename_dots: Whether to write an underscore for each dot in a file's stem.
        strict: Whether a file that is not the image that its name says is an error, and a damaged JPEG that was
            to be rewritten.
        jpeg: ``copy`` leaves JPEGs as they are. ``tile`` rewrites them without any loss, so that crops decode
            quicker; those that cannot be tiled are stored as they are. ``reencode`` decodes each, turns it upright,
            makes it smaller, and stores it tiled. Both need numba: ``pip install numba``.
        max_side: With ``reencode``, pixels of an image's longer side at the most.
        quality: With ``reencode``, 1 to 100; 90 if it is not given.
        max_pixels: With ``reencode``, an image of more pixels is stored as it is; Pillow's limit if it is not given.
        num_workers: How many shards are written at a time; never changes what is written.
        layout: ``auto`` takes class folders or a flat directory, and refuses what looks otherwise: splits, or images
            beside masks. ``classes`` makes a class of each folder, whatever it is called. ``flat`` makes none.
            ``pairs`` makes files of the same name fields of one sample: ``images/a.jpg`` and ``masks/a.png`` become
            its fields ``jpg`` and ``masks.png``, and so do ``a.jpg`` and ``a.masks.png`` in one folder.
        classes: Class names, or a dataset or manifest that has them, by which labels are numbered: those of the
            training data, for validation data; by default the names of the class folders, sorted.
        on_changed: What becomes of a sample whose files changed, or could not be read any more, while the pack ran.
            ``raise`` stops with an error that names the files, ``skip`` leaves the sample out.

    Returns:
        The manifest of the packed dataset.

    Raises:
        PackError: If the source cannot be packed, it changes meanwhile, or the destination is not free.
        TypeError: If ``classes`` is not a list of names, nor has one, or a number is not an integer.
        ValueError: If a setting is out of range.
    """
    check_choice("layout", layout, Layout)
    check_choice("on_changed", on_changed, OnChanged)
    num_workers = check_optional_integer("num_workers", num_workers, at_least=1)
    settings = PackSettings(
        max_shard_size=max_shard_size,
        max_shard_samples=max_shard_samples,
        shuffle_seed=shuffle_seed,
        jpeg=jpeg,
        max_side=max_side,
        quality=quality,
        max_pixels=max_pixels,
    )
    result = pack_directory(
        make_path(src),
        make_path(dst),
        settings,
        layout=layout,
        classes=None if classes is None else check_classes(classes),
        on_changed=on_changed,
        rename_dots=rename_dots,
        strict=strict,
        num_workers=num_workers,
    )
    for problem in result.scan.mislabelled:
        logger.warning("%s %s: packed nonetheless", problem.path, problem.what)
    for problem in result.scan.unreadable:
        logger.warning("%s %s: left out", problem.path, problem.what)
    if left_out := describe_other_images(result.scan.ignored):
        logger.warning("%s: %s", src, left_out)
    for problem in result.changed:
        logger.warning("%s %s: its sample is left out", problem.path, problem.what)
    for problem in result.damaged_shards:
        logger.warning("%s %s: packed again", problem.path, problem.what)
    for problem in result.jpegs.damaged:
        logger.warning("%s %s: packed as it is", problem.path, problem.what)
    return result.manifest


def pack_directory(
    src: Path,
    dst: Path,
    settings: PackSettings,
    *,
    layout: Layout = "auto",
    classes: Sequence[str] | None = None,
    on_changed: OnChanged = "raise",
    rename_dots: bool = False,
    strict: bool = False,
    num_workers: int | None = None,
    progress: PackProgress | None = None,
) -> PackResult:
    """Do what :func:`pack` does; tell ``progress`` on the way, and return also what was found in the source."""
    progress = progress or PackProgress()
    rewrite = choose_rewrite(settings)
    refuse_urls(src, dst)
    destination.check_destination(src, dst)
    scan = scan_directory(src, dst, layout=layout, rename_dots=rename_dots, classes=classes)
    problems = [*scan.unreadable, *scan.mislabelled]
    if strict and problems:
        raise PackError(
            f"{problems[0].path} {problems[0].what} ({len(problems)} such files in all; nothing was packed)"
        )
    plan = make_plan(scan, settings)
    with destination.locked(src, dst):
        destination.begin(dst, plan)
        progress.planned(len(scan.samples), plan.num_bytes)
        writer = ShardWriter(dst, rewrite, strict, on_changed, progress)
        try:
            written = writer.write_all(plan.shards, num_workers)
        except FileChangedError as change:
            files = (file for sample in scan.samples for file in sample.files.values())
            raise explain_changes(change, files, dst) from change
        if not written:
            raise PackError(f"all samples of {src} changed while they were packed: pack when nothing writes to it")
        jpegs = sum_tallies([shard.jpegs for shard in written])
        manifest = _make_manifest(written, scan, settings, jpegs)
        destination.finish(dst, manifest)
    return PackResult(
        manifest=manifest,
        scan=scan,
        num_kept=sum(shard.entry.num_samples for shard in written if shard.was_kept),
        jpegs=jpegs,
        changed=sorted(writer.changed, key=lambda problem: problem.path),  # Threads add to it.
        damaged_shards=writer.damaged,
    )


def _make_manifest(written: list[Written], scan: Scan, settings: PackSettings, jpegs: JpegTally) -> Manifest:
    return Manifest(
        shards=tuple(shard.entry for shard in written),
        fields=tuple(sorted({field for shard in written for field in shard.fields})),
        classes=scan.classes,
        pack={
            "max_shard_size": settings.max_shard_size,
            "max_shard_samples": settings.max_shard_samples,
            "shuffle_seed": settings.shuffle_seed,
            **describe(settings, jpegs),
        },
    )
