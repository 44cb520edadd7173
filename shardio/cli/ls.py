"""``shardio ls``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardio.cli.samples import read_indexes
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo, printable

if TYPE_CHECKING:
    from shardio.shards import IndexColumns


def ls(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A packed directory, a manifest, a tar, a directory of tars, or an indexed .tar.gz."
        ),
    ],
    fields: Annotated[bool, typer.Option("--fields", help="Also print each field and its size in bytes.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: key, shard, and the fields' bytes.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="Print only the first N samples.")] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """List the keys of a dataset's samples, in the order of the shards. Only the indexes are read.

    Example: shardio ls out --fields --limit 10
    """
    num_left = -1 if limit is None else limit
    for tar, columns in read_indexes(source, read_access(storage_option)):
        for sample in range(len(columns.keys)):
            if num_left == 0:
                return
            num_left -= 1
            key = columns.keys.text(sample)
            if as_json:
                contents = {
                    field: {"offset": offset, "size": size} for field, offset, size in _fields_of(columns, sample)
                }
                echo(json.dumps({"key": key, "shard": tar.name, "fields": contents}))
            elif fields:
                parts = [f"{field} {size}" for field, _, size in _fields_of(columns, sample)]
                echo("\t".join([printable(key), *map(printable, parts)]))
            else:
                echo(printable(key))


def _fields_of(columns: IndexColumns, sample: int) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the offset and the size of each field that a sample has."""
    offsets, sizes = columns.starts[:, sample].tolist(), columns.sizes[:, sample].tolist()
    for field, offset, size in zip(columns.header.fields, offsets, sizes, strict=True):
        if offset >= 0:
            yield field, offset, size
