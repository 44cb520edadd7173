"""Implement ``shardio ls``, ``cat``, ``extract``, ``info`` and ``order``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import numpy as np
import typer
from numpy.typing import NDArray

from shardio.cli.options import DatasetPath, StorageOptionTexts, read_access, read_options
from shardio.cli.terminal import (
    check_png_path,
    echo,
    format_counts,
    print_error,
    printable,
    require_matplotlib,
    value_errors_as_usage_errors,
)
from shardio.errors import ShardioError
from shardio.values import count, format_bytes

if TYPE_CHECKING:
    from shardio.images import DecoderName
    from shardio.order import EpochOrder, OrderSettings
    from shardio.reading import KeyedShards
    from shardio.shards import ShardTable
    from shardio.storage import StorageOptions


MAX_SAMPLES = 1000
"""The maximum number of samples whose decoders are forecast. A larger dataset is sampled evenly."""

SAMPLES_PER_READ = 16
"""The number of samples to read into memory at a time."""

SHOWN_CLASSES = 8
"""The maximum number of class names to print."""

MAX_POINTS = 100_000
"""The maximum number of samples to plot. For a larger dataset, a random subset is plotted."""

RATE = 1000
"""The number of samples per second that the table of requests assumes for a rank."""

WORLD_SIZES = (1, 8, 64, 512)
"""The numbers of ranks in the table of requests, besides the number that the user asks for."""

UNREADABLE, NO_KERNEL = "unreadable", "no kernel"

_DRIVE = re.compile(r"[A-Za-z]:")


IndexedPath = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="A packed directory, a manifest, a tar, a directory of tars, or an indexed .tar.gz."
    ),
]


def open_shards(source: str, storage_options: StorageOptions, *, is_cached: bool = False) -> ShardTable:
    """Return the shards of a dataset, or of a compressed tar that has an index. Remote shards may be cached."""
    from shardio.shards import is_compressed, open_compressed, open_table
    from shardio.storage import make_access, make_direct_access, parse_location

    direct = make_direct_access(storage_options)
    location = parse_location(source, direct)
    if is_compressed(location) and location.exists():
        return open_compressed(location)
    return open_table(source, make_access(storage_options) if is_cached else direct)


def read_sample(samples: KeyedShards, key: str) -> dict[str, Any]:
    """Return the fields of a sample by name. If no sample has the key, exit with code 1."""
    try:
        found = samples.read(key)
    except KeyError as error:
        print_error(error.args[0], "shardio ls lists the keys")
        raise typer.Exit(1) from error
    return {field: content for field, content in found.items() if field != "__key__"}


def ls(
    source: IndexedPath,
    fields: Annotated[bool, typer.Option("--fields", help="Also print each field and its size in bytes.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per line: key, shard, and each field's offset and size."),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="Print only the first N samples.")] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """List the keys of a dataset's samples, in the order of the shards. Only the indexes are read.

    Example: shardio ls out --fields --limit 10
    """
    from shardio.shards import read_columns

    table = open_shards(source, read_options(storage_option))
    shards = ((tar, read_columns(index)) for tar, index in zip(table.tars, table.indexes, strict=True))
    samples = ((tar, columns, sample) for tar, columns in shards for sample in range(len(columns.keys)))
    for tar, columns, sample in islice(samples, limit):
        key = columns.keys.text(sample)
        if as_json:
            contents = {field: {"offset": offset, "size": size} for field, offset, size in columns.fields_of(sample)}
            echo(json.dumps({"key": key, "shard": tar.name, "fields": contents}))
        elif fields:
            parts = [f"{field} {size}" for field, _, size in columns.fields_of(sample)]
            echo("\t".join([printable(key), *map(printable, parts)]))
        else:
            echo(printable(key))


def cat(
    source: IndexedPath,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key of a sample, as shardio ls prints it.")],
    field: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field to write; optional if the sample has only one field.")
    ] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the bytes of one field of a sample to standard output.

    Example: shardio cat out cats/0001 --field jpg > 0001.jpg
    """
    from shardio.reading import KeyedShards

    with KeyedShards(open_shards(source, read_options(storage_option), is_cached=True)) as samples:
        fields = read_sample(samples, key)
    if field is None and len(fields) == 1:
        (field,) = fields
    if field not in fields:
        what = "has several fields" if field is None else f"has no field {field!r}"
        print_error(f"sample {key} {what}", f"choose one with --field: {', '.join(fields) or '(none)'}")
        raise typer.Exit(1)
    typer.echo(fields[field], nl=False)


