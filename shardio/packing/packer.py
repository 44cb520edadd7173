"""Packing: scan, plan, write each shard, and the manifest last."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import PackError
from shardio.packing import destination
from shardio.packing.plan import PackSettings, Plan, ShardPlan, make_plan
from shardio.packing.scan import Scan, SourceSample, scan_directory
from shardio.sample import Sample
from shardio.shards import LABEL_FIELD, Manifest, ShardEntry, write_shard

DEFAULT_SHARD_SIZE = 256 * 2**20
"""256 MiB."""

MAX_WORKERS = 4
"""Threads that write shards, at the most, unless the caller says otherwise."""

logger = logging.getLogger(__name__)


Written = tuple[ShardEntry, tuple[str, ...]]
"""A finished shard: its entry, and the names of its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a pack did: the manifest that it wrote, what it found in the source, and what was there already.

    Attributes:
        num_kept: The samples of shards that an earlier run had finished.
    """

    manifest: Manifest
    scan: Scan
    num_kept: int


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
    num_workers: int | None = None,
) -> Manifest:
    """Pack a directory of images into tar shards.

    ``src/class/…/name.jpg`` becomes the members ``class/…/name.jpg`` and ``class/…/name.cls`` of a shard; files
    with the same stem become further fields of the sample. Image bytes are copied untouched. The same input and
    settings give the same bytes. A pack that was killed is gone on with by the same call.

    Args:
        src: The directory: class folders with images, or a flat directory of images.
        dst: A directory that is empty or not there yet.
        max_shard_size: A shard's size in bytes that is not exceeded, unless by a single sample.
        max_shard_samples: A shard's number of samples at the most.
        shuffle_seed: Of the packing order, by which classes are mixed; None packs in the order of the keys.
        rename_dots: Whether to write an underscore for each dot in a file's stem.
        strict: Whether a file that is not the image that its name says is an error.
        num_workers: How many shards are written at a time; never changes what is written.

    Returns:
        The manifest of the packed dataset.

    Raises:
        PackError: If the source cannot be packed or the destination is not free.
    """
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    settings = PackSettings(
        max_shard_size=max_shard_size, max_shard_samples=max_shard_samples, shuffle_seed=shuffle_seed
    )
    result = pack_directory(
        Path(src), Path(dst), settings, rename_dots=rename_dots, strict=strict, num_workers=num_workers
    )
    for problem in result.scan.mislabelled:
        logger.warning("%s %s: packed as it is", problem.path, problem.what)
    for problem in result.scan.unreadable:
        logger.warning("%s %s: left out", problem.path, problem.what)
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
        workers = num_workers or min(MAX_WORKERS, os.cpu_count() or 1)
        written = _write_shards(dst, plan, finished, workers, progress)
        manifest = _make_manifest(written, scan, settings)
        destination.finish(dst, manifest)
    num_kept = sum(entry.num_samples for entry, _ in finished.values())
    return PackResult(manifest=manifest, scan=scan, num_kept=num_kept)


def _make_manifest(written: list[Written], scan: Scan, settings: PackSettings) -> Manifest:
    return Manifest(
        shards=tuple(entry for entry, _ in written),
        fields=tuple(sorted({field for _, fields in written for field in fields})),
        classes=scan.classes,
        pack={
            "max_shard_size": settings.max_shard_size,
            "max_shard_samples": settings.max_shard_samples,
            "shuffle_seed": settings.shuffle_seed,
            "jpeg": "copy",
        },
    )


def _write_shards(
    dst: Path, plan: Plan, finished: dict[str, Written], num_workers: int, progress: PackProgress
) -> list[Written]:
    """Write the shards of a plan that are not there yet, side by side; after an error the others stop soon."""
    stopped = threading.Event()
    failures: list[Exception] = []

    def write(shard: ShardPlan) -> Written:
        if shard.name in finished:
            progress.packed(len(shard.samples), finished[shard.name][0].num_bytes)
            return finished[shard.name]
        try:
            return write_shard(dst / shard.name, _read_samples(shard, stopped, progress))
        except Exception as error:
            failures.append(error)
            stopped.set()
            raise

    with ThreadPoolExecutor(num_workers, thread_name_prefix="shardio-pack") as pool:
        try:
            return list(pool.map(write, plan.shards))
        except Exception as error:
            raise failures[0] from error  # The first failure; the others stopped because of it.
        finally:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _read_samples(shard: ShardPlan, stopped: threading.Event, progress: PackProgress) -> Iterator[Sample]:
    for sample in shard.samples:
        if stopped.is_set():
            raise PackError(f"{shard.name} was left unfinished because another shard failed")
        content = _read_files(sample)
        yield content
        progress.packed(1, sum(map(len, content.fields.values())))


def _read_files(sample: SourceSample) -> Sample:
    label = {} if sample.label is None else {LABEL_FIELD: str(sample.label).encode()}
    try:
        files = {field: path.read_bytes() for field, path in sample.files.items()}
    except OSError as error:
        raise PackError(f"{error.filename or sample.key} cannot be read: {error.strerror or error}") from error
    return Sample(key=sample.key, fields=dict(sorted({**label, **files}.items())), origin=sample.key)
