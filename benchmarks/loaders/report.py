"""Write the results of a run: a JSON file with all figures and the environment, and a chart."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loaders.registry import PIXELS_CHANGED, PIXELS_SMALL
from benchmarks.loaders.rounds import Result, Settings
from benchmarks.loaders.tables import sort_by_speed
from shardio.process import count_processors

ALWAYS = ("shardio", "torch", "numpy", "opencv-python-headless", "pillow", "simplejpeg")
"""Packages whose versions are always recorded."""


def describe_machine() -> dict[str, Any]:
    """Return those facts about the machine that affect the results."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": count_processors(),
        "memory_gb": round(memory / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }


def write_json(
    path: Path, results: Mapping[str, Sequence[Result]], settings: Settings, machine: Mapping[str, Any], data: object
) -> None:
    """Write the results of all rounds, and the versions of the packages."""
    packages = {*ALWAYS, *(p for case in results.values() for result in case for p in result.candidate.packages)}
    content = {
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "versions": {package: version for package in sorted(packages) if (version := find_version(package))},
        "settings": {
            "samples": settings.num_samples,
            "small_samples": settings.num_small,
            "workers": settings.num_workers,
            "epochs": settings.num_epochs,
            "rounds": settings.num_rounds,
        },
        "data": data,
        "cases": {case: [_describe(result) for result in found] for case, found in results.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def draw_chart(path: Path, results: Sequence[Result], machine: Mapping[str, Any]) -> None:
    """Plot images/s and CPU time of each candidate: the medians and ranges of the rounds."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    measured = sort_by_speed([result for result in results if result.rounds and not result.problem])[::-1]
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.3 + 0.33 * len(measured)), sharey=True, layout="constrained")
    panels = (("samples_per_s", "images/s"), ("cpu_us", "CPU time, µs per image"))
    for axis, (name, label) in zip(axes, panels, strict=True):
        medians = [statistics.median(result.figures(name)) for result in measured]
        low = [median - min(result.figures(name)) for median, result in zip(medians, measured, strict=True)]
        high = [max(result.figures(name)) - median for median, result in zip(medians, measured, strict=True)]
        axis.barh(range(len(measured)), medians, xerr=(low, high), color=[_color(r) for r in measured], ecolor="#444")
        for row, (median, above) in enumerate(zip(medians, high, strict=True)):
            axis.text(median + above, row, f" {median:,.0f}", va="center", fontsize=8)
        axis.set_xlabel(label)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(measured)), [_chart_title(result) for result in measured], fontsize=8)
    rounds = len(measured[0].rounds) if measured else 0
    figure.suptitle(
        f"Random crops of 224 pixels and flips, 2 workers; {machine['cores']} cores of {machine['cpu']}; "
        f"medians and ranges of {rounds} rounds",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _chart_title(result: Result) -> str:
    sizes = {PIXELS_CHANGED: " (400 px, quality 90)", PIXELS_SMALL: " (256 px)"}
    return result.candidate.title + sizes.get(result.candidate.stored, "")


def _color(result: Result) -> str:
    if result.candidate.is_shardio:
        return "#1f6fb4"
    return "#9a9a9a" if result.candidate.is_peer else "#cfe0ef"


def _describe(result: Result) -> dict[str, Any]:
    candidate = result.candidate
    return {
        "name": candidate.name,
        "title": candidate.title,
        "stored": candidate.stored,
        "problem": result.reason,
        "rounds": result.rounds,
    }


def find_version(package: str) -> str:
    """Return the version of a package, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
