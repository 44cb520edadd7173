"""Prepare samples for packing: check that their images can be decoded, convert them, and rewrite JPEGs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardio.errors import PackError
from shardio.images import (
    DEFAULT_MAX_PIXELS,
    IMAGE_FORMATS,
    ConvertedFormat,
    TooManyPixels,
    find_clipped_type,
    find_field,
    find_format,
    find_pixels,
    holds_images,
    is_convertible,
)
from shardio.images.jpeg import has_tiles
from shardio.images.jpeg.head import SOF2, read_head
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import DEFAULT_QUALITY
from shardio.packing.sources.source import FileProblem, SourceSample
from shardio.sample import Sample
from shardio.shards import ShardEntry

TILED, TILED_PROGRESSIVE = "tiled", "progressive, tiled as baseline"
"""The outcomes of a JPEG that is stored tiled. Other outcomes are reasons why a JPEG is stored unchanged."""

Rewrite = Callable[[bytes], tuple[bytes, str]]
"""A function that takes a JPEG and returns the bytes to store, and the outcome with details in parentheses."""

_JPEG_START = b"\xff\xd8\xff"


@dataclass(slots=True, kw_only=True)
class JpegTally:
    """A tally of how the JPEGs of a shard, or of all shards, are stored.

    Attributes:
        outcomes: The number of JPEGs by outcome: TILED, TILED_PROGRESSIVE, or the reason why they are stored unchanged.
        num_bytes_before: The total size of the files.
        num_bytes_after: The total size of the stored JPEGs.
        damaged: The damaged files, which are stored unchanged.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    num_bytes_before: int = 0
    num_bytes_after: int = 0
    damaged: list[FileProblem] = field(default_factory=list)

    @property
    def num_tiled(self) -> int:
        """The number of JPEGs that are stored tiled."""
        return self.outcomes[TILED] + self.outcomes[TILED_PROGRESSIVE]

    def count(self, outcome: str, before: int, after: int) -> None:
        """Count one JPEG, given its outcome and its sizes in bytes."""
        reason, _, _ = outcome.partition(" (")
        self.outcomes[reason] += 1
        self.num_bytes_before += before
        self.num_bytes_after += after

    def add(self, other: JpegTally) -> None:
        """Add the counts of another tally."""
        self.outcomes += other.outcomes
        self.num_bytes_before += other.num_bytes_before
        self.num_bytes_after += other.num_bytes_after
        self.damaged += other.damaged

    def note_damage(self, source: SourceSample, field: str, outcome: str) -> None:
        """Record a JPEG as damaged if its outcome reports damage."""
        if outcome.startswith("damaged"):
            verb = "has a" if outcome.startswith("damaged header") else "is"
            self.damaged.append(source.problem(field, f"{verb} {outcome}"))

    def dump(self) -> list[Any]:
        """Return the tally as JSON values."""
        return [self.outcomes, self.num_bytes_before, self.num_bytes_after, _dump_problems(self.damaged)]

    @classmethod
    def load(cls, values: Any) -> JpegTally:
        """Restore a tally from the values that :meth:`dump` returned.

        Raises:
            ValueError, TypeError: If ``values`` do not describe a tally.
        """
        outcomes, before, after, damaged = values
        return cls(
            outcomes=Counter(outcomes),
            num_bytes_before=before,
            num_bytes_after=after,
            damaged=_load_problems(damaged),
        )


def require_kernel() -> None:
    """Load the kernel, which is needed to rewrite JPEGs.

    Raises:
        PackError: If shardio was built without the kernel for this processor.
    """
    from shardio.kernel import require_functions

    try:
        require_functions()
    except ImportError as error:
        raise PackError(f"rewriting JPEGs needs shardio's kernel: {error}") from error


