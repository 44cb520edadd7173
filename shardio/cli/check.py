"""``shardio check`` and ``shardio doctor``."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardio.cli.options import (
    CacheFolder,
    CacheShared,
    CacheSize,
    RemoteArguments,
    StorageOptionTexts,
    read_access,
    read_remote_arguments,
)
from shardio.cli.terminal import count, echo
from shardio.order import POLICIES, Remainder

if TYPE_CHECKING:
    from shardio.check import Coverage, ExpectedSamples
    from shardio.datasets import ShardDataset


EFFECTS = "; ".join(f"{name} {policy.effect}" for name, policy in POLICIES.items())
"""The effects of the remainder policies, for ``--help``."""

MAX_TARS = 8
"""The maximum number of tars that ``shardio doctor`` reads from."""

NUMS_REQUESTS = (1, 2, 4, 8, 16, 32)
"""The numbers of requests at a time with which ``shardio doctor`` measures the bandwidth."""


def check(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="A packed directory, a manifest, a tar, a directory of tars, or script.py:function, a function that "
            "returns a loader. With --merge, the recordings of all ranks.",
        ),
    ],
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    num_workers: Annotated[int, typer.Option(min=0, help="Workers per rank (datasets only).")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch on each rank (datasets only).")] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 1,
    remainder: Annotated[
        Remainder,
        typer.Option(
            help="What to do with the last samples, if they do not fill a batch on every rank: "
            f"{EFFECTS} (datasets only; a script's shardio loader sets its own policy)."
        ),
    ] = "pad",
    shuffle: Annotated[bool, typer.Option(help="Shuffle the order (datasets only).")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the order (datasets only).")] = 0,
    merge: Annotated[bool, typer.Option("--merge", help="Check recordings written by CoverageRecorder.")] = False,
    expected: Annotated[
        str | None,
        typer.Option(
            help="The samples that a script's loader or the recorded run should deliver: their number, or a packed "
            "dataset."
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The name or the index of the field that holds the keys in a script's batches.")
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
            "only a script's batches need it: omit it (a dataset has keys; a recording's keys are set by "
            "CoverageRecorder(key=))",
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
        found, wanted = _record_dataset(
            sources[0], world_size, num_workers, batch_size, epochs, remainder, remote, shuffle=shuffle, seed=seed
        )
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
    from shardio.datasets import ShardDataset

    if expected is None or expected.isdigit():
        return ExpectedSamples(num_samples=None if expected is None else int(expected))
    return _expect_all(ShardDataset(expected, fields="key", rank=0, world_size=1, **remote))


def _expect_all(dataset: ShardDataset) -> ExpectedSamples:
    from shardio.check import ExpectedSamples

    return replace(ExpectedSamples.of_keys(dataset), digest=dataset.digest)


def _record_dataset(
    source: str,
    world_size: int,
    num_workers: int,
    batch_size: int,
    epochs: int,
    remainder: Remainder,
    remote: RemoteArguments,
    *,
    shuffle: bool,
    seed: int,
) -> tuple[list[Coverage], ExpectedSamples]:
    """Iterate over a dataset as all ranks do. Return the coverage of each epoch and the expectation."""
    from shardio.check import Coverage, record
    from shardio.datasets import ShardDataset
    from shardio.loader import DataLoader

    def make_loader(rank: int) -> DataLoader:
        dataset = ShardDataset(
            source,
            fields="key",
            shuffle=shuffle,
            seed=seed,
            remainder=remainder,
            rank=rank,
            world_size=world_size,
            **remote,
        )
        return DataLoader(dataset, batch_size=batch_size, num_workers=num_workers)

    key = 0 if POLICIES[remainder].marks_repeats else None
    loaders = [make_loader(rank) for rank in range(world_size)]
    found = []
    for epoch in range(epochs):
        coverage = Coverage()
        for rank, loader in enumerate(loaders):
            loader.set_epoch(epoch)
            record(loader, coverage, rank=rank, key=key, world_size=world_size)
        found.append(coverage)
    # The expected keys come in manifest order, without ranks, workers or shuffling.
    return found, _expect_all(ShardDataset(source, fields="key", rank=0, world_size=1, **remote))


def doctor(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A packed dataset, above all one in an object store: s3://bucket/train."),
    ],
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Samples per second that your training needs on this machine.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds to measure each number of requests.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Measure how fast the store of a dataset answers, and what that means for a loader.

    It reads parts of up to 8 shards for about 15 seconds; nothing is kept.

    Example: shardio doctor s3://bucket/train --rate 3000
    """
    from shardio.shards import open_table
    from shardio.storage.listing import measure_store

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
