"""Compare mixtures of datasets: shardio's MixedDataset with LitData, MosaicML Streaming, WebDataset and Grain.

``python -m benchmarks.bench_mixture`` writes three datasets of tiny samples in every loader's own format to a temporary
folder, and prints one table. Every measurement runs in a process of its own, and the loaders take turns.

``python -m benchmarks.bench_mixture --only sources PHOTOS`` compares second epochs of a ShardDataset and of mixtures.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import shardio
from benchmarks.loaders.measure import Stopwatch
from benchmarks.loaders.peers_streaming import import_streaming
from benchmarks.timing import ratios, summarize
from benchmarks.worlds import Codes, Job, Opened, answer, compare_resumed, deliver, deliver_here, take_turns
from shardio.libraries import import_library
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

SIZES, WEIGHTS = (30_000, 17_000, 5_000), (0.5, 0.3, 0.2)
NUM_TOKENS, SHARD_SAMPLES = 256, 2500
NUM_BATCHES = 240  # batches whose samples are examined: at least an epoch of every source
make_job = partial(Job, module="benchmarks.bench_mixture", batch_size=256)
BASE = 1_000_000  # A sample's code is its source's number * BASE + its index in the source.


def make_samples(source: int) -> Iterator[dict[str, Any]]:
    """Yield the samples of a source. LitData calls this function in its worker."""
    random = np.random.default_rng(source)
    for number in range(SIZES[source]):
        yield {"code": source * BASE + number, "tokens": random.integers(0, 50_000, NUM_TOKENS, np.int32)}


def write_tars(path: str, source: int) -> None:
    """Write tars, which shardio and WebDataset read."""
    with shardio.ShardWriter(path, max_shard_samples=SHARD_SAMPLES) as writer:
        for sample in make_samples(source):
            file = io.BytesIO()
            np.save(file, sample["tokens"])
            code = str(sample["code"])
            writer.write({"__key__": code.zfill(8), "cls": code.encode(), "npy": file.getvalue()})


def write_mds(path: str, source: int) -> None:
    """Write MosaicML's shards."""
    columns = {"code": "int", "tokens": f"ndarray:int32:{NUM_TOKENS}"}
    size_limit = SHARD_SAMPLES * (4 * NUM_TOKENS + 12)
    with import_streaming().MDSWriter(out=path, columns=columns, size_limit=size_limit) as writer:
        for sample in make_samples(source):
            writer.write(sample)


def write_chunks(path: str, source: int) -> None:
    """Write LitData's chunks."""
    # Chunks of 64 MB (as in LitData's README) or 2,500 samples take about 4 times as much CPU time per sample.
    options: dict[str, Any] = {"output_dir": path, "chunk_size": 1000, "num_workers": 1, "verbose": False}
    _import_litdata().optimize(fn=make_samples, inputs=[source], **options)


def _import_litdata() -> Any:
    import_library("torchvision")  # litdata imports it.
    return importlib.import_module("litdata")


def write_records(path: str, source: int) -> None:
    """Write ArrayRecord files, from which Grain reads single records."""
    module: Any = importlib.import_module("array_record.python.array_record_module")
    Path(path).mkdir()
    writer = module.ArrayRecordWriter(f"{path}/samples.arecord", "group_size:1")
    for sample in make_samples(source):
        writer.write(np.int64(sample["code"]).tobytes() + sample["tokens"].tobytes())
    writer.close()


def _list_sources(job: Job) -> list[tuple[str, float]]:
    # The folders of the sources, and their weights.
    return [(f"{job.data}/{source}", weight) for source, weight in enumerate(WEIGHTS)]


def open_shardio(job: Job) -> Opened:
    """Mix ShardDatasets until each sample has been delivered."""
    sources = {
        path: (shardio.ShardDataset(path, fields=("cls", "npy"), shuffle=True), weight)
        for path, weight in _list_sources(job)
    }
    mix = shardio.MixedDataset(sources, stop="longest")
    loader: Any = shardio.DataLoader(mix, **job.options)
    return Opened(loader, lambda batch: batch[0], loader.state_dict, loader.load_state_dict)


def open_litdata(job: Job) -> Opened:
    """Combine StreamingDatasets in given proportions. An epoch ends when any dataset ends."""
    litdata = _import_litdata()
    datasets = [litdata.StreamingDataset(path, shuffle=True) for path, _ in _list_sources(job)]
    mix = litdata.CombinedStreamingDataset(datasets, weights=WEIGHTS, iterate_over_all=False)
    loader = litdata.StreamingDataLoader(mix, **job.options)
    return Opened(loader, lambda batch: batch["code"], loader.state_dict, loader.load_state_dict)


