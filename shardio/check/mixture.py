"""Check a loader that mixes several sources: proportions after each step, and each source's repeats and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from shardio.check.coverage import ASK_FOR_KEY, Key, keys_in
from shardio.check.report import SHOWN
from shardio.errors import CoverageError, IdentityError
from shardio.values import count


@dataclass(slots=True, kw_only=True)
class SourceReport:
    """The samples that a loader delivered from one source.

    Attributes:
        num_samples: The number of samples in the source.
        share: The expected share of the source.
        num_delivered: The number of delivered samples, including repeats.
        deviation: The largest difference, after a step, between the delivered and the expected number of samples.
        early: The samples that were repeated before all others from the source had been delivered as often.
        lost: The samples that were delivered fewer times than there were full passes through the source.
    """

    num_samples: int
    share: float
    num_delivered: int = 0
    deviation: float = 0.0
    early: list[Hashable] = field(default_factory=list)
    lost: list[Hashable] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class MixtureReport:
    """The samples that a loader delivered from a mixture.

    Attributes:
        sources: The report of each source, by name.
        num_delivered: The number of delivered samples.
        unexpected: The delivered samples that belong to no source.
        tolerance: The largest acceptable deviation.
    """

    sources: dict[str, SourceReport]
    num_delivered: int = 0
    unexpected: list[Hashable] = field(default_factory=list)
    tolerance: float = 1.0

    @property
    def problems(self) -> list[str]:
        """A description of each problem; empty if the mixture is exact."""
        found = []
        for name, source in self.sources.items():
            if source.deviation > self.tolerance + 1e-6:
                deviation = f"by up to {source.deviation:.1f} samples"
                found.append(f"{name} deviates from its share of {source.share:.2%} {deviation}")
            if source.early:
                found.append(f"{name} repeats {_list(source.early)} before its other samples have been delivered")
            if source.lost:
                found.append(f"{name} leaves out {_list(source.lost)}")
        if self.unexpected:
            found.append(f"no source has {_list(self.unexpected)}")
        return found

    def raise_if_wrong(self) -> None:
        """Raise CoverageError if there are problems."""
        if self.problems:
            raise CoverageError(str(self))

    def __str__(self) -> str:
        lines = [f"{count(self.num_delivered, 'sample')} of {count(len(self.sources), 'source')}"]
        for name, source in self.sources.items():
            share = source.num_delivered / max(self.num_delivered, 1)
            times = source.num_delivered / max(source.num_samples, 1)
            lines.append(
                f"  {name}: {count(source.num_delivered, 'sample')}, {share:.2%} of {source.share:.2%}, {times:.2f} "
                f"times, within {source.deviation:.1f} samples after each step"
            )
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


def check_mixture(
    loader: Iterable[Any] | tuple[Iterable[Any], ...],
    sources: Mapping[str, Collection[Hashable]],
    weights: Mapping[str, float],
    *,
    key: Key = None,
    tolerance: float = 1.0,
) -> MixtureReport:
    """Read an epoch of a loader that mixes sources, and report how exact the mixture is.

    >>> print(check_mixture([["a1", "b1"], ["a2", "a1"]], {"a": ["a1", "a2"], "b": ["b1"]}, {"a": 3, "b": 1}))
    4 samples of 2 sources
      a: 3 samples, 75.00% of 75.00%, 1.50 times, within 0.5 samples after each step
      b: 1 sample, 25.00% of 25.00%, 1.00 times, within 0.5 samples after each step

    Args:
        loader: Any iterable of batches, or a tuple of such iterables, one per rank. A step is one batch on each rank.
        sources: The keys of each source's samples, by name. A key must not be in two sources.
        weights: The weight of each source, by name.
        key: The way to find a batch's keys: see :func:`assert_exactly_once`.
        tolerance: The largest acceptable deviation from a source's share, in samples.

    Raises:
        IdentityError: If a batch holds no keys, or a key belongs to two sources. The error is also a TypeError.
        ValueError: If the sources and the weights have different names.
    """
    owner = {each: name for name, keys in sources.items() for each in keys}
    if len(owner) < sum(map(len, sources.values())):
        raise IdentityError("a key belongs to two sources, or occurs twice in one: pass keys that name the source")
    if weights.keys() != sources.keys():
        raise ValueError(f"the weights are for {', '.join(weights)}, but the sources are {', '.join(sources)}")
    total = sum(weights.values())
    reports = {name: SourceReport(num_samples=len(keys), share=weights[name] / total) for name, keys in sources.items()}
    report = MixtureReport(sources=reports, tolerance=tolerance)
    counts = Counter[Hashable]()
    num_complete = dict.fromkeys(sources, 0)  # The number of full passes through each source.
    num_ahead = dict.fromkeys(sources, 0)  # The number of samples delivered num_complete + 1 times.
    for batches in zip_longest(*(loader if isinstance(loader, tuple) else (loader,))):
        for batch in batches:
            if batch is None:  # This rank has no more batches.
                continue
            keys = keys_in(batch, key)
            if keys is None:
                raise IdentityError(f"the batches hold no keys. {ASK_FOR_KEY}")
            for each in keys:
                report.num_delivered += 1
                if (name := owner.get(each)) is None:
                    report.unexpected.append(each)
                    continue
                source = reports[name]
                source.num_delivered += 1
                counts[each] += 1
                if counts[each] == num_complete[name] + 1:
                    num_ahead[name] += 1
                elif counts[each] > num_complete[name] + 1:
                    source.early.append(each)
                if num_ahead[name] == source.num_samples:
                    num_complete[name] += 1
                    num_ahead[name] = sum(counts[other] > num_complete[name] for other in sources[name])
        for source in reports.values():
            expected = report.num_delivered * source.share
            source.deviation = max(source.deviation, abs(source.num_delivered - expected))
    for name, source in reports.items():
        passes = source.num_delivered // max(source.num_samples, 1)
        source.lost = [each for each in sources[name] if counts[each] < passes]
    return report


def _list(keys: list[Hashable]) -> str:
    shown = ", ".join(map(str, keys[:SHOWN]))
    return f"{count(len(keys), 'sample')} ({shown}{', …' if len(keys) > SHOWN else ''})"
