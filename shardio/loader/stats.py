"""Where an epoch's time went."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from shardio.images import Way
from shardio.loader.messages import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """What happened since the loader was last iterated. Times are in seconds.

    Attributes:
        num_batches: Batches that were delivered.
        num_samples: The samples in them.
        elapsed_s: From ``iter(loader)`` to the last batch.
        first_batch_s: From ``iter(loader)`` to the first batch; None before.
        wait_for_data_s: How long the training process waited for batches.
        num_workers: How many workers there are; 0 if the training process makes its batches itself.
        read_s: Workers' time for reading bytes, all workers together.
        transform_s: Likewise, for reading images' heads and drawing the parameters of transforms.
        decode_s: Likewise, for decoding, cropping, resizing.
        wait_for_slot_s: Likewise, for waiting until there was something to do, as there is when a batch is taken:
            the loader is ahead of the training.
        num_replaced: How often another sample was put in the place of one that could not be read, with
            ``on_error="replace"``, in the batches that were begun.
        num_skipped: Likewise, how many samples were left out, with ``on_error="skip"``.
        num_host_deaths: How many background processes died, and were replaced.
        num_images_by_kernel: Images in the batches that were delivered, decoded by shardio's own kernel.
        num_images_by_libjpeg: Likewise, by libjpeg-turbo: JPEGs that the kernel is not made for, large ones of which it
            can decode a smaller picture, and all of them where there is no kernel (yet).
        num_images_by_pillow: Likewise, by Pillow: all other formats, and JPEGs that libjpeg-turbo does not make RGB of.
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
    wait_for_slot_s: float
    num_replaced: int = 0
    num_skipped: int = 0
    num_host_deaths: int = 0
    num_images_by_kernel: int = 0
    num_images_by_libjpeg: int = 0
    num_images_by_pillow: int = 0

    @property
    def samples_per_s(self) -> float:
        """The rate of delivery, with all of the waiting and the training in between."""
        return self.num_samples / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts what becomes :class:`LoaderStats`."""

    num_workers: int
    began: float = field(default_factory=time.perf_counter)
    last: float = 0.0
    first_batch_s: float | None = None
    num_batches: int = 0
    num_samples: int = 0
    wait_s: float = 0.0
    times: StageTimes = field(default_factory=StageTimes)
    num_replaced: int = 0
    num_skipped: int = 0
    num_host_deaths: int = 0
    ways: Counter[Way] = field(default_factory=Counter)

    def count_batch(self, num_samples: int, ways: Counter[Way], wait_s: float) -> None:
        """Count a batch that was delivered after waiting for it, and how many of its images who decoded."""
        self.last = time.perf_counter()
        if self.first_batch_s is None:
            self.first_batch_s = self.last - self.began
        self.num_batches += 1
        self.num_samples += num_samples
        self.wait_s += wait_s
        self.ways += ways

    def sum_up(self) -> LoaderStats:
        """Return the figures so far."""
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
            wait_for_slot_s=self.times.wait_s,
            num_replaced=self.num_replaced,
            num_skipped=self.num_skipped,
            num_host_deaths=self.num_host_deaths,
            num_images_by_kernel=self.ways["kernel"],
            num_images_by_libjpeg=self.ways["libjpeg"],
            num_images_by_pillow=self.ways["pillow"],
        )