def open_mosaic(job: Job, batching: str = "random") -> Opened:
    """Mix streams by their proportions, in an epoch as long as shardio's."""
    streaming = import_streaming()
    streams = [streaming.Stream(local=path, proportion=weight) for path, weight in _list_sources(job)]
    options: dict[str, Any] = {"shuffle": True, "epoch_size": 60_000, "batching_method": batching}
    mix = streaming.StreamingDataset(streams=streams, batch_size=job.options["batch_size"], **options)
    loader = streaming.StreamingDataLoader(mix, **job.options)
    return Opened(loader, lambda batch: batch["code"], loader.state_dict, loader.load_state_dict)


def open_webdataset(job: Job) -> Opened:
    """Mix endless WebDatasets. Each worker reads its own shards."""
    wds: Any = importlib.import_module("webdataset")
    tars = [sorted(map(str, Path(path).glob("*.tar"))) for path, _ in _list_sources(job)]
    datasets = [
        wds.WebDataset(urls, shardshuffle=100).repeat().shuffle(1000).decode().to_tuple("cls", "npy") for urls in tars
    ]
    mix = wds.DataPipeline(wds.RandomMix(datasets, WEIGHTS), wds.batched(job.options["batch_size"]))
    loader = wds.WebLoader(mix, batch_size=None, num_workers=job.num_workers)
    return Opened(loader, lambda batch: batch[0])


def open_grain(job: Job) -> Opened:
    """Mix endless shuffled MapDatasets. The iterator can resume with a different number of ranks."""
    grain: Any = importlib.import_module("grain")
    experimental: Any = importlib.import_module("grain.experimental")
    parts = [
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(f"{path}/samples.arecord")).seed(number).shuffle()
        for number, (path, _) in enumerate(_list_sources(job))
    ]
    mix = grain.MapDataset.mix([part.repeat() for part in parts], weights=WEIGHTS)
    mix = mix.map(lambda row: {"code": np.frombuffer(row, np.int64, 1)[0], "tokens": np.frombuffer(row[8:], "i4")})
    shards = grain.sharding.ShardOptions(shard_index=job.rank, shard_count=job.world_size)
    workers = grain.multiprocessing.MultiprocessingOptions(num_workers=job.num_workers)
    iterator = iter(experimental.ElasticIterator(mix, job.batch_size, shards, multiprocessing_options=workers))
    return Opened(iterator, lambda batch: batch["code"], iterator.get_state, iterator.set_state)


CANDIDATES: dict[str, tuple[str, Callable[[str, int], None], Callable[[Job], Opened]]] = {
    "shardio, `MixedDataset`": ("shardio", write_tars, open_shardio),
    "Grain, `MapDataset.mix`": ("grain", write_records, open_grain),
    "MosaicML, `proportion`": ("streaming", write_mds, open_mosaic),
    "MosaicML, `proportion`, stratified batches": ("streaming", write_mds, partial(open_mosaic, batching="stratified")),
    "LitData, `CombinedStreamingDataset`": ("litdata", write_chunks, open_litdata),
    "WebDataset, `RandomMix`": ("webdataset", write_tars, open_webdataset),
}
"""The module that each loader needs, and the functions that write its data and open it."""


def run_job(job: Job) -> dict[str, Any]:
    """Deliver the batches of a job in this process."""
    if job.loader == "photographs":
        return run_photographs(job)
    return deliver_here(job, CANDIDATES[job.loader][2])


def examine(job: Job) -> list[str]:
    """Return the cells of a loader's row that describe its samples and its state."""
    one_worker, _ = deliver(replace(job, num_workers=1, num_batches=NUM_BATCHES))
    two, state_size = deliver(replace(job, num_batches=NUM_BATCHES, saves=True))
    deviations = _deviations(np.concatenate(one_worker)).max(), max(_deviations(each)[-1] for each in two)
    cells = [f"{deviations[0]:.2f}", f"{deviations[1]:.1f}"]
    exactness = [_count_inexact(np.concatenate(each)) for each in (one_worker, two)]
    cells += [f"{exactness[0][number]:,} / {exactness[1][number]:,}" for number in range(2)]
    if state_size is None:
        return [*cells, *["no state"] * 3, "-"]
    return [*cells, *compare_resumed(job, two), f"{state_size:,}"]


