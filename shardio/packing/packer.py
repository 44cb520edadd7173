"""Packing: scan, plan, write each shard, and the manifest last."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import PackError
from shardio.packing import destination
from shardio.packing.destination import Written
from shardio.packing.jpegs import JpegTally, Rewrite, choose_rewrite, describe, rewrite_sample, sum_tallies
from shardio.packing.plan import JpegMode, PackSettings, ShardPlan, make_plan
from shardio.packing.scan import Scan, SourceSample, scan_directory
from shardio.sample import Sample
from shardio.shards import LABEL_FIELD, Manifest, write_shard

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
    """

    manifest: Manifest
    scan: Scan
    num_kept: int
    jpegs: JpegTally


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
            makes it smaller, and stores it tiled. Both need numba: ``pip install 'shardio[tile]'``.
        max_side: With ``reencode``, pixels of an image's longer side at the most.
        quality: With ``reencode``, 1 to 100; 90 if it is not given.
        max_pixels: With ``reencode``, an image of more pixels is stored as it is; Pillow's limit if it is not given.
        num_workers: How many shards are written at a time; never changes what is written.

    Returns:
        The manifest of the packed dataset.

    Raises:
        PackError: If the source cannot be packed or the destination is not free.
    """
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
        Path(src), Path(dst), settings, rename_dots=rename_dots, strict=strict, num_workers=num_workers
    )
    for problem in result.scan.mislabelled:
        logger.warning("%s %s: packed nonetheless", problem.path, problem.what)
    for problem in result.scan.unreadable:
        logger.warning("%s %s: left out", problem.path, problem.what)
    for problem in result.jpegs.damaged:
        logger.warning("%s %s: packed as it is", problem.path, problem.what)
    return result.manifest


def pack_directory(
    src: Path,
    dst: Path,
    settings: PackSettings,
    *,
    rename_dots: bool = False,
    strict: bool = False,
    num_workers: int | None = None,
    progress: PackProgress | None = None,
) -> PackResult:
    """Do what :func:`pack` does; tell ``progress`` on the way, and return also what was found in the source."""
    progress = progress or PackProgress()
    rewrite = choose_rewrite(settings)
    destination.check_destination(src, dst)
    scan = scan_directory(src, rename_dots=rename_dots)
    problems = [*scan.unreadable, *scan.mislabelled]
    if strict and problems:
        raise PackError(
            f"{problems[0].path} {problems[0].what} ({len(problems)} such files in all; nothing was packed)"
        )
    plan = make_plan(scan, settings)
    with destination.locked(dst):
        destination.begin(dst, plan)
        finished = destination.find_finished(dst, plan)
        progress.planned(len(scan.samples), plan.num_bytes)
        written = _ShardWriter(dst, finished, rewrite, strict, progress).write_all(plan.shards, num_workers)
        jpegs = sum_tallies([shard.jpegs for shard in written])
        manifest = _make_manifest(written, scan, settings, jpegs)
        destination.finish(dst, manifest)
    num_kept = sum(shard.entry.num_samples for shard in written if shard.entry.name in finished)
    return PackResult(manifest=manifest, scan=scan, num_kept=num_kept, jpegs=jpegs)


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
        self, dst: Path, finished: Mapping[str, Written], rewrite: Rewrite, strict: bool, progress: PackProgress
    ) -> None:
        self._dst, self._finished, self._rewrite = dst, finished, rewrite
        self._strict, self._progress = strict, progress
        self._stopped = threading.Event()
        self._failures: list[Exception] = []

    def write_all(self, shards: Sequence[ShardPlan], num_workers: int | None) -> list[Written]:
        workers = num_workers or min(MAX_WORKERS, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers, thread_name_prefix="shardio-pack") as pool:
            try:
                return list(pool.map(self._write, shards))
            except Exception as error:
                raise self._failures[0] from error  # The first failure; the others stopped because of it.
            finally:
                self._stopped.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, plan: ShardPlan) -> Written:
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

    def _write_new(self, plan: ShardPlan) -> Written:
        path, tally = self._dst / plan.name, JpegTally()
        entry, fields = write_shard(path, self._read_samples(plan, tally))
        destination.note_finished(path, tally)
        return Written(entry=entry, fields=fields, jpegs=tally)

    def _check(self, tally: JpegTally) -> None:
        if self._strict and tally.damaged:
            raise PackError(f"{tally.damaged[0].path} {tally.damaged[0].what}")

    def _read_samples(self, plan: ShardPlan, tally: JpegTally) -> Iterator[Sample]:
        for source in plan.samples:
            if self._stopped.is_set():
                raise PackError(f"{plan.name} was left unfinished because another shard failed")
            sample = _read_files(source)
            rewritten = rewrite_sample(self._rewrite, source, sample, tally)
            self._check(tally)
            yield rewritten
            self._progress.packed(1, sum(map(len, sample.fields.values())))


def _read_files(sample: SourceSample) -> Sample:
    label = {} if sample.label is None else {LABEL_FIELD: str(sample.label).encode()}
    try:
        files = {field: path.read_bytes() for field, path in sample.files.items()}
    except OSError as error:
        raise PackError(f"{error.filename or sample.key} cannot be read: {error.strerror or error}") from error
    return Sample(key=sample.key, fields=dict(sorted({**label, **files}.items())), origin=sample.key)