def choose_rewrite(options: PackOptions) -> Rewrite:
    """Return the function that rewrites JPEGs according to the options.

    Raises:
        PackError: If a required package is not installed.
    """
    if options.jpeg == "copy":
        return lambda content: (content, TILED if has_tiles(content) else "copied")
    from shardio.images.tiling import NotTileable, reencode_jpeg, tile_jpeg  # Copying JPEGs does not need this module.

    require_kernel()
    quality, max_pixels = options.quality or DEFAULT_QUALITY, options.max_pixels or DEFAULT_MAX_PIXELS

    def rewrite(content: bytes) -> tuple[bytes, str]:
        try:
            if options.jpeg == "tile":
                tiled = tile_jpeg(content)
                return tiled, TILED_PROGRESSIVE if read_head(content).process == SOF2 else TILED
            reencoded = reencode_jpeg(
                content,
                max_side=options.max_side,
                min_side=options.min_side,
                quality=quality,
                max_pixels=max_pixels,
                to_srgb=options.to_srgb,
            )
            return reencoded, TILED
        except NotTileable as error:
            return content, str(error)
        except TooManyPixels:
            return content, "more than max_pixels"
        except ValueError as error:
            return content, f"damaged ({error})"

    return rewrite


def is_jpeg(content: bytes) -> bool:
    """Return whether the content starts like a JPEG."""
    return content.startswith(_JPEG_START)


def _tiling_proves_soundness(content: bytes, max_pixels: int | None) -> bool:
    """Return whether tiling proves that an image is intact. Tiling reads every code of a JPEG."""
    from shardio.images.tiling import decodes_if_tileable

    if not is_jpeg(content):
        return False
    try:
        return decodes_if_tileable(content, max_pixels=max_pixels or DEFAULT_MAX_PIXELS)
    except ValueError:  # The header is damaged; decoding reports the details.
        return False


