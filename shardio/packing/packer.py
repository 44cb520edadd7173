"""Packing: scan, plan, write each shard, and the manifest last."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from shardio.classes import Classes, check_classes
from shardio.errors import PackError
from shardio.packing import destination
from shardio.packing.destination import Written
from shardio.packing.jpegs import JpegTally, Rewrite, choose_rewrite, describe, rewrite_sample, sum_tallies
from shardio.packing.layouts import Layout, refuse_urls
from shardio.packing.plan import JpegMode, PackSettings, ShardPlan, make_plan
from shardio.packing.scan import Scan, SourceSample, scan_directory
from shardio.packing.sources import FileChangedError, Problem, explain_changes, read_unchanged
from shardio.processors import count_processors
from shardio.sample import Sample
from shardio.shards import LABEL_FIELD, Manifest, write_shard
from shardio.storage import make_path

OnChanged = Literal["raise", "skip"]
"""What becomes of samples whose files change while they are packed."""

DEFAULT_SHARD_SIZE = 256 * 2**20
"""256 MiB."""

MAX_WORKERS = 4
"""Threads that write shards, at the most, unless the caller says otherwise."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a pack did: the manifest that it wrote, what it found in the source, and what was there already.

    Attributes:
        num_kept: The samples of shards that an earlier run had finished.
        jpegs: What became of the JPEGs.
        changed: Files that changed while they were packed; their samples were left out.
    """

    manifest: Manifest
    scan: Scan
    num_kept: int
    jpegs: JpegTally
    changed: list[Problem]


class PackProgress:
    """What a caller is told while packing goes on; this one says nothing. Methods are called from threads."""

    def planned(self, num_samples: int, num_bytes: int) -> None:
        """Called once, before the first shard is written."""

    def packed(self, num_samples: int, num_bytes: int) -> None:
        """Called for each sample (or, where a shard is there already, for all of its samples at once)."""


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
    otherwise. The same input and settings give the same bytes. A pack that was killed is gone on with by the same
    call.

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
        TypeError: If ``classes`` is not a list of names, nor has one.
        ValueError: If a setting is out of range.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    if on_changed not in get_args(OnChanged):
        raise ValueError(f"on_changed must be one of {', '.join(get_args(OnChanged))}, got {on_changed!r}")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
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
    for problem in result.changed:
        logger.warning("%s %s: its sample is left out", problem.path, problem.what)
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
        finished = destination.find_finished(dst, plan)
        progress.planned(len(scan.samples), plan.num_bytes)
        writer = _ShardWriter(dst, finished, rewrite, strict, on_changed, progress)
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
    num_kept = sum(shard.entry.num_samples for shard in written if shard.entry.name in finished)
    return PackResult(manifest=manifest, scan=scan, num_kept=num_kept, jpegs=jpegs, changed=writer.changed)


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


class _ShardWriter:
    """Writes the shards of a plan that are not there yet, side by side; after an error the others stop soon."""

    def __init__(
        self,
        dst: Path,
        finished: Mapping[str, Written],
        rewrite: Rewrite,
        strict: bool,
        on_changed: OnChanged,
        progress: PackProgress,
    ) -> None:
        self._dst, self._finished, self._rewrite = dst, finished, rewrite
        self._strict, self._on_changed, self._progress = strict, on_changed, progress
        self.changed: list[Problem] = []
        self._stopped = threading.Event()
        self._failures: list[Exception] = []

    def write_all(self, shards: Sequence[ShardPlan], num_workers: int | None) -> list[Written]:
        workers = num_workers or min(MAX_WORKERS, count_processors())
        with ThreadPoolExecutor(workers, thread_name_prefix="shardio-pack") as pool:
            try:
                return [written for written in pool.map(self._write, shards) if written is not None]
            except Exception as error:
                raise self._failures[0] from error  # The first failure; the others stopped because of it.
            finally:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, plan: ShardPlan) -> Written | None:
        try:
            written = self._finished.get(plan.name)
            if written is None:
                return self._write_new(plan)
            self._check(written.jpegs)
            self._progress.packed(len(plan.samples), written.entry.num_bytes)
            return written
        except Exception as error:
            self._failures.append(error)
            self._stopped.set()
            raise

    def _write_new(self, plan: ShardPlan) -> Written | None:
        path, tally = self._dst / plan.name, JpegTally()
        entry, fields = write_shard(path, self._read_samples(plan, tally))
        if not entry.num_samples:  # The files of all of them changed.
            destination.remove_shard(path)
            return None
        destination.note_finished(path, tally)
        return Written(entry=entry, fields=fields, jpegs=tally)

    def _check(self, tally: JpegTally) -> None:
        if self._strict and tally.damaged:
            raise PackError(f"{tally.damaged[0].path} {tally.damaged[0].what}")

    def _read_samples(self, plan: ShardPlan, tally: JpegTally) -> Iterator[Sample]:
        for source in plan.samples:
            if self._stopped.is_set():
                raise PackError(f"{plan.name} was left unfinished because another shard failed")
            try:
                sample = _read_files(source)
            except FileChangedError as change:
                if self._on_changed == "raise":
                    raise
                self.changed.append(change.problem)
                continue
            rewritten = rewrite_sample(self._rewrite, source, sample, tally)
            self._check(tally)
            yield rewritten
            self._progress.packed(1, sum(map(len, sample.fields.values())))


def _read_files(sample: SourceSample) -> Sample:
    label = {} if sample.label is None else {LABEL_FIELD: str(sample.label).encode()}
    files = {field: read_unchanged(file) for field, file in sample.files.items()}
    return Sample(key=sample.key, fields=dict(sorted({**label, **files}.items())), origin=sample.key)
