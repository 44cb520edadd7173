"""How fast does a loader read from an object store? shardio, WebDataset and MosaicML Streaming read photographs.

``python -m benchmarks.bench_remote PHOTOS``. A real object store (SeaweedFS) stands behind a proxy that adds 20 ms to
each request and limits each connection to 200 MB/s. Store and proxy have one processor, the loaders another one, so
that what the store costs is not part of what the loaders cost. Each candidate reads two epochs with two workers in a
new process and with an empty cache, and the same from local files; the candidates take turns. All decode with their
usual tools, crop and resize to 224 pixels; the ratio to the local rate shows what the network costs.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

import shardio
from benchmarks.bench_pack import write_mosaic
from benchmarks.timing import ratios, summarise
from shardio.models import import_library
from shardio.storage import walk_files
from tests.faults.proxy import FaultProxy, Script
from tests.servers.seaweedfs import run_seaweedfs
from tests.servers.server import Server
from tests.storage.uploading import upload

BATCH_SIZE = 64
MAX_TRIES = 3
NUM_WORKERS = 2
LOADERS_ON, STORE_ON = {0}, {1}
"""The processors of the loaders, and of the store and the proxy."""

STORE = Script(latency_s=0.02, connection_bytes_per_s=200e6)

Loader = Callable[[str, Path, dict[str, str]], Callable[[int], Iterable[Any]]]
"""A function of the place of the data, an empty folder for a cache, and the store's options; "" is the local data. It
returns a function from an epoch's number to its batches."""


def load_shardio(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read packed shards."""
    from shardio.transforms import RandomResizedCrop

    dataset = shardio.ShardDataset(
        source, shuffle=True, transform=RandomResizedCrop(224), storage_options=options, cache=cache
    )
    loader = shardio.DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)

    def epoch(number: int) -> Iterable[Any]:
        loader.set_epoch(number)
        return loader

    return epoch


def load_webdataset(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read the same shards with WebDataset: a shuffle buffer of 1,000 samples; remote ones by curl into its cache."""
    wds: Any = importlib.import_module("webdataset")
    import torch

    transform = _usual_transform()
    names = sorted(path.name for path in Path(options["local"]).glob("*.tar"))
    cache_dir = str(cache) if "://" in source else None
    dataset = (
        wds.WebDataset([f"{source}/{name}" for name in names], shardshuffle=100, cache_dir=cache_dir, nodesplitter=None)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform, lambda label: label)
    )
    loader: Iterable[Any] = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    return lambda number: loader


def load_mosaic(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read MDS with StreamingDataset."""
    import io

    import torch
    from PIL import Image

    import_library("torchvision")  # streaming imports it.
    streaming: Any = importlib.import_module("streaming")
    transform = _usual_transform()

    class Dataset(streaming.StreamingDataset):  # type: ignore[misc]  # It has no types.
        def __getitem__(self, index: int) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            return transform(Image.open(io.BytesIO(sample["jpg"])).convert("RGB")), sample["cls"]

    is_remote = "://" in source
    dataset = Dataset(
        remote=source if is_remote else None,
        local=str(cache / "mds") if is_remote else source,
        shuffle=True,
        batch_size=BATCH_SIZE,
    )
    loader: Iterable[Any] = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    return lambda number: loader


def _usual_transform() -> Callable[[Any], Any]:
    import_library("torchvision")
    transforms: Any = importlib.import_module("torchvision.transforms.v2")
    found: Callable[[Any], Any] = transforms.Compose(
        [transforms.RandomResizedCrop(224, antialias=True), transforms.PILToTensor()]
    )
    return found


LOADERS: dict[str, Loader] = {"shardio": load_shardio, "webdataset": load_webdataset, "mosaic": load_mosaic}

app = typer.Typer(add_completion=False)


@app.command()
def main(
    photos: Annotated[Path, typer.Argument(help="Class folders of JPEGs.")],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each candidate.")] = 3,
    run: Annotated[str | None, typer.Option(help="For this program itself.", hidden=True)] = None,
) -> None:
    """Print images per second from local files and from the emulated store."""
    if run is not None:
        print(json.dumps(_measure(**json.loads(run))), flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="shardio-bench-") as name:
        folder = Path(name)
        shardio.pack(photos, folder / "shards", max_shard_size="64MiB")
        write_mosaic(photos, folder / "mds")
        os.sched_setaffinity(0, STORE_ON)  # What this process starts has the same processor.
        with run_seaweedfs(folder / "server") as server:
            for kind in ("shards", "mds"):
                upload(folder / kind, f"{server.url}/{kind}", server.options)
            with FaultProxy(server.host, server.port, STORE) as proxy:
                _compare(folder, server.behind(proxy.host, proxy.port), rounds, len(list(walk_files(photos))))


def _compare(folder: Path, server: Server, rounds: int, num_images: int) -> None:
    figures: dict[tuple[str, str, str], list[float]] = {}
    names = list(LOADERS)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            kind = "mds" if name == "mosaic" else "shards"
            # WebDataset reads by HTTP, because it has no client for S3.
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
        print(f"{name}, {place}, {what}: {summarise(found, digits)} {unit}")
    for name in names:
        for what in ("epoch 1", "epoch 2"):
            compared = ratios(figures[name, "store", what], figures[name, "local", what])
            print(f"{name}, {what}: store / local {summarise(compared, 2)}")


def _run(name: str, source: str, options: dict[str, str], server: Server, cache: Path) -> dict[str, float]:
    """Return the seconds of two epochs, and of the first batch, in a new process."""
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
        print(f"{name} failed with exit code {done.returncode}, see its message above: trying again", flush=True)
    sys.exit(f"{name} failed {MAX_TRIES} times")


def _measure(name: str, source: str, options: dict[str, str], cache: str) -> dict[str, float]:
    os.sched_setaffinity(0, LOADERS_ON)
    if name == "shardio":
        options.pop("local")
    epochs = LOADERS[name](source, Path(cache), options)
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
