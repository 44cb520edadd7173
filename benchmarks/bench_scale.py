"""Measure how shardio and peers scale: tiny samples, arrays, many tars, many files, batches, shards sorted by class.

``python -m benchmarks.bench_scale`` creates the datasets in a temporary folder. CPU times are those of one process
without workers; shardio and its peer take turns. ``--only NAME`` runs only one of the measurements.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import shardio
from benchmarks.bench_shuffle import Case, _webdataset_rank
from benchmarks.loaders.peers_streaming import import_streaming
from benchmarks.timing import alternate, ratios, summarize
from shardio.libraries import import_library, import_torchvision
from shardio.order import EpochOrder, choose_settings, divide_among_ranks
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import Manifest, index_tar, open_table, write_manifest, write_shard, write_tar_lists
from shardio.storage import parse_location

ROUNDS = 5


def take_turns(candidates: Mapping[str, Callable[[], Any]], count: int, unit: str) -> None:
    """Print the CPU time of each candidate in µs, divided by ``count``, and its ratio to shardio's time."""
    runs = {name: (lambda _, run=run: run()) for name, run in candidates.items()}
    report(alternate(runs, chunks=[count], rounds=ROUNDS), unit)


def report(times: Mapping[str, list[float]], unit: str) -> None:
    """Print the CPU time of each candidate in µs, and the ratios to shardio's."""
    for name, found in times.items():
        compared = f"; {summarize(ratios(found, times['shardio']), 2)} times shardio" if name != "shardio" else ""
        print(f"  {name}: {summarize(found, 1)} µs per {unit}{compared}", flush=True)


def exhaust(values: Iterable[Any]) -> None:
    """Consume all values."""
    for _ in values:
        pass


TINY_BYTES, TINY_BATCH, NUM_TINY_SHARDS = 100, 256, 128


def write_tiny_tars(data: Path, shard_samples: int) -> None:
    """Write one shard of tiny samples, and link it under 127 other names."""
    samples = (
        Sample(key=f"{number:08d}", fields={"bin": b"x" * TINY_BYTES, "cls": b"7"}, origin="")
        for number in range(shard_samples)
    )
    entry, fields = write_shard(parse_location(data / "shard-000000.tar"), samples)
    entries = [dataclasses.replace(entry, name=f"shard-{number:06d}.tar") for number in range(NUM_TINY_SHARDS)]
    for other in entries[1:]:
        for suffix in ("", ".idx"):
            os.link(data / f"{entry.name}{suffix}", data / f"{other.name}{suffix}")
    write_manifest(parse_location(data / "shardio.json"), Manifest(shards=tuple(entries), fields=fields))


def write_tiny_mds(data: Path, shard_samples: int) -> None:
    """Write one shard of tiny samples with MosaicML Streaming, and link it under 127 other names."""
    import_torchvision()  # Otherwise, a stand-in for torchvision would remain for the next measurements.
    with import_streaming().MDSWriter(out=str(data), columns={"bin": "bytes", "cls": "int"}, size_limit=None) as writer:
        for _ in range(shard_samples):
            writer.write({"bin": b"x" * TINY_BYTES, "cls": 7})
    index = json.loads((data / "index.json").read_text())
    (shard,) = index["shards"]
    name = shard["raw_data"]["basename"]
    for number in range(1, NUM_TINY_SHARDS):
        other = f"shard.{number:05d}.mds"
        os.link(data / name, data / other)
        index["shards"].append({**shard, "raw_data": {**shard["raw_data"], "basename": other}})
    (data / "index.json").write_text(json.dumps(index))


def write_tiny_chunks(data: Path, shard_samples: int) -> None:
    """Write one chunk of tiny samples with LitData, and link it under 127 other names."""
    import_torchvision()  # LitData imports torchvision, whose compiled part may not match torch.
    writer: Any = importlib.import_module("litdata.streaming.writer").BinaryWriter(str(data), chunk_size=shard_samples)
    for number in range(shard_samples):
        writer[number] = {"bin": b"x" * TINY_BYTES, "cls": 7}
    writer.done()
    writer.merge()
    index = json.loads((data / "index.json").read_text())
    (chunk,) = index["chunks"]
    for number in range(1, NUM_TINY_SHARDS):
        other = f"chunk-0-{number}.bin"
        os.link(data / chunk["filename"], data / other)
        index["chunks"].append({**chunk, "filename": other})
    (data / "index.json").write_text(json.dumps(index))


