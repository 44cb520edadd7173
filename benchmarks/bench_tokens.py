"""Compare loaders of token blocks: shardio, a memory-mapped array in torch, LitData, MosaicML Streaming and Grain.

The same documents are stored for each loader in its own format. Each loader uses 2 workers, in its own processes, to
deliver shuffled batches of 16 blocks of 2,049 tokens; the loaders take turns. Then each loader resumes from its state.

    python -m benchmarks.bench_tokens
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.loaders.peers_streaming import import_streaming
from benchmarks.timing import summarize
from benchmarks.worlds import (
    NUM_RESUMED,
    SAVED_AFTER,
    Job,
    Opened,
    answer,
    compare_resumed,
    deliver,
    deliver_here,
    take_turns,
)
from shardio import DataLoader, EpochSampler, PackedTokens, ShardWriter
from shardio.libraries import import_torchvision

BLOCK, BATCH_SIZE, EOS = 2049, 16, 50_256
make_job = partial(Job, module="benchmarks.bench_tokens", batch_size=BATCH_SIZE)


def make_documents(num_documents: int) -> Iterator[NDArray[np.uint16]]:
    """Yield documents of about 840 tokens on average, most of them shorter."""
    rng = np.random.default_rng(0)
    for _ in range(num_documents):
        yield rng.integers(0, EOS, int(rng.lognormal(6, 1.2)) + 1).astype(np.uint16)


@cache
def make_blocks(num_documents: int) -> NDArray[np.uint16]:
    """Return the blocks of all documents, with EOS after each document: shape (blocks, tokens)."""
    stream = np.concatenate([np.append(document, EOS) for document in make_documents(num_documents)])
    return stream[: len(stream) // BLOCK * BLOCK].reshape(-1, BLOCK).astype(np.uint16)


def write_tars(folder: Path, num_documents: int) -> None:
    """Write documents to tars."""
    with ShardWriter(folder, max_shard_samples=5000) as writer:
        for number, document in enumerate(make_documents(num_documents)):
            writer.write({"__key__": f"{number:07d}", "npy": document})


def write_array(folder: Path, num_documents: int) -> None:
    """Write an array of blocks, to be mapped into memory."""
    np.save(folder / "blocks.npy", make_blocks(num_documents))


def write_mds(folder: Path, num_documents: int) -> None:
    """Write blocks in MosaicML's shard format."""
    columns = {"tokens": f"ndarray:uint16:{BLOCK}"}
    with import_streaming().MDSWriter(out=str(folder), columns=columns, exist_ok=True) as writer:
        for block in make_blocks(num_documents):
            writer.write({"tokens": block})


def write_chunks(folder: Path, num_documents: int) -> None:
    """Write documents as LitData's chunks, from which its TokensLoader cuts blocks."""
    form = _import_litdata().TokensLoader(block_size=BLOCK)
    writer: Any = import_module("litdata.streaming.writer").BinaryWriter(
        str(folder), chunk_bytes="64MB", item_loader=form
    )
    for number, document in enumerate(make_documents(num_documents)):
        writer[number] = torch.from_numpy(np.append(document, EOS).astype(np.int32))
    writer.done()
    writer.merge()


def write_records(folder: Path, num_documents: int) -> None:
    """Write Grain's files: one of blocks, and one of documents."""
    module: Any = import_module("array_record.python.array_record_module")
    for name, rows in (("blocks", make_blocks(num_documents)), ("documents", make_documents(num_documents))):
        writer = module.ArrayRecordWriter(str(folder / name), "group_size:1")
        for row in rows:
            writer.write(row.tobytes())
        writer.close()


def _import_litdata() -> Any:
    import_torchvision()  # LitData imports torchvision, whose compiled part may not match torch.
    return import_module("litdata")


def _find_codes(blocks: Any) -> list[int]:
    # A checksum of each block.
    return [zlib.crc32(np.asarray(block, np.int32).tobytes()) for block in blocks]


def _find_tokens(batch: Any) -> list[int]:
    return _find_codes(batch["tokens"])


def open_shardio(job: Job, **options: Any) -> Opened:
    """Cut blocks from documents in tars, and deliver them in random order."""
    tokens = PackedTokens(job.data, BLOCK, eos=EOS, **options)
    loader: Any = DataLoader(tokens, sampler=EpochSampler(tokens, shuffle=True), **job.options)
    find = _find_codes if options else lambda batch: _find_codes(batch[0])
    return Opened(loader, find, loader.state_dict, loader.load_state_dict)


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


def open_mapped(job: Job) -> Opened:
    """Deliver blocks of a memory-mapped array with torch's DataLoader, which has no state."""
    dataset = Mapped(Path(job.data, "blocks.npy"))
    return Opened(torch.utils.data.DataLoader(dataset, shuffle=True, **job.options), _find_codes)


