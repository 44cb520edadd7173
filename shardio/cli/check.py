"""``shardio check``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardio.cli.terminal import echo
from shardio.order import Remainder

if TYPE_CHECKING:
    from shardio.check import Coverage, ExpectedSamples
    from shardio.datasets import ShardDataset


def check(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="A packed directory, a manifest or a directory of tars; or script.py:function, which returns a "
            "loader; or with --merge the recordings of all ranks.",
        ),
    ],
    world_size: Annotated[int, typer.Option(min=1, help="How many ranks.")] = 1,
    num_workers: Annotated[int, typer.Option(min=0, help="Worker processes of each rank, for a dataset.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of one rank's batch, for a dataset.")] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs.")] = 1,
    remainder: Annotated[
        Remainder,
        typer.Option(
            help="What happens to samples that fill no step, for a dataset; a script's shardio loader brings its own."
        ),
    ] = "pad",
    shuffle: Annotated[bool, typer.Option(help="Whether the order is shuffled, for a dataset.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the order, for a dataset.")] = 0,
    merge: Annotated[bool, typer.Option("--merge", help="Judge the files that CoverageRecorder wrote.")] = False,
    expected: Annotated[
        str | None,
        typer.Option(help="What a script's loader or recordings should hold: a number, or a packed dataset."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Where a script's batches have their keys: a field's name, or its place.")
    ] = None,
) -> None:
    """Say which samples came once, more often, or never: of a dataset, of any script's loader, or of a training run.

    Exit code 1 unless every sample of every epoch came exactly once, or as the remainder policy says.
    """
    from shardio.check import find_frozen_orders, judge, merge_recordings
    from shardio.check.processes import record_ranks

    if merge:
        found, wanted = merge_recordings(map(Path, sources)), _expect(expected)
    elif len(sources) != 1:
        raise typer.BadParameter(f"one SOURCE is checked at a time, got {len(sources)} (--merge takes several)")
    elif ".py:" in sources[0]:
        found = record_ranks(sources[0], world_size=world_size, epochs=epochs, key=key)
        wanted = _expect(expected)
    else:
        found, wanted = _record_dataset(
            sources[0], world_size, num_workers, batch_size, epochs, remainder, shuffle=shuffle, seed=seed
        )
    # A script's loader is read once more than asked for where contents must be compared.
    num_judged = len(found) if merge else epochs
    reports = judge(found, wanted, num_judged=num_judged)
    for epoch, report in enumerate(reports):
        echo(f"epoch {epoch}: {'right' if report.is_right else 'WRONG'}: {report}")
        if report.expected.num_samples is None:
            echo("  how many samples there are is not known, so losses were not judged: give --expected")
        for rank, worker, number in report.samples_by_worker:
            echo(f"  rank {rank}{'' if worker is None else f' worker {worker}'}: {number} samples")
    if not reports:
        echo("WRONG: no epoch was recorded")
    frozen = [] if not shuffle else find_frozen_orders(found[:num_judged])
    for cause in frozen:
        echo(f"WRONG: {cause}")
    if frozen or not reports or not all(report.is_right for report in reports):
        raise typer.Exit(1)


def _expect(expected: str | None) -> ExpectedSamples:
    """Return what ``--expected`` names."""
    from shardio.check import ExpectedSamples
    from shardio.datasets import ShardDataset

    if expected is None or expected.isdigit():
        return ExpectedSamples(num_samples=None if expected is None else int(expected))
    return _expect_all(ShardDataset(expected, fields="key", rank=0, world_size=1))


def _expect_all(dataset: ShardDataset) -> ExpectedSamples:
    """Expect the keys of a dataset that yields them in its own order."""
    from shardio.check import ExpectedSamples

    return replace(ExpectedSamples.of_keys(dataset), digest=dataset.digest)


def _record_dataset(
    source: str,
    world_size: int,
    num_workers: int,
    batch_size: int,
    epochs: int,
    remainder: Remainder,
    *,
    shuffle: bool,
    seed: int,
) -> tuple[list[Coverage], ExpectedSamples]:
    """Iterate over a dataset as all ranks would."""
    from shardio.check import Coverage, record
    from shardio.datasets import ShardDataset
    from shardio.loader import DataLoader

    def make_loader(rank: int) -> DataLoader:
        dataset = ShardDataset(
            source, fields="key", shuffle=shuffle, seed=seed, remainder=remainder, rank=rank, world_size=world_size
        )
        return DataLoader(dataset, batch_size=batch_size, num_workers=num_workers)

    loaders = [make_loader(rank) for rank in range(world_size)]
    found = []
    for epoch in range(epochs):
        coverage = Coverage()
        for rank, loader in enumerate(loaders):
            loader.set_epoch(epoch)
            record(loader, coverage, rank=rank, key=0 if remainder == "mask" else None, world_size=world_size)
        found.append(coverage)
    # In manifest order, without ranks, workers or shuffling.
    return found, _expect_all(ShardDataset(source, fields="key", rank=0, world_size=1))
