"""The command ``shardio mix``, which describes a mixture of datasets."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from shardio.cli.options import StorageOptionTexts, read_access
from shardio.cli.terminal import check_png_path, echo, printable, require_matplotlib, value_errors_as_usage_errors
from shardio.errors import FormatError
from shardio.process import let_through
from shardio.values import count

if TYPE_CHECKING:
    from shardio.order import MixedOrder

NUM_POINTS = 500
"""The number of points of each curve of the plot."""


class SourceSpec(BaseModel):
    """A source in a specification: its path or URL, its weight, and its number of repetitions in an epoch."""

    model_config = ConfigDict(extra="forbid")

    path: str
    weight: float | None = None
    repeat: PositiveInt = 1


class MixSpec(BaseModel):
    """A specification, whose entries are the arguments of :class:`shardio.MixedDataset`; ``at`` has steps as keys."""

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
    """Show what an epoch of a mixture consists of, how often each source is repeated, and when it begins again.

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
        rows.append(
            (
                printable(source.name),
                f"{source.num_samples:,}",
                f"{num_picked / order.num_samples:.2%}",
                f"{num_picked:,}",
                f"{num_picked / source.num_samples:.2f}",
                f"sample {begins_again:,}{at_step}" if is_repeated else "never in epoch 0",
            )
        )
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

    access, unshuffled = read_access(storage_option), OrderSettings(shuffle=False, seed=0, window=1, strata=1)
    sources = []
    for name, source in spec.sources.items():
        manifest = open_table(source.path, access).manifest
        sources.append(
            SourceOrder(
                name=name,
                shard_sizes=manifest.shard_sizes,
                settings=unshuffled,
                digest=manifest.digest,
                repeat=source.repeat,
            )
        )
    weights = {name: source.weight for name, source in spec.sources.items() if source.weight is not None}
    if spec.weights is None and (missing := next((name for name in spec.sources if name not in weights), None)):
        raise ValueError(f"the source {missing!r} has no weight: add weight, or weights: proportional")
    if spec.weights is not None and weights:
        raise ValueError(f"weights: {spec.weights} and the weight of {next(iter(weights))!r} contradict each other")
    if unknown := sorted({name for changed in spec.at.values() for name in changed} - set(spec.sources)):
        raise ValueError(f"at names {unknown[0]!r}, which is not a source")
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
