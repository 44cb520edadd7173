"""Measure how long a GPU waits for its batches: ``python -m benchmarks.bench_device [PHOTOS]``.

A training step in bfloat16 gets its batches from (a) the memory of the GPU, (b) shardio's DevicePrefetcher, (c) pinned
memory with non_blocking, as torch's documentation recommends, or (d) timm's prefetcher, if timm is installed. With the
source ``memory``, nothing is decoded, so only the transfer is measured. With ``photographs``, the loaders of shardio
and torch decode JPEGs. A profile shows how much of the copy time overlapped with kernels.

``--device cpu`` runs everything that needs no GPU, at small sizes. A run on the CPU tests the benchmark; its timings
mean nothing.
"""

from __future__ import annotations

import argparse  # ``--source memory`` works without typer: it needs only torch and numpy.
import datetime
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.copies import record
from benchmarks.device.decoding import find_missing, make_photographs, open_photographs, pack_photographs
from benchmarks.device.feeds import Source, make_feeds, open_memory
from benchmarks.device.networks import DEPTHS, WIDTH
from benchmarks.device.rounds import Group, Settings, run_group, tell
from benchmarks.device.tables import judge, make_table
from benchmarks.loaders.report import ALWAYS, describe_machine, find_version
from shardio.process import count_processors

HERE = Path(__file__).parent
SOURCES = ("memory", "photographs")
SIZES = ("batch_size", "warmup", "steps", "profiled", "rounds")
FULL = {"batch_size": 256, "warmup": 10, "steps": 40, "profiled": 10, "rounds": 5}
SMALL = {"batch_size": 2, "warmup": 1, "steps": 2, "profiled": 1, "rounds": 2}


def read_arguments(arguments: list[str] | None = None) -> tuple[Settings, Path | None]:
    """Return the settings from the command line, and the file for the results (None to keep no results)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_device", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("photos", nargs="?", type=Path, help="class folders of JPEGs (default: synthetic images)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a small test run")
    parser.add_argument("--model", action="append", choices=DEPTHS, help="default: both; repeatable")
    parser.add_argument("--source", action="append", choices=SOURCES, help="default: both; repeatable")
    for size in SIZES:
        sizes_help = f"default: {FULL[size]}, or {SMALL[size]} on a CPU"
        parser.add_argument(f"--{size.replace('_', '-')}", type=_positive, help=sizes_help)
    parser.add_argument(
        "--workers", type=_positive, help="workers of shardio's and torch's loaders (default: all cores but one)"
    )
    parser.add_argument(
        "--results", type=Path, help="directory for the results (default: benchmarks/results, or none on a CPU)"
    )
    parser.add_argument("--name", default="device", help="name of the results, used in their file name")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    is_cuda = device.type == "cuda"
    if not is_cuda and device.type != "cpu":
        parser.error(f"--device must be cuda, cuda:N or cpu, got {given.device}")
    if is_cuda and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device; to test the benchmark, pass --device cpu")
    if given.photos is not None and not given.photos.is_dir():
        parser.error(f"{given.photos} is not a directory")
    sizes = {size: getattr(given, size) or (FULL if is_cuda else SMALL)[size] for size in SIZES}
    settings = Settings(
        device=torch.device("cuda", device.index or 0) if is_cuda else device,
        models=given.model or list(DEPTHS),
        sources=given.source or SOURCES,
        workers=given.workers or (max(1, count_processors() - 1) if is_cuda else 1),
        width=WIDTH if is_cuda else 8,
        photos=(10, 60) if is_cuda else (2, 3),
        images=given.photos,
        **sizes,
    )
    results = given.results or (HERE / "results" if is_cuda else None)
    if results is None:
        return settings, None
    machine = re.sub(r"[^a-z0-9]+", "-", describe_device(settings.device)["name"].lower()).strip("-")
    return settings, results / f"{datetime.date.today()}-{given.name}-{machine}.json"


def open_source(name: str, work: Path, settings: Settings) -> Source:
    """Return a source; raise ImportError if a module that it needs is not installed."""
    if name == "memory":
        return open_memory(8, settings.batch_size, settings.device)
    if missing := find_missing():
        raise ImportError(f"not installed: {', '.join(missing)}")
    num_classes, per_class = settings.photos
    tell("creating, copying and packing photographs")
    images = settings.images or make_photographs(work / "made", num_classes=num_classes, per_class=per_class)
    how = pack_photographs(images, work, settings.batch_size * settings.num_batches)
    tell(f"photographs: shardio reads {how}")
    return open_photographs(work, settings.batch_size, settings.workers, settings.device)


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return those facts about the device that affect the results."""
    if device.type != "cuda":
        return {"name": "cpu"}
    return {
        "name": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "memory_gb": round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _ask_driver(),
    }


def _ask_driver() -> list[str]:
    """Return what nvidia-smi reports for each GPU (driver, bus, power limit), or [] if it is not installed."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()


def write(path: Path, groups: list[Group], problems: dict[str, str], settings: Settings) -> None:
    """Write the results of all rounds."""
    versions = {name: version for name in (*ALWAYS, "timm", "torchvision") if (version := find_version(name))}
    images = "synthetic" if settings.images is None else settings.images.resolve().name
    content = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "device": describe_device(settings.device),
        "versions": {**versions, "torch": torch.__version__},
        "settings": {**asdict(settings), "device": str(settings.device), "images": images},
        "problems": problems,
        "groups": [asdict(group) for group in groups],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def run(work: Path, settings: Settings, path: Path | None) -> list[Group]:
    """Measure everything; write the results after each round, and print the table of each group."""
    groups, problems = list[Group](), dict[str, str]()

    def keep(group: Group) -> None:
        if path is not None:
            write(path, [*groups, group], problems, settings)

    for name in settings.sources:
        try:
            source = open_source(name, work, settings)
        except ImportError as error:
            problems[name] = str(error)
            continue
        feeds, missing = make_feeds(source, settings.device)
        problems |= missing
        for model in settings.models:
            groups.append(run_group(model, source, feeds, settings, keep))
            print(make_table(groups[-1]), flush=True)
    for name, problem in problems.items():
        print(f"not measured: {name}: {problem}")
    return groups


def main() -> None:
    """Run the benchmark."""
    settings, path = read_arguments()
    # Exit with an exception, so temporary data and processes are cleaned up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if settings.is_cuda:
        torch.cuda.set_device(settings.device)
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)  # On a busy machine, threads that wait for each other are very slow.
    print(f"{describe_device(settings.device)}, torch {torch.__version__}, batches of {settings.batch_size}")
    print(f"medians of {settings.rounds} rounds (minimum to maximum) of {settings.steps} steps; ratios are per round\n")
    # The first profile of a process begins late, because it loads the profiler's library.
    record(lambda: torch.ones(1000, device=settings.device).sum(), settings.device)
    with tempfile.TemporaryDirectory(prefix="shardio-device-") as work:
        groups = run(Path(work), settings, path)
    if settings.is_cuda:
        print("\n".join(line for group in groups for line in judge(group)))
    else:
        print("\nThis ran on a CPU: it shows only that the benchmark works.")
    if path is not None and groups:
        print(f"\nAll results are in {path}.")
    if not groups or any(group.problems for group in groups):
        sys.exit(1)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


if __name__ == "__main__":
    main()
