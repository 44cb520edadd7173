"""Measure the speed of a loader, of a training step, of both together, and of loaders changed to test advice."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import psutil
import torch
import torch.utils.data
from torch.utils.data._utils.collate import default_collate

from shardio.datasets import ShardDataset, ShardMapDataset, unwrap
from shardio.diagnosis.profiling import SampleProfile
from shardio.loader import DataLoader
from shardio.loader.executor import TorchDataLoader
from shardio.loader.statistics import LoaderStats

Step = Callable[[Any], Any]

CACHED = 8
"""The number of batches on which the training step is measured without the loader."""

LABELED = 2000
"""The number of batches whose labels are kept."""

MAX_START = 3
"""The maximum duration of a measurement, including the starts of its epochs, as a multiple of the measured time."""

CPU_EVERY_S = 0.25
"""The interval at which the processor time of all processes is read, in seconds."""


class WorkerUse(NamedTuple):
    """The number of threads of a loader's process, and the memory in bytes that it shares with no other process."""

    num_threads: int
    private_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRun:
    """The speed of a loader. Rates exclude the time until the first batch of each epoch.

    Attributes:
        samples_per_s: The rate.
        batch_size: The median number of samples in a batch.
        start_s: The median time to the first batch of an epoch, in seconds.
        epoch_s: The duration of an epoch, estimated from the loader's length; None if the length is unknown.
        cpu_s: The processor time of all processes for one sample, in seconds; 0 if unknown.
        own_cpu_s: The processor time of the training process for one sample, in seconds; 0 if unknown.
        busy: The share of the processors' time that all processes used; 0 if unknown.
        waiting: The share of the time in which the training process waited for batches.
        workers: The processes that the loader started.
        batches: The first batches.
        labels: The labels of the first batches, if batches have labels.
    """

    samples_per_s: float
    batch_size: float
    start_s: float
    epoch_s: float | None
    cpu_s: float
    own_cpu_s: float
    busy: float
    waiting: float
    workers: tuple[WorkerUse, ...] = ()
    batches: Sequence[Any] = field(default=(), repr=False)
    labels: Sequence[list[int]] = field(default=(), repr=False)


