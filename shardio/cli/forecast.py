"""Forecast which decoder each image of a dataset needs on this machine, from the headers of the images."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardio.cli.console import count, format_counts

if TYPE_CHECKING:
    from shardio.shards import ShardTable

MAX_SAMPLES = 1000
"""The maximum number of samples to examine. In a larger dataset, they are evenly spaced."""

SAMPLES_PER_READ = 16
"""The number of samples to read into memory at a time."""

UNREADABLE, NO_KERNEL = "unreadable", "no kernel"


def _decoder_texts() -> dict[str, str]:
    """Return the text to print after each decoder's number of images, by the name of the decoder."""
    from shardio.images import DECODER_DESCRIPTIONS

    texts: dict[str, str] = {name: f"by {DECODER_DESCRIPTIONS[name]}" for name in ("kernel", "libjpeg", "pillow")}
    texts["kernel"] += " (by libjpeg-turbo if a crop has more than a million pixels, or without a crop)"
    return {**texts, UNREADABLE: "unreadable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderForecast:
    """The decoders that a dataset's images need, as far as their files determine them.

    Attributes:
        num_samples: The number of samples that were examined.
        is_partial: Whether the dataset has more samples.
        no_kernel: Why there is no kernel on this machine; None if there is one.
        clipped: The number of images whose gray values are clipped when they become RGB, by their type.
        reasons: For each decoder, the number of its images by the reason why the kernel does not decode them.
    """

    num_samples: int
    is_partial: bool
    no_kernel: str | None
    clipped: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in _decoder_texts()})

    def dump(self) -> dict[str, Any]:
        """Return the forecast as values for JSON."""
        num_images_by_decoder = {name: reasons.total() for name, reasons in self.reasons.items()}
        reasons = {
            name: dict(reasons.most_common())
            for name, reasons in self.reasons.items()
            if name not in ("kernel", UNREADABLE)
        }
        return {
            "samples": self.num_samples,
            **num_images_by_decoder,
            "reasons": reasons,
            "clipped": dict(self.clipped),
            "no_kernel": self.no_kernel,
        }

    def describe(self) -> str:
        """Return the forecast as text."""
        parts, texts = [], _decoder_texts()
        for decoder_name, reasons in self.reasons.items():
            known = Counter({reason: num_images for reason, num_images in reasons.items() if reason})
            if reasons:
                details = f" ({format_counts(known)})" if known else ""
                parts.append(f"{reasons.total()} {texts[decoder_name]}{details}")
        if self.no_kernel is not None and self.reasons["libjpeg"][NO_KERNEL]:
            parts.append(f"no kernel because {self.no_kernel}")
        examined = f"of {count(self.num_samples, 'evenly spaced sample')}, " if self.is_partial else ""
        return examined + ("; ".join(parts) or "no images")

    def describe_clipped(self) -> str:
        """Return how many images are clipped, and what to do, as text."""
        from shardio.images import CLIPPED_ADVICE

        examined = f"of {count(self.num_samples, 'evenly spaced sample')}, " if self.is_partial else ""
        images = count(self.clipped.total(), "gray image stores", "gray images store")
        return f"{examined}{images} other numbers than uint8 ({format_counts(self.clipped)}): {CLIPPED_ADVICE}"


def forecast_decoders(table: ShardTable) -> DecoderForecast:
    """Forecast the decoders from the headers of a dataset's images, or of evenly spaced ones if there are many.

    Raises:
        ShardioError: If a sample cannot be read.
        OSError: If a file is missing or unreadable.
    """
    from shardio.images import IMAGE_FIELDS, check_kernel, find_clipped_type, why_no_kernel
    from shardio.reading import SampleReader

    total = table.manifest.num_samples
    num_samples = min(total, MAX_SAMPLES)
    indices = np.arange(num_samples) * total // num_samples
    check_kernel()
    forecast = DecoderForecast(num_samples=num_samples, is_partial=num_samples < total, no_kernel=why_no_kernel())
    fields = [name for name in IMAGE_FIELDS if name in table.manifest.fields]
    reader = SampleReader(table)
    try:
        for start in range(0, num_samples if fields else 0, SAMPLES_PER_READ):
            stored = reader.read(indices[start : start + SAMPLES_PER_READ], fields)
            for row in zip(*stored.columns.values(), strict=True):
                images = [content for content in row if content is not None]
                if images:
                    content = next(filter(None, images), b"")
                    decoder_name, reason = _find_decoder(content, has_kernel=forecast.no_kernel is None)
                    if clipped_type := find_clipped_type(content):
                        forecast.clipped[clipped_type] += 1
                    forecast.reasons[decoder_name][reason] += 1
    finally:
        reader.close()
    return forecast


def _find_decoder(content: bytes, *, has_kernel: bool) -> tuple[str, str]:
    """Return the name of an image's decoder, and why the decoder is not the kernel."""
    from shardio.images import find_format, open_image, why_not_by_kernel

    name = find_format(content)
    if name == "TIFF":  # Opening a TIFF decodes it.
        return "pillow", name
    try:
        decoder_name = open_image(content).decoder_name
    except ValueError:
        return UNREADABLE, ""
    if name is not None and name != "JPEG":
        return "pillow", name
    reason = why_not_by_kernel(content) or (None if has_kernel else NO_KERNEL)
    return ("kernel", "") if reason is None else (decoder_name, reason)
