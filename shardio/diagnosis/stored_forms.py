"""Find a better form for a loader's images: other files, stored pixels, or decoded images that stay in memory.

Each form is measured on some of the images.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import truediv
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Any

from shardio.datasets import ImageFolder, ShardDataset, ShardMapDataset
from shardio.diagnosis.rates import WORTHWHILE, Advice, LoaderEvidence, find_image_size, share_of_stage
from shardio.images import find_field, find_format, open_image
from shardio.loader import DataLoader
from shardio.loader.statistics import count_stored, measure_decoded, read_images
from shardio.packing import pack
from shardio.transforms import RandomResizedCrop
from shardio.values import format_bytes

EXAMINED = 32
"""The number of images on which forms are measured."""

EPOCHS = 7
"""The number of times that each image is loaded and measured in each form."""

LARGE = 3
"""Images are large if their shorter side is more than this many times that of their crops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form in which images could be kept.

    Attributes:
        cause: Why the present form is slow.
        settings: The options of :func:`shardio.pack`.
        in_memory: Whether images stay decoded in memory.
    """

    cause: str = ""
    settings: Mapping[str, Any]
    in_memory: bool = False

    @property
    def name(self) -> str:
        """A name for a directory of images in this form."""
        return "tiled" if self.settings == {"jpeg": "tile"} else str(self.settings.get("convert_to", "small"))

    @property
    def options(self) -> str:
        """The options of ``shardio pack``."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.settings.items())


PRESENT = Form(settings={})


@dataclass(frozen=True, slots=True)
class FormCost:
    """The cost of an image in a form: the processor time of a random crop in seconds, and the stored bytes."""

    cpu_s: float
    num_bytes: float


def advise_forms(evidence: LoaderEvidence) -> list[Advice]:
    """Return advice about the form in which images are kept."""
    size = find_image_size(evidence.run.batches[0])
    contents = list(islice(_read_images(evidence), EXAMINED))
    if size is None or not contents:
        return []
    forms = [form for form in (_find_files(evidence, contents, size), *_find_decoded(evidence, size)) if form]
    present, *costs = measure_forms(contents, size, [PRESENT, *forms]) if forms else [FormCost(0.0, 0.0)]
    found = list[Advice]()
    for form, cost in zip(forms, costs, strict=True):
        speedup = _estimate(evidence, cost, present)
        if speedup >= WORTHWHILE and (remedy := _describe_remedy(evidence, form, cost, speedup)):
            found.append(Advice(cause=form.cause, remedy=remedy, speedup=speedup))
    return found


def _find_files(evidence: LoaderEvidence, contents: Sequence[bytes], size: tuple[int, int]) -> Form | None:
    stored = None if evidence.stats is None else evidence.stats.stored
    ratio = fmean(min(open_image(content).size) for content in contents) / min(size)
    formats = {find_format(content) or "?" for content in contents}
    others = sorted(formats - {"JPEG"})
    if formats == {"PPM"}:
        return None
    if ratio > LARGE:
        settings = {"convert_to": "jpeg"} if others else {"jpeg": "reencode"}
        cause = f"images are {ratio:.0f} times as large as their crops"
        return Form(cause=cause, settings={"min_side": 2 * max(size), **settings})
    if others:
        cause = f"{' and '.join(others)} images decode slowly"
        return Form(cause=cause, settings={"convert_to": "jpeg", "jpeg": "tile"})
    if stored is not None and stored.jpeg in ("tile", "reencode"):
        return None
    return Form(cause="whole JPEGs are decoded for each crop", settings={"jpeg": "tile"})


