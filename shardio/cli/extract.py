"""``shardio extract``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shardio.cli.console import count, format_bytes
from shardio.cli.samples import open_samples, read_sample
from shardio.cli.storage_options import StorageOptionTexts, read_options
from shardio.cli.terminal import echo

_DRIVE = re.compile(r"[A-Za-z]:")


def extract(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A packed directory, a manifest, a tar, a directory of tars, or an indexed .tar.gz."
        ),
    ],
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="The keys of samples, as shardio ls prints them.")],
    into: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write to. It is created.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the fields of samples to files named KEY.FIELD below a directory.

    Keys that lead outside the directory or through a symbolic link are refused before any file is written.

    Example: shardio extract out cats/0001 cats/0002 some-cats
    """
    from shardio.shards import CompressedShard
    from shardio.storage import parse_location

    keys = list(dict.fromkeys(keys))
    for key in keys:
        _check_key(key)
    into, options = into.absolute(), read_options(storage_option)
    num_files = num_bytes = 0
    with open_samples(source, options) as samples:
        if isinstance(samples, CompressedShard):
            keys = samples.sort(keys)
        paths = dict[Path, str]()
        for key in keys:  # Twice, so that a later problem leaves no files. Samples are not kept: they may be large.
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
    """Refuse a key that is not a relative path to a place below a directory."""
    if key.startswith(("/", "\\")):
        _refuse(f"the key {key!r} is an absolute path")
    if _DRIVE.match(key):
        _refuse(f"the key {key!r} starts with a drive")
    if ".." in re.split(r"[/\\]", key):
        _refuse(f"the key {key!r} contains '..', which leads outside the directory")


def _find_path(into: Path, key: str, field: str, *, overwrite: bool) -> Path:
    """Return the path of a field's file; refuse it if it is outside the directory, or must not be written."""
    path = into / f"{key}.{field}"
    if "\0" in str(path) or "\\" in field:
        _refuse(f"the name of field {field!r} of sample {key!r} cannot be a file's")
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
    echo(f"error: {why}: nothing was written", err=True)
    raise typer.Exit(1)
