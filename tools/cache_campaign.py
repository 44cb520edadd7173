"""Kill processes that share a cache, and check that the cache stays within its size limit and never holds a wrong byte.

    python tools/cache_campaign.py --kills 50

Three processes read from an object store (SeaweedFS) through one cache, epoch after epoch, and compare each sample with
the local data. Two processes read shards, and one reads single files, as ImageFolder does. The cache is smaller than
the data. One process, or its storage process, is killed at a random moment and replaced by a new one. After each kill,
every block that a copy in the cache marks as present is compared with the object.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from shardio import ImageFolder, ShardDataset, ShardWriter
from shardio.storage import make_access, parse_location
from shardio.storage.client import client
from shardio.storage.copies import BLOCK, COPY_SUFFIX, name_copy
from shardio.storage.listing import cut_bundles, list_files, make_tail
from tests.servers.server import upload
from tests.servers.stores import run_seaweedfs

NUM_READERS = 3
NUM_SAMPLES = 3000
NUM_SHARDS = 30
NUM_FILES = 2000

Read = Callable[[Connection, Path, str, dict[str, Any], int], None]


def main(
    kills: Annotated[int, typer.Option(min=1, help="Number of processes to kill.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed for the data and for the times at which processes are killed.")] = 0,
) -> None:
    """Kill processes, and exit with code 1 if the cache is ever wrong."""
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="shardio-cache-") as name:
        folder = Path(name)
        write_dataset(folder / "data", seed)
        write_files(folder / "files" / "class", seed)
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        with run_seaweedfs(folder / "server") as server:
            options = dict(server.options)
            for kind in ("data", "files"):
                upload(folder / kind, f"{server.url}/{kind}", options)
            originals = find_originals(f"{server.url}/data", options, folder / "data")
            originals |= find_bundles(f"{server.url}/files", options, folder)
            readers = [
                Reader(READ[place], folder, server.url, options, total // 2, seed) for place in range(NUM_READERS)
            ]
            killed = Counter[str]()
            while killed.total() < kills:
                place = choose.randrange(NUM_READERS)
                time.sleep(choose.uniform(0.05, 1.5))
                killed[readers[place].kill(storage_process=choose.random() < 0.5)] += 1
                num_checked = check_copies(folder / "cache", originals, total // 2 + total // NUM_SHARDS)
                if readers[place].is_dead():
                    readers[place] = Reader(READ[place], folder, server.url, options, total // 2, killed.total())
                print(f"{killed.total()} killed; {num_checked} blocks present, all correct", flush=True)
            epochs = [reader.finish() for reader in readers]
    print(f"{dict(killed)}: the cache was consistent after each kill; the last readers read {sum(epochs)} epochs")


def write_dataset(folder: Path, seed: int) -> None:
    """Write a dataset of random bytes."""
    content = np.random.default_rng(seed)
    with ShardWriter(folder, max_shard_samples=NUM_SAMPLES // NUM_SHARDS) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:06d}", "bin": content.bytes(int(content.integers(1, 20_000)))})


def write_files(folder: Path, seed: int) -> None:
    """Write random bytes to files that are named like images."""
    content = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(NUM_FILES):
        (folder / f"{number:06d}.jpg").write_bytes(content.bytes(int(content.integers(0, 40_000))))


class Reader:
    """A process that reads epochs until it is killed or asked to stop."""

    def __init__(self, read: Read, folder: Path, url: str, options: dict[str, str], cache_size: int, seed: int) -> None:
        self._end, other = multiprocessing.get_context("spawn").Pipe()
        access = {"storage_options": options, "cache": folder / "cache", "cache_size": cache_size}
        self._process = multiprocessing.get_context("spawn").Process(
            target=read, args=(other, folder, url, access, seed), daemon=True
        )
        self._process.start()
        other.close()
        self._storage_process = int(self._end.recv())

    def kill(self, *, storage_process: bool) -> str:
        """Kill the process or its storage process. Return the kind of the killed process."""
        if not self._process.is_alive():
            sys.exit(f"a reader has failed with exit code {self._process.exitcode}: see its message above")
        victim = self._storage_process if storage_process else self._process.pid
        assert victim is not None
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:  # The storage process has already been killed, and its successor's ID is unknown.
            return self.kill(storage_process=False)
        if not storage_process:
            self._process.join()
        return "storage process" if storage_process else "reader"

    def is_dead(self) -> bool:
        """Return whether the process was killed."""
        return not self._process.is_alive()

    def finish(self) -> int:
        """Ask the process to stop after its epoch. Return the number of epochs that it read."""
        self._end.send("stop")
        num_epochs = int(self._end.recv())
        self._process.join()
        return num_epochs


def read_shards(end: Connection, folder: Path, url: str, access: dict[str, Any], seed: int) -> None:
    """Read epochs of shards through the cache, and compare them with the local dataset."""
    expected = dict(ShardDataset(folder / "data", fields=("key", "bin")))
    dataset = ShardDataset(f"{url}/data", fields=("key", "bin"), shuffle=True, seed=seed, **access)

    def read(epoch: int) -> bool:
        dataset.set_epoch(epoch)
        found = list(dataset)
        return len(found) == len(expected) and dict(found) == expected

    read_until_asked(end, read)


def read_files(end: Connection, folder: Path, url: str, access: dict[str, Any], seed: int) -> None:
    """Read epochs of single files through the cache, and compare them with the local files."""
    images = ImageFolder(f"{url}/files", **access)

    def read(epoch: int) -> bool:
        indices = np.random.default_rng([seed, epoch]).permutation(len(images))
        for start in range(0, len(images), 50):
            samples = images.locate(indices[start : start + 50])
            found = images.reader.read(samples, ("jpg",)).columns["jpg"]  # type: ignore[arg-type]  # A FileReader.
            names = [path.removeprefix(f"{url}/") for path, _ in samples]
            if [(folder / name).read_bytes() for name in names] != found:
                return False
        return True

    read_until_asked(end, read)


def read_until_asked(end: Connection, read: Callable[[int], bool]) -> None:
    """Read epochs until the campaign requests a stop; exit if an epoch is wrong."""
    process = client()._process
    assert process is not None
    end.send(process.pid)
    num_epochs = 0
    while not end.poll():
        if not read(num_epochs):
            sys.exit(f"epoch {num_epochs} is wrong")
        num_epochs += 1
    end.send(num_epochs)


READ: list[Read] = [read_shards, read_shards, read_files]
"""The functions with which the three processes read."""


def find_originals(url: str, options: Mapping[str, str], folder: Path) -> dict[str, bytes]:
    """Return the content of each object by the name of its copy."""
    access = make_access(options, cache=folder / "unused")
    found = {}
    for path in folder.iterdir():
        found[name_copy(parse_location(f"{url}/{path.name}", access).stat())] = path.read_bytes()
    return found


def find_bundles(url: str, options: Mapping[str, str], folder: Path) -> dict[str, bytes]:
    """Return the content of each bundle by its name."""
    listing = list_files(parse_location(url, make_access(options, cache=folder / "unused")))
    bundles = cut_bundles(listing)
    found = [bytearray(size) for size in bundles.sizes.tolist()]
    for key, number, start in zip(listing.keys, bundles.numbers.tolist(), bundles.starts.tolist(), strict=True):
        content = (folder / key).read_bytes()
        stored = content + make_tail(content)
        found[number][start : start + len(stored)] = stored
    return dict(zip(bundles.names, map(bytes, found), strict=True))


def check_copies(cache: Path, originals: Mapping[str, bytes], max_bytes: int) -> int:
    """Check all present blocks against the objects, and return the number of blocks checked."""
    num_present = used = 0
    for path in cache.glob(f"*{COPY_SUFFIX}"):
        original = originals.get(path.name)
        if original is None:
            sys.exit(f"{path.name} is not a copy of any object")
        try:
            with path.open("rb") as file:
                used += os.fstat(file.fileno()).st_blocks * 512
                # Read the marks first, because an unmarked block may still be incomplete.
                file.seek(len(original))
                marks = np.frombuffer(file.read(-(-len(original) // BLOCK)), np.uint8)
                file.seek(0)
                content = file.read(len(original))
        except FileNotFoundError:  # The copy has just been removed.
            continue
        for block in np.flatnonzero(marks).tolist():
            span = slice(block * BLOCK, min((block + 1) * BLOCK, len(original)))
            if content[span] != original[span]:
                sys.exit(f"block {block} of {path.name} is wrong")
        num_present += int(np.count_nonzero(marks))
    if used > max_bytes:
        sys.exit(f"the cache uses {used} bytes, more than {max_bytes}")
    return num_present


if __name__ == "__main__":
    typer.run(main)