def _find_decoded(evidence: LoaderEvidence, size: tuple[int, int]) -> Iterator[Form]:
    """Yield the forms that need no decoding, for loaders whose images shardio decodes."""
    stats = evidence.stats
    if stats is None or stats.stored is None or stats.num_images_by_decoder.get("cache"):
        return
    share = share_of_stage(stats, "decode")
    if stats.stored.formats == ("PPM",) or share < 1 - 1 / WORTHWHILE:
        return
    cause = f"decoding takes {share:.0%} of the workers' busy time"
    yield Form(cause=f"{cause}: store pixels instead", settings={"convert_to": "ppm", "min_side": max(size) * 8 // 7})
    if stats.stored.formats == ("JPEG",) and stats.num_images_by_decoder.get("kernel"):
        yield Form(cause=f"{cause}, again in each epoch", settings={}, in_memory=True)


def _describe_remedy(evidence: LoaderEvidence, form: Form, cost: FormCost, speedup: float) -> str:
    """Return instructions for changing to a form; "" if this machine lacks the memory or the disk space."""
    if form.in_memory:
        assert evidence.stats is not None, "shardio's workers decode"
        stored = measure_decoded(evidence.dataset, evidence.stats.stored)
        if stored is None or not 0 < stored.decoded_bytes < stored.free_bytes:
            return ""
        return (
            f"decoded_cache='{1 + stored.decoded_bytes // 2**30}GiB' in the dataset: images stay decoded after the "
            f"first epoch, in about {format_bytes(stored.decoded_bytes)} of {format_bytes(stored.free_bytes)} free "
            "memory"
        )
    changes = "" if form.settings == {"jpeg": "tile"} else " (changes pixels)"
    packed = f"{evidence.source.rstrip('/')}-{form.name}"
    remedy = f"shardio pack {evidence.source} {packed} {form.options}{changes}\n"
    if form.settings.get("convert_to") == "ppm":
        num_bytes = cost.num_bytes * count_stored(evidence.dataset)
        with suppress(OSError):
            if num_bytes > shutil.disk_usage(evidence.source).free:
                return ""
        rate = evidence.run.samples_per_s * speedup * cost.num_bytes
        remedy += (
            f"this takes {format_bytes(num_bytes)} of space; at the expected rate, {format_bytes(rate)}/s is read, "
            "from memory or a fast disk\n"
        )
    return f"{remedy}dataset = shardio.ShardDataset({packed!r}, shuffle=True, transform=…)"


def _estimate(evidence: LoaderEvidence, cost: FormCost, present: FormCost) -> float:
    if evidence.stats is not None:
        share = share_of_stage(evidence.stats, "decode")
        return 1 / (1 - share + share * cost.cpu_s / present.cpu_s)
    if (profile := evidence.profile) is None:
        return 0.0
    kept = profile.share("your code") + sum(
        share
        for stage, share in profile.stages.items()
        if stage.kind == "transform" and "Crop" not in stage.name and "Resize" not in stage.name
    )
    return profile.cpu_s / (cost.cpu_s + kept * profile.cpu_s)


def _read_images(evidence: LoaderEvidence) -> Iterator[bytes]:
    dataset = evidence.dataset
    if isinstance(dataset, ImageFolder | ShardDataset | ShardMapDataset) and dataset.remote_samples() is None:
        yield from read_images(dataset, EXAMINED)
        return
    paths = [image.path for image in evidence.profile.images if image.path] if evidence.profile is not None else []
    known = getattr(dataset, "samples", None)  # As in torchvision's ImageFolder: (path, label), …
    if not paths and isinstance(known, list):
        paths = [str(sample[0]) for sample in known[:: max(len(known) // EXAMINED, 1)] if isinstance(sample, tuple)]
    for path in paths:
        if Path(path).is_file():
            yield Path(path).read_bytes()


def measure_forms(contents: Sequence[bytes], size: tuple[int, int], forms: Sequence[Form]) -> list[FormCost]:
    """Return what an image costs in each form. The forms are measured in turn, epoch by epoch.

    Args:
        contents: The contents of image files.
        size: The size (height, width) of the crops.
        forms: The forms; all others are compared with the first one.
    """
    with tempfile.TemporaryDirectory() as created:
        folders = [Path(created, str(number)) for number in range(len(forms))]
        loaders = list[DataLoader]()
        for folder, form in zip(folders, forms, strict=True):
            samples = ({"__key__": f"{place:03d}", find_field(each): each} for place, each in enumerate(contents))
            pack(samples, folder, **form.settings)
            options: Any = {"verify": "off", "decoded_cache": 2**30 if form.in_memory else None}
            dataset = ShardDataset(folder, fields="image", transform=RandomResizedCrop(size), **options)
            loaders.append(DataLoader(dataset, batch_size=len(contents)))
        seconds: list[list[float]] = [[] for _ in forms]
        for _ in range(EPOCHS + 1):
            for loader, own in zip(loaders, seconds, strict=True):
                began = process_time()
                for _ in loader:
                    pass
                own.append(process_time() - began)
        sizes = [sum(tar.stat().st_size for tar in folder.glob("*.tar")) for folder in folders]
    # The first epoch fills the memory. The crops of an epoch are the same in all forms, but differ between epochs.
    first = seconds[0][1:]
    ratios = [median(map(truediv, own[1:], first)) for own in seconds]
    return [
        FormCost(median(first) * ratio / len(contents), num_bytes / len(contents))
        for ratio, num_bytes in zip(ratios, sizes, strict=True)
    ]
