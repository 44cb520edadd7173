"""Measure how fast a GPU decodes tiles: ``python -m benchmarks.bench_tiles [PHOTOS]``.

- the stages that decode a batch of 256 random crops in bfloat16: the time on the device, in total and for each stage;
- whole batches on the device, decoded there or by the workers: images/s, and the CPU time of all processes;
- the loader alone, with pixels or tiles;
- torchvision's decoder on the device (nvJPEG), which decodes the same photographs in full.

``--device cpu`` tests the benchmark, at small sizes. The CPU then runs the stages, so their timings mean nothing.
``--loader-only`` measures only the loader, which needs no device.
"""

from __future__ import annotations

import argparse  # Machines with a GPU may lack typer.
import datetime
import importlib
import json
import os
import re
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import shardio
from benchmarks.bench_device import describe_device
from benchmarks.device.decoding import make_photographs, pack_photographs
from benchmarks.loaders.report import describe_machine
from shardio.device.tiles import Colors, TiledImages
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Figures = dict[str, Any]


def make_loader(packed: Path, batch_size: int, num_workers: int) -> Any:
    """Return a loader of random crops."""
    transform = Compose([RandomResizedCrop(224), RandomHorizontalFlip()])
    dataset = shardio.ShardDataset(packed, shuffle=True, transform=transform)
    return shardio.DataLoader(dataset, batch_size, num_workers=num_workers, persistent_workers=True)


def measure_stages(loader: Any, device: torch.device, rounds: int) -> Figures:
    """Return the time that decoding a batch takes on the device, in ms, in total and for each stage."""
    with loader.watch_memory(lambda memory: None, takes_tiles=True):
        batches = iter(loader)
        on_host: TiledImages = next(batches)[0]
    tiles = on_host.to(device)
    colors = Colors(torch.bfloat16, torch.ones(3), torch.zeros(3), torch.channels_last)
    num_calls = 20 if device.type == "cuda" else 1  # The program enqueues calls faster than the device completes them.

    def decode() -> None:
        for _ in range(num_calls):
            tiles.decode(colors)

    totals = [_time(decode, device) / num_calls for _ in range(rounds + 1)][1:]
    figures: Figures = {
        "num_images": len(tiles),
        "num_bytes": sum(len(chunk) for chunk in tiles.chunks),
        "num_tiles": int(tiles.images["num_tiles"].sum()),
        "total_ms": statistics.median(totals),
        "total_ms_range": [min(totals), max(totals)],
    }
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(rounds):
                tiles.decode(colors)
            torch.cuda.synchronize(device)
        kernels = defaultdict[str, float](float)
        for event in recorded.events():
            if event.device_type.name == "CUDA":
                kernels[event.name] += event.device_time / 1000 / rounds
        figures["kernels_ms"] = dict(sorted(kernels.items(), key=lambda item: -item[1]))
    return figures


def _time(function: Callable[[], object], device: torch.device) -> float:
    """Return the time in ms that a function's work takes, measured by the device's clock if there is one."""
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - began)
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms


def measure_batches(
    packed: Path, batch_size: int, num_workers: int, device: torch.device | None, rounds: int
) -> Figures:
    """Return the images/s and CPU µs per image of whole epochs for each decoding method. The methods alternate.

    Without a device, only the loader is measured.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    ways: dict[str, Callable[[Any], Iterable[Any]]] = {"loader alone, pixels": iter, "loader alone, tiles": _collect}
    if device is not None:
        ways["decode='workers'"] = lambda loader: _prefetch(loader, device, "workers")
        ways["decode='device'"] = lambda loader: _prefetch(loader, device, "device")
    for _ in range(rounds):
        for name, deliver in ways.items():
            found[name].append(_measure_epoch(make_loader(packed, batch_size, num_workers), deliver, device))
    return {
        name: {"images_per_s": [rate for rate, _ in figures], "cpu_us": [cpu for _, cpu in figures]}
        for name, figures in found.items()
    }


def _prefetch(loader: Any, device: torch.device, decode: Any) -> Iterable[Any]:
    return shardio.DevicePrefetcher(loader, device, normalize=NORMALIZE, dtype=torch.bfloat16, decode=decode)


def _collect(loader: Any) -> Iterable[Any]:
    with loader.watch_memory(lambda memory: None, takes_tiles=True):
        batches: Iterable[Any] = iter(loader)
        return batches


def _measure_epoch(
    loader: Any, deliver: Callable[[Any], Iterable[Any]], device: torch.device | None
) -> tuple[float, float]:
    """Return the images/s and CPU µs per image of a loader's second epoch. The first epoch starts the workers."""
    batches = deliver(loader)
    for _ in batches:
        pass
    batches = deliver(loader)
    began, cpu_s, num_images = time.perf_counter(), _read_cpu_s(), 0
    for batch in batches:
        num_images += len(batch[1])
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return num_images / (time.perf_counter() - began), 1e6 * (_read_cpu_s() - cpu_s) / num_images