def read_tiny_tars(data: Path) -> Iterator[object]:
    """Yield batches of tiny samples in the default shuffled order."""
    table = open_table(data)
    sizes = table.manifest.shard_sizes
    order = EpochOrder(sizes, choose_settings(sizes, shuffle=True, seed=0), 0)
    reader = SampleReader(table)
    for start in range(0, order.num_samples, TINY_BATCH):
        yield reader.read(order.samples_at(np.arange(start, start + TINY_BATCH)), ("bin", "cls"))


def read_tiny_webdataset(data: Path) -> Iterator[object]:
    """Yield samples of shuffled shards from WebDataset's buffer of 10,000 samples."""
    wds: Any = importlib.import_module("webdataset")
    tars = sorted(map(str, data.glob("*.tar")))
    yield from wds.WebDataset(tars, shardshuffle=NUM_TINY_SHARDS).shuffle(10_000, initial=10_000)


def read_tiny_mds(data: Path) -> Iterator[object]:
    """Yield shuffled samples from MosaicML's StreamingDataset."""
    yield from import_streaming().StreamingDataset(local=str(data), batch_size=TINY_BATCH, shuffle=True)


def read_tiny_chunks(data: Path) -> Iterator[object]:
    """Yield shuffled samples from LitData's StreamingDataset, which shuffles chunks and the samples in each chunk."""
    yield from importlib.import_module("litdata").StreamingDataset(str(data), shuffle=True)


TINY_READERS: dict[str, tuple[str, Callable[[Path], Iterator[object]], int]] = {
    "shardio": ("tars", read_tiny_tars, TINY_BATCH),
    "WebDataset, buffer of 10,000": ("tars", read_tiny_webdataset, 1),
    "MosaicML": ("mds", read_tiny_mds, 1),
    "LitData": ("chunks", read_tiny_chunks, 1),
}
"""Each reader's format, the function that yields its samples, and the number of samples that it yields at a time."""


def measure_tiny_samples(folder: Path) -> None:
    """Read tiny samples in shuffled order from 128 shards, with more and more samples per shard."""
    for shard_samples in (1_000, 10_000, 100_000, 1_000_000):
        # With a million samples in each shard, MosaicML's order of 128 million samples needs too much memory.
        names = list(TINY_READERS) if shard_samples <= 100_000 else ["shardio"]
        formats = {"tars": write_tiny_tars, "mds": write_tiny_mds, "chunks": write_tiny_chunks}
        for name in {TINY_READERS[reader][0] for reader in names}:
            data = folder / f"{name}-{shard_samples}"
            data.mkdir()
            formats[name](data, shard_samples)
        print(f" {shard_samples:,} samples in each of {NUM_TINY_SHARDS} shards")
        with ExitStack() as processes:
            # Each reader has its own process: its background threads must not count toward another reader's time.
            readers = {
                name: processes.enter_context(serve_tiny(name, folder / f"{TINY_READERS[name][0]}-{shard_samples}"))
                for name in names
            }
            times: dict[str, list[float]] = {name: [] for name in readers}
            for number in range(ROUNDS + 1):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    readers[name].send(32 * TINY_BATCH)
                    taken_s = readers[name].recv()
                    if number:
                        times[name].append(1e6 * taken_s / (32 * TINY_BATCH))
        report(times, "sample")