def extract(
    source: IndexedPath,
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="The keys of samples, as shardio ls prints them.")],
    into: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory to write to, which is created if it is missing.")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the fields of samples to files named KEY.FIELD below a directory.

    Keys that lead outside the directory or through a symbolic link are rejected before any file is written.

    Example: shardio extract out cats/0001 cats/0002 some-cats
    """
    from shardio.reading import KeyedShards
    from shardio.shards import is_compressed
    from shardio.storage import parse_location

    keys = list(dict.fromkeys(keys))
    for key in keys:
        _check_key(key)
    into, options = into.absolute(), read_options(storage_option)
    num_files = num_bytes = 0
    table = open_shards(source, options, is_cached=True)
    with KeyedShards(table) as samples:
        if is_compressed(table.tars[0]):  # Sort the keys to decompress the tar only once. Unknown keys come first.
            places = {key: place for place, key in enumerate(samples)}
            keys.sort(key=lambda key: places.get(key, -1))
        paths = dict[Path, str]()
        # Samples are read twice: a problem in a later sample must leave no files behind, and the samples may be too
        # large to keep in memory.
        for key in keys:
            for field in read_sample(samples, key):
                path = _find_path(into, key, field, overwrite=overwrite)
                if (other := paths.setdefault(path, key)) != key:
                    _refuse(f"the samples {other} and {key} would be written to the same file, {path}")
        for path, key in paths.items():
            if (parent := next((each for each in path.parents if each in paths), None)) is not None:
                _refuse(f"{parent} would be the file of sample {paths[parent]!r} and a directory for sample {key!r}")
        for key in keys:
            for field, content in read_sample(samples, key).items():
                with parse_location(_find_path(into, key, field, overwrite=overwrite)).write_whole() as file:
                    file.write(content)
                num_files += 1
                num_bytes += len(content)
    echo(f"wrote {count(num_files, 'file')}, {format_bytes(num_bytes)}, to {into}")


def _check_key(key: str) -> None:
    if key.startswith(("/", "\\")):
        _refuse(f"the key {key!r} is an absolute path")
    if _DRIVE.match(key):
        _refuse(f"the key {key!r} starts with a drive")
    if ".." in re.split(r"[/\\]", key):
        _refuse(f"the key {key!r} contains '..', which leads outside the directory")


def _find_path(into: Path, key: str, field: str, *, overwrite: bool) -> Path:
    path = into / f"{key}.{field}"
    if "\0" in str(path) or "\\" in field:
        _refuse(f"the name of field {field!r} of sample {key!r} cannot be part of a file name")
    for at in (*(into / step for step in path.relative_to(into).parents[-2::-1]), path):
        if at.is_symlink():
            _refuse(f"{at} is a symbolic link, through which sample {key!r} would be written elsewhere")
        if at != path and at.exists() and not at.is_dir():
            _refuse(f"{at} is a file, but sample {key!r} needs a directory there")
    if path.is_dir():
        _refuse(f"{path} is a directory")
    if path.exists() and not overwrite:
        _refuse(f"{path} exists: pass --overwrite to replace it")
    return path


def _refuse(why: str) -> NoReturn:
    print_error(f"{why}: nothing was written")
    raise typer.Exit(1)


def _decoder_texts() -> dict[str, str]:
    from shardio.images import DECODER_DESCRIPTIONS

    names: tuple[DecoderName, ...] = ("kernel", "libjpeg", "raw", "pillow")
    texts: dict[str, str] = {name: f"by {DECODER_DESCRIPTIONS[name]}" for name in names}
    texts["kernel"] += " (by libjpeg-turbo without a crop)"
    return {**texts, UNREADABLE: "unreadable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderForecast:
    """The decoders that a dataset's images need, as far as the files determine them.

    Attributes:
        num_samples: The number of samples that were examined.
        is_partial: Whether the dataset has more samples.
        no_kernel: The reason why there is no kernel on this machine; None if there is a kernel.
        clipped: The number of images whose gray values are clipped in the conversion to RGB, by the type of the values.
        reasons: For each decoder, the number of its images by the reason why the kernel does not decode them.
    """

    num_samples: int
    is_partial: bool
    no_kernel: str | None
    clipped: Counter[str] = dataclasses.field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = dataclasses.field(
        default_factory=lambda: {name: Counter() for name in _decoder_texts()}
    )

    def dump(self) -> dict[str, Any]:
        """Return the forecast as values for JSON."""
        others = {name: reasons for name, reasons in self.reasons.items() if name not in ("kernel", UNREADABLE)}
        return {
            "samples": self.num_samples,
            **{name: reasons.total() for name, reasons in self.reasons.items()},
            "reasons": {name: dict(reasons.most_common()) for name, reasons in others.items()},
            "clipped": dict(self.clipped),
            "no_kernel": self.no_kernel,
        }

    @property
    def _examined(self) -> str:
        return f"of {count(self.num_samples, 'evenly spaced sample')}, " if self.is_partial else ""

    def describe(self) -> str:
        """Return the forecast as text."""
        parts, texts = [], _decoder_texts()
        for decoder_name, reasons in self.reasons.items():
            known = Counter({reason: num_images for reason, num_images in reasons.items() if reason})
            if reasons:
                details = f" ({format_counts(known)})" if known else ""
                parts.append(f"{reasons.total()} {texts[decoder_name]}{details}")
        if self.no_kernel is not None and self.reasons["libjpeg"][NO_KERNEL]:
            parts.append(f"no kernel because {self.no_kernel}")
        return self._examined + ("; ".join(parts) or "no images")

    def describe_clipped(self) -> str:
        """Return the number of clipped images and the remedy as text."""
        from shardio.images import CLIPPED_ADVICE

        images = count(self.clipped.total(), "gray image stores", "gray images store")
        return f"{self._examined}{images} values other than uint8 ({format_counts(self.clipped)}): {CLIPPED_ADVICE}"


def forecast_decoders(table: ShardTable) -> DecoderForecast:
    """Predict, from the headers of up to 1,000 evenly spaced images of a dataset, which decoders will be used.

    Raises:
        ShardioError: If a sample cannot be read.
        OSError: If a file is missing or unreadable.
    """
    from shardio.images import IMAGE_FIELDS, find_clipped_type
    from shardio.kernel import why_no_kernel
    from shardio.reading import SampleReader
    from shardio.viewer import choose_evenly

    total = table.manifest.num_samples
    indices = choose_evenly(np.arange(total), MAX_SAMPLES)
    num_samples = len(indices)
    forecast = DecoderForecast(num_samples=num_samples, is_partial=num_samples < total, no_kernel=why_no_kernel())
    fields = [name for name in IMAGE_FIELDS if name in table.manifest.fields]
    with closing(SampleReader(table)) as reader:
        for start in range(0, num_samples if fields else 0, SAMPLES_PER_READ):
            stored = reader.read(indices[start : start + SAMPLES_PER_READ], fields)
            for row in zip(*stored.columns.values(), strict=True):
                images = [content for content in row if content is not None]
                if images:
                    content = next(filter(None, images), b"")
                    decoder_name, reason = _find_decoder(content, has_kernel=forecast.no_kernel is None)
                    if clipped_type := find_clipped_type(content):
                        forecast.clipped[clipped_type] += 1
                    forecast.reasons[decoder_name][reason] += 1
    return forecast


def _find_decoder(content: bytes, *, has_kernel: bool) -> tuple[str, str]:
    from shardio.images import find_format, open_image, why_not_by_kernel

    name = find_format(content)
    if name == "TIFF":  # Opening a TIFF decodes it.
        return "pillow", name
    try:
        decoder_name = open_image(content).decoder_name
    except ValueError:
        return UNREADABLE, ""
    reason = why_not_by_kernel(content) or (None if has_kernel else NO_KERNEL)
    if reason is None:
        return "kernel", ""
    if name is not None and name != "JPEG" and decoder_name != "raw":
        return "pillow", name
    return decoder_name, reason


def info(
    source: DatasetPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Show what a dataset contains, how it was packed, and which decoders its images need on this machine.

    The decoders are estimated from the headers of up to 1,000 evenly spaced images.
    A loader's stats() counts the images that each decoder actually decoded.

    Example: shardio info packed/train
    """
    from shardio.shards import describe_pack, open_table

    table = open_table(source, read_access(storage_option))
    manifest, forecast, failure = table.manifest, None, ""
    try:
        forecast = forecast_decoders(table)
    except (ShardioError, OSError) as error:  # The other rows of the output need only the manifest.
        failure = str(error)
    sizes = manifest.shard_sizes
    tiled = manifest.pack.get("num_tiled")
    if as_json:
        values = {
            "samples": manifest.num_samples,
            "shards": len(manifest.shards),
            "classes": list(manifest.classes),
            "fields": list(manifest.fields),
            "bytes": manifest.num_bytes,
            "samples_per_shard": {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())},
            "digest": manifest.digest,
            "tiled": tiled,
            "decoded": None if forecast is None else forecast.dump(),
            "format": manifest.format,
            "pack": manifest.pack,
        }
        echo(json.dumps(values, indent=1))
        return
    smallest = "" if sizes.min() == sizes.max() else f"{sizes.min()} to "
    mean_size = manifest.num_bytes / manifest.num_samples
    names = ", ".join(manifest.classes[:SHOWN_CLASSES]) + (", …" if len(manifest.classes) > SHOWN_CLASSES else "")
    rows = {
        "samples": f"{manifest.num_samples:,}",
        "shards": f"{len(sizes)}, {smallest}{count(int(sizes.max()), 'sample')}{' each' if len(sizes) > 1 else ''}",
        "size": f"{format_bytes(manifest.num_bytes)}, {format_bytes(mean_size)} per sample",
        "fields": ", ".join(manifest.fields),
        "classes": f"{len(manifest.classes)}{': ' if names else ''}{names}",
        "tiled": "unknown" if tiled is None else f"{tiled} of {count(manifest.num_samples, 'sample')}",
        "decoders": f"unknown: {failure}" if forecast is None else forecast.describe(),
        **({"clipped": forecast.describe_clipped()} if forecast is not None and forecast.clipped else {}),
        "packed": describe_pack(manifest.pack),
        "digest": manifest.digest,
    }
    for name, value in rows.items():
        echo(f"{name:<8} {printable(value)}")


