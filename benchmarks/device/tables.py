"""Present the results as Markdown tables, and judge whether they meet the targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.device.feeds import ALONE, ON_DEVICE, RESIDENT, SHARDIO, TITLES
from benchmarks.device.rounds import Group
from benchmarks.timing import ratios, summarize

OF_RESIDENT, HIDDEN, OF_PINNED = 0.98, 0.95, 0.95
"""The targets for (b): speed relative to (a), hidden share of copy time, bandwidth relative to that of plain copies."""

MAX_PROCESS_US = 10.0
"""The target for the CPU time of the training process per image, in µs."""

MAX_STALL = 0.02
"""The target for the share of the time during which the device waits for data."""


def make_table(group: Group) -> str:
    """Return a table of the results for one network and source."""
    lines = [
        f"**{group.model}, {group.source}** (network: {group.network})\n",
        "| | images/s | share of (a) | stall | copy time hidden | H2D, GB/s | share of plain pinned copies "
        "| CPU µs per image |",
        "|---|---|---|---|---|---|---|---|",
    ]
    resident = group.feeds[RESIDENT]["images_per_s"]
    for name, figures in group.feeds.items():
        if name in group.problems:
            lines.append(f"| {TITLES[name]} | failed: {group.problems[name].splitlines()[0]} | | | | | | |")
            continue
        speeds, stalls = figures["images_per_s"], figures["stall_share"]
        hidden, bandwidth = figures["hidden_share"], figures["copy_gb_per_s"]
        cells = [TITLES[name], summarize(speeds), summarize(ratios(speeds, resident), 3), _cell(stalls, 3)]
        cells += [_cell(hidden, 3), _cell(bandwidth, 1), _cell(_of_pinned(group, bandwidth), 3), ""]
        lines.append(f"| {' | '.join(cells)} |")
    for name, speeds in group.loaders_alone.items():
        if name in group.problems:
            continue
        share, process = summarize(ratios(speeds, resident), 2), summarize(group.process_us[name], 1)
        lines.append(f"| {ALONE[name]} | {summarize(speeds)} | {share} | | | | | {process} |")
    if group.pinned_gb_per_s:
        lines.append(f"| plain pinned copies | | | | | {summarize(group.pinned_gb_per_s, 1)} | | |")
    return "\n".join(lines) + "\n"


def judge(group: Group) -> list[str]:
    """Return one line for each target: whether the median of shardio's rounds meets it."""
    if SHARDIO in group.problems:
        return [f"{group.model}, {group.source}: shardio failed: {group.problems[SHARDIO]}"]
    figures, resident = group.feeds[SHARDIO], group.feeds[RESIDENT]["images_per_s"]
    said = [_judge("speed of (b) over (a)", ratios(figures["images_per_s"], resident), at_least=OF_RESIDENT)]
    if group.loaders_alone:
        keeps_up = statistics.median(ratios(group.loaders_alone["shardio"], resident)) > 1
        said[0] += "" if keeps_up else " (does not count: decoding is the bottleneck)"
        said.append(_judge("CPU µs of the process per image", group.process_us[ON_DEVICE], at_most=MAX_PROCESS_US))
    of_pinned = _of_pinned(group, figures["copy_gb_per_s"])
    said.append(_judge("stall", figures["stall_share"], at_most=MAX_STALL))
    said.append(_judge("copy time hidden", figures["hidden_share"], at_least=HIDDEN))
    said.append(_judge("bandwidth over plain pinned copies", of_pinned, at_least=OF_PINNED))
    if group.is_registered is False:
        said.append("CUDA refused to pin the loader's memory: batches were copied to other memory first")
    if any(figures["pageable_bytes"]):
        said.append(f"{max(figures['pageable_bytes']):,} bytes were copied from pageable memory")
    return [f"{group.model}, {group.source}: {line}" for line in said]


def _of_pinned(group: Group, bandwidth: Sequence[float | None]) -> list[float | None]:
    pairs = zip(bandwidth, group.pinned_gb_per_s, strict=False)  # On a CPU, plain copies are not measured.
    return [None if ours is None else ours / plain for ours, plain in pairs]


def _judge(what: str, rounds: Sequence[float | None], *, at_least: float = -math.inf, at_most: float = math.inf) -> str:
    target = f"at least {at_least}" if at_most == math.inf else f"at most {at_most}"
    seen = [figure for figure in rounds if figure is not None]
    if not seen:
        return f"{what}, {target}: not measured"
    is_met = at_least <= statistics.median(seen) <= at_most
    return f"{what}, {target}: {summarize(seen, 3)}, {'met' if is_met else 'missed'}"


def _cell(rounds: Sequence[float | None], digits: int) -> str:
    seen = [figure for figure in rounds if figure is not None]
    return summarize(seen, digits) if seen else ""
