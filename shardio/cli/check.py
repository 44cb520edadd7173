"""Implement ``shardio check``, ``doctor`` and ``bench``, which check and measure loaders."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardio.cli.options import (
    LOADING,
    BatchSize,
    CacheFolder,
    CacheShared,
    CacheSize,
    NumWorkers,
    OnError,
    RemoteArguments,
    StorageOptionTexts,
    has_class_folders,
    make_loader_options,
    make_transform,
    read_access,
    read_remote_arguments,
    report_rank,
    suggest_on_error,
)
from shardio.cli.terminal import count, echo, name_of, value_errors_as_usage_errors
from shardio.order import POLICIES, Remainder

if TYPE_CHECKING:
    from shardio.check import Coverage, ExpectedSamples
    from shardio.loader import DataLoader, LoaderStats


EFFECTS = "; ".join(f"{name} {policy.effect}" for name, policy in POLICIES.items())
"""The effects of the remainder policies, for ``--help``."""

in_loading, in_output, of_samples, of_script = (
    partial(typer.Option, rich_help_panel=panel) for panel in (LOADING, "Output", "Samples", "Scripts and recordings")
)
"""Functions that create an option in a panel of ``--help``."""

MAX_TARS = 8
"""The maximum number of tars that ``shardio doctor`` reads from."""

NUMS_REQUESTS = (1, 2, 4, 8, 16, 32)
"""The numbers of simultaneous requests for which ``shardio doctor`` measures the bandwidth."""


def check(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="A packed directory, a manifest, a tar, a directory of tars, or script.py:function, a function that "
            "returns a loader. With --merge, the recordings of all ranks.",
        ),
    ],
    world_size: Annotated[int, in_loading(min=1, help="Number of ranks.")] = 1,
    num_workers: Annotated[int, in_loading(min=0, help="Workers per rank (datasets only).")] = 0,
    batch_size: Annotated[int, in_loading(min=1, help="Samples per batch on each rank (datasets only).")] = 32,
    epochs: Annotated[int, in_loading(min=1, help="Number of epochs.")] = 1,
    remainder: Annotated[
        Remainder,
        in_loading(
            help="Policy for the last samples, if they do not fill a batch on every rank: "
            f"{EFFECTS} (datasets only; a script's shardio loader sets its own policy)."
        ),
    ] = "pad",
    shuffle: Annotated[bool, in_loading(help="Shuffle the order (datasets only).")] = True,
    seed: Annotated[int, in_loading(min=0, max=2**63 - 1, help="Seed of the order (datasets only).")] = 0,
    merge: Annotated[bool, of_script("--merge", help="Check recordings written by CoverageRecorder.")] = False,
    expected: Annotated[
        str | None,
        of_script(
            help="The samples that a script's loader or the recorded run should deliver: their number, or a packed "
            "dataset."
        ),
    ] = None,
    key: Annotated[
        str | None, of_script(help="The name or the index of the field that holds the keys in a script's batches.")
    ] = None,
    storage_option: StorageOptionTexts = None,
    cache: CacheFolder = None,
    cache_size: CacheSize = None,
    cache_shared: CacheShared = False,
) -> None:
    """Report which samples a dataset, a script's loader or a training run delivers once, repeatedly or never.

    The exit code is 1 unless each epoch delivers every sample exactly once, or as the remainder policy specifies.

    Example: shardio check packed/train --world-size 4 --num-workers 2
    """
    from shardio.check import find_frozen_orders, judge, merge_recordings
    from shardio.check.ranks import record_ranks

    remote = read_remote_arguments(storage_option, cache, cache_size, cache_shared)
    is_script = not merge and len(sources) == 1 and ".py:" in sources[0]
    if key is not None and not is_script:
        raise typer.BadParameter(
            "only a script's batches need --key: omit the option (a dataset has keys, and CoverageRecorder(key=) "
            "sets a recording's keys)",
            param_hint="--key",
        )
    if merge:
        found, wanted = merge_recordings(map(Path, sources)), _expect(expected, remote)
    elif len(sources) != 1:
        raise typer.BadParameter(f"expected one SOURCE, got {len(sources)} (only --merge accepts several)")
    elif is_script:
        if not (script := Path(sources[0].rpartition(":")[0])).is_file():
            raise typer.BadParameter(f"the script {script} does not exist")
        found = record_ranks(sources[0], world_size=world_size, epochs=epochs, key=key)
        wanted = _expect(expected, remote)
    else:
        if expected is not None:
            raise typer.BadParameter("--expected applies only to a script and to --merge", param_hint="--expected")
        settings: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "remainder": remainder, **remote}
        options = {"batch_size": batch_size, "num_workers": num_workers}
        found = _record_dataset(sources[0], world_size, epochs, settings, options)
        wanted = _expect_all(sources[0], remote)
    # A script's loader may be read for one more epoch than requested, to compare contents.
    num_judged = len(found) if merge else epochs
    reports = judge(found, wanted, num_judged=num_judged)
    for epoch, report in enumerate(reports):
        echo(f"epoch {epoch}: {'right' if report.is_right else 'WRONG'}: {report}")
        if report.expected.num_samples is None:
            echo("  the number of samples is unknown, so lost samples cannot be detected: pass --expected")
        for rank, worker, num_samples in report.samples_by_worker:
            echo(f"  rank {rank}{'' if worker is None else f' worker {worker}'}: {count(num_samples, 'sample')}")
    if not reports:
        echo("WRONG: no epochs were recorded")
    frozen = [] if not shuffle else find_frozen_orders(found[:num_judged])
    for cause in frozen:
        echo(f"WRONG: {cause}")
    if frozen or not reports or not all(report.is_right for report in reports):
        raise typer.Exit(1)


def _expect(expected: str | None, remote: RemoteArguments) -> ExpectedSamples:
    from shardio.check import ExpectedSamples

    if expected is None or expected.isdigit():
        return ExpectedSamples(num_samples=None if expected is None else int(expected))
    return _expect_all(expected, remote)


def _expect_all(source: str, remote: RemoteArguments) -> ExpectedSamples:
    from shardio.check import ExpectedSamples
    from shardio.datasets import ShardDataset

    # The keys come in manifest order, without ranks, workers or shuffling.
    dataset = ShardDataset(source, fields="key", rank=0, world_size=1, **remote)
    return replace(ExpectedSamples.of_keys(dataset), digest=dataset.digest)


def _record_dataset(
    source: str, world_size: int, epochs: int, settings: dict[str, Any], options: dict[str, Any]
) -> list[Coverage]:
    """Iterate over a dataset as all ranks would, given arguments of ShardDataset and DataLoader."""
    from shardio.check import Coverage, record
    from shardio.datasets import ShardDataset
    from shardio.loader import DataLoader

    ranks = range(world_size)
    datasets = [ShardDataset(source, fields="key", rank=rank, world_size=world_size, **settings) for rank in ranks]
    loaders = [DataLoader(dataset, **options) for dataset in datasets]
    found = [Coverage() for _ in range(epochs)]
    for epoch, coverage in enumerate(found):
        for rank, loader in enumerate(loaders):
            loader.set_epoch(epoch)
            key = 0 if POLICIES[settings["remainder"]].marks_repeats else None
            record(loader, coverage, rank=rank, key=key, world_size=world_size)
    return found


def doctor(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A packed dataset, such as s3://bucket/train."),
    ],
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Samples per second that training needs on this machine.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds to measure each number of requests.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Measure the speed of a dataset's store, and compare it with what a loader needs.

    The command reads parts of up to 8 shards in about 15 seconds, and stores nothing.

    Example: shardio doctor s3://bucket/train --rate 3000
    """
    from shardio.shards import open_table
    from shardio.storage.remote import measure_store

    table = open_table(source, read_access(storage_option))
    tars = table.tars[:: -(-len(table.tars) // MAX_TARS)]
    with ExitStack() as stack:
        speed = measure_store([stack.enter_context(closing(tar.open())) for tar in tars], NUMS_REQUESTS, seconds)
    sample_size = table.manifest.num_bytes / table.manifest.num_samples
    possible = speed.best / sample_size
    if as_json:
        values = {
            "latency_s": speed.latency_s,
            "bytes_per_s": {str(number): found for number, found in speed.bytes_per_s.items()},
            "saturated_by": speed.num_saturating,
            "bytes_per_sample": sample_size,
            "samples_per_s": possible,
        }
        echo(json.dumps(values, indent=1))
        return
    echo(f"latency    {1000 * speed.latency_s:.1f} ms for one byte")
    for number, found in speed.bytes_per_s.items():
        echo(f"bandwidth  {found / 1e6:,.0f} MB/s with {number} request{'s' if number > 1 else ''} at a time")
    echo(f"saturated  by {speed.num_saturating} requests at a time; shardio reads ahead with 16")
    echo(f"samples    {possible:,.0f} samples/s of {sample_size / 1e3:,.1f} kB at most, in an epoch without a cache")
    if rate is not None:
        needed = rate * sample_size
        verdict = (
            "the store is fast enough" if needed <= speed.best else "the store is too slow: cache the data (cache=)"
        )
        echo(f"needed     {needed / 1e6:,.0f} MB/s for {rate:,.0f} samples/s: {verdict}")


INTERRUPTED = 130
"""The exit code that shells report after Ctrl-C."""


def bench(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A packed directory, a manifest, a tar, a directory of tars, or class folders of images.",
        ),
    ],
    batch_size: BatchSize = 128,
    num_workers: NumWorkers = 2,
    image_size: Annotated[int, of_samples(min=1, help="Side length of the random crops in pixels.")] = 224,
    epochs: Annotated[int, in_loading(min=1, help="Number of epochs. The first epoch includes worker start-up.")] = 1,
    batches: Annotated[int | None, in_loading(min=1, help="Stop each epoch after this many batches.")] = None,
    fields: Annotated[
        str | None,
        of_samples(help="Comma-separated fields to load from shards, such as image,label (default: image)."),
    ] = None,
    transform: Annotated[
        str | None,
        of_samples(
            metavar="MODULE:NAME",
            help="Your own transform, as package.module:name or path/to/file.py:name, as for shardio augment (default: "
            "random crops and flips).",
        ),
    ] = None,
    decode: Annotated[
        Literal["array", "pil"], of_samples(help="Type of the images for your transform: arrays or Pillow images.")
    ] = "array",
    on_error: OnError = "raise",
    trace: Annotated[
        Path | None,
        in_output(
            metavar="FILE",
            help="Write what the workers did in the last epoch, and when batches were late, to this JSON file. Open it "
            "at https://ui.perfetto.dev.",
        ),
    ] = None,
    as_json: Annotated[bool, in_output("--json", help="Print JSON, one line per epoch.")] = False,
    storage_option: StorageOptionTexts = None,
    cache: CacheFolder = None,
    cache_size: CacheSize = None,
    cache_shared: CacheShared = False,
) -> None:
    """Load a dataset as training would, and report the speed and the bottleneck.

    Press Ctrl-C to stop early and print the results so far.

    Example: shardio bench packed/train --num-workers 8 --epochs 2
    """
    from shardio.loader.choice import fallback_reason
    from shardio.loader.data_loader import NO_STATS
    from shardio.loader.statistics import describe_format, measure_decoded

    remote = read_remote_arguments(storage_option, cache, cache_size, cache_shared)
    with value_errors_as_usage_errors():
        options: dict[str, Any] = {"transform": _choose_transform(transform, image_size), "decode": decode}
        loader_options = make_loader_options(batch_size, num_workers, on_error)
        loader = _make_loader(source, fields, options, loader_options, remote)
    stored = measure_decoded(loader.dataset, describe_format(loader.dataset))

    report_rank()

    def report(epoch: int, meter: ThroughputMeter) -> None:
        why = fallback_reason(loader)
        stats = loader.stats(trace=trace) if why is None else None
        if as_json:
            echo(_as_json(epoch, meter, stats))
            return
        lines = [_describe_speed(epoch, meter)]
        if stats is None:
            lines.append(NO_STATS.format(reason=why))
        elif meter.num_batches:
            lines += replace(stats, stored=stored).describe_stages()
        echo("\n  ".join(lines))

    epoch, meter = 0, ThroughputMeter()
    try:
        for epoch in range(epochs):
            meter = ThroughputMeter()
            with suggest_on_error(on_error):
                meter.watch(islice(loader, batches))
            report(epoch, meter)
    except KeyboardInterrupt:
        report(epoch, meter)
        echo("interrupted: the last epoch is incomplete", err=True)
        raise typer.Exit(INTERRUPTED) from None