def order(
    source: DatasetPath,
    epoch: Annotated[int, typer.Option(min=0, help="The epoch to examine.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the order.")] = 0,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Number of samples to shuffle together; leave unset to let shardio choose."),
    ] = None,
    strata: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of equal parts of a window, from which consecutive samples come in turn; leave unset to let "
            "shardio choose.",
        ),
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch on each rank.")] = 256,
    plot: Annotated[
        Path | None, typer.Option(callback=check_png_path, metavar="FILE.png", help="Plot the epoch to this file.")
    ] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Measure how well an epoch is shuffled, and how much each rank reads; pass --plot to plot the order.

    Example: shardio order packed/train --world-size 8 --plot order.png
    """
    from shardio.order import IDEAL_DISTANCE, EpochOrder, choose_settings, divide_among_ranks, measure_quality
    from shardio.shards import is_sorted_by_class, open_table

    if plot is not None:
        require_matplotlib()
    table = open_table(source, read_access(storage_option))
    manifest, sizes = table.manifest, table.manifest.shard_sizes
    num_bytes = np.array([shard.num_bytes for shard in manifest.shards], dtype=np.int64)
    with value_errors_as_usage_errors():
        # As in shardio.datasets, which is not imported because it imports torch.
        is_sorted = window is None and strata is None and table.is_local and is_sorted_by_class(table)
        settings = choose_settings(sizes, shuffle=True, seed=seed, window=window, strata=strata, is_sorted=is_sorted)
    epoch_order = EpochOrder(sizes, settings, epoch)
    ranks = divide_among_ranks(epoch_order, world_size, batch_size)
    quality = measure_quality(ranks, sizes, num_bytes, world_size * batch_size)
    same, ideal_same = quality.same_shard, quality.ideal_same_shard
    rows = {
        "epoch": f"{epoch}, seed {seed}: {count(manifest.num_samples, 'sample')} in {count(len(sizes), 'shard')}",
        "window": f"{count(settings.window, 'sample')} in {count(settings.strata, 'stratum', 'strata')}",
        "read by": f"{count(world_size, 'rank')}, batches of {batch_size}",
        "moved by": f"{quality.displacement:.3f} of the epoch on average (ideal {IDEAL_DISTANCE:.3f})",
        "neighbors": f"in a shard are {quality.separation:.3f} of the epoch apart (ideal {IDEAL_DISTANCE:.3f})",
        "same shard": f"probability {same:.3g} for two samples of a global batch (ideal {ideal_same:.3g})",
        "shards open": f"{quality.mean_open:.1f} per rank on average, {quality.max_open} at most",
        "bytes read": f"{quality.read_factor:.2f} times a rank's share if it fetches whole shards",
    }
    for name, value in rows.items():
        echo(f"{name:<11} {value}")
    echo(f"\nIf the shards are remote, and each rank reads {RATE:,} samples per second:\n")
    echo("ranks  requests/s  bytes fetched  cache of a rank")
    for size in sorted({world_size, *(size for size in WORLD_SIZES if size * batch_size <= manifest.num_samples)}):
        echo(_estimate_requests(epoch_order, sizes, num_bytes, size, batch_size))
    if plot is not None:
        title = f"epoch {rows['epoch']}, windows of {rows['window']}"
        samples = epoch_order.samples_at(np.arange(manifest.num_samples))
        _plot_epoch(plot, samples, sizes, settings, title)


def _estimate_requests(
    order: EpochOrder, sizes: NDArray[np.int64], num_bytes: NDArray[np.int64], world_size: int, batch_size: int
) -> str:
    """Return a row of the table of requests, estimated from the second window (or the only one) on some ranks."""
    from shardio.order import shards_of, split_whole
    from shardio.reading import SHARE_OF_CACHE, estimate_traffic

    window, step_size = order.settings.window, world_size * batch_size
    begin = window if order.num_samples >= 2 * window else 0
    end = min(begin + max(window, step_size), order.num_samples)  # At least one step, so each rank has samples.
    num_requests = num_fetched = num_needed = num_samples = 0
    for rank in {0, world_size // 2, world_size - 1}:
        split = split_whole(order, rank=rank, world_size=world_size, batch_size=batch_size)
        positions = np.concatenate(split.batches(range(begin // step_size, -(-end // step_size))))
        indices = order.samples_at(positions[(positions >= begin) & (positions < end)])
        requests, fetched = estimate_traffic(indices, sizes, num_bytes)
        num_requests, num_fetched = num_requests + requests, num_fetched + fetched
        num_samples += len(indices)
        num_needed += int((num_bytes // np.maximum(sizes, 1))[shards_of(indices, sizes)].sum())
    if not num_samples:
        return f"{world_size:5,}  (the ranks have no samples)"
    per_second = RATE * world_size * num_requests / num_samples
    cache = format_bytes(SHARE_OF_CACHE * window * int(num_bytes.sum()) // order.num_samples // world_size)
    return f"{world_size:5,}  {per_second:10,.1f}  {num_fetched / num_needed:10.2f} ×  {cache:>15}"


def _plot_epoch(
    path: Path, samples: NDArray[np.int64], sizes: NDArray[np.int64], settings: OrderSettings, title: str
) -> None:
    """Plot the index in the shard, and the shard if there are several, against the position. Colors show strata."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from shardio.order import reverse_bits, shards_of

    positions = np.arange(len(samples))
    if len(positions) > MAX_POINTS:
        # The choice is random, because a fixed step would show only some of the strata.
        positions = np.sort(np.random.default_rng(0).choice(len(samples), MAX_POINTS, replace=False))
    shards = shards_of(samples[positions], sizes)
    indices = samples[positions] - (np.cumsum(sizes) - sizes)[shards]
    size = min(16.0, max(0.3, 6e4 / len(positions)))  # points²
    panels = {"shard": shards, "index in the shard": indices} if len(sizes) > 1 else {"index in the shard": indices}

    figure = Figure(figsize=(12, 4 * len(panels)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, values) in zip(rows, panels.items(), strict=True):
        # With these margins of the color scale, even a single stratum has a bright color.
        colors = reverse_bits(settings.strata)[positions % settings.strata]
        axes.scatter(positions, values, size, colors, cmap="turbo", vmin=-1, vmax=settings.strata, linewidths=0)
        axes.set_ylabel(label)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.01)
    axes.set_xlabel("position in the epoch (color: stratum)")
    figure.suptitle(title)
    figure.savefig(path, format="png")
