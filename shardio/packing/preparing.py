"""Prepare samples for packing: check that their images can be decoded, convert them, and rewrite JPEGs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardio.errors import PackError
from shardio.images import (
    DEFAULT_MAX_PIXELS,
    IMAGE_FORMATS,
    ConvertedFormat,
    find_clipped_type,
    find_field,
    find_format,
    holds_images,
    is_convertible,
)
from shardio.packing.checking import find_mislabelled, why_rejected
from shardio.packing.jpegs import DEFAULT_QUALITY, TILED, JpegTally, choose_rewrite, is_jpeg, tiling_proves_soundness
from shardio.packing.packed_shard import RejectedSample
from shardio.packing.plan import PackSettings
from shardio.packing.sources.files import FileProblem
from shardio.packing.sources.source import SourceSample
from shardio.sample import Sample


class _RejectedError(Exception):
    """An image prevents that its sample is packed."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field, self.reason = field, reason


@dataclass(slots=True, kw_only=True)
class _PreparedImage:
    """An image as it is stored.

    Attributes:
        source_field: The field before packing.
        field: The field.
        content: The content.
        num_bytes_before: If it is a JPEG, its size before it was rewritten.
        mislabelled_as: Its format, if its field has the name of another one.
        converted_from: The format that it was converted from; None if it was not.
        jpeg_outcome: What became of a JPEG; None for other formats.
        clipped_type: The type of its gray values, if they are clipped when it becomes RGB.
    """

    source_field: str
    field: str
    content: bytes
    num_bytes_before: int
    mislabelled_as: str | None = None
    converted_from: str | None = None
    jpeg_outcome: str | None = None
    clipped_type: str | None = None


@dataclass(slots=True, kw_only=True)
class Findings:
    """What is found while samples are prepared."""

    jpegs: JpegTally = field(default_factory=JpegTally)
    converted: Counter[str] = field(default_factory=Counter)
    clipped: Counter[str] = field(default_factory=Counter)
    mislabelled: list[FileProblem] = field(default_factory=list)
    rejected: list[RejectedSample] = field(default_factory=list)
    changed: list[FileProblem] = field(default_factory=list)


class Preparation:
    """Prepares the samples of a shard.

    Attributes:
        findings: What has been found so far.

    Args:
        settings: The settings of the pack.
        root: What precedes the names of the source's files, as a string that ends in a slash.
        strict: Whether a mislabelled, rejected or damaged image is an error.
    """

    def __init__(self, settings: PackSettings, root: str, *, strict: bool) -> None:
        self._settings, self._root, self._strict = settings, root, strict
        self._rewrite = choose_rewrite(settings)
        self._rewrite_converted = self._rewrite
        if settings.convert_to is not None and settings.jpeg == "reencode":  # Losing quality once is enough.
            self._rewrite_converted = choose_rewrite(replace(settings, jpeg="tile"))
        self.findings = Findings()

    def prepare(self, source: SourceSample, sample: Sample) -> Sample | None:
        """Return a sample as it is stored; None if it is rejected.

        Args:
            source: The sample before packing, for messages.
            sample: Its fields.

        Raises:
            PackError: If ``strict`` makes a problem an error.
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
        if self._strict:
            found = self.findings
            refuse_problems(self._root, found.mislabelled, found.rejected, found.jpegs.damaged)
        return stored

    def _is_image(self, field: str) -> bool:
        return holds_images(field) or (self._settings.convert_to is not None and is_convertible(field))

    def _note(self, source: SourceSample, image: _PreparedImage) -> None:
        """Note what became of an image, once its sample is known to be packed."""
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
        """Check an image, convert it, and rewrite it if it is a JPEG.

        Raises:
            _RejectedError: If it cannot be decoded or converted.
        """
        image = _PreparedImage(source_field=field, field=field, content=content, num_bytes_before=len(content))
        to = self._settings.convert_to
        if to is not None and is_convertible(field):
            self._convert(image, to)
        is_kept = image.converted_from is None
        needs_check = is_kept and self._settings.check
        can_prove = (
            needs_check
            and self._settings.jpeg == "tile"
            and tiling_proves_soundness(content, self._settings.max_pixels)
        )
        if needs_check and not can_prove:
            self._check(image.field, content)
        if is_jpeg(image.content) and is_convertible(image.field):
            image.num_bytes_before = len(image.content)
            rewrite = self._rewrite if is_kept else self._rewrite_converted
            image.content, image.jpeg_outcome = rewrite(image.content)
        elif is_convertible(image.field):
            image.clipped_type = find_clipped_type(image.content)
        if can_prove and image.jpeg_outcome != TILED:
            self._check(image.field, content)
        if needs_check:
            image.mislabelled_as = find_mislabelled(image.field, content)
        return image

    def _check(self, field: str, content: bytes) -> None:
        """Raise _RejectedError if an image cannot be decoded."""
        if (why := why_rejected(field, content, self._settings.max_pixels)) is not None:
            raise _RejectedError(field, why)

    def _convert(self, image: _PreparedImage, to: ConvertedFormat) -> None:
        """Convert an image if it is in another format, and give its field the name of the format."""
        found, target = find_format(image.content), to.upper()
        if found != target:
            from shardio.images.converting import convert_image  # It imports Pillow, which copying does not need.

            settings = self._settings
            try:
                image.content = convert_image(
                    image.content,
                    to,
                    quality=settings.quality or DEFAULT_QUALITY,
                    max_side=settings.max_side,
                    to_srgb=settings.to_srgb,
                    max_pixels=settings.max_pixels or DEFAULT_MAX_PIXELS,
                )
            except ValueError as error:
                raise _RejectedError(image.field, f"cannot be converted to {target}: {error}") from error
            image.converted_from = found or "unknown"
        if IMAGE_FORMATS.get(image.field) != target:
            image.field = find_field(image.content)


def refuse_problems(
    root: str,
    mislabelled: Sequence[FileProblem],
    rejected: Sequence[RejectedSample],
    damaged: Sequence[FileProblem],
) -> None:
    """Raise PackError if there is a problem that ``strict`` makes an error.

    Args:
        root: What precedes the names of files of rejected samples.
        mislabelled: Images whose format does not match their suffix.
        rejected: Samples that cannot be decoded.
        damaged: Damaged JPEGs that would be stored unchanged.
    """
    problems = [*((root + each.file, each.reason) for each in rejected), *mislabelled, *damaged]
    if problems:
        path, what = problems[0]
        raise PackError(f"{path} {what}: rename, repair or remove the file, or omit --strict (strict=True)")