@dataclass(slots=True, kw_only=True)
class ThroughputMeter:
    """Measures the throughput of an epoch of any loader. Times are in seconds since the meter was created.

    Attributes:
        num_batches: The number of batches so far.
        num_samples: The number of samples so far.
        elapsed_s: The time of the last batch so far.
        first_batch_s: The time of the first batch; None before that.
        num_first: The number of samples in the first batch.
        started: The value of time.perf_counter() when the meter was created.
    """

    num_batches: int = 0
    num_samples: int = 0
    elapsed_s: float = 0.0
    first_batch_s: float | None = None
    num_first: int = 0
    started: float = field(default_factory=time.perf_counter)

    def watch(self, batches: Iterable[Any]) -> None:
        """Iterate over batches and count them."""
        for batch in batches:
            self.elapsed_s = time.perf_counter() - self.started
            num_samples = _count_samples(batch)
            if self.first_batch_s is None:
                self.first_batch_s, self.num_first = self.elapsed_s, num_samples
            self.num_batches += 1
            self.num_samples += num_samples

    @property
    def samples_per_s(self) -> float:
        """The rate, including the time that workers take to start."""
        return self.num_samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def samples_per_s_after_first_batch(self) -> float | None:
        """The rate after the first batch; None if there are fewer than two batches."""
        if self.num_batches < 2 or self.first_batch_s is None:
            return None
        return (self.num_samples - self.num_first) / (self.elapsed_s - self.first_batch_s)


