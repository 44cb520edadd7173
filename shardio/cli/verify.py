"""``shardio verify``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardio.cli.console import count, format_bytes
from shardio.cli.progress import ProgressReporter
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo, printable

if TYPE_CHECKING:
    from shardio.shards.shard_problems import ContentCheck

SHOWN = 20
"""The maximum number of problems of each kind to print."""


def verify(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
    ],
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all problems as JSON.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of shards to read at a time. Leave unset to let shardio choose."),
    ] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Compare a dataset's manifest, indexes and tars, and print every problem. Nothing is written.

    Each tar is read once. Its size, digest, headers and the hashes of its contents must match its index.
    Repeated keys, tars that the manifest lacks, members that the index lacks, and unfinished packs are problems, too.
    The exit code is 1 if there is any problem.

    Example: shardio verify out --deep
    """
    from shardio.shards import find_problems

    check_content: ContentCheck | None = None
    if deep:
        from shardio.decoding.verification import check_image

        check_content = check_image
    access = read_access(storage_option)
    problems, kinds = [], Counter[str]()
    with ProgressReporter("verifying", "shards") as progress:
        for problem in find_problems(
            source, access, check_content=check_content, num_workers=workers, progress=progress
        ):
            kinds[problem.kind] += 1
            if as_json:
                problems.append(problem.dump())
            elif kinds[problem.kind] <= SHOWN:
                echo(f"{problem.kind}: {printable(problem)}")
    if as_json:
        values = {
            "problems": problems,
            "kinds": dict(kinds),
            "shards": progress.num_done,
            "samples": progress.num_samples,
            "bytes": progress.num_bytes,
            "elapsed_s": progress.elapsed_s,
        }
        echo(json.dumps(values, indent=1))
    else:
        for kind, num_problems in kinds.items():
            if num_problems > SHOWN:
                echo(f"{kind}: {num_problems - SHOWN} more (--json prints all)")
        found = ", ".join(f"{num_problems} {kind}" for kind, num_problems in kinds.items())
        summary = f"{count(kinds.total(), 'problem')} ({found})" if kinds else "no problems"
        rate = f"{format_bytes(progress.num_bytes / max(progress.elapsed_s, 1e-9))}/s"
        read = f"{count(progress.num_done, 'shard')}, {count(progress.num_samples, 'sample')}"
        echo(f"{summary} in {read}, {format_bytes(progress.num_bytes)} ({progress.elapsed_s:.1f} s, {rate})")
    if kinds:
        raise typer.Exit(1)
