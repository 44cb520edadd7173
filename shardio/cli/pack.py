"""``shardio pack``."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shardio.classes import check_classes
from shardio.cli.console import PackReporter, count, format_bytes, wrong_values_are_wrong_usage
from shardio.cli.loading import find_class_folders, has_class_folders
from shardio.cli.terminal import echo, printable
from shardio.images import DEFAULT_MAX_PIXELS
from shardio.packing import (
    DEFAULT_QUALITY,
    DEFAULT_SHARD_SIZE,
    TILED,
    JpegMode,
    JpegTally,
    Layout,
    OnChanged,
    PackProgress,
    PackResult,
    PackSettings,
    Problem,
    pack_directory,
)
from shardio.shards import open_table
from shardio.storage import read_as_utf8

SHOWN = 10
"""How many files of each kind the summary names."""


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as ``256MiB``."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(f"{text!r} is not a size: write it as 256MiB, 1GB or in bytes") from error


def pack(
    images: Annotated[Path, typer.Argument(help="Class folders with images, or a flat directory of images.")],
    out: Annotated[Path, typer.Argument(help="Where to write the shards: an empty directory, or a new one.")],
    max_shard_size: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default="256MiB",
            help="A shard's size at the most, as 256MiB or 1GB.",
        ),
    ] = DEFAULT_SHARD_SIZE,
    max_shard_samples: Annotated[
        int | None, typer.Option(min=1, help="A shard's number of samples at the most.")
    ] = None,
    shuffle_seed: Annotated[int, typer.Option(min=0, help="Seed of the packing order, which mixes classes.")] = 0,
    no_shuffle: Annotated[bool, typer.Option("--no-shuffle", help="Pack in the order of the keys.")] = False,
    rename_dots: Annotated[
        bool, typer.Option("--rename-dots", help="Write an underscore for each dot in a file's stem.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Fail if a file does not begin as the image that its name says, or a JPEG to rewrite is damaged.",
        ),
    ] = False,
    jpeg: Annotated[
        JpegMode,
        typer.Option(
            help="What to make of JPEGs: copy them; tile them, without any loss, so that crops decode quicker; or "
            "reencode them smaller, upright and tiled."
        ),
    ] = "copy",
    max_side: Annotated[
        int | None, typer.Option(min=1, help="With reencode: pixels of an image's longer side at the most.")
    ] = None,
    quality: Annotated[
        int | None, typer.Option(min=1, max=100, show_default=str(DEFAULT_QUALITY), help="With reencode: JPEG quality.")
    ] = None,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=str(DEFAULT_MAX_PIXELS), help="With reencode: an image of more is stored as it is."
        ),
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(min=1, help="Shards written at a time; never changes what is written.")
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(
            help="How the files lie: class folders or a flat directory, which auto tells apart; or pairs such as "
            "images/a.jpg and masks/a.png, or a.jpg and a.mask.png, which become one sample."
        ),
    ] = "auto",
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DATASET",
            help="Number labels by these classes: a text file of a name a line, a packed directory, or class folders.",
        ),
    ] = None,
    on_changed: Annotated[
        OnChanged,
        typer.Option(help="What becomes of a sample whose files change meanwhile: an error, or it is left out."),
    ] = "raise",
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no summary.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Pack a directory of images into tar shards, with an index for each and a manifest."""
    with wrong_values_are_wrong_usage():
        settings = PackSettings(
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            shuffle_seed=None if no_shuffle else shuffle_seed,
            jpeg=jpeg,
            max_side=max_side,
            quality=quality,
            max_pixels=max_pixels,
        )
        names = None if classes is None else _read_classes(classes)
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
                progress=progress,
            )
    except KeyboardInterrupt:
        echo("interrupted: finished shards are kept; run the same command to resume", err=True)
        raise
    summary = _summarise(result, out, time.perf_counter() - start)
    if as_json:
        echo(json.dumps(summary, indent=1))
    elif not quiet:
        _print(result, summary)
        _warn_of_large_samples(result, max_shard_size)


