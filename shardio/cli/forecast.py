"""Which way a dataset's images will go on this machine, estimated from the headers of their files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardio.cli.console import count

if TYPE_CHECKING:
    from shardio.shards import ShardTable

MAX_LOOKED_AT = 1000
"""Samples; of more, so many evenly spaced ones are taken."""

SAMPLES_AT_ONCE = 16
"""Whole files are in memory meanwhile."""

NOBODY, NO_KERNEL = "nobody", "no kernel"


def _decoders() -> dict[str, str]:
    """Return each decoder's name for people."""
    from shardio.images import DECODER_DESCRIPTIONS

    names = dict[str, str](DECODER_DESCRIPTIONS.items())
    names["kernel"] += ", unless a crop is at least halved"
    return {**names, NOBODY: "nobody: they cannot be read"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Who will decode a dataset's images, as far as their files decide that.

    Attributes:
        num_samples: Samples that were looked at.
        is_sample: Whether there are more.
        no_kernel: Why there is no kernel, if there is none.
        reasons: By who decodes, for each reason why it is not the kernel, how many images there are.
    """

    num_samples: int
    is_sample: bool
    no_kernel: str | None
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in _decoders()})

    def dump(self) -> dict[str, Any]:
        """Return it for JSON."""
        num_images_by_decoder = {decoder_name: reasons.total() for decoder_name, reasons in self.reasons.items()}
        reasons = {
            decoder_name: dict(reasons.most_common())
            for decoder_name, reasons in self.reasons.items()
            if decoder_name not in ("kernel", NOBODY)
        }
        return {"samples": self.num_samples, **num_images_by_decoder, "reasons": reasons, "no_kernel": self.no_kernel}

    def describe(self) -> str:
        """Return it for people."""
        parts, decoders = [], _decoders()
        for decoder_name, reasons in self.reasons.items():
            why = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common() if reason)
            if reasons:
                parts.append(f"{reasons.total()} by {decoders[decoder_name]}{f' ({why})' if why else ''}")
        if self.no_kernel is not None and self.reasons["libjpeg"][NO_KERNEL]:
            parts.append(f"{NO_KERNEL}: {self.no_kernel}")
        where = f"of {count(self.num_samples, 'evenly spaced sample')}, " if self.is_sample else ""
        return where + ("; ".join(parts) or "no images")


def foresee(table: ShardTable) -> Forecast:
    """Look at the headers of a dataset's images, or of a sample of them.

    Raises:
        ShardioError: If they cannot be read.
        OSError: If there are no such files.
    """
    from shardio.images import IMAGE_FIELDS, why_no_kernel
    from shardio.reading import SampleReader

    total = table.manifest.num_samples
    numbers = np.arange(min(total, MAX_LOOKED_AT))
    numbers = numbers * total // len(numbers)
    forecast = Forecast(num_samples=len(numbers), is_sample=len(numbers) < total, no_kernel=why_no_kernel())
    fields = [name for name in IMAGE_FIELDS if name in table.manifest.fields]
    reader = SampleReader(table)
    try:
        for start in range(0, len(numbers) if fields else 0, SAMPLES_AT_ONCE):
            stored = reader.read(numbers[start : start + SAMPLES_AT_ONCE], fields)
            for contents in zip(*stored.columns.values(), strict=True):
                there = [content for content in contents if content is not None]
                if there:
                    decoder_name, reason = _find_way(
                        next(filter(None, there), b""), has_kernel=forecast.no_kernel is None
                    )
                    forecast.reasons[decoder_name][reason] += 1
    finally:
        reader.close()
    return forecast


def _find_way(content: bytes, *, has_kernel: bool) -> tuple[str, str]:
    """Return who will decode an image, and why that is not the kernel."""
    from shardio.images import find_format, open_image, why_not_by_kernel

    name = find_format(content)
    if name == "TIFF":  # Opening one decodes it.
        return "pillow", name
    try:
        decoder_name = open_image(content).decoder_name
    except ValueError:
        return NOBODY, ""
    if name is not None and name != "JPEG":
        return decoder_name, name
    why = why_not_by_kernel(content) or (None if has_kernel else NO_KERNEL)
    return ("kernel", "") if why is None else (decoder_name, why)