def _count_samples(batch: Any) -> int:
    column = batch[0] if isinstance(batch, list | tuple) else batch
    while isinstance(column, dict):
        column = next(iter(column.values()))
    return len(column)


def _choose_transform(name: str | None, image_size: int) -> Any:
    from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

    if name is None:
        return Compose([RandomResizedCrop(image_size), RandomHorizontalFlip()])
    return make_transform(None, name, image_size)


def _make_loader(
    source: str, fields: str | None, settings: dict[str, Any], options: dict[str, Any], remote: RemoteArguments
) -> DataLoader:
    import shardio
    from shardio.storage import make_access

    if has_class_folders(source, make_access(**remote)):
        if fields is not None:
            raise ValueError(f"--fields applies only to shards, but {name_of(source)} has class folders")
        folder = shardio.ImageFolder(source, **settings, **remote)
        return shardio.DataLoader(folder, sampler=shardio.EpochSampler(folder), **options)
    names = ("image",) if fields is None else tuple(fields.split(","))
    has_images = "image" in names
    dataset = shardio.ShardDataset(source, fields=names, shuffle=True, **remote, **(settings if has_images else {}))
    return shardio.DataLoader(dataset, **options)


def _as_json(epoch: int, meter: ThroughputMeter, stats: LoaderStats | None) -> str:
    from shardio.world import find_world

    counts = {name: getattr(meter, name) for name in ("num_batches", "num_samples", "elapsed_s", "first_batch_s")}
    rates = {name: getattr(meter, name) for name in ("samples_per_s", "samples_per_s_after_first_batch")}
    return json.dumps(
        {"epoch": epoch, **asdict(find_world()), **counts, **({} if stats is None else asdict(stats)), **rates}
    )


def _describe_speed(epoch: int, meter: ThroughputMeter) -> str:
    said = (
        f"epoch {epoch}: {count(meter.num_samples, 'sample')} in {count(meter.num_batches, 'batch', 'batches')}, "
        f"{meter.elapsed_s:.2f} s, {meter.samples_per_s:,.0f} samples/s"
    )
    if meter.first_batch_s is None:
        return f"{said}: no batches"
    said += f"; first batch after {1000 * meter.first_batch_s:.0f} ms"
    rate = meter.samples_per_s_after_first_batch
    return said if rate is None else f"{said}, then {rate:,.0f} samples/s"
