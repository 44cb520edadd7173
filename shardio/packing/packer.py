"""Pack a source or an iterable: scan it, plan the shards, write them, and write the manifest last."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import CLIPPED_ADVICE, describe_other_images
from shardio.order import make_rng_key, permute
from shardio.packing.executors import PackExecutor, ShardJob, choose_executor
from shardio.packing.folders import (
    DatasetFolder,
    UnfinishedDataset,
    are_ending,
    begun,
    check_destination,
    choose_folder,
    end,
    finish,
    holds_unfinished,
    locked,
)
from shardio.packing.pack_call import REJECTED_NAME, PackOptions, kinds_of_options
from shardio.packing.preparing import (
    Findings,
    PackedShard,
    Preparation,
    RejectedSample,
    choose_rewrite,
)
from shardio.packing.samples import DEFAULT_QUALITY, ValueEncoder, encode_sample
from shardio.packing.shard_writer import ShardWriter, name_shard
from shardio.packing.sources.directory import find_main_file, quote, refuse_url, scan_directory
from shardio.packing.sources.source import (
    OPTIONS_OF_DOCUMENTS,
    OPTIONS_OF_KINDS,
    SOURCES,
    FileChangedError,
    FileProblem,
    PackSource,
    Parts,
    SourceKind,
    SourceScan,
    SourceTable,
    describe_option,
    divide,
    explain_changes,
    list_some,
)
from shardio.process import WorkProgress
from shardio.sample import Sample
from shardio.shards import END, Manifest, PackSettings, hash_key
from shardio.storage import Location, absolute_path, parse_location
from shardio.values import count

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PackResult(Findings):
    """The result of a pack, with the findings about all of its samples.

    Attributes:
        manifest: The manifest that was written.
        ignored: The files of the source that do not belong to a sample.
        suffixed: The keys that end in their file's suffix, because another image's path differs only in its suffix.
        num_kept: The number of samples in shards that an earlier run had finished.
        damaged_shards: Shards that were damaged after an earlier run had finished them. They were packed again.
    """

    manifest: Manifest
    ignored: Sequence[Path] = ()
    suffixed: Sequence[str] = ()
    num_kept: int = 0
    damaged_shards: Sequence[FileProblem] = ()

    def describe_clipped(self) -> str:
        """Return a message about gray images whose values are clipped."""
        types = ", ".join(f"{num_images} × {kind}" for kind, num_images in self.clipped.most_common())
        images = count(self.clipped.total(), "gray image stores", "gray images store")
        return f"{images} values other than uint8 ({types}): {CLIPPED_ADVICE}"

    def describe_suffixed(self) -> str:
        """Return a message about the keys that end in a suffix."""
        return (
            f"{count(len(self.suffixed), 'image has', 'images have')} the same name as another, apart from the suffix: "
            f"each becomes a sample whose key ends in the suffix, such as {self.suffixed[0]!r}. If some are masks of "
            "others, pack them as fields of one sample, for example with --fields jpg,png (fields=['jpg', 'png'])"
        )

    def warn(self, src: str) -> None:
        """Log findings that need attention."""
        found = [f"{src}: {self.describe_clipped()}"] if self.clipped else []
        found += [f"{path} {what}: packed anyway" for path, what in self.mislabelled]
        found += [f"{src}: {sample.file} {sample.reason}: left out" for sample in self.rejected]
        if left_out := describe_other_images(self.ignored):
            found.append(f"{src}: {left_out}")
        if self.suffixed:
            found.append(f"{src}: {self.describe_suffixed()}")
        found += [f"{path} {what}: its sample was left out" for path, what in self.changed]
        found += [f"{path} {what}: packed again" for path, what in self.damaged_shards]
        found += [f"{path} {what}: packed unchanged" for path, what in self.jpegs.damaged]
        for message in found:
            logger.warning("%s", message)


def _write_rejected(folder: Location, rejected: Sequence[RejectedSample]) -> None:
    location = folder / REJECTED_NAME
    if not rejected:
        location.remove()
        return
    with location.write_whole() as file:
        for sample in sorted(rejected):
            file.write(json.dumps(sample._asdict(), ensure_ascii=False).encode(errors="surrogateescape") + b"\n")


@cache
def _load_source(kind: SourceKind) -> PackSource:
    module, _, name = SOURCES[kind].partition(":")
    return cast(PackSource, getattr(import_module(f"shardio.packing.sources.{module}"), name)())


def _others() -> dict[SourceKind, PackSource]:
    return {kind: _load_source(kind) for kind in SOURCES if kind != "files"}


def scan_source(src: Path, dst: Location, options: PackOptions) -> SourceScan:
    """Find the samples of a source: a directory of images, or another tool's dataset. Messages mention ``dst``.

    Raises:
        PackError: If the source cannot be packed, or holds samples of several kinds.
    """
    kind = _choose_kind(src, options)
    if (option := _find_other_option(kind, options)) is not None:
        raise PackError(f"{describe_option(option)} does not apply to {src}: omit it")
    if kind != "files":
        return _load_source(kind).scan(src, options)
    if src.is_dir() and find_main_file(src, options) is None:
        _refuse_outer_folder(src, dst)
    return scan_directory(src, dst, options)


def _refuse_outer_folder(src: Path, dst: Location) -> None:
    lines = [
        f"  shardio pack {quote(folder)} {quote(dst / folder.name)}"
        for folder in sorted(src.iterdir())
        if folder.is_dir()
        and any((found := source.find(folder)) and found.holds_samples for source in _others().values())
    ]
    if lines:
        first = f"{src} holds no samples itself, but its folders do. Pack each one:"
        raise PackError("\n".join([first, *list_some(lines, "  (and {} more)")]))


def _choose_kind(src: Path, options: PackOptions) -> SourceKind:
    """Return the kind of a source. Files that hold no samples, such as label tables, do not affect the kind."""
    if (kind := options.source_kind) != "auto":
        if kind != "files" and _load_source(kind).find(src) is None:
            raise PackError(f"{src} is not {_load_source(kind).what}: omit --source-kind {kind} (source_kind={kind!r})")
        return kind
    all_found = {kind: evidence for kind, source in _others().items() if (evidence := source.find(src)) is not None}
    if "documents" in all_found:
        if options.find_given(OPTIONS_OF_DOCUMENTS) is not None:
            return "documents"
        if not all_found["documents"].holds_samples:
            del all_found["documents"]
    found = {kind: evidence.file for kind, evidence in all_found.items() if evidence.holds_samples}
    if all_found and (file := find_main_file(src, options)) is not None:
        found["files"] = file
    found = found or {kind: evidence.file for kind, evidence in all_found.items()} or {"files": src}
    if len(found) > 1:  # An option that applies to only one kind selects that kind.
        found = {kind: file for kind, file in found.items() if _find_other_option(kind, options) is None} or found
    first_kinds = {file: kind for kind, file in reversed(found.items())}  # Keep only the first kind for each file.
    found = {kind: file for kind, file in found.items() if first_kinds[file] == kind}
    if len(found) > 1:
        lines = [
            f"  {_load_source(kind).what}, such as {file}: --source-kind {kind} (source_kind={kind!r})"
            for kind, file in found.items()
        ]
        raise PackError(
            f"{src} holds samples of {len(found)} kinds:\n"
            + "\n".join(lines)
            + "\nPass one of these options, or move the files of the other kinds out of the source"
        )
    return next(iter(found))


def _find_other_option(kind: SourceKind, options: PackOptions) -> str | None:
    """Return an option that is given but does not apply to a kind of source, or None if all apply."""
    return options.find_given(name for name in OPTIONS_OF_KINDS if name not in _load_source(kind).takes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """All shards to write, in manifest order.

    Attributes:
        order: The rows of all samples in packing order, int64 [n].
        stops: The end of each shard in packing order, int64 [shards].
        digest: The identity of an unfinished pack: a digest of the samples, their labels, their files' sizes and
            times, and the settings.
    """

    order: NDArray[np.int64]
    stops: NDArray[np.int64]
    digest: str

    def __len__(self) -> int:
        return len(self.stops)

    @property
    def names(self) -> list[str]:
        """The file names of the shards."""
        return list(map(name_shard, range(len(self))))

    @property
    def rows(self) -> list[NDArray[np.int64]]:
        """The rows of the samples of each shard, int64 [k]."""
        return np.split(self.order, self.stops[:-1])


def make_plan(samples: SourceTable, classes: Sequence[str], options: PackOptions) -> PackPlan:
    """Order the samples of a source and distribute them among shards."""
    rows = np.arange(len(samples))
    seed = options.shuffle_seed
    order = rows if seed is None else permute(rows, np.array([len(samples)]), make_rng_key(seed, "pack"))
    digest = xxhash.xxh3_128(options.identify(classes) + samples.digest())
    sizes = samples.sizes_in_tar()[order]
    return PackPlan(order=order, stops=np.array(_cut(sizes, options), np.int64), digest=digest.hexdigest())


def _cut(sizes: NDArray[np.int64], options: PackOptions) -> list[int]:
    """Return the end of each shard, given the samples' sizes in a tar, in packing order."""
    ends, stops, start = np.cumsum(sizes), list[int](), 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + options.max_shard_size - len(END), side="right"))
        most = start + (options.max_shard_samples or len(sizes))
        start = min(max(stop, start + 1), most)
        stops.append(start)
    return stops


