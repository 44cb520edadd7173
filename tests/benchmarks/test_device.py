"""The device benchmark computes its figures from profiles, and runs without a GPU."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.bench_device import open_source, read_arguments
from benchmarks.device.copies import Activity, Copy, Interval, merge, overlap, read_trace
from benchmarks.device.feeds import ON_DEVICE, RESIDENT, SHARDIO, TORCH, Batch, check_feed, make_feeds, open_memory
from benchmarks.device.networks import make_network
from benchmarks.device.rounds import Group, run_group
from benchmarks.device.tables import judge, make_table
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_overlaps_are_those_that_are_counted_cell_by_cell() -> None:
    random, cells = np.random.default_rng(0), np.arange(70)

    def draw_intervals() -> list[Interval]:
        starts, lengths = random.integers([[50], [12]], size=(2, random.integers(0, 9)))
        return [(float(start), float(start + length)) for start, length in zip(starts, lengths, strict=True)]

    def on_grid(intervals: list[Interval]) -> Any:
        return np.array([any(start <= cell < stop for start, stop in intervals) for cell in cells])

    for _ in range(100):
        ours, theirs = draw_intervals(), draw_intervals()
        assert overlap(ours, theirs) == overlap(theirs, ours) == (on_grid(ours) & on_grid(theirs)).sum()
        merged = merge(ours)
        assert (on_grid(merged) == on_grid(ours)).all()
        assert all(before[1] < after[0] for before, after in pairwise(merged))


def test_a_trace_says_what_was_copied_and_computed() -> None:
    # The events have the format of torch's profiler.
    pinned, pageable = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 100.0, "dur": 3.0, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 100.0, "dur": 1000.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "add", "ts": 1200.0, "dur": 300.0, "args": {"stream": 7}},
        # Kernels run during the first 900 µs of this copy, which takes 1,000 µs.
        {"ph": "X", "cat": "gpu_memcpy", "name": pinned, "ts": 200.0, "dur": 1000.0, "args": {"bytes": 25_000_000}},
        {"ph": "X", "cat": "gpu_memcpy", "name": pageable, "ts": 1300.0, "dur": 2.0, "args": {"bytes": 2048}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "ts": 0, "dur": 9, "args": {}},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 200.0, "dur": 9.0, "args": {"bytes": 8}},
    ]
    activity = read_trace({"traceEvents": events})
    assert activity.copies == [Copy((200, 1200), 25_000_000, False), Copy((1300, 1302), 2048, True)]
    assert activity.kernels == [(100, 1100), (1200, 1500)]
    assert activity.hidden_share == pytest.approx(902 / 1002)
    assert activity.gb_per_s == pytest.approx(25), "only the large copy counts"
    assert activity.pageable_bytes == 2048
    idle = Activity(kernels=[(0, 1)])
    assert (idle.hidden_share, idle.gb_per_s, idle.pageable_bytes) == (None, None, 0)


@pytest.mark.parametrize(
    ("name", "number"), [("resnet18", 11_689_512), pytest.param("resnet50", 25_557_032, marks=pytest.mark.slow)]
)
def test_the_networks_have_as_many_parameters_as_torchvisions(name: str, number: int) -> None:
    """The expected numbers are from torchvision's documentation, so the test does not need torchvision."""
    network, _ = make_network(name)
    assert sum(parameter.numel() for parameter in network.parameters()) == number
    narrow, _ = make_network(name, width=8)
    assert narrow(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


def test_all_feeds_give_the_same_and_another_one_is_refused() -> None:
    source = open_memory(3, 4, CPU)
    feeds, _ = make_feeds(source, CPU)
    for feed in feeds.values():
        check_feed(feed, source, CPU, 4)
    darker: Any = ((images - 0.1, labels) for images, labels in feeds[SHARDIO])
    with pytest.raises(ValueError, match=r"differ by up to 0\.1"):
        check_feed(darker, source, CPU, 4)


class _EndsEarly:
    num_uses = 0

    def __init__(self, feed: Any) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[Batch]:
        self.num_uses += 1
        yield from islice(self.feed, 2)
        raise RuntimeError("no more shared memory")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one torch thread: several threads are very slow on busy processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_feed_that_fails_is_left_out_and_named() -> None:
    settings, path = read_arguments(["--device", "cpu", "--steps", "1"])
    assert path is None
    source = open_memory(2, 2, CPU)
    feeds, _ = make_feeds(source, CPU)
    failing = _EndsEarly(feeds[TORCH])
    chosen = {RESIDENT: feeds[RESIDENT], SHARDIO: feeds[SHARDIO], TORCH: failing}
    group = run_group("resnet18", source, chosen, settings)
    assert failing.num_uses == 2, "one use to examine it, and one in the first round"
    assert group.problems == {TORCH: "RuntimeError: no more shared memory"}
    assert len(group.feeds[SHARDIO]["images_per_s"]) == len(group.feeds[RESIDENT]["images_per_s"]) == settings.rounds
    assert "failed: RuntimeError: no more shared memory" in make_table(group)


def make_group(shardio: float, loader: float) -> Group:
    """Return a group of 3 rounds with made-up figures, in which the resident feed yields 1,000 images/s."""
    others: dict[str, list[Any]] = {"stall_share": [0.01, 0.03, 0.025], "hidden_share": [0.97, 0.96, 0.9]}
    others |= {"copy_gb_per_s": [18.0, 20.0, 24.5], "pageable_bytes": [0, 0, 0]}
    group = Group(model="resnet50", source="photographs", network="none")
    speeds = {RESIDENT: 1000.0, SHARDIO: shardio}
    group.feeds = {name: {"images_per_s": [speed] * 3, **others} for name, speed in speeds.items()}
    group.loaders_alone, group.pinned_gb_per_s = {SHARDIO: [loader] * 3}, [25.0] * 3
    group.process_us = {ON_DEVICE: [8.0, 9.0, 12.0]}
    return group


@pytest.mark.parametrize(
    ("shardio", "loader", "said"),
    [(985, 2000, "met"), (975, 2000, "missed"), (700, 710, "missed (does not count: decoding is the bottleneck)")],
)
def test_targets_are_judged_by_medians_where_decoding_keeps_up(shardio: float, loader: float, said: str) -> None:
    speed, process, stall, hidden, bandwidth = judge(make_group(shardio, loader))
    assert said in speed
    assert process.endswith("at most 10.0: 9.000 (8.000 to 12.000), met")
    assert stall.endswith("at most 0.02: 0.025 (0.010 to 0.030), missed")
    assert hidden.endswith("0.960 (0.900 to 0.970), met")
    assert bandwidth.endswith("0.800 (0.720 to 0.980), missed")


@pytest.mark.slow
def test_it_runs_on_a_cpu_and_keeps_all_figures(images: Path, tmp_path: Path) -> None:
    settings, _ = read_arguments(["--device", "cpu"])
    source = open_source("photographs", tmp_path, replace(settings, photos=(1, 1)))  # Photographs are made if needed.
    assert [path.name for path in (tmp_path / "made").rglob("*.jpg")] == ["0000.jpg"]
    batch, labels = next(iter(make_feeds(source, CPU)[0][SHARDIO]))
    assert (batch.shape[1:], labels.tolist()) == ((3, 224, 224), [0, 0])
    results = tmp_path / "results"
    command = ["-m", "benchmarks.bench_device", images, "--device", "cpu", "--model", "resnet18", "--results", results]
    command += ["--rounds", 1, "--steps", 1]
    with tempfile.TemporaryDirectory() as temporary:  # tmp_path is too long for the names of sockets.
        environment = {**os.environ, "TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        done = run_python(*command, cwd=ROOT, environment=environment)
        assert done.returncode == 0, done.stderr
        assert list(Path(temporary).iterdir()) == []
    assert not {"met", "missed"} & set(done.stdout.split()), "results on a CPU are not compared with the targets"
    (path,) = results.iterdir()
    assert path.name.endswith("-device-cpu.json")
    content = json.loads(path.read_text())
    found = [(group["model"], group["source"]) for group in content["groups"]]
    assert found == [("resnet18", "memory"), ("resnet18", "photographs")]
    for group in content["groups"]:
        assert set(group["feeds"]) >= {"resident", "resident-uint8", "shardio", "torch"}
        for figures in group["feeds"].values():
            assert {len(rounds) for rounds in figures.values()} == {content["settings"]["rounds"]}
            assert all(speed > 0 for speed in figures["images_per_s"])
        assert len(group["process_us"]) == (3 if group["source"] == "photographs" else 0)
        for rounds in group["process_us"].values():
            assert len(rounds) == content["settings"]["rounds"]
            assert all(process_us > 0 for process_us in rounds)
