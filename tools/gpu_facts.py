"""Measure what needs a GPU: transfers, pinning, stalls and normalization. ``python -m tools.gpu_facts [--device cpu]``.

Each fact is measured separately: if a measurement fails, its error is the result. As a trial run, ``--device cpu``
measures the facts that need no GPU. The results are printed and, with ``--results DIR``, written to ``DIR/facts.json``
after each fact.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardio.device import DevicePrefetcher
from shardio.device.prefetcher import DecodePlace
from shardio.device.streams import Registration
from shardio.device.tiles import normalize

Facts = dict[str, Any]

BATCH = (256, 3, 224, 224)
"""The shape of a batch of images."""

BUFFER_BYTES = int(np.prod(BATCH))
"""The size of a batch of that shape in bytes, as uint8."""

NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def describe_machine(device: torch.device) -> Facts:
    """Return the versions, the GPU and the processors."""
    facts: Facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "processors": len(os.sched_getaffinity(0)),
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "capability": torch.cuda.get_device_capability(device)}
    return facts


def measure_registration(device: torch.device) -> Facts:
    """Compare registering a buffer in place with torch's pinned memory: time, return code and bandwidth."""
    from shardio.loader.buffers import make_memory, map_in_torch

    descriptor = make_memory(BUFFER_BYTES)
    memory = map_in_torch(descriptor, BUFFER_BYTES)
    os.close(descriptor)
    memory[:] = 1  # Allocates its pages.
    cudart, address = torch.cuda.cudart(), memory.ctypes.data
    codes, took_ms = [], []
    for _ in range(5):
        began = time.perf_counter()
        codes.append(int(cudart.cudaHostRegister(address, BUFFER_BYTES, 0)))
        took_ms.append(1000 * (time.perf_counter() - began))
        codes.append(int(cudart.cudaHostUnregister(address)))
    pinned = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    facts: Facts = {"codes": codes, "register_ms": statistics.median(took_ms)}
    facts["pageable_gb_per_s"] = _measure_bandwidth(torch.from_numpy(memory), device)
    Registration(device)(memory)
    facts["is_pinned"] = torch.from_numpy(memory).is_pinned()
    facts["registered_gb_per_s"] = _measure_bandwidth(torch.from_numpy(memory), device)
    facts["torchs_pinned_gb_per_s"] = _measure_bandwidth(pinned, device)
    return facts


def _measure_bandwidth(source: torch.Tensor, device: torch.device) -> float:
    there = torch.empty_like(source, device=device)
    seconds = _time(lambda: there.copy_(source, non_blocking=True), device)
    return len(source) / seconds / 1e9


