"""``shardio pack``."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from shardio.classes import check_classes
from shardio.cli.console import PackReporter, count, format_bytes, format_counts, value_errors_as_usage_errors
from shardio.cli.loading import find_class_folders, has_class_folders
from shardio.cli.terminal import echo, printable
from shardio.images import DEFAULT_MAX_PIXELS
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
    PackProgress,
    PackResult,
    PackSettings,
    pack_directory,
)
from shardio.shards import open_table
from shardio.storage import read_as_utf8

SHOWN = 10
"""The maximum number of files of each kind that the summary names."""


def parse_size(text: str | int) -> int:
    """Return the number of bytes in a size such as ``256MiB``."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(
            f"{text!r} is not a size: write, for example, 256MiB, 1GB or a number of bytes"
        ) from error


def pack(
    images: Annotated[
        Path, typer.Argument(metavar="IMAGES", help="Class folders with images, or a flat directory of images.")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="Where to write the shards: a new or empty directory, or that of an interrupted pack to resume.",
        ),
    ],
    max_shard_size: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default="256MiB",
            help="Maximum size of a shard, such as 256MiB or 1GB.",
        ),
    ] = DEFAULT_SHARD_SIZE,
    max_shard_samples: Annotated[int | None, typer.Option(min=1, help="Maximum number of samples in a shard.")] = None,
    shuffle_seed: Annotated[int, typer.Option(min=0, help="Seed of the packing order, which mixes classes.")] = 0,
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Pack in the order of the keys.")] = False,
    rename_dots: Annotated[
        bool, typer.Option("--rename-dots", help="Replace each dot in a file's stem with an underscore.")
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
    max_side: Annotated[
        int | None, typer.Option(min=1, help="With reencode: maximum length of an image's longer side in pixels.")
    ] = None,
    quality: Annotated[
        int | None, typer.Option(min=1, max=100, show_default=str(DEFAULT_QUALITY), help="With reencode: JPEG quality.")
    ] = None,
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
    layout: Annotated[
        Layout,
        typer.Option(
            help="Layout of the files. auto recognises class folders and flat directories; classes makes each folder "
            "a class; flat makes no classes; pairs makes one sample of images/a.jpg and masks/a.png, or of a.jpg and "
            "a.mask.png."
        ),
    ] = "auto",
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DATASET",
            help="Where to read the class names that define the labels: a text file with one name per line, a packed "
            "directory, or class folders.",
        ),
    ] = None,
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
            "machines of the cluster must see IMAGES and OUT under the same paths."
        ),
    ] = "processes",
    address: Annotated[
        str | None,
        typer.Option(
            help="With --engine ray: address of the cluster, such as auto. Leave unset to start Ray on this machine."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no summary.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Pack a directory of images into tar shards, with an index for each shard and a manifest.

    Rerun the same command to resume an interrupted pack.
    """
    with value_errors_as_usage_errors():
        settings = PackSettings(
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            shuffle_seed=None if no_shuffle else shuffle_seed,
            jpeg=jpeg,
            max_side=max_side,
            quality=quality,
            max_pixels=max_pixels,
            check=not no_check,
        )
        names = None if classes is None else read_classes(classes)
    start = time.perf_counter()
    reporter = nullcontext(PackProgress()) if quiet or as_json else PackReporter()
    try:
        with reporter as progress:
            result = pack_directory(
                images,
                out,
                settings,
                layout=layout,
                classes=names,
                on_changed=on_changed,
                rename_dots=rename_dots,
                strict=strict,
                num_workers=num_workers,
                engine=engine,
                ray_address=address,
                progress=progress,
            )
    except KeyboardInterrupt:
        echo("interrupted: finished shards are kept; rerun the same command to resume", err=True)
        raise
    summary = _summarise(result, out, time.perf_counter() - start)
    if as_json:
        echo(json.dumps(summary, indent=1))
    elif not quiet:
        _print(result, summary)
        _warn_of_large_samples(result, max_shard_size)


def read_classes(source: Path) -> tuple[str, ...]:
    """Return the class names in a text file or of a dataset."""
    if source.is_file() and source.suffix != ".json":
        return check_classes(_read_lines(source))
    if has_class_folders(source):
        return check_classes(sorted(read_as_utf8(path.name) for path in find_class_folders(source)))
    return check_classes(open_table(source).manifest)


def _read_lines(path: Path) -> list[str]:
    """Return a text file's lines without empty lines at its end.

    Raises:
        ValueError: If another line is empty, or the file is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a UTF-8 text file: pass a text file with one class name per line, a packed directory, or "
            "class folders"
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(
                f"line {line_number} of {path} is empty, but each line defines a label: delete it or write a class name"
            )
    return lines


def _summarise(result: PackResult, out: Path, seconds: float) -> dict[str, Any]:
    manifest, scan, jpegs = result.manifest, result.scan, result.jpegs
    return {
        "out": str(out),
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
        "mislabelled": [_as_row(problem) for problem in result.mislabelled],
        "packed_again": [_as_row(problem) for problem in result.damaged_shards],
        "changed": [_as_row(problem) for problem in result.changed],
        "rejected": [sample._asdict() for sample in result.rejected],
        "ignored": [str(path) for path in scan.ignored],
    }


def _as_row(problem: FileProblem) -> dict[str, str]:
    return {"path": str(problem.path), "what": problem.what}


def _print(result: PackResult, summary: dict[str, Any]) -> None:
    classes = f" of {count(summary['classes'], 'class', 'classes')}" if summary["classes"] else ""
    rate = (summary["samples"] - result.num_kept) / max(summary["seconds"], 1e-3)
    echo(
        f"packed {count(summary['samples'], 'sample')}{classes} into {count(summary['shards'], 'shard')}, "
        f"{format_bytes(summary['bytes'])}, in {summary['seconds']:.1f} s ({rate:.0f} samples/s)"
    )
    if result.num_kept:
        echo(f"kept {count(result.num_kept, 'sample')} from an earlier run")
    mode = result.manifest.pack["jpeg"]
    if mode != "copy":
        _print_jpegs(result.jpegs, "re-encoded and tiled" if mode == "reencode" else "tiled")
    for problem in result.damaged_shards:
        echo(f"packed again: {printable(problem.path)} {problem.what}", err=True)
    scan = result.scan
    _print_files("packed despite a wrong suffix", [f"{p.path} {p.what}" for p in result.mislabelled])
    _print_files("changed during the pack (samples left out)", [f"{p.path} {p.what}" for p in result.changed])
    _print_files(f"left out (listed in {REJECTED_NAME})", [f"{s.file} {s.reason}" for s in result.rejected])
    _print_files("ignored (not part of any sample)", [str(path) for path in scan.ignored])


def _warn_of_large_samples(result: PackResult, max_shard_size: int) -> None:
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
        for file in files[:SHOWN]:
            echo(f"  {printable(file)}", err=True)
        if len(files) > SHOWN:
            echo(f"  and {len(files) - SHOWN} more (--json lists all of them)", err=True)
