"""Implement ``shardio check``, which finds samples that a loader repeats or loses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.options import (
    LOADING,
    CacheFolder,
    CacheShared,
    CacheSize,
    RemoteArguments,
    StorageOptionTexts,
    read_remote_arguments,
)
from shardio.cli.terminal import echo
from shardio.order import POLICIES, Remainder
from shardio.values import count

if TYPE_CHECKING:
    from shardio.check import Coverage, ExpectedSamples


EFFECTS = "; ".join(f"{name} {policy.effect}" for name, policy in POLICIES.items())
"""The effects of the remainder policies, for ``--help``."""

in_loading, in_output, of_samples, of_script = (
    partial(typer.Option, rich_help_panel=panel) for panel in (LOADING, "Output", "Samples", "Scripts and recordings")
)
"""Functions that create an option in a panel of ``--help``."""


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
