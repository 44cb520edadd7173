"""Recognise the kind of a source, and scan it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import cast

from shardio.errors import PackError
from shardio.packing.pack_call import PackOptions, describe_option
from shardio.packing.sources.directory import find_main_file, scan_directory
from shardio.packing.sources.files import SHOWN
from shardio.packing.sources.layouts import quote
from shardio.packing.sources.source import OPTIONS_OF_KINDS, SOURCES, PackSource, SourceKind, SourceScan
from shardio.storage import Location


@cache
def load_source(kind: SourceKind) -> PackSource:
    """Return the source of a kind."""
    module, _, name = SOURCES[kind].partition(":")
    return cast(PackSource, getattr(import_module(f"shardio.packing.sources.{module}"), name)())


def _others() -> dict[SourceKind, PackSource]:
    return {kind: load_source(kind) for kind in SOURCES if kind != "files"}


def scan_source(src: Path, dst: Location, options: PackOptions) -> SourceScan:
    """Find the samples of a source.

    Args:
        src: A directory of images, or the dataset of another tool.
        dst: The destination, which error messages name.
        options: The options of the pack.

    Raises:
        PackError: If it cannot be packed, or holds samples of several kinds.
    """
    kind = _choose_kind(src, options)
    if (option := _find_other_option(kind, options)) is not None:
        raise PackError(f"{describe_option(option)} does not apply to {src}: omit it")
    if kind != "files":
        return load_source(kind).scan(src, options)
    if src.is_dir() and find_main_file(src, options) is None:
        _refuse_outer_folder(src, dst)
    return scan_directory(src, dst, options)


def _refuse_outer_folder(src: Path, dst: Location) -> None:
    """Raise PackError, with the right commands, if folders of a source without samples are sources themselves."""
    lines = [
        f"  shardio pack {quote(folder)} {quote(dst / folder.name)}"
        for folder in sorted(src.iterdir())
        if folder.is_dir()
        and any((found := source.find(folder)) and found.holds_samples for source in _others().values())
    ]
    if lines:
        more = [f"  (and {len(lines) - SHOWN} more)"] if len(lines) > SHOWN else []
        raise PackError(
            "\n".join([f"{src} holds no samples itself, but in its folders. Pack each one:", *lines[:SHOWN], *more])
        )


def _choose_kind(src: Path, options: PackOptions) -> SourceKind:
    """Return the kind of a source. Files that hold no samples, such as tables of labels, do not decide it."""
    if (kind := options.source_kind) != "auto":
        if kind != "files" and load_source(kind).find(src) is None:
            raise PackError(f"{src} is not {load_source(kind).what}: omit --source-kind {kind} (source_kind={kind!r})")
        return kind
    all_found = {kind: evidence for kind, source in _others().items() if (evidence := source.find(src)) is not None}
    found = {kind: evidence.file for kind, evidence in all_found.items() if evidence.holds_samples}
    if all_found and (file := find_main_file(src, options)) is not None:
        found["files"] = file
    found = found or {kind: evidence.file for kind, evidence in all_found.items()} or {"files": src}
    if len(found) > 1:  # An option that applies to one of them chooses it.
        found = {kind: file for kind, file in found.items() if _find_other_option(kind, options) is None} or found
    if len(found) > 1:
        lines = [
            f"  {load_source(kind).what}, such as {file}: --source-kind {kind} (source_kind={kind!r})"
            for kind, file in found.items()
        ]
        raise PackError(
            f"{src} holds samples of {len(found)} kinds:\n"
            + "\n".join(lines)
            + "\nPass one of these options, or move the others out of the source"
        )
    return next(iter(found))


def _find_other_option(kind: SourceKind, options: PackOptions) -> str | None:
    """Return an option that is given but does not apply to a kind of source; None if all apply."""
    return options.find_given(name for name in OPTIONS_OF_KINDS if name not in load_source(kind).takes)
