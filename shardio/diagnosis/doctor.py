"""``shardio.doctor``: find out whether loading holds training back, which stage is responsible, and what to change."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
import torch.utils.data

from shardio.device import DevicePrefetcher
from shardio.diagnosis.profiling import SampleProfile, profile_samples
from shardio.diagnosis.rates import (
    Advice,
    LoaderEvidence,
    LoaderRun,
    Step,
    measure_other_programs,
    run_loader,
    time_step,
)
from shardio.diagnosis.remedies import advise_prefetcher, find_remedies, sort_advice
from shardio.loader import DataLoader, LoaderStats
from shardio.loader.choice import fallback_reason
from shardio.loader.statistics import NEGLIGIBLE
from shardio.process import count_processors, keep_generators
from shardio.values import count

PROFILED = 64
"""The maximum number of samples that are profiled."""

MUCH_BUSY = 0.15
"""The share of the processors' time above which other programs distort the measurements."""

SHOWN = 0.01
"""The share of a sample's time below which a stage is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of :func:`doctor`. ``print`` shows it as a report.

    Attributes:
        run: The speed of the loader alone.
        step_rate: The speed of the training step on batches in memory, in samples per second; None without a step.
        both: The speed of the loader with the step; None without a step.
        profile: Where the time of a sample goes; None if the loader has no dataset, or the doctor needed no profile.
        stats: The statistics of shardio's own workers; None if other workers made the batches.
        num_processors: The number of processors that this process may use.
        others_busy: The share of the processors' time that other programs used.
        advice: What to change, the largest speed-up first; empty if loading does not hold training back.
    """

    run: LoaderRun
    step_rate: float | None
    both: LoaderRun | None
    profile: SampleProfile | None
    stats: LoaderStats | None
    num_processors: int
    others_busy: float
    advice: Sequence[Advice]

    @property
    def keeps_up(self) -> bool:
        """Whether training spends less than 5 % of its time waiting for data; False if no step was measured."""
        return self.both is not None and self.both.waiting < NEGLIGIBLE

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.both is None:
            return "Without a training step (step=, --step), the doctor cannot say whether loading is the bottleneck."
        share = f"{self.both.waiting:.1%}" if self.both.waiting < 2 * NEGLIGIBLE else f"{self.both.waiting:.0%}"
        answer = "Loading is not the bottleneck" if self.keeps_up else "Loading holds training back"
        return f"{answer}: training spends {share} of its time waiting for data."

    def __str__(self) -> str:
        return "\n".join(
            [self.verdict, "", *self._describe_rates(), *self._describe_stages(), *self._describe_advice()]
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures and the advice as JSON values. Times are in seconds."""
        names = ("samples_per_s", "batch_size", "start_s", "epoch_s", "cpu_s", "own_cpu_s", "busy", "waiting")
        runs = {"loader": self.run, "both": self.both}
        return {
            "verdict": self.verdict,
            "keeps_up": self.keeps_up,
            "step_samples_per_s": self.step_rate,
            "num_processors": self.num_processors,
            "others_busy": self.others_busy,
            **{key: run and {name: getattr(run, name) for name in names} for key, run in runs.items()},
            "stages": {str(stage): share for stage, share in self.profile.stages.items()} if self.profile else {},
            "advice": [asdict(advice) for advice in self.advice],
        }

    def _describe_rates(self) -> Iterator[str]:
        yield f"{'':<34}{'samples/s':>12}"
        if self.step_rate is not None:
            yield f"{'the step, on batches in memory':<34}{self.step_rate:>12,.0f}"
        yield f"{'the loader':<34}{self.run.samples_per_s:>12,.0f}"
        if self.both is not None:
            yield f"{'both':<34}{self.both.samples_per_s:>12,.0f}"
        yield f"first batch of an epoch after {self.run.start_s:.2f} s"
        if self.run.cpu_s:
            limit = self.num_processors / self.run.cpu_s
            yield (
                f"{count(self.num_processors, 'processor')}, {self.run.busy:.0%} busy while the loader runs alone; at "
                f"{1e6 * self.run.cpu_s:,.0f} µs of processor time per sample, they allow {limit:,.0f} samples/s"
            )
            yield f"of that time in the training process: {1e6 * self.run.own_cpu_s:,.0f} µs"
        if self.others_busy > MUCH_BUSY:
            yield f"Other programs used {self.others_busy:.0%} of the processors' time: stop them, and measure again."

    def _describe_stages(self) -> Iterator[str]:
        if self.stats is not None:
            yield ""
            yield from self.stats.describe_stages()[:-1]
        if (profile := self.profile) is None or (self.stats is not None and not self.stats.in_python):
            return
        yield ""
        yield f"{f'a sample, in one thread ({profile.num_samples} samples)':<46}{'µs':>9}{'share':>8}"
        for stage, share in profile.stages.items():
            if share >= SHOWN:
                yield f"{_describe(stage, profile):<46}{1e6 * share * profile.sample_s:>9,.0f}{share:>8.0%}"

    def _describe_advice(self) -> Iterator[str]:
        if self.keeps_up:
            return
        yield ""
        if not self.advice:
            competes = self.step_rate is not None and self.run.samples_per_s > self.step_rate
            why = ": alone, the loader is faster than the step, but both compete for the processors" if competes else ""
            yield f"The doctor found nothing to change{why}."
            return
        yield "What to change, the largest gain in loader speed first:"
        for number, advice in enumerate(self.advice, 1):
            first, *rest = str(advice).splitlines()
            yield f"{number:>2}. {first}"
            yield from (f"    {line}" for line in rest)


def _describe(stage: Any, profile: SampleProfile) -> str:
    if stage.kind == "decoding" and profile.images:
        image = profile.images[0]
        return f"decoding ({image.format}, {image.size[0]}×{image.size[1]} and similar)"
    return str(stage)


def doctor(loader: Iterable[Any], step: Step | None = None, *, seconds: float = 3.0) -> Diagnosis:
    """Find out whether a loader holds training back, which stage is responsible, and what to change.

    The doctor measures the loader alone, the training step on batches in memory, and both together. If training waits
    for data, the doctor profiles some samples, and tries changes such as different numbers of workers. This takes about
    ten times ``seconds``.

    >>> print(shardio.doctor(loader, step=train_step))  # doctest: +SKIP

    Args:
        loader: Any iterable of batches. Changes are tried only for torch's and shardio's DataLoader.
        step: The training step: a function of a batch. The step is called as in training, so it changes the model.
        seconds: The time of each measurement, in seconds.

    Raises:
        ValueError: If the loader yields no batch.
    """
    num_processors = count_processors()
    others_busy = measure_other_programs(seconds / 10, num_processors)
    with keep_generators():
        run = run_loader(loader, seconds, num_processors)
        inner = loader.loader if isinstance(loader, DevicePrefetcher) else loader
        stats = _find_stats(inner)
        step_rate = both = None
        if step is not None:
            step_rate = time_step(step, run.batches, seconds)
            both = run_loader(loader, seconds, num_processors, step)
        profile, advice = None, list[Advice]()
        if both is None or both.waiting >= NEGLIGIBLE:
            profile = _profile(inner, seconds)
            alone = run if inner is loader else run_loader(inner, seconds, num_processors)
            evidence = LoaderEvidence(
                loader=inner,
                run=alone,
                profile=profile,
                stats=stats,
                num_processors=num_processors,
                trial_s=seconds / 2,
                shm_free=_find_shared_memory(),
            )
            advice = find_remedies(evidence)
            if isinstance(loader, DevicePrefetcher) and loader.device.type == "cpu":
                advice = sort_advice([*advise_prefetcher(run, alone), *advice])
    return Diagnosis(
        run=run,
        step_rate=step_rate,
        both=both,
        profile=profile,
        stats=stats,
        num_processors=num_processors,
        others_busy=others_busy,
        advice=advice,
    )


def _find_stats(loader: Any) -> LoaderStats | None:
    return loader.stats() if isinstance(loader, DataLoader) and fallback_reason(loader) is None else None


def _find_shared_memory() -> int | None:
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return None


def _profile(loader: Any, seconds: float) -> SampleProfile | None:
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return None
    with _one_thread(loader):
        return profile_samples(lambda: _iterate_samples(loader), getattr(loader, "collate_fn", None), PROFILED, seconds)


def _iterate_samples(loader: Any) -> Iterator[Any]:
    dataset = loader.dataset
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        yield from dataset
        return
    sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None) or range(len(dataset))
    for indices in islice(iter(sampler), 2 * PROFILED):
        for index in indices if isinstance(indices, list | tuple) else [indices]:
            yield dataset[index]


@contextmanager
def _one_thread(loader: Any) -> Iterator[None]:
    """Limit torch to one thread, as in its worker processes."""
    before = torch.get_num_threads()
    if getattr(loader, "num_workers", 0):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
