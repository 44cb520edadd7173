"""The summary of a pack: as JSON, as text, and warnings about files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardio.cli.console import count, format_bytes, format_counts, name_of
from shardio.cli.terminal import echo, printable
from shardio.images import UNCOMPRESSED, describe_other_images, is_convertible
from shardio.packing import REJECTED_NAME, TILED, FileProblem, JpegTally, PackResult

SHOWN = 10
"""The maximum number of files of each kind that the summary names."""


def report(
    results: Mapping[Path, PackResult], seconds: float, max_shard_size: int, *, as_json: bool, quiet: bool
) -> None:
    """Print the results of a pack.

    Args:
        results: The result for each dataset, by its directory.
        seconds: How long the pack took.
        max_shard_size: The maximum size of a shard that was asked for.
        as_json: Whether to print JSON: an object, or a list of objects if there are several datasets.
        quiet: Whether to print nothing else.
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
    """Print the summary of one dataset, and on standard error the files that need attention.

    Args:
        result: The result.
        summary: Its summary.
        where: What the first line begins with.
        timing: What it ends with; "" for nothing.
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
        for file in files[:SHOWN]:
            echo(f"  {printable(file)}", err=True)
        if len(files) > SHOWN:
            echo(f"  and {len(files) - SHOWN} more (--json lists all of them)", err=True)
