"""Compare the cost of packing with shardio, with tar, and with the writers of other formats.

``python -m benchmarks.bench_pack PHOTOS``. All candidates pack the same photographs and take turns. Each
candidate is a whole process, and its startup is included. A warm-up round fills the page cache. CPU time includes the
process and all its children. The wall time of ``shardio pack`` includes syncing every shard to disk, a step that the
other tools omit.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.timing import ratios, summarize
from shardio.libraries import import_library
from shardio.storage import walk_files

SHARD_SIZE = 96 * 2**20
"""The size of a shard in bytes, small enough that several workers have shards to write."""


def read_samples(source: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield the key, the content and the label of each image in class folders."""
    classes = {path.name: i for i, path in enumerate(sorted(source.iterdir()))}
    for path in walk_files(source):
        key = path.relative_to(source).with_suffix("")
        yield str(key), path.read_bytes(), classes[path.parent.name]


def write_webdataset(source: Path, out: Path) -> None:
    """Pack with WebDataset's ShardWriter."""
    wds: Any = importlib.import_module("webdataset")
    out.mkdir()
    with wds.ShardWriter(str(out / "%06d.tar"), maxsize=SHARD_SIZE, maxcount=10**9, verbose=0) as writer:
        for key, content, label in read_samples(source):
            writer.write({"__key__": key, "jpg": content, "cls": label})


def write_mosaic(source: Path, out: Path) -> None:
    """Pack with MosaicML's MDSWriter, which also writes hashes."""
    import_library("torchvision")  # streaming imports it.
    streaming: Any = importlib.import_module("streaming")
    columns = {"key": "str", "jpg": "bytes", "cls": "int"}
    with streaming.MDSWriter(out=str(out), columns=columns, hashes=["xxh64"], size_limit=SHARD_SIZE) as writer:
        for key, content, label in read_samples(source):
            writer.write({"key": key, "jpg": content, "cls": label})


def read_one(path: str) -> dict[str, Any]:
    """Return the sample in a file. LitData calls this function in its workers."""
    return {"key": path, "jpg": Path(path).read_bytes(), "cls": 0}


def write_litdata(source: Path, out: Path) -> None:
    """Pack with LitData's optimize, using two workers."""
    import_library("torchvision")  # litdata imports it.
    litdata: Any = importlib.import_module("litdata")
    litdata.optimize(
        fn=read_one,
        inputs=list(map(str, walk_files(source))),
        output_dir=str(out),
        chunk_bytes=SHARD_SIZE,
        num_workers=2,
        verbose=False,
    )


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "webdataset": write_webdataset,
    "mosaic": write_mosaic,
    "litdata": write_litdata,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The cost of one run of a candidate: CPU time and wall time in µs per image."""

    cpu_us: float
    wall_us: float


def make_commands(source: Path, out: Path) -> dict[str, list[str]]:
    """Return the candidates' command lines."""
    python, module = [sys.executable, "-m"], "benchmarks.bench_pack"
    pack = [*python, "shardio", "pack", str(source), str(out), "--quiet", "--max-shard-size", str(SHARD_SIZE)]
    commands = {
        "tar cf": ["tar", "cf", str(out), "-C", str(source.parent), source.name],
        "shardio, no check, 1 worker": [*pack, "--no-check", "--num-workers", "1"],
        "shardio, no check, 2 workers": [*pack, "--no-check", "--num-workers", "2"],
        "shardio, 2 workers": [*pack, "--num-workers", "2"],
        "shardio, tile, 2 workers": [*pack, "--num-workers", "2", "--jpeg", "tile"],
    }
    modules = {"webdataset": "webdataset", "mosaic": "streaming", "litdata": "litdata"}
    for name, package in modules.items():
        if importlib.util.find_spec(package) is not None:
            commands[name] = [*python, module, str(source), "--write", name, "--out", str(out)]
    return commands


def measure(command: list[str], num_images: int) -> Run:
    """Run a command and return its cost."""
    os.sync()  # Writes from earlier runs must not slow this run down.
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Run(cpu_us=1e6 * (usage.ru_utime + usage.ru_stime) / num_images, wall_us=1e6 * wall / num_images)


def main(
    photos: Annotated[Path, typer.Argument(help="Class folders of JPEGs.")],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each candidate.")] = 5,
    write: Annotated[str | None, typer.Option(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Pack photographs with each candidate in turn, and print CPU time and speed."""
    if write is not None and out is not None:
        WRITERS[write](photos, out)
        return
    num_images = sum(1 for _ in walk_files(photos))
    with tempfile.TemporaryDirectory(prefix="shardio-bench-", dir=photos.resolve().parent) as name:
        target = Path(name) / "out"
        commands = make_commands(photos.resolve(), target)
        runs: dict[str, list[Run]] = {candidate: [] for candidate in commands}
        for round_number in range(rounds + 1):
            for candidate, command in commands.items():
                run = measure(command, num_images)
                shutil.rmtree(target) if target.is_dir() else target.unlink()
                if round_number:
                    runs[candidate].append(run)
    print(f"{num_images} photographs, {rounds} rounds: median (range)")
    reference = [run.cpu_us for run in runs["tar cf"]]
    for candidate, measured in runs.items():
        cpu, speed = [run.cpu_us for run in measured], [1e6 / run.wall_us for run in measured]
        ratio = summarize(ratios(cpu, reference), 2)
        print(f"{candidate:30} {summarize(cpu)} CPU µs/image, {ratio} × tar; {summarize(speed)} images/s")


if __name__ == "__main__":
    typer.run(main)
