"""Determine from a profile when the device copied and computed, and measure the speed of plain copies."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

LARGE = 2**20
"""The size in bytes above which bandwidth dominates the time of a copy. For the few kB of labels, latency dominates."""

Interval = tuple[float, float]
"""Start and end, in µs."""


class Copy(NamedTuple):
    """A copy from the host to the device."""

    interval: Interval
    num_bytes: int
    is_pageable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The activity of a device during a period: copies to it, and its kernels."""

    copies: list[Copy] = field(default_factory=list)
    kernels: list[Interval] = field(default_factory=list)

    @property
    def hidden_share(self) -> float | None:
        """The share of the copy time during which kernels ran; None if nothing was copied."""
        copies = [copy.interval for copy in self.copies]
        copying_us = sum(stop - start for start, stop in merge(copies))
        return overlap(copies, self.kernels) / copying_us if copying_us else None

    @property
    def gb_per_s(self) -> float | None:
        """The bandwidth of large copies, in 10^9 bytes per second; None if there were no large copies."""
        large = [copy for copy in self.copies if copy.num_bytes >= LARGE]
        copying_us = sum(copy.interval[1] - copy.interval[0] for copy in large)
        return sum(copy.num_bytes for copy in large) / copying_us / 1e3 if copying_us else None

    @property
    def pageable_bytes(self) -> int:
        """The number of bytes copied from pageable memory; the program waits for these copies."""
        return sum(copy.num_bytes for copy in self.copies if copy.is_pageable)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, disjoint intervals."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        elif stop > start:
            merged.append((start, stop))
    return merged


def overlap(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return the length of the intersection of two unions of intervals."""
    ours, theirs = merge(intervals), merge(others)
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        total += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return total


def read_trace(trace: Mapping[str, Any]) -> Activity:
    """Return the device's activity in a trace of torch's profiler (Kineto) in Chrome's format."""
    activity = Activity()
    for event in trace["traceEvents"]:
        category, name = event.get("cat"), event.get("name", "")
        if category == "kernel":
            activity.kernels.append(_read_interval(event))
        elif category == "gpu_memcpy" and name.startswith("Memcpy HtoD"):
            # The full name is "Memcpy HtoD (Pinned -> Device)" or "Memcpy HtoD (Pageable -> Device)".
            activity.copies.append(Copy(_read_interval(event), int(event["args"]["bytes"]), "Pageable" in name))
    return activity


def record(run: Callable[[], object], device: torch.device) -> Activity:
    """Run a function, wait until the device has finished its work, and return the device's activity."""
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        run()
        if is_cuda:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="shardio-profile-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))


def time_pinned_copies(num_bytes: int, device: torch.device, num_copies: int = 40) -> float:
    """Return the bandwidth of copies of ``num_bytes`` bytes from pinned memory to a CUDA device, in 10^9 bytes/s."""
    # There are several blocks, as in a buffer pool: a single one might stay in the processor's cache.
    here = [torch.zeros(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(8)]
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(-5, num_copies):  # The first five copies are a warm-up.
        if number == 0:
            start.record()
        there.copy_(here[number % len(here)], non_blocking=True)
    stop.record()
    stop.synchronize()
    elapsed_ms: float = start.elapsed_time(stop)
    return num_copies * num_bytes / elapsed_ms / 1e6


def _read_interval(event: Mapping[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])
