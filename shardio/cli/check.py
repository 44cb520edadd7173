"""Implement ``check``, which finds repeated and lost samples, and ``mix``, which describes a mixture of datasets."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from shardio.cli.options import (
    LOADING,
    CacheFolder,
    CacheShared,
    CacheSize,
    RemoteArguments,
    StorageOptionTexts,
    read_access,
    read_remote_arguments,
)
from shardio.cli.terminal import check_png_path, echo, printable, require_matplotlib, value_errors_as_usage_errors
from shardio.errors import FormatError
from shardio.order import POLICIES, Remainder
from shardio.process import let_through
from shardio.values import count

if TYPE_CHECKING:
    from shardio.check import Coverage, ExpectedSamples
    from shardio.order import MixedOrder


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


NUM_POINTS = 500
"""The number of points in each curve of the plot."""


class SourceSpec(BaseModel):
    """A source in a specification: its path or URL, its weight, and its number of repetitions in an epoch."""

    model_config = ConfigDict(extra="forbid")

    path: str
    weight: float | None = None
    repeat: PositiveInt = 1


class MixSpec(BaseModel):
    """A specification: the arguments of :class:`shardio.MixedDataset`. The keys of ``at`` are steps."""

    model_config = ConfigDict(extra="forbid")

    sources: dict[str, SourceSpec]
    weights: Literal["proportional"] | None = None
    temperature: float = 1.0
    stop: Literal["first", "longest", "all-once"] | PositiveInt = "first"
    batches: Literal["mixed", "pure"] = "mixed"
    global_batch_size: PositiveInt | None = None
    at: dict[PositiveInt, dict[str, float]] = {}


def mix(
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC", exists=True, dir_okay=False, help="The mixture: a YAML or JSON file. See docs/mixtures.md."
        ),
    ],
    plot: Annotated[
        Path | None,
        typer.Option(callback=check_png_path, metavar="FILE.png", help="Plot the weights and the epochs to this file."),
    ] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Show what an epoch of a mixture consists of, how often each source is repeated, and when the first repeat begins.

    Example: shardio mix mixture.yaml --plot mixture.png
    """
    if plot is not None:
        require_matplotlib()
    settings = read_spec(spec)
    with value_errors_as_usage_errors():
        order = make_order(settings, storage_option)
    counts, step = order.count(order.num_samples), settings.global_batch_size
    unit = f" = {count(-(-order.num_samples // step), 'step')}" if step else ""
    echo(f"an epoch has {count(order.num_samples, 'sample')}{unit}\n")
    rows = [("source", "samples", "share", "in an epoch", "times", "first repeat at")]
    for number, (source, num_picked) in enumerate(zip(order.sources, counts, strict=True)):
        begins_again = order.find(number, -(-source.num_samples // order.unit))
        is_repeated = begins_again is not None and begins_again < order.num_samples
        at_step = f" (step {begins_again // step:,})" if step and begins_again is not None else ""
        share, times = f"{num_picked / order.num_samples:.2%}", f"{num_picked / source.num_samples:.2f}"
        repeat = f"sample {begins_again:,}{at_step}" if is_repeated else "never in epoch 0"
        rows.append((printable(source.name), f"{source.num_samples:,}", share, f"{num_picked:,}", times, repeat))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *others, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:-1], strict=True)]
        echo("  ".join([name.ljust(widths[0]), *cells, last]))
    if plot is not None:
        _plot(plot, order)


def read_spec(path: Path) -> MixSpec:
    """Read a specification.

    Raises:
        FormatError: If the file is not a specification, or it is YAML and PyYAML is not installed.
    """
    text = path.read_text(encoding="utf-8")
    try:
        values: Any = json.loads(text) if path.suffix == ".json" else import_module("yaml").safe_load(text)
        return MixSpec.model_validate(values)
    except ModuleNotFoundError as error:
        raise FormatError(f"{path} is YAML, which needs PyYAML: pip install pyyaml, or write it as JSON") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in error.errors())
        raise FormatError(f"{path} does not describe a mixture: {wrong}. See docs/mixtures.md") from error
    except Exception as error:  # json and yaml raise errors of their own.
        let_through(error)
        raise FormatError(f"{path} cannot be read: {error}") from error


def make_order(spec: MixSpec, storage_option: list[str] | None) -> MixedOrder:
    """Return the order of a mixture. Only the sizes of the sources are read.

    Raises:
        ValueError: If the weights are invalid, or the settings contradict each other.
    """
    from shardio.order import OrderSettings, SourceOrder, make_mixed_order, weigh_by_size
    from shardio.shards import open_table

    access, sources = read_access(storage_option), []
    make = partial(SourceOrder, settings=OrderSettings(shuffle=False, seed=0, window=1, strata=1))
    for name, source in spec.sources.items():
        manifest = open_table(source.path, access).manifest
        sources.append(make(name=name, shard_sizes=manifest.shard_sizes, digest=manifest.digest, repeat=source.repeat))
    weights = {name: source.weight for name, source in spec.sources.items() if source.weight is not None}
    if spec.weights is None and (missing := next((name for name in spec.sources if name not in weights), None)):
        raise ValueError(f"the source {missing!r} has no weight: add weight, or weights: proportional")
    if spec.weights is not None and weights:
        raise ValueError(f"weights: {spec.weights} and the weight of {next(iter(weights))!r} contradict each other")
    if unknown := sorted({name for changed in spec.at.values() for name in changed} - set(spec.sources)):
        raise ValueError(f"'at' refers to {unknown[0]!r}, which is not a source")
    return make_mixed_order(
        sources,
        weigh_by_size(sources, spec.temperature) if spec.weights else weights,
        sorted(spec.at.items()),
        stop=spec.stop,
        is_pure=spec.batches == "pure",
        global_batch_size=spec.global_batch_size,
        seed=None,
    )


def _plot(path: Path, order: MixedOrder) -> None:
    """Plot each source's share, and the number of its epochs, against the position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    positions = np.unique(np.linspace(0, order.num_samples, NUM_POINTS).astype(np.int64)).tolist()
    shares = np.array([order.weights_at(position) for position in positions], float)
    epochs = np.array([order.count(position) for position in positions]) / [each.num_samples for each in order.sources]
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.stackplot(positions, (shares / shares.sum(axis=1, keepdims=True)).T, labels=[s.name for s in order.sources])
    upper.set_ylabel("share of the samples")
    lower.plot(positions, epochs)
    lower.set_ylabel("epochs of the source")
    lower.set_xlabel("sample of the epoch")
    lower.grid(alpha=0.3)
    upper.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, format="png")