def _deviations(codes: Codes) -> NDArray[np.float64]:
    # For each prefix, the largest deviation of a source.
    counts = (codes[:, None] // BASE == np.arange(len(SIZES))).cumsum(axis=0)
    return np.abs(counts - np.arange(1, len(codes) + 1)[:, None] * WEIGHTS).max(axis=1)  # type: ignore[no-any-return]


def _count_inexact(codes: Codes) -> tuple[int, int]:
    # The number of samples repeated while others of their source had been delivered less often, and the number of
    # samples that are missing from the first n deliveries of a source of n samples.
    early = missing = 0
    for source, size in enumerate(SIZES):
        own = codes[codes // BASE == source]
        missing += min(size, len(own)) - len(np.unique(own[:size]))
        times, counts = np.argsort(own, kind="stable"), np.unique(own, return_counts=True)[1]
        repeats = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
        for number in range(1, counts.max()):
            before = times[repeats == number - 1]
            early += int(np.sum(times[repeats == number] < (before.max() if len(before) == size else len(own))))
    return early, missing


def measure_mixtures(folder: Path, rounds: int) -> None:
    """Print the table of loaders."""
    names = [name for name, each in CANDIDATES.items() if importlib.util.find_spec(each[0])]
    for write in {CANDIDATES[name][1] for name in names}:
        (folder / write.__name__).mkdir()
        for source in range(len(SIZES)):
            write(str(folder / write.__name__ / str(source)), source)
    jobs, cells = dict[str, Job](), dict[str, list[str]]()
    for name in names:
        jobs[name] = make_job(loader=name, data=str(folder / CANDIDATES[name][1].__name__), codes=str(folder / "codes"))
        cells[name] = examine(jobs[name])
        print(f"{name}: {cells[name]}", file=sys.stderr, flush=True)
    found = take_turns(jobs, rounds)
    print("| loader | largest deviation of a prefix | of a global batch of 256 | early repeats, 1 / 2 workers ", end="")
    print("| missing from the sources' first epochs, 1 / 2 workers | resumed in the same setup | 1 worker ", end="")
    print("| 2 ranks | bytes of state | samples/s | CPU µs per sample |\n" + "|---" * 11 + "|")
    for name in names:
        times = [summarize(found[name]["rate"]), summarize(found[name]["cpu_us"], 1)]
        print(f"| {name} | {' | '.join([*cells[name], *times])} |")


def run_photographs(job: Job) -> dict[str, Any]:
    """Deliver two epochs of photographs in this process; return the rate and the CPU time of the second."""
    transform = Compose([RandomResizedCrop(224), RandomHorizontalFlip()])
    parts = sorted(Path(job.data).iterdir())
    sources = {path.name: shardio.ShardDataset(path, shuffle=True, transform=transform) for path in parts}
    mix = shardio.MixedDataset(sources, weights="proportional", stop="all-once")
    dataset: Any = mix if len(parts) > 1 else sources["part-0"]
    loader: Any = shardio.DataLoader(dataset, batch_size=128, num_workers=job.num_workers, persistent_workers=True)
    for _ in range(2):
        stopwatch = Stopwatch()
        count = sum(len(labels) for _, labels in loader)
        times = stopwatch.stop()
    return {"rate": count / times.wall_s, "cpu_us": 1e6 * times.cpu_s / count, "count": count}


def measure_sources(folder: Path, photographs: Path, rounds: int) -> None:
    """Print the table that compares a ShardDataset with mixtures of its parts."""
    images, jobs = sorted(photographs.rglob("*.jpg")), dict[str, Job]()
    for num_parts, name in ((1, "`ShardDataset` alone"), (2, "2 sources"), (10, "10 sources")):
        for part in range(num_parts):
            unpacked = folder / f"images-{num_parts}-{part}"
            for image in images[part::num_parts]:
                copy = unpacked / image.relative_to(photographs)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(image.read_bytes())
            shardio.pack(unpacked, folder / str(num_parts) / f"part-{part}", jpeg="tile", max_shard_size=8 * 2**20)
        jobs[name] = make_job(loader="photographs", data=str(folder / str(num_parts)), codes="")
    found = take_turns(jobs, rounds)
    print("| dataset | images/s in the second epoch | CPU µs per image | CPU time relative to the `ShardDataset` |")
    print("|---|---|---|---|")
    reference = found["`ShardDataset` alone"]["cpu_us"]
    for name, own in found.items():
        compared = summarize(ratios(own["cpu_us"], reference), 3)
        print(f"| {name} | {summarize(own['rate'])} | {summarize(own['cpu_us'], 1)} | {compared} |")


def main(
    photographs: Annotated[Path | None, typer.Argument(help="Class folders of JPEGs, for --only sources.")] = None,
    only: Annotated[str, typer.Option(help="mixtures or sources.")] = "mixtures",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the tables."""
    if job is not None:
        answer(job, run_job)
        return
    with tempfile.TemporaryDirectory(prefix="shardio-bench-") as folder:
        if only == "sources" and photographs is not None:
            measure_sources(Path(folder), photographs, rounds)
        else:
            measure_mixtures(Path(folder), rounds)


if __name__ == "__main__":
    typer.run(main)
