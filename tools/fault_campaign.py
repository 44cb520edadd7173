"""Read from an object store over a network that fails at random, and check that each epoch is complete and correct.

    python tools/fault_campaign.py --faults 10000

A proxy in front of a real object store (SeaweedFS) injects every kind of fault that it supports into a fraction of all
responses. The faults are error statuses, expired credentials, resets, stalls, bodies that are truncated, too long or
corrupt, wrong ranges, and false claims that an object has changed. One rank or three ranks read each epoch, each with
two worker processes, through a cache that is much smaller than the dataset. The order and the bytes of the delivered
samples must be those of the local dataset. The campaign continues until the proxy has injected the requested number of
faults.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from shardio import DataLoader, ShardDataset, ShardWriter
from tests.faults.proxy import KINDS, FaultProxy, Script
from tests.servers.server import Server, upload
from tests.servers.stores import run_seaweedfs

STALL_S = 0.5
"""The timeout, in seconds, of a request that makes no progress."""


def main(
    faults: Annotated[int, typer.Option(min=1, help="Number of faults to inject.")] = 10_000,
    rate: Annotated[float, typer.Option(min=0, max=0.9, help="Fraction of responses with faults.")] = 0.2,
    samples: Annotated[int, typer.Option(min=100, help="Number of samples.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of data and faults.")] = 0,
) -> None:
    """Read epochs until enough faults have been injected; exit with code 1 at the first wrong sample."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardio-faults-") as name:
        folder = Path(name)
        write_dataset(folder / "data", samples, seed)
        with run_seaweedfs(folder / "server") as server:
            upload(folder / "data", f"{server.url}/data", server.options)
            script = Script(seed=seed, faults=dict.fromkeys(KINDS, rate / len(KINDS)), methods=("GET", "HEAD"))
            with FaultProxy(server.host, server.port, script) as proxy:
                behind, injected, epoch = server.behind(proxy.host, proxy.port), Counter[str](), 0
                while injected.total() < faults:
                    read_epoch(folder, behind, epoch, world_size=(1, 3)[epoch % 2])
                    counts = proxy.counts()
                    injected = Counter(counts.num_faults)
                    epoch += 1
                    print(
                        f"epoch {epoch}: correct; {counts.num_requests} requests, {injected.total()} faults, "
                        f"{time.monotonic() - began:.0f} s",
                        flush=True,
                    )
    print("faults: " + ", ".join(f"{kind} {number}" for kind, number in sorted(injected.items())))
    print(f"{injected.total()} faults in {epoch} epochs of {samples} samples: each sample arrived once, unchanged")


def write_dataset(folder: Path, num_samples: int, seed: int) -> None:
    """Write a dataset of random bytes in 40 shards."""
    random = np.random.default_rng(seed)
    with ShardWriter(folder, max_shard_samples=-(-num_samples // 40)) as writer:
        for number in range(num_samples):
            writer.write({"__key__": f"{number:06d}", "bin": random.bytes(int(random.integers(1, 20_000)))})


def read_epoch(folder: Path, server: Server, epoch: int, world_size: int) -> None:
    """Read an epoch as each rank, from the store and from the local files, and compare them."""
    for rank in range(world_size):
        remote = deliver(
            f"{server.url}/data",
            epoch,
            rank,
            world_size,
            storage_options={**server.options, "retries": 50, "timeout_s": STALL_S},
            cache=folder / "cache",
            cache_size="4MB",
        )
        expected = deliver(folder / "data", epoch, rank, world_size)
        if remote != expected:
            wrong = [key for (key, found), (other, content) in zip(remote, expected, strict=False) if found != content]
            sys.exit(f"epoch {epoch}, rank {rank} of {world_size}: {len(remote)} samples, wrong: {wrong[:10]}")


def deliver(source: str | Path, epoch: int, rank: int, world_size: int, **options: Any) -> list[tuple[str, bytes]]:
    """Return the keys and contents of a rank's samples in an epoch, in order."""
    dataset = ShardDataset(
        source, fields=("key", "bin"), shuffle=True, rank=rank, world_size=world_size, remainder="keep", **options
    )
    loader = DataLoader(dataset, batch_size=50, num_workers=2)
    loader.set_epoch(epoch)
    return [pair for keys, contents in loader for pair in zip(keys, contents, strict=True)]


if __name__ == "__main__":
    typer.run(main)
