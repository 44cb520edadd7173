"""Recognise the kind of a source, and scan it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from shardio.errors import PackError
from shardio.packing.sources import hugging_face, litdata, lmdb, mds, path_tables, tars
from shardio.packing.sources.directory import find_main_file, scan_directory
from shardio.packing.sources.files import SHOWN
from shardio.packing.sources.layouts import quote
from shardio.packing.sources.records import RecordScan, scan_records
from shardio.packing.sources.source import Evidence, SourceKind, SourceOptions, SourceScan
from shardio.storage import Location


class _Adapter(NamedTuple):
    """The name of another tool's dataset in messages, the functions that find and read it, and its options."""

    what: str
    find: Callable[[Path], Evidence | None]
    scan: Callable[[Path, SourceOptions], RecordScan | SourceScan]
    has_columns: bool = True
    has_fields: bool = False
    has_splits: bool = False


_ADAPTERS: Mapping[SourceKind, _Adapter] = {
    "saved": _Adapter(
        "a saved dataset", hugging_face.find_saved_dataset, hugging_face.scan_saved_dataset, has_splits=True
    ),
    "table": _Adapter("a table of paths", path_tables.find_path_table, path_tables.scan_path_table, has_splits=True),
    "parquet": _Adapter(
        "Parquet files with contents", hugging_face.find_parquet, hugging_face.scan_parquet, has_splits=True
    ),
    "mds": _Adapter("MDS shards", mds.find_mds, mds.scan_mds),
    "litdata": _Adapter("LitData chunks", litdata.find_litdata, litdata.scan_litdata),
    "tars": _Adapter("tars", tars.find_tars, tars.scan_tars, has_columns=False, has_splits=True),
    "lmdb": _Adapter("an LMDB environment", lmdb.find_lmdb, lmdb.scan_lmdb, has_columns=False, has_fields=True),
}
"""The adapters. To pack another tool's datasets, write a module with these two functions, and add a line here."""


def scan_source(src: Path, dst: Location, options: SourceOptions) -> SourceScan:
    """Find the samples of a source.

    Args:
        src: A directory of images, or the dataset of another tool.
        dst: The destination, which error messages name.
        options: The options for reading the source.

    Raises:
        PackError: If it cannot be packed, or holds samples of several kinds.
    """
    kind = _choose_kind(src, options)
    if (option := _find_other_option(kind, options)) is not None:
        raise PackError(f"{option} does not apply to {src}: omit it")
    if kind == "files":
        if src.is_dir() and find_main_file(src, options) is None:
            _refuse_outer_folder(src, dst)
        return scan_directory(src, dst, options)
    found = _ADAPTERS[kind].scan(src, options)
    return found if isinstance(found, SourceScan) else scan_records(found, options)


def _refuse_outer_folder(src: Path, dst: Location) -> None:
    """Raise PackError, with the right commands, if folders of a source without samples are sources themselves."""
    lines = [
        f"  shardio pack {quote(folder)} {quote(dst / folder.name)}"
        for folder in sorted(src.iterdir())
        if folder.is_dir()
        and any((found := adapter.find(folder)) and found.holds_samples for adapter in _ADAPTERS.values())
    ]
    if lines:
        more = [f"  (and {len(lines) - SHOWN} more)"] if len(lines) > SHOWN else []
        raise PackError(
            "\n".join([f"{src} holds no samples itself, but in its folders. Pack each one:", *lines[:SHOWN], *more])
        )


def _choose_kind(src: Path, options: SourceOptions) -> SourceKind:
    """Return the kind of a source. Files that hold no samples, such as tables of labels, do not decide it."""
    if (kind := options.source_kind) != "auto":
        if kind != "files" and _ADAPTERS[kind].find(src) is None:
            raise PackError(f"{src} is not {_ADAPTERS[kind].what}: omit --source-kind {kind} (source_kind={kind!r})")
        return kind
    all_found = {kind: evidence for kind, adapter in _ADAPTERS.items() if (evidence := adapter.find(src)) is not None}
    found = {kind: evidence.file for kind, evidence in all_found.items() if evidence.holds_samples}
    if all_found and (file := find_main_file(src, options)) is not None:
        found["files"] = file
    found = found or {kind: evidence.file for kind, evidence in all_found.items()} or {"files": src}
    if len(found) > 1:  # An option that applies to one of them chooses it.
        found = {kind: file for kind, file in found.items() if _find_other_option(kind, options) is None} or found
    if len(found) > 1:
        lines = [
            f"  {_ADAPTERS[kind].what if kind in _ADAPTERS else 'files'}, such as {file}: --source-kind {kind} "
            f"(source_kind={kind!r})"
            for kind, file in found.items()
        ]
        raise PackError(
            f"{src} holds samples of {len(found)} kinds:\n"
            + "\n".join(lines)
            + "\nPass one of these options, or move the others out of the source"
        )
    return next(iter(found))


def _find_other_option(kind: SourceKind, options: SourceOptions) -> str | None:
    """Return an option that is given but does not apply to a kind of source; None if all apply."""
    adapter = _ADAPTERS.get(kind)
    if kind != "tars" and options.prefix_keys:
        return "--prefix-keys (prefix_keys)"
    if adapter is not None and options.layout != "auto":
        return "--layout (layout)"
    if adapter is not None and not adapter.has_splits and options.source_split is not None:
        return "--source-split (source_split)"
    if adapter is not None and not adapter.has_fields and options.fields is not None:
        return "--fields (fields)"
    if adapter is None or not adapter.has_columns:
        for name in ("image_column", "label_column", "key_column"):
            if getattr(options, name) is not None:
                return f"--{name.replace('_', '-')} ({name})"
    return None