def check_refused_registration(device: torch.device) -> Facts:
    """Register the same memory twice, then compute: the refused registration must not affect the computation."""
    memory, cudart = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8), torch.cuda.cudart()
    second_half = memory.ctypes.data + memory.nbytes // 2
    first = int(cudart.cudaHostRegister(second_half, memory.nbytes // 2, 0))
    try:
        Registration(device)(memory)  # CUDA refuses the overlapping registration.
        total = int(torch.ones(1000, device=device).sum())
    finally:
        cudart.cudaHostUnregister(second_half)
    check(total == 1000, f"the sum is {total} instead of 1,000")
    return {"first_code": first, "kernel_is_right": True}


def check_plain_iteration(device: torch.device) -> Facts:
    """Iterate without a prefetcher over a loader that a prefetcher has used: none of its buffers may be pinned."""
    with tempfile.TemporaryDirectory() as folder:
        loader = _make_loader(Path(folder), persistent_workers=True)
        for _ in DevicePrefetcher(loader, device):
            pass
        num_pinned = sum(images.is_pinned() for images, _ in loader)
    check(num_pinned == 0, f"{num_pinned} batches are pinned in an iteration without a prefetcher")
    return {"pinned_batches": num_pinned}


def measure_normalization(device: torch.device) -> Facts:
    """Time two ways to normalize a batch, in microseconds, and compare their results."""
    shape = BATCH if device.type == "cuda" else (16, *BATCH[1:])
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).to(memory_format=torch.channels_last)
    mean, std = (torch.tensor(values, device=device).reshape(3, 1, 1) for values in NORMALIZE)
    facts: Facts = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        arguments = (images, 1 / (255 * std), -mean / std, dtype, torch.channels_last)
        one, other = (normalize(*arguments, in_one_kernel=is_one) for is_one in (True, False))
        facts[str(dtype).removeprefix("torch.")] = {
            "one_kernel_us": 1e6 * _time(lambda a=arguments: normalize(*a, in_one_kernel=True), device),  # type: ignore[misc]
            "steps_us": 1e6 * _time(lambda a=arguments: normalize(*a, in_one_kernel=False), device),  # type: ignore[misc]
            "largest_difference": float((one.double() - other.double()).abs().max()),
        }
    return facts


def measure_waiting(device: torch.device) -> Facts:
    """Return the CPU time of a half-second wait for the device, with blocking and with spinning events."""
    facts: Facts = {}
    matrix = torch.ones(4096, 4096, device=device)
    per_step_s = _time(lambda: matrix @ matrix, device)
    for name, is_blocking in (("spinning", False), ("blocking", True)):
        event = torch.cuda.Event(blocking=is_blocking)
        for _ in range(max(int(0.5 / per_step_s), 1)):
            torch.mm(matrix, matrix)
        event.record()
        began, used = time.perf_counter(), time.process_time()
        event.synchronize()
        facts[name] = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - used}
    return facts


def measure_overhead(device: torch.device) -> Facts:
    """Return the time per small batch in microseconds, including waits for the device."""
    batches = [(torch.zeros(8, 3, 32, 32, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64))] * 2000
    took_us = []
    for _ in range(5):
        prefetcher = DevicePrefetcher(batches, device, normalize=NORMALIZE)
        began = time.perf_counter()
        for _ in prefetcher:
            pass
        took_us.append(1e6 * (time.perf_counter() - began) / len(batches))
    return {"median_us": statistics.median(took_us), "min_us": min(took_us), "max_us": max(took_us)}


def measure_stalls(device: torch.device) -> Facts:
    """Measure the stalls of a loader that takes 20 ms per batch, and of a loader whose batches are ready."""

    def load(seconds: float) -> Iterator[torch.Tensor]:
        for _ in range(50):
            time.sleep(seconds)
            yield torch.zeros(4)

    matrix, facts = torch.ones(2048 if device.type == "cuda" else 64, device=device).diag(), Facts()
    for name, seconds, num_products in (("starving", 0.02, 0), ("ready", 0.0, 40)):
        prefetcher, began = DevicePrefetcher(load(seconds), device), time.perf_counter()
        for _ in prefetcher:
            for _ in range(num_products):
                torch.mm(matrix, matrix)
        _synchronize(device)
        stats = prefetcher.stats()
        facts[name] = {
            "elapsed_s": time.perf_counter() - began,
            "data_stall_s": stats.data_stall_s,
            "loader_wait_s": stats.loader_wait_s,
        }
    return facts


def measure_decoding(device: torch.device) -> Facts:
    """Compare nvJPEG's full decodes with shardio's decoding of tiles on the CPU, in images per second."""
    decode_jpeg = importlib.import_module("torchvision.io").decode_jpeg
    with tempfile.TemporaryDirectory() as folder:
        loader = _make_loader(Path(folder), batch_size=64, num_images=600)
        for _ in loader:
            pass
        began = time.perf_counter()
        num_images = sum(len(images) for images, _ in loader)
        tiles_s = time.perf_counter() - began
        contents = [
            torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for path in sorted(Path(folder, "images").rglob("*.jpg"))
        ]
        seconds = _time(lambda: decode_jpeg(contents[:256], device=device), device, num_rounds=5)
    return {
        "nvjpeg_images_per_s": min(256, len(contents)) / seconds,
        "tiles_images_per_s": num_images / tiles_s,
        "tiles_include": "crops to 224, and the start of the workers",
    }


