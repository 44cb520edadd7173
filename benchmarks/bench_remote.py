"""Compare how fast loaders read photographs from an object store.

``python -m benchmarks.bench_remote PHOTOS`` compares shardio with WebDataset, MosaicML Streaming and LitData. With
``--raw``, the benchmark compares the loaders that read single images: shardio's ImageFolder and LitData's
StreamingRawDataset.

A real object store (SeaweedFS) is behind a proxy that adds 20 ms to each request and limits each connection to 200
MB/s. The store and the proxy run on one processor and the loaders on another, so the loaders' cost does not include the
store's. The candidates take turns. Each loader reads two epochs with two workers in a new process and with an empty
cache, once from local files and once from the store. Each loader decodes with its usual tool, then crops and resizes to
224 pixels. The ratio to the local rate shows the cost of the network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import shardio
from benchmarks.bench_pack import write_mosaic
from benchmarks.remote_loaders import PACKED, RAW, write_litdata
from benchmarks.timing import ratios, summarize
from shardio.storage import walk_files
from tests.faults.proxy import FaultProxy, Script
from tests.servers.server import Server, upload
from tests.servers.stores import run_seaweedfs

MAX_TRIES = 3
LOADERS_ON, STORE_ON = {0}, {1}
"""The processors that run the loaders, and those that run the store and the proxy."""

STORE = Script(latency_s=0.02, connection_bytes_per_s=200e6)

WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "shards": lambda photos, out: shardio.pack(photos, out, max_shard_size="64MiB"),
    "mds": write_mosaic,
    "litdata": write_litdata,
    "images": shutil.copytree,
}
"""Functions that write the photographs in each format."""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    photos: Annotated[Path, typer.Argument(help="Class folders of JPEGs.")],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each candidate.")] = 3,
    raw: Annotated[bool, typer.Option("--raw", help="Compare loaders that read single images.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run only this candidate; may be repeated.")] = None,
    run: Annotated[str | None, typer.Option(help="Used by this program itself.", hidden=True)] = None,
) -> None:
    """Print the images per second read from local files and from the emulated store."""
    if run is not None:
        print(json.dumps(_measure(**json.loads(run))), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="shardio-bench-") as name:
        folder = Path(name)
        candidates = RAW if raw else PACKED
        names = [name for name in candidates if not only or name in only]
        kinds = {candidates[name][0] for name in names}
        for kind in kinds:
            WRITERS[kind](photos, folder / kind)
        os.sched_setaffinity(0, STORE_ON)  # Child processes run on the same processor.
        with run_seaweedfs(folder / "server") as server:
            for kind in kinds:
                upload(folder / kind, f"{server.url}/{kind}", server.options)
            with FaultProxy(server.host, server.port, STORE) as proxy:
                _compare(names, folder, server.behind(proxy.host, proxy.port), rounds, len(list(walk_files(photos))))


def _compare(names: list[str], folder: Path, server: Server, rounds: int, num_images: int) -> None:
    figures: dict[tuple[str, str, str], list[float]] = {}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            kind, _ = {**PACKED, **RAW}[name]
            # WebDataset reads over HTTP, because it has no S3 client.
            root = f"http://{server.host}:{server.port}/{server.url[5:]}" if name == "webdataset" else server.url
            for place, source in {"local": str(folder / kind), "store": f"{root}/{kind}"}.items():
                seconds = _run(name, source, {**server.options, "local": str(folder / kind)}, server, folder / "cache")
                print(f"round {number + 1}: {name}, {place}: {seconds}", flush=True)
                for what, taken_s in seconds.items():
                    figure = num_images / taken_s if what.startswith("epoch") else taken_s
                    figures.setdefault((name, place, what), []).append(figure)
    print()
    for (name, place, what), found in figures.items():
        unit, digits = ("images/s", 0) if what.startswith("epoch") else ("s", 2)
        print(f"{name}, {place}, {what}: {summarize(found, digits)} {unit}")
    for name in names:
        for what in ("epoch 1", "epoch 2"):
            compared = ratios(figures[name, "store", what], figures[name, "local", what])
            print(f"{name}, {what}: store / local {summarize(compared, 2)}")


def _run(name: str, source: str, options: dict[str, str], server: Server, cache: Path) -> dict[str, float]:
    """Return the times, in seconds, that two epochs and the first batch take in a new process."""
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    environment = {
        **os.environ,
        "S3_ENDPOINT_URL": server.options["endpoint"],
        "AWS_ACCESS_KEY_ID": server.options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": server.options["secret_access_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    arguments = json.dumps({"name": name, "source": source, "options": options, "cache": str(cache)})
    command = [sys.executable, "-m", "benchmarks.bench_remote", "-", "--run", arguments]
    for _ in range(MAX_TRIES):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            return found
        print(f"{name} failed with exit code {done.returncode} (see its message above): trying again", flush=True)
    sys.exit(f"{name} failed {MAX_TRIES} times")


def _measure(name: str, source: str, options: dict[str, str], cache: str) -> dict[str, float]:
    os.sched_setaffinity(0, LOADERS_ON)
    if name.startswith("shardio"):
        options.pop("local")
    _, load = {**PACKED, **RAW}[name]
    epochs = load(source, Path(cache), options)
    seconds: dict[str, float] = {}
    for number in range(2):
        began = time.perf_counter()
        for batch in epochs(number):
            assert len(batch[0])
            seconds.setdefault("first batch", time.perf_counter() - began)
        seconds[f"epoch {number + 1}"] = time.perf_counter() - began
    return seconds


if __name__ == "__main__":
    app()
