"""Where an epoch's time went."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

from shardio.images import DecoderName
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
        num_images_by_decoder: Images in the delivered batches, by what decoded them: ``kernel`` is shardio's own JPEG
            code; ``libjpeg`` is libjpeg-turbo, which takes the JPEGs that the kernel does not support, large ones that
            it can decode at a smaller size, and all of them while there is no kernel; ``pillow`` takes all other
            formats, and JPEGs that libjpeg-turbo cannot convert to RGB.
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
    num_images_by_decoder: dict[DecoderName, int] = field(default_factory=dict)

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
    num_images_by_decoder: Counter[DecoderName] = field(default_factory=Counter)

    def count_batch(self, num_samples: int, num_images_by_decoder: Counter[DecoderName], wait_s: float) -> None:
        """Count a batch that was delivered after waiting for it, and how many of its images who decoded."""
        self.last = time.perf_counter()
        if self.first_batch_s is None:
            self.first_batch_s = self.last - self.began
        self.num_batches += 1
        self.num_samples += num_samples
        self.wait_s += wait_s
        self.num_images_by_decoder += num_images_by_decoder

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
            num_images_by_decoder={name: self.num_images_by_decoder[name] for name in get_args(DecoderName)},
        )
