"""Parquet files, and datasets that Hugging Face's ``datasets`` saved to disk. The package ``datasets`` reads both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import dump_json
from shardio.packing.sources.files import SourceFile, stat_file
from shardio.packing.sources.labels import SplitColumn, holds_contents, select_files, split_of
from shardio.packing.sources.records import Columns, RecordScan, choose_columns, name_field, scan_records
from shardio.packing.sources.source import COLUMNS, Evidence, PackSource, SourceScan
from shardio.shards import find_gaps
from shardio.storage import parse_location

_BATCH = 10_000
"""The number of rows that the scan reads at a time."""

_SMALL_TYPES = {"string", "large_string", "bool", "int8", "uint8", "int16", "int32", "int64", "float32", "float64"}
"""The types of columns that may name splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of a dataset: see :class:`~shardio.packing.sources.records.Records`."""

    path: Path
    files: tuple[SourceFile, ...]
    kind: Literal["parquet", "saved"]
    columns: Columns = field(default_factory=Columns)

    def open(self) -> _Reader:
        return _Reader(_load(self.kind, self.path, self.files), self.columns)

    def describe(self, row: int) -> str:
        return f"row {row}"


class _Reader:
    """Reads rows: see :class:`~shardio.packing.sources.records.RecordReader`."""

    def __init__(self, dataset: Any, columns: Columns) -> None:
        self._dataset, self._columns = dataset, columns

    def read(self, row: int) -> Mapping[str, bytes]:
        values = self._dataset[row]
        found = dict[str, bytes]()
        for name in self._columns.contents:
            content, suffix = _read_content(values[name])
            found[name_field(self._columns, name, content, suffix)] = content
        if self._columns.others:
            found["json"] = dump_json({name: values[name] for name in self._columns.others})
        return found


class SavedDataset(PackSource):
    """A dataset that ``save_to_disk`` of Hugging Face's ``datasets`` wrote."""

    what = "a saved dataset"
    takes = (*COLUMNS, "source_split")

    def find(self, src: Path) -> Evidence | None:
        info, splits = src / "dataset_info.json", src / "dataset_dict.json"
        if (src / "state.json").is_file() and info.is_file():
            return Evidence(info)
        return Evidence(splits) if splits.is_file() else None

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Scan a directory that ``save_to_disk`` wrote.

        Raises:
            PackError: If it holds several splits, or its columns cannot be packed.
        """
        if (src / "dataset_dict.json").is_file():
            names = sorted(path.parent.name for path in src.glob("*/state.json"))
            if options.source_split in names:
                return self.scan(src / options.source_split, replace(options, source_split=None))
            raise PackError(
                f"{src} holds the splits {', '.join(names)}: pack each one, such as {src / names[0] if names else src}"
            )
        return scan_records(_scan("saved", src, sorted(src.glob("*.arrow")), options), options)


class ParquetFiles(PackSource):
    """Parquet files: one, a pattern, or in a directory. They hold samples if a column holds the contents of files."""

    what = "Parquet files with contents"
    takes = (*COLUMNS, "source_split")

    def find(self, src: Path) -> Evidence | None:
        if not src.is_dir():
            is_parquet = src.suffix.lower() == ".parquet"
            return Evidence(src, not src.is_file() or holds_contents(src)) if is_parquet else None
        with_contents, others = _find_in_folder(src)
        return next((Evidence(path, bool(with_contents)) for path in with_contents + others), None)

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Scan Parquet files, in the order of their names.

        Raises:
            PackError: If they are of several splits, or their columns cannot be packed.
        """
        paths, others = [src], list[Path]()
        if src.is_dir():
            paths, others = _find_in_folder(src)
            if not paths and others and options.source_kind != "parquet":
                raise PackError(
                    f"{src} holds no files that can be packed, and no column of {others[0]} holds the contents of "
                    "files. If this table names the files, pass the table itself as the source. To pack its rows as "
                    "they are, pass --source-kind parquet (source_kind='parquet')"
                )
            if not paths:
                paths, others = others, []
        elif "*" in src.name:
            paths = sorted(path for path in src.parent.glob(src.name) if path.suffix.lower() == ".parquet")
        if not paths or not paths[0].exists():
            raise PackError(f"the source {src} does not exist: pass a Parquet file, a pattern of files, or a directory")
        selected = select_files(src, paths, options.source_split, may_be_column=True)
        if missing := find_gaps([path.name for path in selected]) if len(paths) > 1 or src.is_dir() else ():
            warnings.warn(
                f"{src} lacks {len(missing)} Parquet files, such as {missing[0]}, as the names of the others say: "
                "check whether a download is unfinished, or two versions are mixed",
                RuntimeWarning,
                stacklevel=2,
            )
        found = _scan("parquet", src, selected, options, has_selected_files=len(selected) < len(paths))
        return scan_records(replace(found, ignored=others), options)


def _find_in_folder(src: Path) -> tuple[list[Path], list[Path]]:
    """Return the Parquet files of a directory that hold contents, and its other Parquet files."""
    others = list[Path]()
    for folder in (src, src / "data"):  # The second is Hugging Face's own.
        with_contents = list[Path]()
        for path in sorted(folder.glob("*.parquet")):
            (with_contents if holds_contents(path) else others).append(path)
        if with_contents:
            return with_contents, others
    return [], others


