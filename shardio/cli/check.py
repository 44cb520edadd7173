"""``shardio check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.order import Remainder

if TYPE_CHECKING:
    from shardio.check import CoverageReport


def check(
    source: Annotated[Path, typer.Argument(help="A packed directory, a manifest, or a directory of tars.")],
    world_size: Annotated[int, typer.Option(min=1, help="How many ranks.")] = 1,
    num_workers: Annotated[int, typer.Option(min=0, help="Worker processes of each rank.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of one rank's batch.")] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs.")] = 1,
    remainder: Annotated[Remainder, typer.Option(help="What happens to samples that fill no step.")] = "pad",
    shuffle: Annotated[bool, typer.Option(help="Whether the order is shuffled.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the order.")] = 0,
) -> None:
    """Iterate over a dataset as all ranks would, and say which samples came once, more often, or never.

    Exit code 1 unless every sample of every epoch came exactly once, or as the remainder policy says.
    """
    from shardio.check import Coverage, record
    from shardio.datasets import ShardDataset
    from shardio.loader import DataLoader

    def make_dataset(rank: int) -> ShardDataset:
        return ShardDataset(
            source, fields="key", shuffle=shuffle, seed=seed, remainder=remainder, rank=rank, world_size=world_size
        )

    loaders = [
        DataLoader(make_dataset(rank), batch_size=batch_size, num_workers=num_workers) for rank in range(world_size)
    ]
    # In manifest order, without ranks, workers or shuffling.
    expected = list(ShardDataset(source, fields="key", rank=0, world_size=1))
    num_left_over = len(expected) % (world_size * batch_size)
    is_right = True
    for epoch in range(epochs):
        coverage = Coverage()
        for rank, loader in enumerate(loaders):
            loader.set_epoch(epoch)
            record(loader, coverage, rank=rank, key=_valid_keys if remainder == "mask" else None)
        report = coverage.report(
            expected,
            num_repeats=-len(expected) % world_size if remainder == "pad" else 0,
            num_missing=num_left_over if remainder == "drop" else 0,
        )
        is_right = is_right and report.is_right
        _print(epoch, report)
    if not is_right:
        raise typer.Exit(1)


def _valid_keys(batch: Any) -> list[str]:
    keys, valid = batch
    return [key for key, is_valid in zip(keys, valid.tolist(), strict=True) if is_valid]


def _print(epoch: int, report: CoverageReport) -> None:
    typer.echo(f"epoch {epoch}: {'right' if report.is_right else 'WRONG'}: {report}")
    for rank, worker, number in report.sources:
        typer.echo(f"  rank {rank} worker {worker}: {number} samples")
