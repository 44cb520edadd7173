"""Prepare samples for packing: check that their images can be decoded, and rewrite JPEGs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardio.errors import PackError
from shardio.images import holds_images
from shardio.packing.checking import find_mislabelled, why_rejected
from shardio.packing.jpegs import JpegTally, choose_rewrite, is_rewritable
from shardio.packing.packed_shard import RejectedSample
from shardio.packing.plan import PackSettings
from shardio.packing.sources.files import FileProblem
from shardio.packing.sources.source import SourceSample
from shardio.sample import Sample


@dataclass(slots=True, kw_only=True)
class Findings:
    """What is found while samples are prepared."""

    jpegs: JpegTally = field(default_factory=JpegTally)
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
        self.findings = Findings()

    def prepare(self, source: SourceSample, sample: Sample) -> Sample | None:
        """Return a sample as it is stored; None if it is rejected.

        Args:
            source: The sample before packing, for messages.
            sample: Its fields.

        Raises:
            PackError: If ``strict`` makes a problem an error.
        """
        is_sound = not self._settings.check or self._is_sound(source, sample)
        stored = self._rewrite_jpegs(source, sample) if is_sound else None
        if self._strict:
            found = self.findings
            refuse_problems(self._root, found.mislabelled, found.rejected, found.jpegs.damaged)
        return stored

    def _is_sound(self, source: SourceSample, sample: Sample) -> bool:
        """Return whether a sample's images can be decoded; note it if not, or if one has another format's suffix."""
        if (why := why_rejected(sample.fields, self._settings.max_pixels)) is not None:
            path, reason = source.problem(*why)
            self.findings.rejected.append(RejectedSample(sample.key, str(path).removeprefix(self._root), reason))
            return False
        for name, content in sample.fields.items():
            if holds_images(name) and (found := find_mislabelled(name, content)) is not None:
                what = f"has the suffix .{name.rpartition('.')[2]} but is in {found} format"
                self.findings.mislabelled.append(source.problem(name, what))
        return True

    def _rewrite_jpegs(self, source: SourceSample, sample: Sample) -> Sample:
        changed = dict[str, bytes]()
        for name, before in sample.fields.items():
            if is_rewritable(name, before):
                after, outcome = self._rewrite(before)
                self.findings.jpegs.count(outcome, len(before), len(after))
                self.findings.jpegs.note_damage(source, name, outcome)
                if after is not before:
                    changed[name] = after
        return replace(sample, fields={**sample.fields, **changed}) if changed else sample


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