def measure_other_programs(seconds: float, num_processors: int) -> float:
    """Return the share of the processors' time that other programs use, while this program waits.

    Args:
        seconds: The time to measure.
        num_processors: The number of processors that this process may use at a time.
    """
    process = psutil.Process()
    usable = set(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else None  # not on macOS
    percents = psutil.cpu_percent(seconds, percpu=True)
    busy: list[float] = [each / 100 for number, each in enumerate(percents) if usable is None or number in usable]
    # In a container with a quota, other programs may be busy on processors that the quota leaves to them.
    return max(num_processors - len(busy) + sum(busy), 0.0) / num_processors


def run_loader(loader: Iterable[Any], seconds: float, num_processors: int, step: Step | None = None) -> LoaderRun:
    """Iterate over a loader for a given time, for several epochs if they are short.

    Args:
        loader: Any iterable of batches.
        seconds: The time to measure, excluding the time until the first batch of each epoch.
        num_processors: The number of processors that this process may use.
        step: The training step to perform on each batch, if any.

    Raises:
        ValueError: If the loader yields no batch.
    """
    length, parts, first = _find_length(loader), list[_Part](), _FirstBatches()
    # Batches that were made before the first one arrived would make the loader look faster than it is.
    num_ahead = 1 + (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", None) or 2)
    num_skipped = min(num_ahead, (length or 1000) // 4)
    ends_at, left_s = perf_counter() + MAX_START * seconds, seconds
    while left_s > 0 and (not parts or perf_counter() < ends_at):
        parts.append(_run_epoch(loader, left_s, num_skipped, length, step, first))
        left_s -= parts[-1].elapsed_s
    num_samples, elapsed_s = sum(part.num_samples for part in parts), sum(part.elapsed_s for part in parts)
    with_cpu = [part for part in parts if part.cpu_wall_s]
    num_cpu = max(sum(part.num_cpu_samples for part in with_cpu), 1)
    cpu_s, cpu_wall_s = sum(part.cpu_s for part in with_cpu), sum(part.cpu_wall_s for part in with_cpu)
    batch_size = statistics.median(map(count_samples, first.batches))
    start_s, rate = statistics.median(part.start_s for part in parts), num_samples / elapsed_s
    return LoaderRun(
        samples_per_s=rate,
        batch_size=batch_size,
        start_s=start_s,
        epoch_s=None if length is None else start_s * (not parts[0].is_whole) + length * batch_size / rate,
        cpu_s=cpu_s / num_cpu,
        own_cpu_s=sum(part.own_cpu_s for part in with_cpu) / num_cpu,
        busy=min(cpu_s / (cpu_wall_s * num_processors), 1.0) if cpu_wall_s else 0.0,
        waiting=sum(part.wait_s for part in parts) / elapsed_s,
        workers=next((part.workers for part in parts if part.workers), ()),
        batches=first.batches,
        labels=first.labels,
    )


@dataclass(slots=True)
class _FirstBatches:
    batches: list[Any] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)

    def add(self, batch: Any) -> None:
        if len(self.batches) < CACHED:
            self.batches.append(batch)
        if len(self.labels) < LABELED and (labels := find_labels(batch)) is not None:
            self.labels.append(labels)


@dataclass(slots=True)
class _Part:
    """The measured part of an epoch, or the whole epoch if it is short.

    Processor times cover fewer samples, because the processor clock is read less often.
    """

    is_whole: bool = False
    start_s: float = 0.0
    num_samples: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    num_cpu_samples: int = 0
    cpu_wall_s: float = 0.0
    cpu_s: float = 0.0
    own_cpu_s: float = 0.0
    workers: tuple[WorkerUse, ...] = ()


def _run_epoch(
    loader: Iterable[Any], seconds: float, num_skipped: int, length: int | None, step: Step | None, first: _FirstBatches
) -> _Part:
    part, processes = _Part(), list[psutil.Process]()
    num_samples, wait_s, number = 0, 0.0, 0
    skipped_samples, skipped_s = 0, 0.0
    cpu: _Cpu | None = None  # None before the measurement begins.
    began = before = perf_counter()
    iterator = iter(loader)
    while part.elapsed_s < seconds:
        asked = perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            break
        now = perf_counter()
        part.start_s = part.start_s if number else now - began
        num_samples, wait_s, number = num_samples + count_samples(batch), wait_s + now - asked, number + 1
        first.add(batch)
        if step is not None:
            step(batch)
            synchronize()
        if cpu is not None:
            part.num_samples, part.wait_s = num_samples - skipped_samples, wait_s - skipped_s
            part.elapsed_s = perf_counter() - before
            is_last = number == length or part.elapsed_s >= seconds  # Workers may exit after the last batch.
            if is_last or perf_counter() - cpu.read_at > CPU_EVERY_S:
                cpu = _add_cpu(part, cpu, part.num_samples, processes)
        elif number > num_skipped:
            skipped_samples, skipped_s = num_samples, wait_s
            processes = psutil.Process().children(recursive=True)
            part.workers = _describe_workers(processes)
            cpu, before = _read_cpu(0, processes), perf_counter()
    if not number:
        raise ValueError("the loader yields no batches")
    if not part.num_samples:  # The epoch is too short for its beginning to be left out.
        part.is_whole = True
        part.num_samples, part.wait_s, part.elapsed_s = num_samples, wait_s, perf_counter() - began
    return part


def time_step(step: Step, batches: Sequence[Any], seconds: float) -> float:
    """Return the rate, in samples per second, of a training step on batches in memory."""
    for batch in batches[:2]:  # The first calls allocate memory, and may compile.
        step(batch)
    synchronize()
    began, num_samples, number = perf_counter(), 0, 0
    while (elapsed_s := perf_counter() - began) < seconds or number < len(batches[:3]):
        batch = batches[number % len(batches)]
        step(batch)
        synchronize()
        num_samples += count_samples(batch)
        number += 1
    return num_samples / elapsed_s


def synchronize() -> None:
    """Wait until the current CUDA device has finished its work, if CUDA is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first value."""
    while isinstance(batch, Mapping) or (isinstance(batch, list | tuple) and batch):
        first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
        if not hasattr(first, "__len__") or isinstance(first, str | bytes):
            break
        batch = first
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    return len(batch) if hasattr(batch, "__len__") else 1


def holds(batch: Any, kind: type) -> bool:
    """Return whether a batch, or one of its values, is an instance of a type."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    return any(isinstance(value, kind) for value in values)


def find_labels(batch: Any) -> list[int] | None:
    """Return the labels of a batch, its first one-dimensional tensor or array of integers; None if it has none."""
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    for value in values if isinstance(values, list | tuple) else ():
        if len(getattr(value, "shape", ())) == 1 and len(value) > 1 and "int" in str(value.dtype):
            labels: list[int] = value.tolist()
            return labels
    return None


def find_image_size(batch: Any) -> tuple[int, int] | None:
    """Return the (height, width) of the images in a batch, its first four-dimensional value; None if it has none."""
    if isinstance(batch, Mapping | list | tuple):
        values = batch.values() if isinstance(batch, Mapping) else batch
        return next((size for value in values if (size := find_image_size(value)) is not None), None)
    shape: tuple[int, ...] = tuple(getattr(batch, "shape", ()))
    if len(shape) != 4:
        return None
    is_channels_last = shape[3] in (1, 3, 4)
    height, width = shape[1:3] if is_channels_last else shape[2:4]
    return int(height), int(width)


def _find_length(loader: Any) -> int | None:
    with suppress(TypeError, NotImplementedError):  # torch's loaders over iterable datasets may lack a length.
        return len(loader)
    return None


class _Cpu(NamedTuple):
    """The processor time, in seconds, and the number of samples read, up to some moment."""

    read_at: float
    own_s: float
    by_process: Mapping[int, float]
    num_samples: int


def _read_cpu(num_samples: int, processes: Sequence[psutil.Process]) -> _Cpu:
    by_process = dict[int, float]()
    for process in processes:
        with suppress(psutil.Error):  # The process has ended.
            times = process.cpu_times()
            by_process[process.pid] = times.user + times.system
    return _Cpu(perf_counter(), process_time(), by_process, num_samples)


def _add_cpu(part: _Part, before: _Cpu, num_samples: int, processes: Sequence[psutil.Process]) -> _Cpu:
    after = _read_cpu(num_samples, processes)
    own_s = after.own_s - before.own_s
    part.num_cpu_samples += after.num_samples - before.num_samples
    part.cpu_wall_s += after.read_at - before.read_at
    part.own_cpu_s += own_s
    part.cpu_s += own_s + sum(spent - before.by_process[each] for each, spent in after.by_process.items())
    return after


def _describe_workers(processes: Sequence[psutil.Process]) -> tuple[WorkerUse, ...]:
    found = list[WorkerUse]()
    for process in processes:
        with suppress(psutil.Error):
            found.append(WorkerUse(process.num_threads(), process.memory_full_info().uss))
    return tuple(found)


WORTHWHILE = 1.1
"""The smallest speed-up for which advice is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change to a loader.

    Attributes:
        cause: The cause, in a few words, such as ``too few workers``.
        remedy: What to change.
        speedup: The expected rate of the loader divided by its present rate; None if the change is not about speed.
        is_measured: Whether the speed-up was measured with this change, rather than estimated.
    """

    cause: str
    remedy: str
    speedup: float | None = None
    is_measured: bool = False

    def __str__(self) -> str:
        speedup = ""
        if self.speedup is not None:
            speedup = f"{self.speedup:.1f} × ({'measured' if self.is_measured else 'estimated'}): "
        return f"{speedup}{self.cause}\n{self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderEvidence:
    """The measurements of a loader.

    Attributes:
        loader: The loader.
        run: Its speed.
        profile: Where the time of a sample goes; None if the loader's dataset is unknown.
        stats: The statistics of shardio's own workers; None if others made the batches.
        num_processors: The number of processors that this process may use.
        trial_s: The time to measure each change, in seconds.
        shm_free: The free shared memory of the machine in bytes; None if unknown.
    """

    loader: Any
    run: LoaderRun
    profile: SampleProfile | None
    stats: LoaderStats | None
    num_processors: int
    trial_s: float
    shm_free: int | None

    @property
    def is_torchs(self) -> bool:
        """Whether the loader is a DataLoader of torch or shardio, which can be rebuilt with different arguments."""
        return type(self.loader) in (TorchDataLoader, DataLoader)

    @property
    def dataset(self) -> Any:
        """The innermost dataset: Subsets and shardio's wrappers are removed."""
        return unwrap(getattr(self.loader, "dataset", None)).dataset

    @property
    def source(self) -> str:
        """The directory of the dataset, for commands; a placeholder if it is unknown."""
        if isinstance(self.dataset, ShardDataset | ShardMapDataset):
            folders = {str(tar).rpartition("/")[0] for tar in self.dataset.table.tars}
            return folders.pop() if len(folders) == 1 else "SOURCE"
        root = getattr(self.dataset, "root", None)
        return str(root) if isinstance(root, str | Path) else "SOURCE"

    def try_change(self, kind: type[Any] | None = None, **changes: Any) -> float:
        """Return how much faster the loader would be with different arguments."""
        return self.try_loader(rebuild(self.loader, kind, **changes))

    def try_loader(self, loader: Any) -> float:
        """Return how much faster a different loader would be."""
        return self.compare(self.measure(loader))

    def compare(self, run: LoaderRun) -> float:
        """Return the rate of a run, divided by the mean of the loader's rates before and after it."""
        return 2 * run.samples_per_s / (self.run.samples_per_s + self.measure(self.loader).samples_per_s)

    def measure(self, loader: Any) -> LoaderRun:
        """Return the speed of a loader."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The user has already seen the loader's warnings.
            return run_loader(loader, self.trial_s, self.num_processors)


def rebuild(loader: Any, kind: type[Any] | None = None, **changes: Any) -> Any:
    """Return a DataLoader like the given one, but with different arguments.

    Args:
        loader: A loader.
        kind: The class of the new loader; by default, the loader's class.
        changes: The arguments that differ.
    """
    names = ("dataset", "num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    given = {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers", "in_order")}
    if loader.collate_fn is not default_collate and "channels_last" not in getattr(loader.collate_fn, "__name__", ""):
        given["collate_fn"] = loader.collate_fn
    is_iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if loader.batch_size is None and not is_iterable and loader.batch_sampler is not None:
        given["batch_sampler"] = loader.batch_sampler
    else:
        given |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not is_iterable:
            given["sampler"] = loader.sampler
    given |= changes
    if not given["num_workers"]:
        given |= {"prefetch_factor": None, "persistent_workers": False, "multiprocessing_context": None, "timeout": 0}
    return (kind or type(loader))(**given)


def without(share: float) -> float:
    """Return the speed-up that results from saving a share of a sample's time."""
    return 1 / max(1 - share, 0.01)


def share_of_stage(stats: LoaderStats, stage: str) -> float:
    """Return a stage's share of the time in which workers are not idle."""
    seconds = stats.seconds_by_stage()
    return seconds[stage] / (sum(seconds.values()) - seconds.get("idle", 0.0) or 1.0)