def _read_classes(source: Path) -> tuple[str, ...]:
    """Return the class names that a text file lists, or a dataset has."""
    if source.is_file() and source.suffix != ".json":
        return check_classes(_read_lines(source))
    if has_class_folders(source):
        return check_classes(sorted(read_as_utf8(path.name) for path in find_class_folders(source)))
    return check_classes(open_table(source).manifest)


def _read_lines(path: Path) -> list[str]:
    """Return a text file's lines; empty ones at its end count for nothing.

    Raises:
        ValueError: If another line is empty, or the file is not UTF-8.
    """
    lines = [line.removesuffix("\r") for line in path.read_bytes().decode("utf-8-sig").split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(f"line {number} of {path} is empty: labels are line numbers, so delete it or name a class")
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
        "mislabelled": [_as_row(problem) for problem in scan.mislabelled],
        "packed_again": [_as_row(problem) for problem in result.damaged_shards],
        "changed": [_as_row(problem) for problem in result.changed],
        "left_out": [_as_row(problem) for problem in scan.unreadable],
        "ignored": [str(path) for path in scan.ignored],
    }


def _as_row(problem: Problem) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(problem).items()}


def _print(result: PackResult, summary: dict[str, Any]) -> None:
    kept = f", of which {result.num_kept} were there already" if result.num_kept else ""
    rate = (summary["samples"] - result.num_kept) / max(summary["seconds"], 1e-3)
    echo(
        f"packed {count(summary['samples'], 'sample')} of {count(summary['classes'], 'class', 'classes')} into "
        f"{count(summary['shards'], 'shard')}, {format_bytes(summary['bytes'])}{kept}, in {summary['seconds']:.1f} s "
        f"({rate:.0f} samples/s)"
    )
    mode = result.manifest.pack["jpeg"]
    if mode != "copy":
        _print_jpegs(result.jpegs, "encoded again and tiled" if mode == "reencode" else "tiled")
    for problem in result.damaged_shards:
        echo(f"packed again: {printable(problem.path)} {problem.what}", err=True)
    scan = result.scan
    _print_files("packed, though named otherwise", [f"{p.path} {p.what}" for p in scan.mislabelled])
    _print_files("changed meanwhile, of samples left out", [f"{p.path} {p.what}" for p in result.changed])
    _print_files("left out", [f"{p.path} {p.what}" for p in scan.unreadable])
    _print_files("ignored, belonging to no image", [str(path) for path in scan.ignored])


def _warn_of_large_samples(result: PackResult, max_shard_size: int) -> None:
    larger = [shard for shard in result.manifest.shards if shard.num_samples == 1 and shard.num_bytes > max_shard_size]
    if larger:
        echo(
            f"{count(len(larger), 'shard')} of one sample exceed --max-shard-size {format_bytes(max_shard_size)}: a "
            "sample is never divided, so give a larger one",
            err=True,
        )


def _print_jpegs(jpegs: JpegTally, what_was_done: str) -> None:
    before, after = jpegs.num_bytes_before, jpegs.num_bytes_after
    change = f", {after / before - 1:+.1%}" if before else ""
    sizes = f"{format_bytes(before)} before, {format_bytes(after)} now{change}"
    echo(f"JPEGs: {jpegs.outcomes[TILED]} {what_was_done}; {sizes}")
    untouched = {reason: number for reason, number in jpegs.outcomes.most_common() if reason != TILED}
    if untouched:
        reasons = ", ".join(f"{number} {reason}" for reason, number in untouched.items())
        echo(f"JPEGs stored as they were: {sum(untouched.values())}: {reasons}")
    _print_files("packed untouched, though damaged", [f"{p.path} {p.what}" for p in jpegs.damaged])


def _print_files(what: str, files: list[str]) -> None:
    if files:
        echo(f"{count(len(files), 'file')} {what}:", err=True)
        for file in files[:SHOWN]:
            echo(f"  {printable(file)}", err=True)
        if len(files) > SHOWN:
            echo(f"  and {len(files) - SHOWN} more (--json names them all)", err=True)
