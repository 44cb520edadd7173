"""Recognise what a source is, and scan it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardio.errors import PackError
from shardio.packing.sources import hugging_face, litdata_chunks, lmdb_entries, mds, path_tables, tars
from shardio.packing.sources.directory import scan_directory
from shardio.packing.sources.records import RecordScan, scan_records
from shardio.packing.sources.source import SourceOptions, SourceScan
from shardio.storage import Location


class _Adapter(NamedTuple):
    """How a dataset of another tool is recognised and read, and what can be chosen: columns, or fields."""

    recognises: Callable[[Path], bool]
    scan: Callable[[Path, SourceOptions], RecordScan | SourceScan]
    has_columns: bool = True
    has_fields: bool = False


_ADAPTERS = (
    _Adapter(hugging_face.is_saved_dataset, hugging_face.scan_saved_dataset),
    _Adapter(path_tables.is_path_table, path_tables.scan_path_table),
    _Adapter(hugging_face.is_parquet, hugging_face.scan_parquet),
    _Adapter(mds.is_mds, mds.scan_mds),
    _Adapter(litdata_chunks.is_litdata, litdata_chunks.scan_litdata),
    _Adapter(tars.is_tars, tars.scan_tars, has_columns=False),
    _Adapter(lmdb_entries.is_lmdb, lmdb_entries.scan_lmdb, has_columns=False, has_fields=True),
)
"""To pack another tool's datasets, write a module with these two functions, and add a line here."""


def scan_source(src: Path, dst: Location, options: SourceOptions) -> SourceScan:
    """Find the samples of a source.

    Args:
        src: A directory of images, or the dataset of another tool.
        dst: The destination, which error messages name.
        options: How to read the source.

    Raises:
        PackError: If it cannot be packed.
    """
    for adapter in _ADAPTERS:
        if adapter.recognises(src):
            _refuse(options.prefix_keys and adapter.scan is not tars.scan_tars, "--prefix-keys (prefix_keys)", src)
            _refuse(options.layout != "auto", "--layout (layout)", src)
            _refuse(options.fields is not None and not adapter.has_fields, "--fields (fields)", src)
            if not adapter.has_columns:
                _refuse_columns(src, options)
            found = adapter.scan(src, options)
            return found if isinstance(found, SourceScan) else scan_records(found, options)
    _refuse(options.prefix_keys, "--prefix-keys (prefix_keys)", src)
    _refuse_columns(src, options)
    return scan_directory(src, dst, options)


def _refuse_columns(src: Path, options: SourceOptions) -> None:
    for name in ("image_column", "label_column", "key_column"):
        _refuse(getattr(options, name) is not None, f"--{name.replace('_', '-')} ({name})", src)


def _refuse(is_given: bool, option: str, src: Path) -> None:
    if is_given:
        raise PackError(f"{option} does not apply to {src}: omit it")
