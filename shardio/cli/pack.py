"""Implement ``shardio pack``."""

from __future__ import annotations

import dataclasses
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from shardio.cli.options import SHARDS, STORAGE, MaxShardSize, StorageOptionTexts, read_classes, read_options
from shardio.cli.terminal import ProgressReporter, echo, format_counts, name_of, printable, value_errors_as_usage_errors
from shardio.images import UNCOMPRESSED, describe_other_images, is_convertible
from shardio.packing import (
    REJECTED_NAME,
    TILED,
    TILED_PROGRESSIVE,
    FileProblem,
    JpegTally,
    PackOptions,
    PackResult,
    Parts,
    make_parts,
    pack_parts,
    pack_source,
)
from shardio.packing.pack_call import Option, kinds_of_options
from shardio.process import WorkProgress
from shardio.storage import make_direct_access
from shardio.values import count, format_bytes

SHOWN_FILES = 10
"""The maximum number of files of each kind that the summary names."""


def report(
    results: Mapping[str, PackResult], seconds: float, max_shard_size: int, *, as_json: bool, quiet: bool
) -> None:
    """Print the results of a pack.

    Args:
        results: The result for each dataset, by its directory.
        seconds: The duration of the pack in seconds.
        max_shard_size: The requested maximum size of a shard in bytes.
        as_json: Whether to print JSON: an object, or a list of objects if there are several datasets.
        quiet: Whether to print nothing, unless ``as_json``.
    """
    summaries = [summarize(result, out, seconds) for out, result in results.items()]
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


def summarize(result: PackResult, out: str, seconds: float) -> dict[str, Any]:
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
    """Print the summary of one dataset and, on standard error, the files that need attention.

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
    if (uncompressed := sorted(UNCOMPRESSED & images)) and result.manifest.pack.get("convert_to") != "ppm":
        names = " and ".join(f".{field}" for field in uncompressed)
        others = " and also convert all other images" if images - UNCOMPRESSED else ""
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
    num_progressive = jpegs.outcomes[TILED_PROGRESSIVE]
    formerly = f" ({num_progressive} formerly progressive)" if num_progressive else ""
    echo(f"JPEGs: {jpegs.num_tiled} {what_was_done}{formerly}; {format_bytes(before)} → {format_bytes(after)}{change}")
    unchanged = jpegs.outcomes - Counter({TILED: jpegs.outcomes[TILED], TILED_PROGRESSIVE: num_progressive})
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
            help="Class folders with images, a flat directory, or another tool's dataset: Parquet files, a dataset "
            "that Hugging Face's datasets saved, tars, MDS shards, LitData chunks, an LMDB environment, a CSV or "
            "JSON Lines file of paths, or documents for PackedTokens.",
        ),
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="Destination of the shards: a new or empty directory, the directory of an interrupted pack to resume, "
            "or a URL such as s3://bucket/train.",
        ),
    ],
    *,
    no_shuffle: Annotated[
        bool, typer.Option("--no-shuffle", rich_help_panel=SHARDS, help="Pack in the order of the keys.")
    ] = False,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="FRACTIONS",
            rich_help_panel=SHARDS,
            help="Divide the samples among the datasets OUT/train, OUT/val and so on, in fractions such as 0.9,0.1, by "
            "a hash of each sample's key. A sample stays in its dataset when other samples are added.",
        ),
    ] = None,
    split_names: Annotated[
        str, typer.Option(metavar="NAMES", rich_help_panel=SHARDS, help="With --split, the names of the datasets.")
    ] = "train,val,test",
    quiet: Annotated[
        bool, typer.Option("--quiet", rich_help_panel="Running", help="Show no progress and no summary.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Running", help="Print the summary as JSON.")
    ] = False,
    **given: Any,
) -> None:
    """Pack images, or another tool's dataset, into tar shards, with an index for each shard and a manifest.

    Rerun the same command to resume an interrupted pack.

    Example: shardio pack images/train packed/train --jpeg tile --workers 8
    """
    with value_errors_as_usage_errors():
        given["check"] = not given["check"]
        if no_shuffle:
            given["shuffle_seed"] = None
        given["storage_options"] = read_options(given["storage_options"])
        if given["fields"] is not None:
            given["fields"] = given["fields"].split(",")
        if given["classes"] is not None:
            given["classes"] = read_classes(given["classes"], make_direct_access(given["storage_options"]))
        options = PackOptions(**given)
        parts = None if split is None else make_split(split, split_names)
    start = time.perf_counter()
    reporter = nullcontext(WorkProgress()) if quiet or as_json else ProgressReporter("packing")
    try:
        with reporter as progress:
            if parts is None:
                results = {out: pack_source(source, out, options, progress)}
            else:
                by_name = pack_parts(source, out, parts, options, progress)
                results = {f"{name_of(out)}/{name}": result for name, result in by_name.items()}
    except KeyboardInterrupt:
        echo("interrupted: finished shards are kept; rerun the same command to resume", err=True)
        raise
    report(results, time.perf_counter() - start, options.max_shard_size, as_json=as_json, quiet=quiet)


_OWN_TYPES: dict[str, Any] = {
    "max_shard_size": MaxShardSize,
    "shuffle_seed": int,
    "fields": str | None,
    "tokenizer": str | None,
    "classes": str | None,
    "storage_options": StorageOptionTexts,
}
"""The command-line types of options whose Python types differ from them."""

_PANELS = ("Source", "Labels", "Images", "Documents", SHARDS, "Running", STORAGE, "Options")
"""The panels of ``--help`` in their order."""


def _make_signature(command: Callable[..., None]) -> inspect.Signature:
    """Return the command's own parameters, and the options of a pack in place of ``**given``, panel by panel."""
    own = dict(inspect.signature(command, eval_str=True).parameters)
    arguments = [own.pop("source"), own.pop("out")]
    del own["given"]
    options = []
    for each in dataclasses.fields(PackOptions):
        kind, option = kinds_of_options()[each.name]
        default = False if each.name == "check" else each.default
        kind = _OWN_TYPES.get(each.name, kind)
        if not hasattr(kind, "__metadata__"):  # Shared options are already declared.
            kind = Annotated[kind, _make_option(each.name, kind, option)]
        options.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    options = sorted([*options, *own.values()], key=lambda each: _PANELS.index(_panel_of(each)))
    return inspect.Signature([*arguments, *options], return_annotation=None)


def _panel_of(parameter: inspect.Parameter) -> str:
    return str(parameter.annotation.__metadata__[0].rich_help_panel)


def _make_option(name: str, kind: Any, option: Option) -> Any:
    names = option.names or ((f"--{name.replace('_', '-')}",) if kind is bool else ())
    # The help does not mention the limit of 64-bit integers, which applies anyway.
    at_most = None if option.below is None or option.below >= 2**63 else option.below - 1
    return typer.Option(
        *names,
        metavar=option.metavar,
        help=option.help,
        min=option.at_least,
        max=at_most,
        show_default=option.shown_default or True,
        rich_help_panel=option.panel,
    )


pack.__signature__ = _make_signature(pack)  # type: ignore[attr-defined]  # typer reads it.


def make_split(fractions: str, names: str) -> Parts:
    """Return the parts that ``--split`` and ``--split-names`` describe. Surplus default names are ignored."""
    each = fractions.split(",")
    chosen = names.split(",")
    return make_parts(each, chosen[: len(each)] if names == "train,val,test" else chosen)
