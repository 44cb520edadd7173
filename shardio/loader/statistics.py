"""A loader's statistics: counts, times, a table with a verdict, a trace of the workers, and OpenMetrics text."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardio.bad_samples import BadSamples
from shardio.datasets import ImageFolder, ShardDataset, ShardMapDataset, unwrap
from shardio.errors import SampleError
from shardio.files import write_whole
from shardio.images import CLIPPED_ADVICE, IMAGE_FORMATS, DecoderName, count_free_memory, open_image
from shardio.loader.wire import StageTimes
from shardio.process import count_processors
from shardio.values import count, format_bytes

STAGES = {
    "read": "reading bytes",
    "transform": "reading image headers, choosing crops",
    "python": "your own code",
    "decode": "decoding, cropping, resizing",
    "idle": "idle until a batch is taken",
}
"""Descriptions of the stages of a worker's time."""

NEGLIGIBLE = 0.05
"""The share of the time that training may wait for data before loading counts as a bottleneck."""

TRACED = 10_000
"""The maximum number of chunks, and of batches, in a trace. A trace holds an epoch's latest chunks and batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFormat:
    """The format in which samples are stored, as far as it is known.

    Attributes:
        in_shards: Whether the samples are in shards rather than in class folders.
        has_images: Whether images are loaded.
        formats: The sorted formats of the images, such as ``"PNG"``.
        jpeg: How the pack stored JPEGs: ``copy``, ``tile`` or ``reencode``; None if unknown.
        decoded_bytes: The approximate size of all JPEGs when they are kept decoded; 0 if unknown.
        free_bytes: The free memory of this machine; 0 if unknown.
        has_gpu: Whether this machine has a CUDA device.
    """

    in_shards: bool
    has_images: bool
    formats: tuple[str, ...] = ()
    jpeg: Any = None
    decoded_bytes: int = 0
    free_bytes: int = 0
    has_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Statistics since the latest call to ``iter(loader)``. Times are in seconds.

    Attributes:
        num_batches: The number of delivered batches.
        num_samples: The number of samples in the delivered batches.
        elapsed_s: The time from ``iter(loader)`` to the last batch.
        first_batch_s: The time from ``iter(loader)`` to the first batch; None before that batch.
        wait_for_data_s: The time that the training process spent waiting for batches.
        num_workers: The number of workers; 0 if the calling process makes the batches.
        read_s: The time for reading bytes, summed over all workers.
        transform_s: The time for reading images' headers and drawing the transforms' parameters or, if you pass code of
            your own, the time in that code instead; summed over all workers.
        python_s: The time in your own code: transforms, decoders and ``collate_fn``, summed over all workers.
        in_python: The names of your transforms, decoders and ``collate_fn``.
        recognized: The names of shardio's transforms that replace the first steps of another library's pipeline.
        decode_s: The time for decoding, cropping and resizing, and for reading the rows of PPMs, summed over all
            workers.
        idle_s: The time workers spent waiting for a chunk, summed over all workers. Workers wait while the loader is
            ahead of training.
        num_replaced: The number of unreadable samples that were replaced (``on_error="replace"``), in all batches that
            were begun.
        num_skipped: The number of unreadable samples that were left out (``on_error="skip"``), in all batches that were
            begun.
        num_worker_restarts: The number of worker processes that died and were restarted.
        worker_bytes: The memory of each of shardio's worker processes between two chunks, in bytes, excluding batches.
            If this memory keeps growing, your own code leaks memory.
        num_images_by_decoder: The number of images in the delivered batches, by decoder. ``kernel`` is shardio's code
            for JPEGs, and for PPMs, which need no decoding. ``device`` counts JPEGs that the device decodes
            (``decode="device"``). ``cache`` counts JPEGs whose pixels came from ``decoded_cache``. ``libjpeg`` is
            libjpeg-turbo: it decodes JPEGs that the kernel does not support, and all JPEGs if there is no kernel for
            the processor. ``raw`` counts PPMs read without a kernel. ``pillow`` is Pillow or, for plain PNGs, OpenCV.
            These libraries decode all other formats, and the JPEGs that libjpeg-turbo cannot convert to RGB.
        stored: The format of the samples; None if shardio's own code does not read them.
    """

    num_batches: int
    num_samples: int
    elapsed_s: float
    first_batch_s: float | None
    wait_for_data_s: float
    num_workers: int
    read_s: float
    transform_s: float
    decode_s: float
    idle_s: float
    num_replaced: int = 0
    num_skipped: int = 0
    num_worker_restarts: int = 0
    worker_bytes: tuple[int, ...] = ()
    num_images_by_decoder: dict[DecoderName, int] = field(default_factory=dict)
    python_s: float = 0.0
    in_python: tuple[str, ...] = ()
    recognized: tuple[str, ...] = ()
    stored: DatasetFormat | None = None

    @property
    def samples_per_s(self) -> float:
        """The rate of delivery, including the time that training takes between batches."""
        return self.num_samples / self.elapsed_s if self.elapsed_s else 0.0

    def __str__(self) -> str:
        """Return a table of the stages, and the bottleneck with remedies."""
        if not self.num_batches:
            return "no batches have been delivered yet"
        waited = self.wait_for_data_s / (self.elapsed_s or 1.0)
        lines = [
            f"{count(self.num_samples, 'sample')} in {count(self.num_batches, 'batch', 'batches')}, "
            f"{self.elapsed_s:.2f} s, {self.samples_per_s:,.0f} samples/s; the training process waited for data "
            f"{waited:.0%} of the time"
        ]
        return "\n".join([*lines, *self.describe_stages()])

    def describe_stages(self) -> list[str]:
        """Return the lines of the table and of the verdict."""
        seconds = self.seconds_by_stage()
        total_s = sum(seconds.values()) or 1.0
        lines = [f"{'stage (all workers)':<40} {'seconds':>9} {'share':>6} {'µs/sample':>12}"]
        for stage, spent_s in seconds.items():
            us_per_sample = 1e6 * spent_s / max(self.num_samples, 1)
            lines.append(f"{STAGES[stage]:<40} {spent_s:>9.3f} {spent_s / total_s:>6.0%} {us_per_sample:>12.1f}")
        if self.recognized:
            lines.append(f"replaced by shardio's own transforms: {', '.join(self.recognized)}")
        if self.in_python:
            lines.append(f"run in Python: {', '.join(self.in_python)}")
        return [*lines, advise(self, count_processors())]

    def seconds_by_stage(self) -> dict[str, float]:
        """Return the seconds that all workers spent on each stage, by its name in :data:`STAGES`."""
        seconds = {"read": self.read_s, "transform": self.transform_s - self.python_s, "decode": self.decode_s}
        if self.in_python:
            seconds["python"] = self.python_s
        return {**seconds, "idle": self.idle_s} if self.num_workers else seconds

    def format_openmetrics(self) -> str:
        """Return the statistics in the text format of OpenMetrics 1.0, for Prometheus and similar tools.

        The names begin with ``shardio_``. Counters restart with each epoch of the loader.
        """
        lines = list[str]()
        for name, unit, value, meaning in (
            ("batches", "", self.num_batches, "Delivered batches."),
            ("samples", "", self.num_samples, "Samples in the delivered batches."),
            ("wait_seconds", "seconds", self.wait_for_data_s, "Time the training process spent waiting for batches."),
            ("elapsed_seconds", "seconds", self.elapsed_s, "Time from the start of the epoch to the last batch."),
            ("replaced_samples", "", self.num_replaced, "Unreadable samples that were replaced."),
            ("skipped_samples", "", self.num_skipped, "Unreadable samples that were left out."),
            ("worker_restarts", "", self.num_worker_restarts, "Worker processes that died and were restarted."),
        ):
            lines += _format_family(name, "counter", unit, meaning, {"": value})
        stages = {f'{{stage="{stage}"}}': spent_s for stage, spent_s in self.seconds_by_stage().items()}
        images = {f'{{decoder="{name}"}}': number for name, number in self.num_images_by_decoder.items()}
        memory = {f'{{worker="{number}"}}': size for number, size in enumerate(self.worker_bytes)}
        lines += _format_family("stage_seconds", "counter", "seconds", "Time workers spent in each stage.", stages)
        lines += _format_family("images", "counter", "", "Images in the delivered batches, by decoder.", images)
        lines += _format_family("worker_memory_bytes", "gauge", "bytes", "Memory of each worker process.", memory)
        lines += _format_family("workers", "gauge", "", "Workers of the loader.", {"": self.num_workers})
        return "\n".join([*lines, "# EOF", ""])


