"""Statistics of an epoch: the delivered batches and samples, and the time of each stage."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import dataclass, field

from shardio.images import CLIPPED_ADVICE, DecoderName
from shardio.loader.wire import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Statistics since the latest ``iter`` of a loader. Times are in seconds.

    Attributes:
        num_batches: The number of delivered batches.
        num_samples: The number of samples in them.
        elapsed_s: The time from ``iter(loader)`` to the last batch.
        first_batch_s: The time from ``iter(loader)`` to the first batch; None before it.
        wait_for_data_s: The time that the training process waited for batches.
        num_workers: The number of workers; 0 if the calling process makes the batches.
        read_s: The time for reading bytes, summed over all workers.
        transform_s: The time for reading images' headers and drawing the transforms' parameters or, if there is some,
            in your own code, summed over all workers.
        python_s: The time in your own code: transforms, decoders and ``collate_fn``, summed over all workers.
        in_python: The names of your transforms, decoders and ``collate_fn``.
        recognised: The names of shardio's transforms that replace the first steps of another library's pipeline.
        decode_s: The time for decoding, cropping and resizing, summed over all workers.
        idle_s: The time that workers waited for a chunk, summed over all workers. They wait while the loader is ahead
            of the training.
        num_replaced: The number of unreadable samples that were replaced (``on_error="replace"``), in all batches that
            were begun.
        num_skipped: The number of unreadable samples that were left out (``on_error="skip"``), in all batches that were
            begun.
        num_worker_restarts: The number of worker processes that died and were restarted.
        worker_bytes: The memory of each of shardio's worker processes between two chunks, in bytes, without batches. If
            it keeps growing, your own code leaks memory.
        num_images_by_decoder: The number of images in the delivered batches, by decoder. ``kernel`` is shardio's JPEG
            code. ``libjpeg`` is libjpeg-turbo: it decodes JPEGs that the kernel does not support, crops of more than a
            million pixels, and all JPEGs while the kernel is not available.
            ``pillow`` is Pillow, or OpenCV for plain PNGs: it decodes all other formats, and JPEGs that libjpeg-turbo
            cannot convert to RGB.
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
    recognised: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """The rate of delivery, including the time that the training takes between batches."""
        return self.num_samples / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """Running counts, which become :class:`LoaderStats`."""

    num_workers: int
    in_python: tuple[str, ...] = ()
    recognised: tuple[str, ...] = ()
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
    has_warned: bool = False

    @property
    def num_bad(self) -> int:
        """The number of samples that were replaced or skipped."""
        return self.num_replaced + self.num_skipped

    def count_batch(self, num_samples: int, num_images_by_decoder: Counter[DecoderName], wait_s: float) -> None:
        """Count a delivered batch, its images by decoder, and the time that the training process waited for it."""
        self.last = time.perf_counter()
        if self.first_batch_s is None:
            self.first_batch_s = self.last - self.began
        self.num_batches += 1
        self.num_samples += num_samples
        self.wait_s += wait_s
        self.num_images_by_decoder += num_images_by_decoder
        if num_images_by_decoder["pillow, clipped"] and not self.has_warned:
            self.has_warned = True
            warnings.warn(f"gray images store other numbers than uint8: {CLIPPED_ADVICE}", stacklevel=2)

    def sum_up(self) -> LoaderStats:
        """Return the statistics so far."""
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
            num_replaced=self.num_replaced,
            num_skipped=self.num_skipped,
            num_worker_restarts=self.num_worker_restarts,
            python_s=self.times.python_s,
            in_python=self.in_python,
            recognised=self.recognised,
            num_images_by_decoder={
                "kernel": self.num_images_by_decoder["kernel"],
                "libjpeg": self.num_images_by_decoder["libjpeg"],
                "pillow": self.num_images_by_decoder["pillow"] + self.num_images_by_decoder["pillow, clipped"],
            },
        )
