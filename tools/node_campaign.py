"""Simulate, on one machine, a run on several nodes that is stopped and then resumed on fewer nodes.

Each rank is a process with torchrun's variables. The ranks of a node share a cache, and reach a real object store
(SeaweedFS) through the node's own proxy, which delays each request and counts the node's requests. The campaign checks
that each sample is delivered exactly once and that the global batches are those of an uninterrupted run on one rank,
and prints what each node has fetched. Run ``bash tools/servers.sh`` first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

import shardio
from tests.faults.proxy import FaultProxy, Script
from tests.servers.server import upload
from tests.servers.stores import run_seaweedfs

SAMPLE_BYTES = 8000

STORE = Script(latency_s=0.02)

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The task of one rank: to read some batches, or all the remaining batches of the epoch, starting at a position."""

    source: str
    options: dict[str, str]
    cache: str
    batch_size: int
    num_batches: int | None
    state: dict[str, Any] | None
    out: str


def read(job: Job) -> None:
    """Read batches as one rank. Write the batches' keys and the state."""
    dataset = shardio.ShardDataset(
        job.source,
        fields=("key", "bin"),
        shuffle=True,
        seed=3,
        remainder="keep",
        storage_options=job.options,
        cache=job.cache,
    )
    loader = shardio.DataLoader(dataset, job.batch_size, num_workers=1)
    if job.state is not None:
        loader.load_state_dict(job.state)
    keys = [list(keys) for keys, _ in islice(loader, job.num_batches)]
    Path(job.out).write_text(json.dumps({"keys": keys, "state": loader.state_dict()}))


def run_nodes(
    source: str,
    proxies: list[FaultProxy],
    server: Any,
    folder: Path,
    num_ranks: int,
    *,
    batch_size: int,
    num_batches: int | None,
    state: dict[str, Any] | None,
) -> tuple[list[list[list[str]]], dict[str, Any]]:
    """Run ``num_ranks`` ranks on each node. Return each rank's batches, and the state that all ranks saved."""
    processes, outs = [], []
    world_size = num_ranks * len(proxies)
    for rank in range(world_size):
        node, local_rank = divmod(rank, num_ranks)
        behind = server.behind(proxies[node].host, proxies[node].port)
        outs.append(folder / f"rank-{rank}.json")
        job = Job(
            source=f"{behind.url}/{source}",
            options=behind.options,
            cache=str(folder / f"cache-of-node-{node}"),
            batch_size=batch_size,
            num_batches=num_batches,
            state=state,
            out=str(outs[-1]),
        )
        variables = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": num_ranks,
            "OMP_NUM_THREADS": 1,
        }
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        command = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"ranks {[rank for rank, code in enumerate(codes) if code]} failed")
    found = [json.loads(out.read_text()) for out in outs]
    for rank, each in enumerate(found):
        if each["state"] != found[0]["state"]:
            sys.exit(f"rank {rank} has saved a different state: {each['state']} instead of {found[0]['state']}")
    return [each["keys"] for each in found], found[0]["state"]


def describe_traffic(proxy: FaultProxy, num_samples: int) -> str:
    """Return what a node has requested since the last call."""
    requests = proxy.requests()
    proxy.reset()
    gets = Counter[str]()
    num_bytes = Counter[str]()
    for each in requests:
        kind = "head" if each.method == "HEAD" else each.path.rpartition(".")[2]
        gets[kind] += 1
        num_bytes[kind] += each.num_bytes
    share = num_bytes["tar"] / (num_samples * SAMPLE_BYTES)
    return (
        f"{gets['head']} HEAD requests, {gets['json']} reads of the manifest, {gets['idx']} of indexes, "
        f"{gets['tar']} of tars: {gets['tar'] / num_samples:.4f} per sample, {share:.2f} times the samples' bytes"
    )


@app.command()
def main(
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes before the interruption.")] = 4,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks on each node.")] = 4,
    then: Annotated[int, typer.Option(min=1, help="Number of nodes after the interruption; a divisor of --nodes.")] = 2,
    batches: Annotated[int, typer.Option(min=1, help="Number of batches on each rank before the interruption.")] = 20,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 24_000,
    job: Annotated[str | None, typer.Option(help="Used by this program itself.", hidden=True)] = None,
) -> None:
    """Read an epoch on several nodes, with an interruption, and compare it with an epoch of the local dataset."""
    if job is not None:
        read(Job(**json.loads(job)))
        return
    batch_size, num_global = 16, 16 * nodes * ranks
    with tempfile.TemporaryDirectory(prefix="shardio-nodes-") as name, ExitStack() as stack:
        folder = Path(name)
        random = np.random.default_rng(0)
        with shardio.ShardWriter(folder / "data", max_shard_samples=2000) as writer:
            for number in range(samples):
                writer.write({"__key__": f"{number:06d}", "bin": random.bytes(SAMPLE_BYTES)})
        server = stack.enter_context(run_seaweedfs(folder / "server"))
        upload(folder / "data", f"{server.url}/data", server.options)
        proxies = [stack.enter_context(FaultProxy(server.host, server.port, STORE)) for _ in range(nodes)]

        before, state = run_nodes(
            "data", proxies, server, folder, ranks, batch_size=batch_size, num_batches=batches, state=None
        )
        for number, proxy in enumerate(proxies):
            own = batches * batch_size * ranks
            print(f"node {number} of {nodes}, {own} samples: {describe_traffic(proxy, own)}")
        after, _ = run_nodes(
            "data",
            proxies[:then],
            server,
            folder,
            ranks,
            batch_size=num_global // (then * ranks),
            num_batches=None,
            state=state,
        )
        for number, proxy in enumerate(proxies[:then]):
            own = sum(len(batch) for rank in after[number * ranks :][:ranks] for batch in rank)
            print(f"then node {number} of {then}, {own} samples: {describe_traffic(proxy, own)}")

        local = shardio.ShardDataset(
            folder / "data", fields="key", shuffle=True, seed=3, remainder="keep", rank=0, world_size=1
        )
        expected = [sorted(keys) for keys in shardio.DataLoader(local, num_global, num_workers=0)]
        found = [
            sorted(key for rank in part for key in (rank[step] if step < len(rank) else []))
            for part in (before, after)
            for step in range(max(map(len, part)))
        ]
        if found != expected:
            step = next(step for step, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other)
            sys.exit(f"global batch {step} differs from that of an uninterrupted run on one rank")
        print(
            f"all {samples} samples were delivered exactly once, in the {len(found)} global batches of an "
            f"uninterrupted run, on {nodes} and then {then} nodes of {ranks} ranks"
        )


if __name__ == "__main__":
    app()
