"""``shardio pack``."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from shardio.cli.options import MaxShardSize, StorageOptionTexts, read_access, read_classes
from shardio.cli.terminal import (
    ProgressReporter,
    count,
    echo,
    format_counts,
    name_of,
    printable,
    value_errors_as_usage_errors,
)
from shardio.images import DEFAULT_MAX_PIXELS, UNCOMPRESSED, ConvertedFormat, describe_other_images, is_convertible
from shardio.packing import (
    DEFAULT_QUALITY,
    DEFAULT_SHARD_SIZE,
    REJECTED_NAME,
    TILED,
    Engine,
    FileProblem,
    JpegMode,
    JpegTally,
    Layout,
    OnChanged,
    OnIncomplete,
    PackResult,
    PackSettings,
    Parts,
    RunOptions,
    SourceKind,
    make_options,
    make_parts,
    pack_parts,
    pack_source,
)
from shardio.progress import WorkProgress
from shardio.values import format_bytes

SHOWN_FILES = 10
"""The maximum number of files of each kind that the summary names."""


def report(
    results: Mapping[Path, PackResult], seconds: float, max_shard_size: int, *, as_json: bool, quiet: bool
) -> None:
    """Print the results of a pack.

    Args:
        results: The result for each dataset, by its directory.
        seconds: The duration of the pack in seconds.
        max_shard_size: The requested maximum size of a shard in bytes.
        as_json: Whether to print JSON: an object, or a list of objects if there are several datasets.
        quiet: Whether to print nothing, unless ``as_json``.
    """
    summaries = [summarise(result, out, seconds) for out, result in results.items()]
    if as_json:
        echo(json.dumps(summaries if len(summaries) > 1 else summaries[0], indent=1))
    elif not quiet:
        num_packed = sum(result.manifest.num_samples - result.num_kept for result in results.values())
        timing = f"in {seconds:.1f} s ({num_packed / max(seconds, 1e-3):.0f} samples/s)"
        is_single = len(results) == 1
        for (out, result), summary in zip(results.items(), summaries, strict=True):
            print_summary(
                result, summary, "" if is_single else f"{printable(name_of(out))}: ", timing if is_single else ""
            )
            warn_of_large_samples(result, max_shard_size)
        if not is_single:
            echo(timing)


def summarise(result: PackResult, out: Path, seconds: float) -> dict[str, Any]:
    """Return the summary as JSON values."""
    manifest, jpegs = result.manifest, result.jpegs
    return {
        "out": name_of(out),
        "samples": manifest.num_samples,
        "kept": result.num_kept,
        "classes": len(manifest.classes),
        "shards": len(manifest.shards),
        "bytes": manifest.num_bytes,
        "fields": list(manifest.fields),
        "digest": manifest.digest,
        "seconds": round(seconds, 3),
        "jpegs": {
            "outcomes": dict(sorted(jpegs.outcomes.items())),
            "bytes_before": jpegs.num_bytes_before,
            "bytes_after": jpegs.num_bytes_after,
            "damaged": [_as_row(problem) for problem in jpegs.damaged],
        },
        "converted": dict(sorted(result.converted.items())),
        "clipped": dict(sorted(result.clipped.items())),
        "mislabelled": [_as_row(problem) for problem in result.mislabelled],
        "packed_again": [_as_row(problem) for problem in result.damaged_shards],
        "changed": [_as_row(problem) for problem in result.changed],
        "rejected": [sample._asdict() for sample in result.rejected],
        "ignored": [str(path) for path in result.ignored],
        "suffixed": list(result.suffixed),
    }


def _as_row(problem: FileProblem) -> dict[str, str]:
    return {"path": str(problem.path), "what": problem.what}


def print_summary(result: PackResult, summary: dict[str, Any], where: str, timing: str) -> None:
    """Print the summary of one dataset, and the files that need attention on standard error.

    Args:
        result: The result.
        summary: Its summary.
        where: The start of the first line.
        timing: The end of the first line; "" for nothing.
    """
    classes = f" of {count(summary['classes'], 'class', 'classes')}" if summary["classes"] else ""
    echo(
        f"{where}packed {count(summary['samples'], 'sample')}{classes} into {count(summary['shards'], 'shard')}, "
        f"{format_bytes(summary['bytes'])}{timing and ', ' + timing}"
    )
    if result.num_kept:
        echo(f"kept {count(result.num_kept, 'sample')} from an earlier run")
    mode = result.manifest.pack["jpeg"]
    if mode != "copy":
        _print_jpegs(result.jpegs, "re-encoded and tiled" if mode == "reencode" else "tiled")
    if result.converted:
        echo(f"images converted: {result.converted.total()} ({format_counts(result.converted)})")
    if result.clipped:
        echo(result.describe_clipped(), err=True)
    for problem in result.damaged_shards:
        echo(f"packed again: {printable(problem.path)} {problem.what}", err=True)
    if result.suffixed:
        echo(printable(result.describe_suffixed()), err=True)
    _print_files("packed despite a wrong suffix", [f"{p.path} {p.what}" for p in result.mislabelled])
    _print_files("changed during the pack (samples left out)", [f"{p.path} {p.what}" for p in result.changed])
    _print_files(f"left out (listed in {REJECTED_NAME})", [f"{s.file} {s.reason}" for s in result.rejected])
    _print_files("ignored (not part of any sample)", [str(path) for path in result.ignored])
    if left_out := describe_other_images(result.ignored):
        echo(printable(left_out), err=True)
    images = set(filter(is_convertible, result.manifest.fields))
    if uncompressed := sorted(UNCOMPRESSED & images):
        names = " and ".join(f".{field}" for field in uncompressed)
        others = " and convert all others, too" if images - UNCOMPRESSED else ""
        echo(f"{names} images are uncompressed: --convert-to png would store them in less space{others}", err=True)


def warn_of_large_samples(result: PackResult, max_shard_size: int) -> None:
    """Print a warning if shards are larger than the maximum."""
    larger = [shard for shard in result.manifest.shards if shard.num_samples == 1 and shard.num_bytes > max_shard_size]
    if larger:
        echo(
            f"{count(len(larger), 'shard exceeds', 'shards exceed')} --max-shard-size {format_bytes(max_shard_size)} "
            "because samples are never split: pass a larger size",
            err=True,
        )


def _print_jpegs(jpegs: JpegTally, what_was_done: str) -> None:
    before, after = jpegs.num_bytes_before, jpegs.num_bytes_after
    change = f" ({after / before - 1:+.1%})" if before else ""
    echo(f"JPEGs: {jpegs.outcomes[TILED]} {what_was_done}; {format_bytes(before)} → {format_bytes(after)}{change}")
    unchanged = Counter({reason: num_files for reason, num_files in jpegs.outcomes.items() if reason != TILED})
    if unchanged:
        echo(f"JPEGs stored unchanged: {unchanged.total()} ({format_counts(unchanged)})")
    _print_files("stored unchanged although damaged", [f"{p.path} {p.what}" for p in jpegs.damaged])


def _print_files(outcome: str, files: list[str]) -> None:
    if files:
        echo(f"{count(len(files), 'file')} {outcome}:", err=True)
        for file in files[:SHOWN_FILES]:
            echo(f"  {printable(file)}", err=True)
        if len(files) > SHOWN_FILES:
            echo(f"  and {len(files) - SHOWN_FILES} more (--json lists all of them)", err=True)


def pack(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Class folders with images, a flat directory, or the dataset of another tool: Parquet files, a saved "
            "dataset of Hugging Face's, tars, MDS shards, LitData chunks, an LMDB environment, or a CSV or JSON Lines "
            "file of paths.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="Where to write the shards: a new or empty directory, or that of an interrupted pack to resume. Or a "
            "URL such as s3://bucket/train.",
        ),
    ],
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    max_shard_samples: Annotated[int | None, typer.Option(min=1, help="Maximum number of samples in a shard.")] = None,
    shuffle_seed: Annotated[int, typer.Option(min=0, help="Seed of the packing order, which mixes classes.")] = 0,
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Pack in the order of the keys.")] = False,
    rename_dots: Annotated[
        bool, typer.Option("--rename-dots", help="Replace each dot in a file's stem with an underscore.")
    ] = False,
    prefix_keys: Annotated[
        bool,
        typer.Option(
            "--prefix-keys",
            help="Put the name of its tar before each key, if samples of several tars have the same key: 0001 of "
            "train-3.tar becomes train-3/0001.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Fail if an image cannot be decoded or its content does not match its suffix.",
        ),
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check",
            help="Pack all files as they are, at full speed. By default, each image is decoded first. Images that "
            f"cannot be decoded are left out and listed in OUT/{REJECTED_NAME}.",
        ),
    ] = False,
    jpeg: Annotated[
        JpegMode,
        typer.Option(
            help="How to store JPEGs: copy stores them unchanged, tile rewrites them losslessly so that crops decode "
            "faster, and reencode decodes them and stores them upright, tiled and, with --max-side, smaller."
        ),
    ] = "copy",
    convert_to: Annotated[
        ConvertedFormat | None,
        typer.Option(
            help="Format that images in other formats are converted to, also those such as GIF and AVIF, which are not "
            "packed otherwise. Masks stay as they are."
        ),
    ] = None,
    max_side: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum length of the longer side, in pixels, of images that are re-encoded or converted."
        ),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            show_default=str(DEFAULT_QUALITY),
            help="Quality of JPEGs and WebPs that are re-encoded or converted.",
        ),
    ] = None,
    to_srgb: Annotated[
        bool,
        typer.Option(
            "--to-srgb",
            help="Convert the colours of images that are re-encoded or converted from their ICC profiles to sRGB.",
        ),
    ] = False,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=str(DEFAULT_MAX_PIXELS),
            help="Maximum number of pixels of an image. Larger images are left out.",
        ),
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            "--num-workers",
            "--workers",
            min=1,
            help="Number of worker processes. Each writes one shard at a time. Does not affect the output. "
            "Leave unset to let shardio choose.",
        ),
    ] = None,
    source_kind: Annotated[
        SourceKind,
        typer.Option(
            help="What SOURCE is, if it holds samples of several kinds, such as images and tars. auto recognises it; "
            "files is a directory of images; saved is a saved dataset of Hugging Face's; table is a table of paths."
        ),
    ] = "auto",
    layout: Annotated[
        Layout,
        typer.Option(
            help="Layout of the files. auto recognises class folders and flat directories; classes makes each folder "
            "a class; flat makes no classes; pairs makes one sample of images/a.jpg and masks/a.png, or of a.jpg and "
            "a.mask.png."
        ),
    ] = "auto",
    source_split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|all",
            help="Which split to pack, if SOURCE holds several: train for the folders images/train and masks/train, "
            "for train-0.tar, or for the rows of a table whose column says train. all packs all splits as one "
            "dataset.",
        ),
    ] = None,
    on_incomplete: Annotated[
        OnIncomplete,
        typer.Option(
            help="With --layout pairs: what to do with an image that lacks a file that others have, such as a mask: "
            "raise an error, skip the image, or keep it with the files that it has."
        ),
    ] = "raise",
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="SUFFIXES",
            help="Fields to pack from a directory, such as wav,json: each sample must have the first, and other files "
            "are ignored. By default, samples are images, with all files that have the same stem.",
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DATASET",
            help="Where to read the class names that define the labels: a text file with one name per line, a packed "
            "directory, or class folders.",
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV, JSON Lines or Parquet file that labels the images, instead of class folders: class names or "
            "integers. Each image needs a label; rows for other images are allowed.",
        ),
    ] = None,
    image_column: Annotated[
        str | None,
        typer.Option(help="Column with the images, if the source has columns. Leave unset if there is only one."),
    ] = None,
    label_column: Annotated[
        str | None,
        typer.Option(
            help="Column with the labels, in the file of --labels or in the source. Leave unset if the file has two "
            "columns, or the source has a column of labels or one called label."
        ),
    ] = None,
    key_column: Annotated[
        str | None,
        typer.Option(
            help="Column with keys (cats/0001) or paths (cats/0001.jpg), in the file of --labels or in the source. "
            "Leave unset if the file has two columns, or to number the samples of the source."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="FRACTIONS",
            help="Divide the samples by a hash of their keys into several datasets, OUT/train, OUT/val and so on, such "
            "as 0.9,0.1. A sample stays in its dataset when others are added.",
        ),
    ] = None,
    split_names: Annotated[
        str, typer.Option(metavar="NAMES", help="With --split: the names of the datasets.")
    ] = "train,val,test",
    on_changed: Annotated[
        OnChanged,
        typer.Option(
            help="What to do with a sample whose files change or become unreadable during the pack: raise an error or "
            "skip it."
        ),
    ] = "raise",
    engine: Annotated[
        Engine,
        typer.Option(
            help="Where to pack: in processes of this machine, or on a Ray cluster, one task for each shard. All "
            "machines of the cluster must see SOURCE and OUT under the same paths."
        ),
    ] = "processes",
    address: Annotated[
        str | None,
        typer.Option(
            help="With --engine ray: address of the cluster, such as auto. Leave unset to start Ray on this machine."
        ),
    ] = None,
    storage_option: StorageOptionTexts = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no summary.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Pack images or the dataset of another tool into tar shards, with an index for each shard and a manifest.

    Rerun the same command to resume an interrupted pack.

    Example: shardio pack images/train packed/train --jpeg tile --workers 8
    """
    with value_errors_as_usage_errors():
        settings = PackSettings(
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            shuffle_seed=None if no_shuffle else shuffle_seed,
            jpeg=jpeg,
            convert_to=convert_to,
            max_side=max_side,
            quality=quality,
            to_srgb=to_srgb,
            max_pixels=max_pixels,
            check=not no_check,
        )
        access = read_access(storage_option)
        names = None if classes is None else read_classes(classes, access)
        options = make_options(
            source_kind=source_kind,
            layout=layout,
            source_split=source_split,
            on_incomplete=on_incomplete,
            fields=None if fields is None else fields.split(","),
            converts=convert_to is not None,
            rename_dots=rename_dots,
            prefix_keys=prefix_keys,
            classes=names,
            labels=labels,
            image_column=image_column,
            label_column=label_column,
            key_column=key_column,
        )
        parts = None if split is None else make_split(split, split_names)
    run = RunOptions(
        strict=strict,
        on_changed=on_changed,
        num_workers=num_workers,
        engine=engine,
        ray_address=address,
        access=access,
    )
    start = time.perf_counter()
    reporter = nullcontext(WorkProgress()) if quiet or as_json else ProgressReporter("packing")
    try:
        with reporter as progress:
            if parts is None:
                results = {out: pack_source(source, out, settings, options, run, progress)}
            else:
                by_name = pack_parts(source, out, parts, settings, options, run, progress)
                results = {out / name: result for name, result in by_name.items()}
    except KeyboardInterrupt:
        echo("interrupted: finished shards are kept; rerun the same command to resume", err=True)
        raise
    report(results, time.perf_counter() - start, max_shard_size, as_json=as_json, quiet=quiet)


def make_split(fractions: str, names: str) -> Parts:
    """Return the parts that ``--split`` and ``--split-names`` describe: as many names as there are fractions."""
    each = fractions.split(",")
    chosen = names.split(",")
    return make_parts(each, chosen[: len(each)] if names == "train,val,test" else chosen)