class RejectedSample(NamedTuple):
    """A sample that was not packed: its key, its file's path relative to the source, and the reason."""

    key: str
    file: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Findings:
    """The findings from preparing samples.

    Attributes:
        jpegs: The tally of the JPEGs.
        converted: The number of converted images by their original format.
        clipped: The number of images whose gray values are clipped in the conversion to RGB, by the type of the values.
        mislabelled: Images that are packed although their format does not match their suffix.
        rejected: Samples that are left out because their image cannot be decoded.
        changed: Files that changed during the pack; their samples are left out.
    """

    jpegs: JpegTally = field(default_factory=JpegTally)
    converted: Counter[str] = field(default_factory=Counter)
    clipped: Counter[str] = field(default_factory=Counter)
    mislabelled: list[FileProblem] = field(default_factory=list)
    rejected: list[RejectedSample] = field(default_factory=list)
    changed: list[FileProblem] = field(default_factory=list)

    def add(self, others: Iterable[Findings]) -> None:
        """Add the findings about other samples, and sort the lists."""
        for other in others:
            self.jpegs.add(other.jpegs)
            self.converted += other.converted
            self.clipped += other.clipped
            self.mislabelled += other.mislabelled
            self.rejected += other.rejected
            self.changed += other.changed
        for problems in (self.mislabelled, self.rejected, self.changed):
            problems.sort()

    def refuse_problems(self, root: str) -> None:
        """Raise PackError if ``strict`` forbids one of the problems. ``root`` is the prefix of file names."""
        rejected = [(root + each.file, each.reason) for each in self.rejected]
        for path, what in (*rejected, *self.mislabelled, *self.jpegs.damaged):
            raise PackError(f"{path} {what}: rename, repair or remove the file, or omit --strict (strict=True)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShard:
    """A finished shard.

    Attributes:
        entry: The shard's entry in the manifest.
        fields: The names of the samples' fields.
        identity: The content's identifier from ``DatasetFolder.identify``, or "" if the shard has no samples.
        findings: The findings about the shard's samples.
        was_kept: Whether an earlier run wrote the shard.
        damage: The damage that caused an earlier run's shard to be packed again, or "" if there was none.
    """

    entry: ShardEntry
    fields: tuple[str, ...]
    identity: str
    findings: Findings = field(default_factory=Findings)
    was_kept: bool = False
    damage: str = ""

    def dump(self) -> dict[str, Any]:
        """Return the shard as a JSON object."""
        found = self.findings
        return {
            "entry": asdict(self.entry),
            "fields": self.fields,
            "identity": self.identity,
            "jpegs": found.jpegs.dump(),
            "converted": found.converted,
            "clipped": found.clipped,
            "mislabelled": _dump_problems(found.mislabelled),
            "rejected": found.rejected,
            "changed": _dump_problems(found.changed),
        }

    @classmethod
    def load(cls, values: dict[str, Any]) -> PackedShard:
        """Restore a shard from the values that :meth:`dump` returned.

        Raises:
            ValueError, TypeError, KeyError: If ``values`` do not describe a shard.
        """
        findings = Findings(
            jpegs=JpegTally.load(values["jpegs"]),
            converted=Counter(values["converted"]),
            clipped=Counter(values["clipped"]),
            mislabelled=_load_problems(values["mislabelled"]),
            rejected=[RejectedSample(*each) for each in values["rejected"]],
            changed=_load_problems(values["changed"]),
        )
        entry, fields = ShardEntry(**values["entry"]), tuple(values["fields"])
        return cls(entry=entry, fields=fields, identity=values["identity"], findings=findings)


def _dump_problems(problems: Sequence[FileProblem]) -> list[tuple[str, str]]:
    return [(str(path), what) for path, what in problems]


def _load_problems(values: Sequence[tuple[str, str]]) -> list[FileProblem]:
    return [FileProblem(Path(path), what) for path, what in values]


def _find_mislabelled(field: str, content: bytes) -> str | None:
    """Return an image's format if its field's suffix belongs to a different format; otherwise, return None."""
    found = find_format(content)
    return found if found is not None and found != IMAGE_FORMATS[field.rpartition(".")[2]] else None


def _why_rejected(field: str, content: bytes, max_pixels: int | None) -> str | None:
    from shardio.images import decode_image, decode_unconverted  # Packing without a check does not need this module.

    if find_format(content) is None:
        return "is not an image"
    # A mask's values are read as they are stored: conversion to RGB may be impossible.
    decode = decode_image if field in IMAGE_FORMATS else decode_unconverted
    try:
        decode(content, max_pixels=max_pixels or DEFAULT_MAX_PIXELS)
    except TooManyPixels as error:
        return f"is too large: {error}"
    except ValueError as error:
        return f"cannot be decoded: {error}"
    return None


class _RejectedError(Exception):
    """A sample cannot be packed because of one of its images."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason


@dataclass(slots=True, kw_only=True)
class _PreparedImage:
    source_field: str
    field: str
    content: bytes
    num_bytes_before: int
    mislabelled_as: str | None = None
    converted_from: str | None = None
    jpeg_outcome: str | None = None
    clipped_type: str | None = None


class Preparation:
    """The preparation of a shard's samples.

    Attributes:
        findings: The findings so far.

    Args:
        options: The options of the pack.
        root: The slash-terminated prefix of the source's file names.
    """

    def __init__(self, options: PackOptions, root: str) -> None:
        self._options, self._root = options, root
        self._rewrite = choose_rewrite(options)
        self._rewrite_converted = self._rewrite
        if options.convert_to is not None and options.jpeg == "reencode":  # Avoid a second lossy compression.
            self._rewrite_converted = choose_rewrite(replace(options, jpeg="tile"))
        self.findings = Findings()

    def prepare(self, source: SourceSample, sample: Sample) -> Sample | None:
        """Return the sample to store, or None if the sample is rejected.

        Args:
            source: The sample in the source, for messages.
            sample: The content of the sample.

        Raises:
            PackError: If ``strict`` forbids a problem with the sample.
        """
        stored: Sample | None = None
        try:
            images = [self._prepare_image(name, sample.fields[name]) for name in filter(self._is_image, sample.fields)]
        except _RejectedError as rejected:
            path, reason = source.problem(rejected.field, rejected.reason)
            self.findings.rejected.append(RejectedSample(sample.key, str(path).removeprefix(self._root), reason))
        else:
            for image in images:
                self._note(source, image)
            stored = sample
            if any(image.content is not sample.fields.get(image.field) for image in images):
                fields = {name: content for name, content in sample.fields.items() if not self._is_image(name)}
                fields |= {image.field: image.content for image in images}
                stored = replace(sample, fields=dict(sorted(fields.items())))
        if self._options.strict:
            self.findings.refuse_problems(self._root)
        return stored

    def _is_image(self, field: str) -> bool:
        return holds_images(field) or (self._options.convert_to is not None and is_convertible(field))

    def _note(self, source: SourceSample, image: _PreparedImage) -> None:
        found = self.findings
        if image.mislabelled_as is not None:
            what = f"has the suffix .{image.field.rpartition('.')[2]} but is in {image.mislabelled_as} format"
            found.mislabelled.append(source.problem(image.source_field, what))
        if image.converted_from is not None:
            found.converted[image.converted_from] += 1
        if image.clipped_type is not None:
            found.clipped[image.clipped_type] += 1
        if image.jpeg_outcome is not None:
            found.jpegs.count(image.jpeg_outcome, image.num_bytes_before, len(image.content))
            found.jpegs.note_damage(source, image.source_field, image.jpeg_outcome)

    def _prepare_image(self, field: str, content: bytes) -> _PreparedImage:
        image = _PreparedImage(source_field=field, field=field, content=content, num_bytes_before=len(content))
        to = self._options.convert_to
        if to is not None and is_convertible(field):
            self._convert(image, to)
        is_kept = image.converted_from is None
        needs_check = is_kept and self._options.check
        can_prove = (
            needs_check and self._options.jpeg == "tile" and _tiling_proves_soundness(content, self._options.max_pixels)
        )
        if needs_check and not can_prove:
            self._check(image.field, content)
        if is_jpeg(image.content) and is_convertible(image.field):
            image.num_bytes_before = len(image.content)
            rewrite = self._rewrite if is_kept else self._rewrite_converted
            image.content, image.jpeg_outcome = rewrite(image.content)
        elif is_convertible(image.field):
            image.clipped_type = find_clipped_type(image.content)
        if can_prove and image.jpeg_outcome not in (TILED, TILED_PROGRESSIVE):
            self._check(image.field, content)
        if needs_check:
            image.mislabelled_as = _find_mislabelled(image.field, content)
        return image

    def _check(self, field: str, content: bytes) -> None:
        if (why := _why_rejected(field, content, self._options.max_pixels)) is not None:
            raise _RejectedError(field, why)

    def _convert(self, image: _PreparedImage, to: ConvertedFormat) -> None:
        found, target = find_format(image.content), to.upper()
        # PPMs that store values as text, or in more than 8 bits, cannot be cropped without decoding.
        if found != target or (to == "ppm" and find_pixels(image.content) is None):
            from shardio.images.converting import convert_image  # Packing without conversion does not need Pillow.

            options = self._options
            try:
                image.content = convert_image(
                    image.content,
                    to,
                    quality=options.quality or DEFAULT_QUALITY,
                    max_side=options.max_side,
                    min_side=options.min_side,
                    to_srgb=options.to_srgb,
                    max_pixels=options.max_pixels or DEFAULT_MAX_PIXELS,
                )
            except ValueError as error:
                raise _RejectedError(image.field, f"cannot be converted to {target}: {error}") from error
            image.converted_from = found or "unknown"
        if IMAGE_FORMATS.get(image.field) != target:
            image.field = find_field(image.content)