def open_litdata(job: Job) -> Opened:
    """Cut blocks from LitData's chunks."""
    litdata = _import_litdata()
    form = litdata.TokensLoader(block_size=BLOCK)
    blocks = litdata.StreamingDataset(job.data, item_loader=form, shuffle=True, drop_last=True)
    loader = litdata.StreamingDataLoader(blocks, **job.options)
    return Opened(loader, _find_codes, loader.state_dict, loader.load_state_dict)


def open_mosaic(job: Job) -> Opened:
    """Deliver the blocks of MosaicML's shards."""
    streaming = import_streaming()
    blocks = streaming.StreamingDataset(local=job.data, shuffle=True, batch_size=job.options["batch_size"])
    loader = streaming.StreamingDataLoader(blocks, **job.options)
    return Opened(loader, _find_tokens, loader.state_dict, loader.load_state_dict)


def open_grain(job: Job) -> Opened:
    """Deliver stored blocks, with the iterator that can resume with a different number of ranks."""
    grain: Any = import_module("grain")
    blocks = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(f"{job.data}/blocks")).seed(0).shuffle()
    blocks = blocks.repeat().map(lambda row: np.frombuffer(row, np.uint16).astype(np.int32))
    shards = grain.sharding.ShardOptions(shard_index=job.rank, shard_count=job.world_size)
    workers = grain.multiprocessing.MultiprocessingOptions(num_workers=job.num_workers)
    elastic: Any = import_module("grain.experimental").ElasticIterator
    iterator = iter(elastic(blocks, job.batch_size, shards, multiprocessing_options=workers))
    return Opened(iterator, _find_codes, iterator.get_state, iterator.set_state)


def open_grain_documents(job: Job) -> Opened:
    """Shuffle documents, and cut blocks from them in each worker."""
    grain: Any = import_module("grain")
    documents = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(f"{job.data}/documents")).seed(0).shuffle()
    documents = documents.repeat().map(
        lambda row: {"tokens": np.append(np.frombuffer(row, np.uint16), EOS).astype(np.int32)}
    )
    rows = documents[job.rank :: job.world_size].to_iter_dataset()
    pack: Any = import_module("grain.experimental").ConcatThenSplitIterDataset
    blocks = pack(rows, length_struct={"tokens": BLOCK}).batch(job.options["batch_size"])
    workers = grain.multiprocessing.MultiprocessingOptions(num_workers=job.num_workers)
    iterator = iter(blocks.mp_prefetch(workers))
    return Opened(iterator, _find_tokens, iterator.get_state, iterator.set_state)


CANDIDATES: dict[str, tuple[str, Callable[[Path, int], None], Callable[[Job], Opened]]] = {
    '**shardio**, `fields="tokens"`': ("shardio", write_tars, partial(open_shardio, fields="tokens")),
    "**shardio**, with documents and positions": ("shardio", write_tars, open_shardio),
    "torch, array of blocks in mapped memory": ("torch", write_array, open_mapped),
    "LitData, `TokensLoader`": ("litdata", write_chunks, open_litdata),
    "MosaicML Streaming, stored blocks": ("streaming", write_mds, open_mosaic),
    "Grain, stored blocks": ("grain", write_records, open_grain),
    "Grain, blocks cut by workers": ("grain", write_records, open_grain_documents),
}
"""The module that each loader needs, and the functions that write and open its data."""


def examine(job: Job) -> list[str]:
    """Return the cells of a loader's row that describe its state."""
    batches, state_size = deliver(replace(job, num_batches=SAVED_AFTER + NUM_RESUMED, saves=True))
    return ["no state"] * 3 + ["-"] if state_size is None else [*compare_resumed(job, batches), f"{state_size}"]


def main(
    documents: Annotated[int, typer.Option(min=4000, help="Number of documents.")] = 40_000,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 3,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the table."""
    if job is not None:
        answer(job, lambda described: deliver_here(described, CANDIDATES[described.loader][2]))
        return
    jobs, cells = dict[str, Job](), dict[str, list[str]]()
    with tempfile.TemporaryDirectory(prefix="shardio-bench-") as created:
        for name, (module, write, _) in CANDIDATES.items():
            if not find_spec(module):
                print(f"{name}: not installed", file=sys.stderr)
                continue
            folder = Path(created, write.__name__)
            if not folder.exists():
                folder.mkdir()
                write(folder, documents)
            jobs[name] = make_job(loader=name, data=str(folder), codes=f"{created}/codes")
            cells[name] = examine(jobs[name])
            print(f"{name}: {cells[name]}", file=sys.stderr, flush=True)
        found = take_turns(jobs, rounds)
    print(
        "| loader | resumed in the same setup | with 1 worker | with 2 ranks | bytes of state ",
        end="",
    )
    print("| million tokens/s | CPU µs per block |\n" + "|---" * 7 + "|")
    for name, own in found.items():
        times = [summarize([rate * BLOCK / 1e6 for rate in own["rate"]], 1), summarize(own["cpu_us"])]
        print(f"| {name} | {' | '.join([*cells[name], *times])} |")


if __name__ == "__main__":
    typer.run(main)
