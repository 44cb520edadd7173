"""Measure what grows with a dataset: tiny samples, arrays, many tars, many files, batches, and shards sorted by class.

``python -m benchmarks.bench_scale`` creates the datasets in a temporary folder. CPU times are those of one process
without workers; shardio and its peer take turns. ``--only NAME`` runs one measure.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import shardio
from benchmarks.bench_shuffle import Case, _webdataset_rank
from benchmarks.timing import alternate, ratios, summarize
from shardio.libraries import import_library
from shardio.order import EpochOrder, choose_settings, divide_among_ranks
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import Manifest, index_tar, open_table, write_manifest, write_shard, write_tar_lists
from shardio.storage import parse_location

ROUNDS = 5


def take_turns(candidates: dict[str, Callable[[], Any]], count: int, unit: str) -> None:
    """Print the CPU time of each candidate, in µs divided by ``count``, and the ratios to shardio's."""
    runs = {name: (lambda _, run=run: run()) for name, run in candidates.items()}
    times = alternate(runs, chunks=[count], rounds=ROUNDS)
    for name, found in times.items():
        compared = f"; {summarize(ratios(found, times['shardio']), 2)} times shardio" if name != "shardio" else ""
        print(f"  {name}: {summarize(found, 1)} µs per {unit}{compared}", flush=True)


def exhaust(values: Iterable[Any]) -> None:
    """Consume all values."""
    for _ in values:
        pass


def measure_tiny_samples(folder: Path) -> None:
    """Read tiny samples in the default shuffled order, 256 at a time, from shards of more and more samples."""
    for shard_samples in (1_000, 10_000, 100_000):
        data = folder / f"tiny-{shard_samples}"
        data.mkdir()
        samples = (
            Sample(key=f"{number:08d}", fields={"bin": b"x" * 100, "cls": b"7"}, origin="")
            for number in range(shard_samples)
        )
        entry, fields = write_shard(parse_location(data / "shard-000000.tar"), samples)
        entries = [dataclasses.replace(entry, name=f"shard-{number:06d}.tar") for number in range(128)]
        for other in entries[1:]:
            for suffix in ("", ".idx"):
                os.link(data / f"{entry.name}{suffix}", data / f"{other.name}{suffix}")
        write_manifest(parse_location(data / "shardio.json"), Manifest(shards=tuple(entries), fields=fields))
        table = open_table(data)
        sizes = table.manifest.shard_sizes
        order = EpochOrder(sizes, choose_settings(sizes, shuffle=True, seed=0), 0)
        reader = SampleReader(table)
        starts = iter(range(0, order.num_samples, 256))

        def read(reader: SampleReader = reader, order: EpochOrder = order, starts: Any = starts) -> None:
            for start in [next(starts) for _ in range(32)]:
                reader.read(order.samples_at(np.arange(start, start + 256)), ("bin", "cls"))

        print(f" {shard_samples:,} samples in each of 128 shards")
        take_turns({"shardio": read}, 32 * 256, "sample")


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
    """Open 3,000 small tars that other tools packed, with the list that ``shardio index`` writes."""
    import tarfile

    data = folder / "tars"
    data.mkdir()
    for number in range(3000):
        with tarfile.open(data / f"{number:05d}.tar", "w") as tar:
            for row in range(3):
                member = tarfile.TarInfo(f"{number:05d}{row}.txt")
                member.size = 4
                tar.addfile(member, io.BytesIO(b"%04d" % number))
    write_tar_lists([index_tar(parse_location(path)) for path in sorted(data.glob("*.tar"))])
    take_turns({"shardio": lambda: open_table(data)}, 3000, "tar")


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
    """Small samples that cost little."""

    def __init__(self, num_rows: int) -> None:
        self.rows = torch.randn(num_rows, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index


def measure_batches(folder: Path) -> None:
    """Make batches of small samples of any dataset, without workers."""
    for batch_size in (1, 8, 64):
        dataset = Rows(3000 * batch_size)
        loaders = {
            "shardio": shardio.DataLoader(dataset, batch_size, shuffle=True, num_workers=0),
            "torch": torch.utils.data.DataLoader(dataset, batch_size, shuffle=True),
        }
        print(f" batches of {batch_size}")
        take_turns({name: lambda each=each: exhaust(each) for name, each in loaders.items()}, 3000, "batch")  # type: ignore[misc]


def measure_sorted(folder: Path) -> None:
    """Count the classes in a batch of 256 of one of 8 ranks, if 1,281 shards are sorted by 1,000 classes."""
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
    """Print the measures."""
    for name, measure in MEASURES.items():
        if only in (None, name):
            print(f"{name}: {measure.__doc__}", flush=True)
            with tempfile.TemporaryDirectory(prefix="shardio-bench-") as folder:
                measure(Path(folder))


if __name__ == "__main__":
    typer.run(main)