def _format_family(name: str, kind: str, unit: str, meaning: str, values: Mapping[str, float]) -> list[str]:
    suffix = "_total" if kind == "counter" else ""
    lines = [f"# TYPE shardio_{name} {kind}", *([f"# UNIT shardio_{name} {unit}"] if unit else [])]
    lines.append(f"# HELP shardio_{name} {meaning}")
    return [*lines, *(f"shardio_{name}{suffix}{labels} {value}" for labels, value in values.items())]


class _Wait(NamedTuple):
    """The time that the training process spent waiting for a batch, on the clock of ``time.perf_counter``."""

    began: float
    ended: float


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running counts, which become :class:`LoaderStats`, and the latest spans, which become a trace.

    Attributes:
        bad_samples: The policy that counts the bad samples, if workers call the dataset.
    """

    num_workers: int
    bad_samples: BadSamples | None = None
    in_python: tuple[str, ...] = ()
    recognized: tuple[str, ...] = ()
    began: float = field(default_factory=time.perf_counter)
    last: float = 0.0
    first_batch_s: float | None = None
    num_batches: int = 0
    num_samples: int = 0
    wait_s: float = 0.0
    times: StageTimes = field(default_factory=StageTimes)
    num_replaced: int = 0
    num_skipped: int = 0
    num_worker_restarts: int = 0
    num_images_by_decoder: Counter[DecoderName] = field(default_factory=Counter)
    bytes_by_worker: Mapping[int, int] = field(default_factory=dict)
    has_warned: bool = False
    chunks: deque[StageTimes] = field(default_factory=lambda: deque(maxlen=TRACED))
    waits: deque[_Wait] = field(default_factory=lambda: deque(maxlen=TRACED))

    @property
    def num_bad(self) -> int:
        """The number of samples that were replaced or skipped."""
        return self.num_replaced + self.num_skipped

    def count_times(self, times: StageTimes) -> None:
        """Add the times of a chunk's stages."""
        self.times += times
        self.chunks.append(times)

    def count_batch(self, num_samples: int, num_images_by_decoder: Counter[DecoderName], wait_s: float) -> None:
        """Count a delivered batch, its images by decoder, and the time the training process spent waiting for it."""
        self.last = time.perf_counter()
        if self.first_batch_s is None:
            self.first_batch_s = self.last - self.began
        self.num_batches += 1
        self.num_samples += num_samples
        self.wait_s += wait_s
        self.waits.append(_Wait(self.last - wait_s, self.last))
        if not num_images_by_decoder:
            return
        self.num_images_by_decoder += num_images_by_decoder
        if num_images_by_decoder["pillow, clipped"] and not self.has_warned:
            self.has_warned = True
            warnings.warn(f"gray images store values other than uint8: {CLIPPED_ADVICE}", stacklevel=2)

    def sum_up(self) -> LoaderStats:
        """Return the statistics so far."""
        images = self.num_images_by_decoder
        names: tuple[DecoderName, ...] = ("kernel", "device", "cache", "libjpeg", "raw")
        num_replaced, num_skipped = self.num_replaced, self.num_skipped
        if self.bad_samples is not None:
            num_counted, is_replacing = self.bad_samples.num_counted, self.bad_samples.on_error == "replace"
            num_replaced, num_skipped = (num_counted, 0) if is_replacing else (0, num_counted)
        return LoaderStats(
            num_batches=self.num_batches,
            num_samples=self.num_samples,
            elapsed_s=max(self.last - self.began, 0.0),
            first_batch_s=self.first_batch_s,
            wait_for_data_s=self.wait_s,
            num_workers=self.num_workers,
            read_s=self.times.read_s,
            transform_s=self.times.transform_s,
            decode_s=self.times.decode_s,
            idle_s=self.times.idle_s,
            num_replaced=num_replaced,
            num_skipped=num_skipped,
            num_worker_restarts=self.num_worker_restarts,
            python_s=self.times.python_s,
            in_python=self.in_python,
            recognized=self.recognized,
            worker_bytes=tuple(self.bytes_by_worker.values()),
            num_images_by_decoder={
                **{name: images[name] for name in names},
                "pillow": images["pillow"] + images["pillow, clipped"],
            },
        )

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the latest spans as a JSON file in the Trace Event Format, which Perfetto and Chrome can open.

        The format is described at https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

        Raises:
            OSError: If the file cannot be written.
        """
        events = [*self._trace_workers(), *self._trace_waits()]
        events.sort(key=lambda event: event.get("ts", 0.0))
        with write_whole(Path(path)) as file:
            file.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())

    def _trace_workers(self) -> Iterator[dict[str, Any]]:
        for process_id in sorted({os.getpid(), *(times.process_id for times in self.chunks)}):
            name = "training process" if process_id == os.getpid() else "worker process"
            yield {"name": "process_name", "ph": "M", "pid": process_id, "tid": 0, "args": {"name": f"shardio {name}"}}
        for times in self.chunks:
            # A chunk's samples may pass through the stages in several rounds; the trace shows each stage's total.
            planning_s = times.transform_s - times.python_s
            start = times.began - self.began
            for name, seconds in (
                ("read", times.read_s),
                ("plan", planning_s),
                ("your code", times.python_s),
                ("decode", times.decode_s),
            ):
                if seconds > 0:
                    yield _span(name, start, seconds, times.process_id, times.thread_id)
                    start += seconds

    def _trace_waits(self) -> Iterator[dict[str, Any]]:
        here = os.getpid()
        for wait in self.waits:
            yield _span("wait for a batch", wait.began - self.began, wait.ended - wait.began, here, 0)


def _span(name: str, start_s: float, seconds: float, process_id: int, thread_id: int) -> dict[str, Any]:
    times = {"ts": round(1e6 * start_s, 1), "dur": round(1e6 * seconds, 1)}
    return {"name": name, "ph": "X", **times, "pid": process_id, "tid": thread_id}


def describe_format(dataset: Any) -> DatasetFormat | None:
    """Return the format of the samples of a shardio dataset, even within torch's Subsets; None for other datasets."""
    torch = sys.modules.get("torch")
    inner = unwrap(dataset).dataset
    if not isinstance(inner, ImageFolder | ShardDataset | ShardMapDataset):
        return None
    has_images, has_gpu = bool(inner.decoder.image_names), torch is not None and torch.cuda.is_available()
    if isinstance(inner, ImageFolder):
        step = -(-len(inner) // 1000) or 1
        suffixes = {inner.samples[index][0].rpartition(".")[2].lower() for index in range(0, len(inner), step)}
        formats = {IMAGE_FORMATS[suffix] for suffix in suffixes if suffix in IMAGE_FORMATS}
        return DatasetFormat(in_shards=False, has_images=has_images, formats=tuple(sorted(formats)), has_gpu=has_gpu)
    manifest = inner.table.manifest
    formats = {IMAGE_FORMATS[name] for name in manifest.fields if name in IMAGE_FORMATS}
    return DatasetFormat(
        in_shards=True,
        has_images=has_images,
        formats=tuple(sorted(formats)),
        jpeg=manifest.pack.get("jpeg"),
        has_gpu=has_gpu,
    )


def measure_decoded(dataset: Any, stored: DatasetFormat | None) -> DatasetFormat | None:
    """Add the decoded size of local JPEGs, estimated from up to 64 evenly spaced images, and the free memory."""
    if stored is None or stored.formats != ("JPEG",) or not stored.has_images:
        return stored
    inner = unwrap(dataset).dataset
    if inner.remote_samples() is not None:
        return stored
    sizes = list[int]()
    with suppress(SampleError, ValueError):  # Loading reports bad samples.
        sizes += (math.prod(open_image(content).size) for content in read_images(inner, 64))
    # Most JPEGs have a quarter as many samples of each chroma component as of luma.
    decoded_bytes = int(1.5 * count_stored(inner) * sum(sizes) / len(sizes)) if sizes else 0
    return replace(stored, decoded_bytes=decoded_bytes, free_bytes=count_free_memory())


def count_stored(dataset: ImageFolder | ShardDataset | ShardMapDataset) -> int:
    """Return the number of stored samples, no matter which rank reads them."""
    return len(dataset) if isinstance(dataset, ImageFolder) else dataset.table.manifest.num_samples


def read_images(dataset: ImageFolder | ShardDataset | ShardMapDataset, number: int) -> Iterator[bytes]:
    """Yield the contents of up to ``number`` evenly spaced images of a local dataset.

    Raises:
        SampleError: If a sample cannot be read.
    """
    num_samples = count_stored(dataset)
    indices = np.linspace(0, num_samples - 1, min(num_samples, number), dtype=np.int64)
    reader: Any = dataset.reader  # Each kind of reader accepts what its dataset's locate() returns.
    columns = reader.read(dataset.locate(indices), dataset.decoder.stored_fields).columns
    for contents in zip(*(columns[name] for name in IMAGE_FORMATS if name in columns), strict=True):
        yield next(filter(None, contents), b"")


def advise(stats: LoaderStats, num_processors: int) -> str:
    """Return a sentence that names the bottleneck of an epoch and suggests remedies.

    Args:
        stats: The statistics of the epoch.
        num_processors: The number of processors that this process may use.
    """
    stored = stats.stored or DatasetFormat(in_shards=False, has_images=False)
    seconds = stats.seconds_by_stage()
    # A running worker is always in one of the stages, so the rest of the time passed before the workers ran.
    start_s = stats.elapsed_s - sum(seconds.values()) / max(stats.num_workers, 1)
    if stats.num_workers and start_s > stats.elapsed_s / 2:
        return (
            f"too short to judge: about {start_s:.2f} s of {stats.elapsed_s:.2f} s passed before the workers ran. "
            "Load more samples, or a second epoch"
        )
    first_s = stats.first_batch_s or 0.0
    if stats.wait_for_data_s - first_s < NEGLIGIBLE * (stats.elapsed_s - first_s):
        return "loading keeps up: batches are ready when the training process takes them"
    longest = max(seconds, key=lambda stage: seconds[stage])
    more_workers = (
        f"more workers (up to {num_processors}, the number of processors)" if stats.num_workers < num_processors else ""
    )
    match longest:
        case "read":
            bottleneck = "storage is the bottleneck"
            faster = "a local disk, or larger shards" if stored.in_shards else "a local disk, or shards (shardio pack)"
            remedies = ["more workers (more reads at a time)", faster]
        case "transform":
            bottleneck = "per-image overhead is the bottleneck because the images are small"
            remedies = [more_workers]
        case "python":
            bottleneck = f"your own code is the bottleneck ({', '.join(stats.in_python)})"
            remedies = [more_workers, "less work in it"]
        case "decode":
            bottleneck = "decoding is the bottleneck"
            remedies = [more_workers, _decode_on_gpu(stored), _less_to_decode(stored), _keep_decoded(stored)]
        case _:
            bottleneck = "the workers idle while training waits"
            remedies = ["larger batches", "a larger prefetch_factor"]
    suggestion = ", or ".join(filter(None, remedies))
    remedy = f"try {suggestion}" if suggestion else "there are already at least as many workers as processors"
    workers = count(stats.num_workers, "worker") if stats.num_workers else "no workers"
    return f"{workers} on {count(num_processors, 'processor')}: {bottleneck}; {remedy}"


def _decode_on_gpu(stored: DatasetFormat) -> str:
    if not stored.has_gpu or not stored.has_images or not {*stored.formats} <= {"JPEG"}:
        return ""
    packing = "" if stored.jpeg == "tile" else "packing with --jpeg tile, and "
    return f"{packing}decoding on the GPU (DevicePrefetcher(decode='device'))"


def _keep_decoded(stored: DatasetFormat) -> str:
    if not 0 < stored.decoded_bytes < stored.free_bytes:
        return ""
    needed, free = (format_bytes(size) for size in (stored.decoded_bytes, stored.free_bytes))
    gibibytes = 1 + stored.decoded_bytes // 2**30
    return f"decoded images in memory (decoded_cache='{gibibytes}GiB': they need about {needed}, and {free} is free)"


def _less_to_decode(stored: DatasetFormat) -> str:
    if not stored.has_images:
        return ""
    if others := [each for each in stored.formats if each != "JPEG"]:
        return (
            f"JPEGs instead of {' and '.join(others)} (pack with --convert-to jpeg --jpeg tile, which changes pixels "
            "slightly)"
        )
    if stored.jpeg == "reencode":
        return "smaller images (pack with a smaller --max-side)"
    if stored.jpeg == "tile":
        return "smaller images (pack with --jpeg reencode --max-side 400)"
    return "images that decode faster (pack with --jpeg tile, or with --jpeg reencode --max-side 400)"