def cross_in_a_short_loop(device: torch.device, decode: DecodePlace = "workers") -> Facts:
    """Copy the batches of a real loader for a few epochs, for NVIDIA's compute-sanitizer; compare the copies' sums."""
    with tempfile.TemporaryDirectory() as folder:
        loader = _make_loader(Path(folder), persistent_workers=True)
        plain, are_equal = _make_loader(Path(folder)), True
        prefetcher = DevicePrefetcher(loader, device, depth=3, decode=decode)
        for epoch in range(3):
            prefetcher.set_epoch(epoch)
            plain.set_epoch(epoch)
            sums = [int(images.long().sum()) for images, _ in prefetcher]
            are_equal &= sums == [int(images.long().sum()) for images, _ in plain]
    check(are_equal, "batches on the device differ from those of the loader")
    return {"sums_are_equal": are_equal}


FACTS: dict[str, Callable[[torch.device], Facts]] = {
    "machine": describe_machine,
    "crossing": cross_in_a_short_loop,
    "tiles": partial(cross_in_a_short_loop, decode="device"),
    "refused_registration": check_refused_registration,
    "plain_iteration": check_plain_iteration,
    "registration": measure_registration,
    "normalization": measure_normalization,
    "stalls": measure_stalls,
    "waiting": measure_waiting,
    "overhead": measure_overhead,
    "decoding": measure_decoding,
}
"""The functions that measure the facts, in order."""

NEED_CUDA = ("refused_registration", "registration", "waiting", "decoding")


def check(is_right: bool, problem: str) -> None:
    """Raise ValueError with the problem if a fact is wrong."""
    if not is_right:
        raise ValueError(problem)


def _make_loader(folder: Path, *, batch_size: int = 8, num_images: int = 60, **options: Any) -> Any:
    import shardio
    from benchmarks.device.decoding import make_photographs
    from shardio.transforms import RandomResizedCrop

    packed = folder / "packed"
    if not packed.exists():
        images = make_photographs(folder / "images", num_classes=2, per_class=num_images // 2)
        shardio.pack(images, packed, jpeg="tile")
    dataset = shardio.ShardDataset(packed, shuffle=True, transform=RandomResizedCrop(224))
    num_workers = max(1, min(8, len(os.sched_getaffinity(0)) - 1))
    return shardio.DataLoader(dataset, batch_size, num_workers=num_workers, **options)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(function: Callable[[], object], device: torch.device, num_rounds: int = 20) -> float:
    """Return the time of one call in seconds, including the device's work."""
    for _ in range(3):
        function()
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(num_rounds):
        function()
    _synchronize(device)
    return (time.perf_counter() - began) / num_rounds


def main(arguments: list[str] | None = None) -> int:
    """Measure the facts. Return 1 if a measurement failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_facts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, help="directory for facts.json")
    parser.add_argument("--only", action="append", choices=list(FACTS), help="measure only this fact; repeatable")
    given = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device()) if given.device == "cuda" else torch.device(given.device)
    found, has_failed = Facts(), False
    for name, measure in FACTS.items():
        if given.only is not None and name not in given.only:
            continue
        if device.type != "cuda" and name in NEED_CUDA:
            found[name] = "needs CUDA"
            continue
        try:
            found[name] = measure(device)
        except Exception as error:  # An error must not prevent the other measurements.
            traceback.print_exc()
            found[name], has_failed = f"failed: {type(error).__name__}: {error}", True
        print(f"{name}: {json.dumps(found[name], default=str)}", flush=True)
        if given.results is not None:
            (given.results / "facts.json").write_text(json.dumps(found, indent=1, default=str))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