@contextmanager
def serve_tiny(name: str, data: Path) -> Iterator[Connection]:
    """Start a process that reads tiny samples. Yield a connection: send a number, receive the CPU time in seconds."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(name, data, theirs), daemon=True)
    process.start()
    yield ours
    process.kill()
    process.join()


def _answer(name: str, data: Path, connection: Connection) -> None:
    _, read, num_at_once = TINY_READERS[name]
    samples = read(data)
    while True:
        num_samples = connection.recv()
        began = time.process_time()
        for _ in range(num_samples // num_at_once):
            next(samples)
        connection.send(time.process_time() - began)


def measure_sequence(folder: Path) -> None:
    """Read 200,000 samples of 1 KiB in sequence, from tars that WebDataset wrote."""
    wds: Any = importlib.import_module("webdataset")
    data, random = folder / "sequence", np.random.default_rng(0)
    data.mkdir()
    with wds.ShardWriter(str(data / "%05d.tar"), maxcount=10_000, verbose=0) as writer:
        for number in range(200_000):
            writer.write({"__key__": f"{number:08d}", "bin": random.bytes(1024)})
    tars = sorted(map(str, data.glob("*.tar")))
    candidates: dict[str, Callable[[], Any]] = {
        # A new dataset compares each sample with the index again.
        "shardio": lambda: exhaust(shardio.ShardDataset(data, fields="bin")),
        "shardio.DataLoader, batches of 256": lambda: exhaust(
            shardio.DataLoader(shardio.ShardDataset(data, fields="bin"), 256, num_workers=0)
        ),
        "WebDataset": lambda: exhaust(wds.WebDataset(tars, shardshuffle=False)),
    }
    take_turns(candidates, 200_000, "sample")


class Memmap(torch.utils.data.Dataset[torch.Tensor]):
    """The rows of one npy file."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index].copy())


def measure_arrays(folder: Path) -> None:
    """Read shuffled arrays of 2,048 tokens in batches of 64; torch reads rows of one large file."""
    random = np.random.default_rng(0)
    rows = random.integers(0, 50_000, (40_000, 2048)).astype(np.int32)
    np.save(folder / "tokens.npy", rows)
    with shardio.ShardWriter(folder / "arrays", max_shard_samples=4000) as writer:
        for number, row in enumerate(rows):
            file = io.BytesIO()
            np.save(file, row)
            writer.write({"__key__": f"{number:06d}", "npy": file.getvalue()})
    ours = shardio.DataLoader(shardio.ShardDataset(folder / "arrays", fields="npy", shuffle=True), 64, num_workers=0)
    theirs = torch.utils.data.DataLoader(Memmap(folder / "tokens.npy"), 64, shuffle=True)
    take_turns({"shardio": lambda: exhaust(ours), "torch, memmap": lambda: exhaust(theirs)}, len(rows), "sample")


def measure_tars(folder: Path) -> None:
    """Open 3,000 small tars that other tools packed, with the list that ``shardio index`` writes, and read them."""
    wds: Any = importlib.import_module("webdataset")
    data = folder / "tars"
    data.mkdir()
    for number in range(3000):
        with tarfile.open(data / f"{number:05d}.tar", "w") as tar:
            for row in range(3):
                member = tarfile.TarInfo(f"{number:05d}{row}.txt")
                member.size = 4
                tar.addfile(member, io.BytesIO(b"%04d" % number))
    tars = sorted(data.glob("*.tar"))
    write_tar_lists([index_tar(parse_location(path)) for path in tars])

    def list_members() -> None:
        for path in tars:
            with tarfile.open(path) as tar:
                tar.getmembers()

    print(" finding the samples of all tars")
    take_turns({"shardio": lambda: open_table(data), "tarfile": list_members}, 3000, "tar")
    print(" opening and reading all tars in sequence")
    candidates: dict[str, Callable[[], Any]] = {
        "shardio": lambda: exhaust(shardio.ShardDataset(data, fields="txt")),
        "WebDataset": lambda: exhaust(wds.WebDataset(list(map(str, tars)), shardshuffle=False)),
    }
    take_turns(candidates, 3000, "tar")


