"""``shardio order``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from shardio.cli.console import check_png_path, count, require_matplotlib, value_errors_as_usage_errors
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo

MAX_POINTS = 100_000
"""The maximum number of samples to plot. For a larger dataset, a random subset is plotted."""


def order(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
    ],
    epoch: Annotated[int, typer.Option(min=0, help="The epoch to examine.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the order.")] = 0,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of lanes: equal parts of the shuffled shards, from which consecutive samples come in turn; "
            "leave unset to let shardio choose.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Number of samples of a lane to shuffle together; leave unset to let shardio choose."),
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch on each rank.")] = 256,
    plot: Annotated[
        Path | None, typer.Option(callback=check_png_path, metavar="FILE.png", help="Plot the epoch to this file.")
    ] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Measure how well an epoch is shuffled and how much data a rank reads; pass --plot to plot the order.

    Example: shardio order packed/train --world-size 8 --plot order.png
    """
    from shardio.order import IDEAL_DISTANCE, EpochOrder, choose_settings, measure_quality
    from shardio.shards import open_table

    if plot is not None:
        require_matplotlib()
    manifest = open_table(source, read_access(storage_option)).manifest
    sizes = manifest.shard_sizes
    num_bytes = np.array([shard.num_bytes for shard in manifest.shards], dtype=np.int64)
    with value_errors_as_usage_errors():
        settings = choose_settings(sizes, shuffle=True, seed=seed, lanes=lanes, window=window)
    samples = EpochOrder(sizes, settings, epoch).samples_at(np.arange(manifest.num_samples))
    # Rank r reads the positions p with p mod W == r, as Split does in a shuffled order.
    ranks = [samples[rank::world_size] for rank in range(world_size)]
    quality = measure_quality(ranks, sizes, num_bytes, world_size * batch_size)
    same, ideal_same = quality.same_shard, quality.ideal_same_shard
    rows = {
        "epoch": f"{epoch}, seed {seed}: {count(len(samples), 'sample')} in {count(len(sizes), 'shard')}",
        "lanes": str(settings.lanes),
        "window": count(settings.window, "sample"),
        "read by": f"{count(world_size, 'rank')}, batches of {batch_size}",
        "moved by": f"{quality.displacement:.3f} of the epoch on average (ideal {IDEAL_DISTANCE:.3f})",
        "neighbours": f"in a shard are {quality.separation:.3f} of the epoch apart (ideal {IDEAL_DISTANCE:.3f})",
        "same shard": f"probability {same:.3g} for two samples of a global batch (ideal {ideal_same:.3g})",
        "shards open": f"{quality.mean_open:.1f} per rank on average, {quality.max_open} at most",
        "bytes read": f"{quality.read_factor:.2f} times a rank's share if it fetches whole shards",
    }
    for name, value in rows.items():
        echo(f"{name:<11} {value}")
    if plot is not None:
        title = f"epoch {rows['epoch']}, {count(settings.lanes, 'lane')}, windows of {rows['window']}"
        _plot_epoch(plot, samples, sizes, settings.lanes, title)


def _plot_epoch(path: Path, samples: NDArray[np.int64], sizes: NDArray[np.int64], lanes: int, title: str) -> None:
    """Plot the shard, and the index in the shard, against the position; the colour shows the lane."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from shardio.order import shards_of

    positions = np.arange(len(samples))
    if len(positions) > MAX_POINTS:
        # Random, because a fixed step would show only some of the lanes.
        positions = np.sort(np.random.default_rng(0).choice(len(samples), MAX_POINTS, replace=False))
    shards = shards_of(samples[positions], sizes)
    indices = samples[positions] - (np.cumsum(sizes) - sizes)[shards]
    size = min(6.0, max(0.3, 6e4 / len(positions)))  # points²

    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, values, label in zip(
        figure.subplots(2, 1, sharex=True), (shards, indices), ("shard", "index in the shard"), strict=True
    ):
        # The margins of the colour scale give a single lane a bright colour, too.
        axes.scatter(
            positions,
            values,
            s=size,
            c=positions % lanes,
            cmap="turbo",
            vmin=-1,
            vmax=lanes,
            linewidths=0,
        )
        axes.set_ylabel(label)
        axes.margins(x=0.01)
    axes.set_xlabel("position in the epoch (colour: lane)")
    figure.suptitle(title)
    figure.savefig(path, format="png")