def _scan(
    kind: Literal["parquet", "saved"],
    src: Path,
    paths: Sequence[Path],
    options: PackOptions,
    *,
    has_selected_files: bool = False,
) -> RecordScan:
    files = tuple(stat_file(str(path)) for path in paths)
    dataset = _load(kind, src, files)
    features: Mapping[str, Any] = dataset.features
    columns = choose_columns(
        src,
        list(features),
        contents=[name for name, feature in features.items() if _holds_content(feature)],
        labels=[name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"],
        options=options,
    )
    sizes, keys, labels = list[NDArray[np.int64]](), list[object](), list[Any]()
    used = dataset.select_columns([*{*columns.contents, columns.key, columns.label} - {None}]).with_format("arrow")
    for batch in used.iter(batch_size=_BATCH) if used.column_names else ():
        contents = [_sizes_of(src, batch.column(name)) for name in columns.contents]
        sizes.append(np.sum(contents, axis=0, dtype=np.int64) if contents else np.zeros(len(batch), np.int64))
        keys += batch.column(columns.key).to_pylist() if columns.key is not None else ()
        labels += batch.column(columns.label).to_pylist() if columns.label is not None else ()
    return RecordScan(
        records=_Rows(path=src, files=files, kind=kind, columns=columns),
        sizes=np.concatenate(sizes) if sizes else np.zeros(len(dataset), np.int64),
        num_fields=len(columns.contents) + bool(columns.others),
        keys=keys if columns.key is not None else None,  # type: ignore[arg-type]
        labels=labels if columns.label is not None else None,
        classes=tuple(getattr(features.get(columns.label or ""), "names", None) or ()),
        is_selected=_select_rows(src, dataset, columns, options, has_selected_files=has_selected_files),
    )


def _select_rows(
    src: Path, dataset: Any, columns: Columns, options: PackOptions, *, has_selected_files: bool
) -> NDArray[np.bool_] | None:
    """Return which rows are of the chosen split, bool [n]; None for all."""
    small = [name for name in columns.others if getattr(dataset.features[name], "dtype", "") in _SMALL_TYPES]
    first = dataset.select_columns(small)[:1] if small else {}
    candidates = [name for name, values in first.items() if all(split_of(name, value) is not None for value in values)]
    split, selected = SplitColumn(src, options.source_split, ()), list[bool]()
    for batch in dataset.select_columns(candidates).with_format("arrow").iter(batch_size=_BATCH) if candidates else ():
        selected += map(split.selects, batch.to_pylist())
    split.check(has_selected_files=has_selected_files)
    return None if all(selected) else np.array(selected)


def _load(kind: Literal["parquet", "saved"], src: Path, files: Sequence[SourceFile]) -> Any:
    """Open a dataset without decoding its contents."""
    try:
        import datasets
    except ImportError as error:
        raise PackError(
            f"{src} is read by the package datasets ({error}): pip install 'shardio-loader[parquet]'"
        ) from error
    with _without_progress_bars(datasets):
        try:
            if kind == "saved":
                dataset: Any = datasets.load_from_disk(str(src))
            else:
                paths = [file.path for file in files]
                dataset = datasets.load_dataset("parquet", data_files=paths, split="train")
        except Exception as error:  # Of pyarrow, or of datasets itself.
            raise PackError(f"{src} cannot be read by the package datasets: {error}") from error
    for name, feature in dataset.features.items():
        if type(feature).__name__ in ("Audio", "Image", "Pdf", "Video"):
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    return dataset


@contextmanager
def _without_progress_bars(datasets: Any) -> Iterator[None]:
    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()


def _holds_content(feature: Any) -> bool:
    """Return whether a column holds the contents of files: bytes, or bytes with a path."""
    if type(feature).__name__ in ("Audio", "Image", "Pdf", "Video"):
        return True
    if isinstance(feature, Mapping):
        return {"bytes", "path"} == set(feature)
    return getattr(feature, "dtype", None) in ("binary", "large_binary")


def _sizes_of(src: Path, column: Any) -> NDArray[np.int64]:
    """Return the sizes of contents in bytes, int64 [n]. Contents may be in files that the column names."""
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    is_struct = types.is_struct(column.type)
    contents = pc.struct_field(column, "bytes") if is_struct else column
    if types.is_null(contents.type):  # All of them are missing.
        contents = contents.cast(pyarrow.binary())
    sizes = pc.binary_length(contents)
    paths = pc.struct_field(column, "path") if is_struct and sizes.null_count else None
    found: NDArray[np.int64] = sizes.fill_null(0).to_numpy().astype(np.int64)
    if paths is not None:
        for row in np.flatnonzero(sizes.is_null().to_numpy()).tolist():
            if (path := paths[row].as_py()) is not None:
                try:
                    found[row] = stat_file(path).size
                except OSError as error:
                    raise PackError(
                        f"the file {path}, which {src} names instead of its content, cannot be read: "
                        f"{error.strerror or error}. Add the file, or remove the row"
                    ) from error
    return found


def _read_content(value: Any) -> tuple[bytes, str]:
    """Return a content and the suffix of its file, "" if that is unknown. A missing content is empty."""
    if value is None or isinstance(value, bytes):
        return value or b"", ""
    content, path = value["bytes"], value["path"]
    if content is None and path is not None:
        content = parse_location(path).read_whole()
    return content or b"", PurePath(path or "").suffix[1:].lower()
