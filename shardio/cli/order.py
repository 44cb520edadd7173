"""``shardio order``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from shardio.cli.console import check_picture, count, require_matplotlib, wrong_values_are_wrong_usage
from shardio.cli.terminal import echo

MAX_POINTS = 100_000
"""How many samples are drawn at the most; of more, so many are chosen at random."""


def order(
    source: Annotated[Path, typer.Argument(help="A packed directory, a manifest, or a directory of tars.")],
    epoch: Annotated[int, typer.Option(min=0, help="Which epoch.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the order.")] = 0,
    lanes: Annotated[int | None, typer.Option(min=1, help="Stretches of the epoch that take turns.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Samples of a lane that are shuffled together.")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="How many ranks.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of one rank's batch.")] = 256,
    plot: Annotated[
        Path | None, typer.Option(callback=check_picture, metavar="FILE.png", help="Draw the epoch into this file.")
    ] = None,
) -> None:
    """Say how well an epoch is shuffled, and what reading it in that order costs a rank; draw it."""
    from shardio.order import IDEAL_DISTANCE, EpochOrder, choose_settings, measure_quality
    from shardio.shards import open_table

    if plot is not None:
        require_matplotlib()
    manifest = open_table(source).manifest
    sizes = manifest.shard_sizes
    num_bytes = np.array([shard.num_bytes for shard in manifest.shards], dtype=np.int64)
    with wrong_values_are_wrong_usage():
        settings = choose_settings(sizes, shuffle=True, seed=seed, lanes=lanes, window=window)
    samples = EpochOrder(sizes, settings, epoch).samples_at(np.arange(manifest.num_samples))
    # Rank r reads the positions p with p mod W == r, as Split deals a shuffled order.
    ranks = [samples[rank::world_size] for rank in range(world_size)]
    quality = measure_quality(ranks, sizes, num_bytes, world_size * batch_size)
    same, ideal_same = quality.same_shard, quality.ideal_same_shard
    rows = {
        "epoch": f"{epoch}, with seed {seed}: {count(len(samples), 'sample')} of {count(len(sizes), 'shard')}",
        "lanes": str(settings.lanes),
        "window": count(settings.window, "sample"),
        "read by": f"{count(world_size, 'rank')}, batches of {batch_size}",
        "moved by": f"{quality.displacement:.3f} of the epoch on average, ideal {IDEAL_DISTANCE:.3f}",
        "neighbours": f"in a shard come {quality.separation:.3f} of the epoch apart, ideal {IDEAL_DISTANCE:.3f}",
        "same shard": f"chance {same:.3g} for two samples of a batch of all ranks, ideal {ideal_same:.3g}",
        "shards open": f"{quality.mean_open:.1f} on a rank on average, {quality.max_open} at the most",
        "bytes read": f"{quality.read_factor:.2f} times its share, by a rank that fetches whole shards",
    }
    for name, value in rows.items():
        echo(f"{name:<11} {value}")
    if plot is not None:
        title = f"epoch {rows['epoch']}, {count(settings.lanes, 'lane')}, windows of {rows['window']}"
        _draw(plot, samples, sizes, settings.lanes, title)


def _draw(path: Path, samples: NDArray[np.int64], sizes: NDArray[np.int64], lanes: int, title: str) -> None:
    """Draw source shard and index in the shard against position; the colour is the lane."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from shardio.order import shards_of

    positions = np.arange(len(samples))
    if len(positions) > MAX_POINTS:
        # At random, since a fixed step would see some of the lanes only.
        positions = np.sort(np.random.default_rng(0).choice(len(samples), MAX_POINTS, replace=False))
    shards = shards_of(samples[positions], sizes)
    indices = samples[positions] - (np.cumsum(sizes) - sizes)[shards]
    size = min(6.0, max(0.3, 6e4 / len(positions)))  # points²

    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, values, label in zip(
        figure.subplots(2, 1, sharex=True), (shards, indices), ("source shard", "index in the shard"), strict=True
    ):
        # A limit on either side, so that a single lane has a bright colour, too.
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