def _read_cpu_s() -> float:
    """Return the CPU time of this process and all its descendants, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total, parents = usage.ru_utime + usage.ru_stime, dict[int, tuple[int, float]]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                values = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # The process has ended.
                continue
            parents[int(folder.name)] = int(values[1]), (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
    for parent, own_s in list(parents.values()):
        while parent in parents and parent != os.getpid():
            parent = parents[parent][0]
        total += own_s if parent == os.getpid() else 0
    return total


def measure_torchvision(folder: Path, device: torch.device, batch_size: int, rounds: int) -> Figures:
    """Return the rate at which torchvision decodes whole images on the device, in images/s."""
    if device.type != "cuda":
        return {"problem": "needs CUDA"}
    io: Any = importlib.import_module("torchvision.io")
    paths = list(islice(sorted(folder.rglob("*.jpg")), batch_size))
    files = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in paths]
    times = [_time(lambda: io.decode_jpeg(files, device=device), device) for _ in range(rounds + 2)][2:]
    return {"images_per_s": [1000 * len(files) / each for each in times]}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_tiles", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("photos", nargs="?", type=Path, help="class folders of JPEGs (default: synthetic images)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a small test run")
    parser.add_argument("--workers", type=int, action="append", help="worker processes (default: 2); repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, help="default: 256, or 16 on a CPU")
    parser.add_argument("--samples", type=int, help="sample count; images may repeat (default: 10240, or 128 on a CPU)")
    parser.add_argument("--loader-only", action="store_true", help="measure only the loader")
    parser.add_argument("--results", type=Path, help="directory for the results (default: none)")
    given = parser.parse_args()
    device = torch.device(given.device)
    device = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
    batch_size = given.batch_size or (256 if device.type == "cuda" else 16)
    num_samples = given.samples or (10_240 if device.type == "cuda" else 128)
    figures: Figures = {"device": describe_device(device), "machine": describe_machine(), "batch_size": batch_size}
    with tempfile.TemporaryDirectory(prefix="shardio-tiles-") as folder:
        work = Path(folder)
        images = given.photos or make_photographs(work / "made", num_classes=4, per_class=32)
        pack_photographs(images, work, num_samples)
        for num_workers in given.workers or [2]:
            used = None if given.loader_only else device
            measured = measure_batches(work / "packed", batch_size, num_workers, used, given.rounds)
            figures[f"{num_workers} workers"] = measured
        if not given.loader_only:
            figures["stages"] = measure_stages(make_loader(work / "packed", batch_size, 2), device, given.rounds)
            try:
                whole = measure_torchvision(work / "folder", device, batch_size, given.rounds)
            except (ImportError, RuntimeError) as error:
                whole = {"problem": str(error)}
            figures["torchvision, whole images"] = whole
    text = json.dumps(figures, indent=1)
    print(text)
    if given.results is not None:
        machine = re.sub(r"[^a-z0-9]+", "-", figures["device"]["name"].lower()).strip("-")
        path = given.results / f"{datetime.date.today()}-tiles-{machine}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