def pack_source(
    src: Path, dst: str | os.PathLike[str], options: PackOptions, progress: WorkProgress | None = None
) -> PackResult:
    """Pack as :func:`~shardio.packing.pack` does, report to ``progress``, and return the manifest with the findings."""
    out = parse_location(dst, options.access)
    (result,) = _pack(src, out, [out], options, progress, lambda scan: [scan])
    return result


def pack_parts(
    src: Path,
    out: str | os.PathLike[str],
    parts: Parts,
    options: PackOptions,
    progress: WorkProgress | None = None,
) -> dict[str, PackResult]:
    """Pack a source into several datasets. A hash of each sample's key determines the sample's dataset.

    All datasets have the class names of the whole source. Samples stay in their parts when other samples are added to
    the source. In all other respects, this function behaves like :func:`pack_source`.

    Returns:
        The result for each part, by name. The first result also lists the ignored files of the whole source, and the
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

    home = parse_location(out, options.access)
    results = _pack(src, home, [home / name for name in parts.names], options, progress, divide_scan)
    return dict(zip(parts.names, results, strict=True))


def _pack(
    src: Path,
    out: Location,
    dsts: Sequence[Location],
    options: PackOptions,
    progress: WorkProgress | None,
    divide_scan: Callable[[SourceScan], Sequence[SourceScan]],
) -> list[PackResult]:
    progress = progress or WorkProgress()
    choose_rewrite(options)  # Raise an error early if a required package is missing.
    refuse_url(src, out)
    if options.engine == "ray":  # Ray tasks run in different directories.
        src = absolute_path(src)
    folders = [choose_folder(dst) for dst in dsts]
    is_ending = are_ending(folders)
    if not is_ending:
        for folder in folders:
            check_destination(src, folder)
    scans = divide_scan(scan_source(src, out, options))
    plans = [make_plan(scan.samples, scan.classes, options) for scan in scans]
    if is_ending:
        manifests = end({folder: plan.digest for folder, plan in zip(folders, plans, strict=True)})
        return [
            PackResult(manifest=each, ignored=scan.ignored, suffixed=scan.suffixed, num_kept=each.num_samples)
            for scan, each in zip(scans, manifests, strict=True)
        ]
    with ExitStack() as stack:
        unfinished = list[UnfinishedDataset]()
        for folder, plan in zip(folders, plans, strict=True):
            stack.enter_context(locked(src, folder))
            unfinished.append(stack.enter_context(begun(folder, plan.digest, set(plan.names))))
        progress.start(sum(len(scan.samples) for scan in scans), sum(scan.samples.num_bytes for scan in scans))
        results = [
            _write_dataset(src, folder, scan, plan, options, progress)
            for folder, scan, plan in zip(folders, scans, plans, strict=True)
        ]
        finish({each: result.manifest for each, result in zip(unfinished, results, strict=True)})
    return results


def _write_dataset(
    src: Path, folder: DatasetFolder, scan: SourceScan, plan: PackPlan, options: PackOptions, progress: WorkProgress
) -> PackResult:
    samples = scan.samples
    execute = choose_executor(options, len(plan), samples.num_bytes)
    # Jobs do not need these options, which may be large or secret.
    of_jobs = replace(options, classes=None, labels=None, tokenizer=None, storage_options=None)
    try:
        shards = _write_shards(
            folder, samples, plan, partial(ShardJob, root=samples.root, options=of_jobs), execute, progress
        )
    except FileChangedError as change:
        raise explain_changes(change, samples.find_changes(), folder.location) from change
    result = PackResult(
        manifest=_make_manifest(shards, scan, options),
        ignored=scan.ignored,
        suffixed=scan.suffixed,
        num_kept=sum(shard.entry.num_samples for shard in shards if shard.was_kept),
        damaged_shards=[
            FileProblem(folder.location / shard.entry.name, shard.damage) for shard in shards if shard.damage
        ],
    )
    result.add(shard.findings for shard in shards)
    if not result.manifest.num_samples:
        raise PackError(_explain_nothing_left(src, samples.root, result.rejected))
    _write_rejected(folder.location, result.rejected)
    return result


def _write_shards(
    folder: DatasetFolder,
    samples: SourceTable,
    plan: PackPlan,
    make_job: Callable[..., ShardJob],
    execute: PackExecutor,
    progress: WorkProgress,
) -> list[PackedShard]:
    with folder.open_journal() as journal:
        jobs = (
            make_job(
                number=number, folder=folder, name=name, samples=samples.take(rows), earlier=journal.finished.get(name)
            )
            for number, (name, rows) in enumerate(zip(plan.names, plan.rows, strict=True))
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
                f"packing into {folder.location} failed: {error}. Finished and kept {len(shards)} of "
                f"{count(len(plan), 'shard')}. Fix the cause (if the disk is full, free some space) and rerun the same "
                "command to resume"
            ) from error
        return [shards[number] for number in range(len(plan))]


def _explain_nothing_left(src: Path, root: str, rejected: Sequence[RejectedSample]) -> str:
    if rejected:
        more = f" (there are {len(rejected)} such images)" if len(rejected) > 1 else ""
        return f"{src} holds no images that can be packed: {root}{rejected[0].file} {rejected[0].reason}{more}"
    return f"all samples of {src} changed during the pack: pack again when nothing is writing to the source"


def _make_manifest(shards: Sequence[PackedShard], scan: SourceScan, options: PackOptions) -> Manifest:
    return Manifest(
        shards=tuple(shard.entry for shard in shards if shard.entry.num_samples),
        fields=tuple(sorted({field for shard in shards for field in shard.fields})),
        classes=scan.classes,
        pack=options.describe(sum(shard.findings.jpegs.num_tiled for shard in shards)),
    )


class _Given:
    """A sample from an iterable: see :class:`~shardio.packing.sources.source.SourceSample`."""

    def __init__(self, sample: Sample) -> None:
        self.key = sample.key
        self._sample = sample

    def read(self) -> Sample:
        return self._sample

    def problem(self, field: str, what: str) -> FileProblem:
        return FileProblem(Path(f"{self.key}.{field}"), what)


class _Writer(ShardWriter):
    """A ShardWriter whose manifest says how the images were prepared."""

    def __init__(self, out: str | os.PathLike[str], options: PackOptions, preparation: Preparation) -> None:
        super().__init__(
            out,
            max_shard_size=options.max_shard_size,
            max_shard_samples=options.max_shard_samples,
            classes=options.classes,
            overwrite=holds_unfinished(choose_folder(parse_location(out, options.access))),
            storage_options=options.storage_options,
        )
        self._options, self._preparation = options, preparation

    def _describe(self) -> PackSettings:
        settings = self._options.describe(self._preparation.findings.jpegs.num_tiled)
        return settings | {"shuffle_seed": None}


def pack_iterable(
    samples: Iterable[Mapping[str, Any]], dst: str | os.PathLike[str], options: PackOptions
) -> PackResult:
    """Pack the samples of an iterable or a sequence, in order.

    An interrupted call cannot be resumed: a repeated call starts over.

    Raises:
        PackError: If the directory cannot be used, two samples have the same key, or nothing is packed.
        TypeError: If a sample is not a mapping, or a field cannot hold its value.
        ValueError: If a key, a field name or a value is invalid, or an option does not apply.
    """
    options_of = kinds_of_options().items()
    of_files = [name for name, (_, each) in options_of if not (each.decides_output or each.of_iterables)]
    of_files += OPTIONS_OF_DOCUMENTS
    if name := (replace(options, num_workers=None) if options.num_workers == 1 else options).find_given(of_files):
        raise ValueError(f"{name} does not apply to an iterable of samples: omit it")
    preparation = Preparation(options, "")
    encoder = ValueEncoder(classes=options.classes or (), quality=options.quality or DEFAULT_QUALITY)
    writer = _Writer(dst, options, preparation)
    with writer:
        for number, sample in enumerate(_iterate(samples)):
            if not isinstance(sample, Mapping):
                raise TypeError(
                    f"sample {number} is a {type(sample).__name__}: an iterable must yield mappings such as "
                    "{'__key__': 'cats/1', 'jpg': …, 'cls': 0}"
                )
            encoded = encode_sample(encoder, {"__key__": f"{number:08d}", **sample})
            stored = preparation.prepare(_Given(encoded), encoded)
            if stored is not None:
                writer.write({"__key__": stored.key, **stored.fields})
        found = preparation.findings
        if not writer.num_samples and found.rejected:
            raise PackError(f"no sample can be packed: {found.rejected[0].file} {found.rejected[0].reason}")
        _write_rejected(parse_location(dst, options.access), found.rejected)
    assert writer.manifest is not None, "the block writes it"
    result = PackResult(manifest=writer.manifest)
    result.add([found])
    return result


def _iterate(samples: Any) -> Iterator[Any]:
    if hasattr(type(samples), "__iter__") or not hasattr(type(samples), "__len__"):
        return iter(samples)
    return (samples[number] for number in range(len(samples)))
