"""The laws of order and state, checked for one case by counting in plain Python.

Hypothesis draws cases in ``test_order.py``, and ``tools/order_campaign.py`` draws hundreds of thousands.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import gcd

import numpy as np
from numpy.typing import NDArray

from shardio.order import (
    Cursor,
    EpochCounter,
    EpochOrder,
    OrderSettings,
    Progress,
    Remainder,
    Split,
    dump_state,
    iterate_steps,
    read_state,
)
from shardio.order.epoch_order import permute_shards
from shardio.testing.samples import check_shares

DIGEST = "a dataset's digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of one part of a training run. Each has some workers, and stops after some batches or at the end."""

    world_size: int
    num_workers: int
    batch_size: int
    num_batches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An epoch of a dataset, and the groups of ranks that train on it. Each group resumes where the previous group
    stopped.

    Some shards may be empty, but not all. The last group trains to the end. The greatest common divisor of
    ``other_world_size`` and the number of samples in a step is another world size with the same steps. ``probe``
    selects individual positions at which the order is evaluated.
    """

    shard_sizes: tuple[int, ...]
    settings: OrderSettings
    epoch: int
    remainder: Remainder
    groups: tuple[Group, ...]
    other_world_size: int
    probe: int

    @property
    def num_samples(self) -> int:
        return sum(self.shard_sizes)


class LawBrokenError(AssertionError):
    """A law of the order does not hold."""


def check_laws(case: Case) -> None:
    """Check all laws for one case. An error names the law that does not hold."""
    order = EpochOrder(np.array(case.shard_sizes, dtype=np.int64), case.settings, case.epoch)
    samples = order.samples_at(np.arange(case.num_samples)).tolist()
    check_order(case, order, samples)
    written = _WrittenOrder(order, samples)

    start = 0
    for group in case.groups:
        splits = [_split(case, start, rank, group.world_size, group.batch_size) for rank in range(group.world_size)]
        batches = check_remainder(case, splits)
        check_global_batches(case, splits, batches)
        check_regions(case, batches)
        for split, of_rank in zip(splits, batches, strict=True):
            check_workers(written, split, of_rank, group.num_workers)

        num_batches = max(map(len, batches)) if group.num_batches is None else group.num_batches
        now = [position for rank in batches for batch in rank[:num_batches] for position in batch]
        stop = check_cursor(case, splits, batches, num_batches)
        if stop < case.num_samples:
            _hold("the delivered positions are those before the cursor", sorted(now), list(range(start, stop)))
        start = stop


def check_order(case: Case, order: EpochOrder, samples: list[int]) -> None:
    size = case.num_samples
    _hold("an epoch's order is a permutation", sorted(samples), list(range(size)))
    if not case.settings.shuffle:
        _hold("without shuffling, position p is sample p", samples, list(range(size)))
    else:
        check_windows(case, samples)
        check_strata(case, samples)
    positions = [(case.probe * factor) % (2 * size) for factor in (1, 3, 7, 13)]
    alone = order.samples_at(np.array(positions, dtype=np.int64)).tolist()
    law = "a single position has the same sample, and positions past the end repeat"
    _hold(law, alone, [samples[p % size] for p in positions])


def check_windows(case: Case, samples: list[int]) -> None:
    starts = list(np.cumsum(case.shard_sizes) - case.shard_sizes)
    stops = list(np.cumsum(case.shard_sizes))
    unfinished: int | None = None  # The shard that the last window left unfinished.
    next_sample = 0
    for first in range(0, len(samples), case.settings.window):
        by_shard: dict[int, list[int]] = {}
        for sample in sorted(samples[first : first + case.settings.window]):
            by_shard.setdefault(bisect_right(stops, sample), []).append(sample)
        if unfinished is not None:
            _hold("a window continues in the shard where the last one ended", unfinished in by_shard, True)
        broken = []
        for shard, run in by_shard.items():
            expected = next_sample if shard == unfinished else starts[shard]
            whole = list(range(expected, expected + len(run)))
            _hold("a window has consecutive samples of each of its shards", run, whole)
            if run[-1] + 1 < stops[shard]:
                broken.append(shard)
        _hold("a window ends in the middle of at most one shard", len(broken) <= 1, True)
        unfinished = broken[0] if broken else None
        if unfinished is not None:
            next_sample = by_shard[unfinished][-1] + 1
    _hold("the tape ends with a shard", unfinished, None)


def check_strata(case: Case, samples: list[int]) -> None:
    starts = np.cumsum(case.shard_sizes) - case.shard_sizes
    shards = permute_shards(len(case.shard_sizes), case.settings.seed, case.epoch).tolist()
    tape = chain.from_iterable(range(starts[shard], starts[shard] + case.shard_sizes[shard]) for shard in shards)
    offsets = {sample: offset for offset, sample in enumerate(tape)}
    strata = case.settings.strata
    for first in range(0, len(samples), case.settings.window):
        window = [offsets[sample] - first for sample in samples[first : first + case.settings.window]]
        visited = [set(window[_reverse_bits(stratum, strata) :: strata]) for stratum in range(strata)]
        # The window is rotated, so its first stratum may begin anywhere.
        begin = next((offset for offset in visited[0] if (offset - 1) % len(window) not in visited[0]), 0)
        for stratum in visited:
            expected = {(begin + i) % len(window) for i in range(len(stratum))}
            _hold("turns visit neighboring samples, and the strata in bit-reversed order", stratum, expected)
            begin += len(stratum)


def check_remainder(case: Case, splits: list[Split]) -> list[list[list[int]]]:
    batches = check_shares(splits)
    policy, num_left = splits[0].remainder_policy, case.num_samples - splits[0].start
    unit = len(splits) * (splits[0].batch_size if policy.uses_batch_size else 1)
    fitting = {num_left - num_left % unit} if policy.leaves_out else set[int]()
    fitting |= {num_left + -num_left % unit} if policy.repeats else set()
    num_dealt = sum(split.num_own_samples for split in splits)
    _hold(f"all ranks together have {fitting or num_left} samples", {num_dealt} <= (fitting or {num_left}), True)
    return batches


def check_global_batches(case: Case, splits: list[Split], batches: list[list[list[int]]]) -> None:
    step_size = len(splits) * splits[0].batch_size
    world_size = gcd(step_size, case.other_world_size)
    others = [
        _split(case, splits[0].start, rank, world_size, step_size // world_size).batch for rank in range(world_size)
    ]
    for step in range((case.num_samples - splits[0].start) // step_size):
        there = sorted(chain.from_iterable(batch(step).tolist() for batch in others))
        _hold("global batches do not depend on the world size", sorted(_step(batches, step)), there)


def check_regions(case: Case, batches: list[list[list[int]]]) -> None:
    strata = case.settings.strata
    for step in range(max(map(len, batches))):
        own = [rank[step] if step < len(rank) else [] for rank in batches]
        visited = [sorted(_reverse_bits(p % strata, strata) for p in batch if p < case.num_samples) for batch in own]
        in_order = list(chain.from_iterable(visited))
        _hold("the ranks read the strata in order", in_order, sorted(in_order))
        repeats = [position >= case.num_samples for batch in own for position in batch]
        _hold("repeats are at the end of a step", repeats, sorted(repeats))


def check_workers(order: _WrittenOrder, split: Split, batches: list[list[int]], num_workers: int) -> None:
    """Check that the number of workers does not affect a rank's batches, whether workers yield batches or samples.

    Torch's loader receives batches from the workers in turn, and skips workers that have ended. If workers yield
    samples, the loader batches each worker's samples separately.
    """
    streams = []
    for worker in range(num_workers):
        steps = range(worker, split.num_batches, num_workers)
        positions: list[list[int]] = []
        samples: list[int] = []
        for some_positions, some_samples in iterate_steps(order.samples_at, split, steps):
            positions += [batch.tolist() for batch in some_positions]
            samples += some_samples.tolist()
        flat = list(chain.from_iterable(positions))
        _hold("samples are those of their positions", samples, order.samples_at(np.array(flat, dtype=int)).tolist())
        _hold("a worker builds every n-th batch", positions, batches[worker::num_workers])
        streams.append(flat)
    cut = [[stream[i : i + split.batch_size] for i in range(0, len(stream), split.batch_size)] for stream in streams]
    _hold("batches do not depend on the workers", list(_in_turn(cut)), batches)


def check_cursor(case: Case, splits: list[Split], batches: list[list[list[int]]], num_batches: int) -> int:
    """Check that all ranks save the same state after some batches. Return the position at which a run resumes."""
    start, step_size = splits[0].start, len(splits) * splits[0].batch_size
    is_over = num_batches >= max(map(len, batches))
    expected = case.num_samples if is_over else start + num_batches * step_size
    cursor = Cursor(epoch=case.epoch, position=start)
    for split, of_rank in zip(splits, batches, strict=True):
        progress = Progress(
            cursor=cursor,
            split=split,
            num_batches=min(num_batches, len(of_rank)),
            is_finished=num_batches > len(of_rank),
        )
        _hold("all ranks have the same cursor", progress.now, Cursor(epoch=case.epoch, position=expected))
    now = Cursor(epoch=case.epoch, position=expected)
    state = json.loads(json.dumps(dump_state(now, case.settings, DIGEST, case.num_samples)))
    _hold("a state is read as it was saved", read_state(state, case.settings, DIGEST, case.num_samples), now)
    counter = EpochCounter()
    counter.load(now)
    counter.set_epoch(case.epoch)
    _hold("the loaded epoch is resumed", counter.start(case.num_samples), now)
    counter.load(now)
    after = Cursor(epoch=case.epoch + 1) if is_over else now
    _hold("if the loaded epoch is over, the next one follows", counter.start(case.num_samples), after)
    return expected


class _WrittenOrder(EpochOrder):
    """An order that looks up previously computed values."""

    def __init__(self, order: EpochOrder, samples: list[int]) -> None:
        self.settings, self.epoch, self.num_samples = order.settings, order.epoch, order.num_samples
        self._samples = np.array(samples, dtype=np.int64)

    def samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._samples[positions % self.num_samples]


def _split(case: Case, start: int, rank: int, world_size: int, batch_size: int) -> Split:
    return Split(
        num_samples=case.num_samples,
        start=start,
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        strata=case.settings.strata,
        remainder=case.remainder,
    )


def _step(batches: list[list[list[int]]], step: int) -> Iterable[int]:
    return chain.from_iterable(of_rank[step] for of_rank in batches if step < len(of_rank))


def _reverse_bits(number: int, below: int) -> int:
    num_bits = below.bit_length() - 1
    return int(f"{number:0{num_bits}b}"[::-1], 2) if num_bits else 0


def _in_turn(streams: list[list[list[int]]]) -> Iterator[list[int]]:
    """Yield one batch from each stream in turn, skipping exhausted streams."""
    for turn in range(max(map(len, streams))):
        yield from (stream[turn] for stream in streams if turn < len(stream))


def _hold(law: str, got: object, expected: object) -> None:
    if got != expected:
        raise LawBrokenError(f"{law}: got {got}, expected {expected}")
