"""``shardio index``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.console import count, format_bytes
from shardio.cli.progress import ProgressReporter
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo, printable
from shardio.errors import FormatError

if TYPE_CHECKING:
    from shardio.shards.indexing import IndexReport
    from shardio.storage import Location

SHOWN = 20
"""The maximum number of keys to print for each tar."""


def index(
    tars: Annotated[
        list[Path],
        typer.Argument(metavar="TARS", help="Tars, compressed tars (.tar.gz, .tgz), or directories of them."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all keys.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Index tars that other tools packed, and report what they contain. The tars are not changed.

    The index is written next to the tar if possible, otherwise to the user's cache folder.
    Tars compressed with gzip are indexed, too: ls, cat and extract then read them. Datasets do not.
    Members with the same key become one sample, even if they are not adjacent in the tar.
    The exit code is 1 if a tar cannot be indexed, or if several of its samples have the same key.

    Example: shardio index data/*.tar
    """
    from shardio.shards.indexing import index_tar
    from shardio.storage import parse_location

    access = read_access(storage_option)
    found = _find_tars([parse_location(source, access) for source in tars])
    reports, failures = list[dict[str, Any]](), dict[str, str]()
    has_repeated = False
    with ProgressReporter("indexing", "tars") as progress:
        progress.start(len(found))
        for tar in found:
            try:
                report = index_tar(tar)
            except (FormatError, OSError) as error:
                failures[str(tar)] = str(error)
                progress.advance(1)
                echo(f"error: {error}", err=True)
                continue
            progress.advance(1, tar.stat().size)
            has_repeated = has_repeated or bool(report.repeated)
            if as_json:
                reports.append(_dump(report))
            else:
                _print(report)
    if as_json:
        echo(json.dumps({"tars": reports, "failures": failures}, indent=1))
    if failures or has_repeated:
        raise typer.Exit(1)


def _find_tars(sources: list[Location]) -> list[Location]:
    from shardio.shards import MANIFEST_NAME, is_compressed

    found: list[Location] = []
    for location in sources:
        if (location / MANIFEST_NAME).exists():
            raise FormatError(
                f"{location} is a packed dataset, whose indexes were written with it. To rebuild missing or damaged "
                f"ones, run: shardio repair {location}"
            )
        if location.is_folder():
            names = [name for name in location.list() if not name.startswith(".")]
            inside = [location / name for name in names]
            inside = [tar for tar in inside if tar.name.lower().endswith(".tar") or is_compressed(tar)]
            if not inside:
                raise FileNotFoundError(f"the directory {location} holds no *.tar, *.tar.gz or *.tgz")
            found += inside
        elif location.exists():
            found.append(location)
        else:
            raise FileNotFoundError(f"no such tar or directory: {location}")
    return list(dict.fromkeys(found))


def _dump(report: IndexReport) -> dict[str, Any]:
    return {
        "tar": str(report.tar),
        "index": str(report.index),
        "was_current": report.was_current,
        "samples": report.num_samples,
        "fields": report.fields,
        "bytes": report.num_bytes,
        "compression": report.compression,
        "added_by_macos": report.num_added_by_macos,
        "without_key": report.num_without_key,
        "skipped": list(report.skipped),
        "not_adjacent": list(report.scattered),
        "repeated": list(report.repeated),
    }


def _print(report: IndexReport) -> None:
    fields = ", ".join(f"{field} ({num_samples})" for field, num_samples in report.fields.items())
    size = format_bytes(report.num_bytes) + (" decompressed" if report.compression else "")
    echo(printable(f"{report.tar}: {count(report.num_samples, 'sample')}, {size}, fields: {fields or 'none'}"))
    if num_skipped := (report.num_added_by_macos or 0) + (report.num_without_key or 0):
        names = ", ".join(report.skipped) + (", …" if num_skipped > len(report.skipped) else "")
        echo(printable(f"  skipped {count(num_skipped, 'member')} without a key, or added by macOS: {names}"))
    if report.scattered:
        echo(
            printable(
                f"  the members of {count(len(report.scattered), 'sample')} are not adjacent (tar without "
                f"--sort=name?), such as those of {report.scattered[0]}: datasets gather them, streams and WebDataset "
                "cannot"
            )
        )
    for key in report.repeated[:SHOWN]:
        echo(printable(f"  several samples have the key {key}"))
    if len(report.repeated) > SHOWN:
        echo(f"  and {len(report.repeated) - SHOWN} more such keys (--json prints all)")
    echo(printable(f"  index: {report.index}{' (already current)' if report.was_current else ''}"))