def measure_folder(folder: Path) -> None:
    """List an ImageFolder of 100,000 files, and then one of 1,000,000."""
    import_library("torchvision")
    torchvision: Any = importlib.import_module("torchvision.datasets")
    for num_files, num_classes in ((100_000, 100), (1_000_000, 1000)):
        images = folder / f"images-{num_files}"
        for label in range(num_classes):
            own = images / f"class-{label:04d}"
            own.mkdir(parents=True)
            first = own / "img_0000000.jpg"
            first.write_bytes(b"x")
            for number in range(1, num_files // num_classes):
                os.link(first, own / f"img_{number:07d}.jpg")
        print(f" {num_files:,} files")
        for name, load in {
            "shardio": "from shardio import ImageFolder",
            "torchvision": "from shardio.libraries import import_library; import_library('torchvision'); "
            "from torchvision.datasets import ImageFolder",
        }.items():
            code = f"from resource import *; {load}; before = getrusage(0).ru_maxrss; ImageFolder({str(images)!r}); "
            code += "print((getrusage(0).ru_maxrss - before) // 1024)"
            done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
            print(f"  {name}: the peak of a new process's memory grows by {done.stdout.strip()} MiB")
        take_turns(
            {"shardio": lambda: shardio.ImageFolder(images), "torchvision": lambda: torchvision.ImageFolder(images)},  # noqa: B023
            num_files,
            "file",
        )


class Rows(torch.utils.data.Dataset[Any]):
    """A dataset of small samples that take little time to make."""

    def __init__(self, num_rows: int) -> None:
        self.rows = torch.randn(num_rows, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index


def measure_batches(folder: Path) -> None:
    """Make batches of small samples from a dataset that is not shardio's, without workers."""
    for batch_size in (1, 8, 64):
        dataset = Rows(3000 * batch_size)
        loaders = {
            "shardio": shardio.DataLoader(dataset, batch_size, shuffle=True, num_workers=0),
            "torch": torch.utils.data.DataLoader(dataset, batch_size, shuffle=True),
        }
        print(f" batches of {batch_size}")
        take_turns({name: lambda each=each: exhaust(each) for name, each in loaders.items()}, 3000, "batch")  # type: ignore[misc]


def measure_sorted(folder: Path) -> None:
    """Count the classes in a batch of 256 samples on one of 8 ranks, with 1,281 shards sorted by 1,000 classes."""
    case = Case(num_shards=1281, shard_size=1000, world_size=8, batch_size=256, num_workers=4, choices=[])
    classes = np.arange(case.num_samples) * 1000 // case.num_samples
    random = np.random.default_rng(0)
    epochs = {
        "shardio, from local disks": _rank_of(case, is_sorted=True),
        "shardio, from a bucket, with a warning": _rank_of(case, is_sorted=False),
        "WebDataset, buffer of 10,000": np.concatenate(list(_webdataset_rank(case, 3, 10_000))),
        "at random": random.permutation(case.num_samples),
    }
    for name, samples in epochs.items():
        batches = samples[: len(samples) // 256 * 256].reshape(-1, 256)
        counts = [float(len(np.unique(classes[batch]))) for batch in batches[:600]]
        print(f"  {name}: {np.mean(counts):.1f} classes")


def _rank_of(case: Case, *, is_sorted: bool) -> Any:
    settings = choose_settings(case.sizes, shuffle=True, seed=0, is_sorted=is_sorted)
    return divide_among_ranks(EpochOrder(case.sizes, settings, 0), case.world_size, case.batch_size)[3]


MEASURES = {
    "tiny": measure_tiny_samples,
    "sequence": measure_sequence,
    "arrays": measure_arrays,
    "tars": measure_tars,
    "folder": measure_folder,
    "batches": measure_batches,
    "sorted": measure_sorted,
}


def main(only: Annotated[str | None, typer.Option(help=f"One of {', '.join(MEASURES)}.")] = None) -> None:
    """Print the measurements."""
    for name, measure in MEASURES.items():
        if only in (None, name):
            print(f"{name}: {measure.__doc__}", flush=True)
            with tempfile.TemporaryDirectory(prefix="shardio-bench-") as folder:
                measure(Path(folder))


if __name__ == "__main__":
    typer.run(main)
