"""Run rounds: every feed has one turn per round, and a different feed comes first in each round."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.device.copies import record, time_pinned_copies
from benchmarks.device.feeds import ON_DEVICE, RESIDENT, SHARDIO, TORCH, Batch, Source, check_feed
from benchmarks.device.networks import make_network
from benchmarks.loaders.job import TARGET
from shardio.device import DevicePrefetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run.

    Attributes:
        warmup: The number of steps at the start of each turn that are not timed.
        steps: The number of timed steps.
        profiled: The number of steps after the timed ones that are profiled, but not timed.
        width: The number of channels of the networks' first stage.
        photos: The number of classes, and of photographs per class, to create if none are given.
    """

    device: torch.device
    models: Sequence[str]
    sources: Sequence[str]
    batch_size: int
    warmup: int
    steps: int
    profiled: int
    rounds: int
    workers: int
    width: int
    photos: tuple[int, int]
    images: Path | None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch: a few more than a turn needs, so no epoch ends within a turn."""
        return self.warmup + self.steps + self.profiled + 8


@dataclass(slots=True, kw_only=True)
class Group:
    """The results for one network with one source of samples: one figure per round.

    Attributes:
        network: A description of the network's origin.
        feeds: The figures of each feed, by the feed's name and the figure's name.
        loaders_alone: The images/s of the decoding loaders and of DevicePrefetcher, without training.
        process_us: The CPU time of this process per image in the runs without training, in µs. The time of workers is
            not included.
        pinned_gb_per_s: The bandwidth of plain copies from pinned memory.
        is_registered: Whether candidate (b) copies from the loader's own memory; None on a CPU.
        problems: The reason why a feed was not measured completely, by the feed's name.
    """

    model: str
    source: str
    network: str
    feeds: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    loaders_alone: dict[str, list[float]] = field(default_factory=dict)
    process_us: dict[str, list[float]] = field(default_factory=dict)
    pinned_gb_per_s: list[float] = field(default_factory=list)
    is_registered: bool | None = None
    problems: dict[str, str] = field(default_factory=dict)


class Training:
    """A network and its training step in bfloat16."""

    def __init__(self, name: str, settings: Settings) -> None:
        network, self.origin = make_network(name, settings.width)
        self._settings = settings
        self._network: nn.Module = network.to(settings.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]  # not in its stubs
        self._loss = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=1e-3, momentum=0.9)

    def run(self, batches: Iterator[Batch], num_steps: int) -> None:
        """Enqueue the work of some steps on the device, without waiting for results."""
        num_done = 0
        for images, labels in islice(batches, num_steps):
            with torch.autocast(self._settings.device.type, torch.bfloat16):
                loss = self._loss(self._network(images), labels)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()
            num_done += 1
        if num_done != num_steps:
            raise RuntimeError(f"a feed ended after {num_done} of {num_steps} batches")

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        if self._settings.is_cuda:
            torch.cuda.synchronize(self._settings.device)


def run_group(
    model: str,
    source: Source,
    feeds: dict[str, Iterable[Batch]],
    settings: Settings,
    keep: Callable[[Group], None] = lambda _: None,
) -> Group:
    """Run all rounds of one network with one source of samples, and call ``keep`` with the figures after each round.

    A feed that fails is left out of later rounds. If (a) fails, its error is raised.
    """
    training = Training(model, settings)
    group = Group(model=model, source=source.name, network=training.origin)
    group.feeds = {name: {} for name in feeds}
    loaders = dict[str, Iterable[Batch]]()
    if source.decodes:
        loaders = {SHARDIO: source.for_shardio, ON_DEVICE: feeds[SHARDIO], TORCH: source.for_others}
    group.loaders_alone = {name: [] for name in loaders}
    group.process_us = {name: [] for name in loaders}

    def attempt(name: str, what: str, turn: Callable[[], None]) -> None:
        if name in group.problems:
            return
        tell(f"{model}, {source.name}: {what}: {name}")
        try:
            turn()
        except Exception as error:  # Peers may raise any error, for example if workers die for lack of shared memory.
            if name == RESIDENT:
                raise
            group.problems[name] = f"{type(error).__name__}: {error}"
            tell(group.problems[name])

    def train(name: str) -> None:
        for figure, value in _take_turn(training, feeds[name], settings).items():
            group.feeds[name].setdefault(figure, []).append(value)

    def time_loader(name: str, loader: Iterable[Batch]) -> None:
        images_per_s, process_us = _time_loader(loader, settings)
        group.loaders_alone[name].append(images_per_s)
        group.process_us[name].append(process_us)

    for name, feed in feeds.items():
        attempt(name, "check", partial(check_feed, feed, source, settings.device, settings.batch_size))
    if settings.is_cuda and SHARDIO not in group.problems:
        group.is_registered = all(images.is_pinned() for images, _ in islice(source.for_shardio, 8))
    names = list(feeds)
    for number in range(settings.rounds):
        what, first = f"round {number + 1} of {settings.rounds}", number % len(names)
        for name in names[first:] + names[:first]:
            attempt(name, what, partial(train, name))
        for name, loader in loaders.items():
            attempt(name, f"{what}, loader alone", partial(time_loader, name, loader))
        if settings.is_cuda:
            num_bytes = settings.batch_size * 3 * TARGET * TARGET
            group.pinned_gb_per_s.append(time_pinned_copies(num_bytes, settings.device))
        keep(group)
    return group


def tell(what: str) -> None:
    """Print progress on standard error: a run takes minutes."""
    print(what, file=sys.stderr, flush=True)


def _take_turn(training: Training, feed: Iterable[Batch], settings: Settings) -> dict[str, Any]:
    batches = iter(feed)
    training.run(batches, settings.warmup)
    training.wait()
    stalled_s = feed.stats().data_stall_s if isinstance(feed, DevicePrefetcher) else 0.0
    start = time.perf_counter()
    training.run(batches, settings.steps)
    training.wait()
    elapsed_s = time.perf_counter() - start
    stall_share = None
    if isinstance(feed, DevicePrefetcher):
        stall_share = (feed.stats().data_stall_s - stalled_s) / elapsed_s
    activity = record(lambda: training.run(batches, settings.profiled), settings.device)
    return {
        "images_per_s": settings.steps * settings.batch_size / elapsed_s,
        "stall_share": stall_share,
        "hidden_share": activity.hidden_share,
        "copy_gb_per_s": activity.gb_per_s,
        "num_copies": len(activity.copies),
        "num_kernels": len(activity.kernels),
        "pageable_bytes": activity.pageable_bytes,
    }


def _time_loader(loader: Iterable[Batch], settings: Settings) -> tuple[float, float]:
    """Return a loader's images/s and this process's CPU time per image in µs. Batches are discarded immediately."""
    batches, num_images = iter(loader), settings.steps * settings.batch_size
    for _ in islice(batches, settings.warmup):
        pass
    start, process_start = time.perf_counter(), time.process_time()
    for _ in islice(batches, settings.steps):
        pass
    process_s = time.process_time() - process_start
    return num_images / (time.perf_counter() - start), 1e6 * process_s / num_images
