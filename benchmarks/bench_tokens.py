"""Compare loaders of token blocks: shardio, a memory-mapped array in torch, LitData and MosaicML Streaming.

The same documents are stored for each loader in its own form. Each loader delivers shuffled batches of 16 blocks of
2,049 tokens with 2 workers, in a process of its own, and the loaders take turns. The second epoch is measured.

    python -m benchmarks.bench_tokens
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from shardio.libraries import import_torchvision

BLOCK, BATCH_SIZE, NUM_WORKERS, EOS = 2049, 16, 2, 50_256


def draw_documents(num_documents: int) -> Iterable[np.ndarray[Any, np.dtype[np.uint16]]]:
    """Yield documents of about 840 tokens on average, most of them shorter."""
    rng = np.random.default_rng(0)
    for _ in range(num_documents):
        yield rng.integers(0, EOS, int(rng.lognormal(6, 1.2)) + 1).astype(np.uint16)


def write(folder: Path, num_documents: int) -> None:
    """Store the documents for each loader."""
    from shardio import ShardWriter

    with ShardWriter(folder / "shardio", max_shard_samples=5000) as writer:
        for number, document in enumerate(draw_documents(num_documents)):
            writer.write({"__key__": f"{number:07d}", "npy": document})
    stream = np.concatenate([np.append(document, EOS) for document in draw_documents(num_documents)]).astype(np.uint16)
    whole = stream[: len(stream) // BLOCK * BLOCK]
    np.save(folder / "blocks.npy", whole.reshape(-1, BLOCK))
    if find_spec("streaming"):
        mosaic = _import_streaming()
        with mosaic.MDSWriter(out=str(folder / "mosaic"), columns={"tokens": f"ndarray:uint16:{BLOCK}"}) as file:
            for block in whole.reshape(-1, BLOCK):
                file.write({"tokens": block})
    if find_spec("litdata"):
        (folder / "litdata").mkdir()
        form = import_module("litdata").TokensLoader(block_size=BLOCK)
        binary = import_module("litdata.streaming.writer")
        chunks = binary.BinaryWriter(str(folder / "litdata"), chunk_bytes="64MB", item_loader=form)
        for number, document in enumerate(draw_documents(num_documents)):
            chunks[number] = torch.from_numpy(np.append(document, EOS).astype(np.int32))
        chunks.done()
        chunks.merge()


def _import_streaming() -> Any:
    import_torchvision()  # Streaming imports torchvision, whose compiled part may not fit torch.
    return import_module("streaming")


class Mapped(torch.utils.data.Dataset[torch.Tensor]):
    """Blocks in a memory-mapped array."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._blocks: Any = None

    def __len__(self) -> int:
        return len(np.load(self.path, mmap_mode="r"))

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._blocks is None:
            self._blocks = np.load(self.path, mmap_mode="r")
        return torch.from_numpy(self._blocks[index].astype(np.int32))


def make_loader(name: str, folder: Path) -> Any:
    """Return the loader of one library."""
    if name.startswith("shardio"):
        from shardio import DataLoader, EpochSampler, PackedTokens

        tokens = PackedTokens(folder / "shardio", BLOCK, eos=EOS)
        if name == "shardio":
            tokens = PackedTokens(folder / "shardio", BLOCK, eos=EOS, fields="tokens")
        return DataLoader(tokens, BATCH_SIZE, sampler=EpochSampler(tokens), num_workers=NUM_WORKERS)
    if name == "torch, memory-mapped":
        return torch.utils.data.DataLoader(
            Mapped(folder / "blocks.npy"), BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS
        )
    if name == "MosaicML Streaming":
        streaming = _import_streaming()
        blocks = streaming.StreamingDataset(local=str(folder / "mosaic"), shuffle=True, batch_size=BATCH_SIZE)
        return streaming.StreamingDataLoader(blocks, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    litdata: Any = import_module("litdata")
    form = litdata.TokensLoader(block_size=BLOCK)
    blocks = litdata.StreamingDataset(str(folder / "litdata"), item_loader=form, shuffle=True)
    return litdata.StreamingDataLoader(blocks, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)


def measure(name: str, folder: Path) -> None:
    """Print the rate of the second epoch, the CPU time of the process and its workers, and the size of the state."""
    torch.set_num_threads(1)
    loader = make_loader(name, folder)
    for _ in loader:
        pass
    began, num_blocks, state = time.perf_counter(), 0, None
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    for batch in loader:
        tokens = batch["tokens"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list | tuple) else batch
        num_blocks += len(tokens)
        if state is None and hasattr(loader, "state_dict"):
            state = len(json.dumps(loader.state_dict(), default=str))
    elapsed = time.perf_counter() - began
    later = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(new.ru_utime + new.ru_stime - old.ru_utime - old.ru_stime for old, new in zip(usage, later, strict=True))
    print(json.dumps({"rate": num_blocks * BLOCK / elapsed, "cpu": cpu / num_blocks * 1e6, "state": state}))


def main(
    documents: Annotated[int, typer.Option(min=100, help="Number of documents.")] = 40_000,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 3,
    run: Annotated[str | None, typer.Option(hidden=True)] = None,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare loaders of token blocks."""
    if run is not None and folder is not None:
        measure(run, folder)
        return
    names = ["shardio", "shardio, with documents and positions", "torch, memory-mapped"]
    names += ["LitData"] if find_spec("litdata") else []
    names += ["MosaicML Streaming"] if find_spec("streaming") else []
    with tempfile.TemporaryDirectory() as created:
        write(Path(created), documents)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                command = [sys.executable, "-m", "benchmarks.bench_tokens", "--run", name, "--folder", created]
                done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
                if done.returncode:
                    print(name, "failed:", done.stderr.strip().splitlines()[-1:], file=sys.stderr)
                    continue
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print("| loader | million tokens/s | CPU µs a block | state, bytes |\n|---|---|---|---|")
    for name, runs in found.items():
        if runs:
            rates, costs = ([each[key] for each in runs] for key in ("rate", "cpu"))
            print(
                f"| {name} | {statistics.median(rates) / 1e6:.1f} ({min(rates) / 1e6:.1f} to {max(rates) / 1e6:.1f}) | "
                f"{statistics.median(costs):.0f} ({min(costs):.0f} to {max(costs):.0f}) | {runs[0]['state']} |"
            )


if __name__ == "__main__":
    typer.run(main)
