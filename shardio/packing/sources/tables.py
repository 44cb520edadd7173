"""Pack tables: CSV, JSON Lines and Parquet files with a column of paths, and Parquet files with contents."""

from __future__ import annotations

import csv
import os
import warnings
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import IMAGE_FORMATS, read_format
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import dump_json
from shardio.packing.sources.files import FileName, FileTable, split_suffix
from shardio.packing.sources.labels import (
    TABLE_SUFFIXES,
    Row,
    SplitColumn,
    holds_contents,
    make_keys,
    read_rows,
    select_files,
    separate_equal_stems,
    split_of,
    without_image_suffix,
)
from shardio.packing.sources.records import (
    Columns,
    RecordScan,
    choose_columns,
    name_field,
    number_labels_of_records,
    scan_records,
)
from shardio.packing.sources.source import (
    COLUMNS,
    SHOWN,
    Evidence,
    PackSource,
    SourceFile,
    SourceScan,
    requiring,
    stat_file,
)
from shardio.shards import MAX_MEMBER, TOO_LARGE, find_gaps
from shardio.storage import absolute_path, parse_location
from shardio.values import count

_USUAL_NAMES = ("file", "file_name", "file_path", "filename", "filepath", "image", "image_path", "img_path", "path")
"""The usual names of columns that hold paths."""


class TableOfPaths(PackSource):
    """A CSV, JSON Lines or Parquet file with a column of paths."""

    what = "a table of paths"
    takes = (*COLUMNS, "source_split")

    def find(self, src: Path) -> Evidence | None:
        """Recognize a table. If a Parquet file has columns of file contents, the user must choose this kind."""
        suffix = src.suffix.lower()
        if not src.is_file() or suffix not in TABLE_SUFFIXES:
            return None
        return Evidence(src, suffix != ".parquet" or not holds_contents(src))

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Find the samples of a table of paths, and read the size and modification time of each file.

        Paths are absolute, or relative to the table's folder. Without a key column, the keys are the paths without
        suffixes.

        Raises:
            PackError: If the table cannot be read, a file is missing, a key or a label is missing or invalid, or two
                samples have the same key.
        """
        rows, other_labels = _Rows(src, options.main_fields), list[Any]()
        columns: Columns | None = None
        split: SplitColumn | None = None
        try:
            for number, row in enumerate(read_rows(src), 1):
                columns = columns or _choose_columns(src, list(row), options)
                split = split or SplitColumn(src, options.source_split, (columns.image, columns.label, columns.key))
                if split.selects(row):
                    rows.add(number, row, columns)
                elif columns.label is not None:
                    other_labels.append(row.get(columns.label))
        except (OSError, ValueError, csv.Error) as error:
            raise PackError(f"{src} cannot be read as a table of paths: {error}") from error
        if columns is None or split is None:
            raise PackError(f"{src} has no rows: there is nothing to pack")
        split.check()
        table = rows.finish(columns, rename_dots=options.rename_dots)
        labels = None if columns.label is None else rows.labels + other_labels
        is_selected = np.arange(len(labels or ())) < len(rows.labels)
        numbers, classes = number_labels_of_records(
            src, rows, labels, (), options, is_selected=is_selected, keys=table.keys, other_names=rows.names
        )
        if numbers is not None:
            table = replace(table, labels=numbers)
        return SourceScan(samples=table, classes=classes, suffixed=rows.suffixed)


class _Rows:
    """Collects rows in columns."""

    def __init__(self, path: Path, main_fields: Collection[str]) -> None:
        self._main_fields = main_fields
        self._path, self._folder = path, absolute_path(path.parent).as_posix()
        self._root = f"{path.parent}/".replace("//", "/")
        self.labels = list[Any]()
        self._keys, self._stems = list[Any](), list[str]()
        self._kind_ids, self._kinds = dict[FileName, int](), array("i")
        self._sizes, self._mtimes = array("q"), array("q")
        self._json, self._json_bounds, self._has_json = bytearray(), array("q", [0]), False
        self.names, self.suffixed = dict[str, str](), list[str]()
        self._numbers, self._num_errors, self._errors = array("q"), 0, list[str]()

    def describe(self, row: int) -> str:
        return f"row {self._numbers[row]}" if row < len(self._numbers) else "a row of another split"

    def add(self, number: int, row: Row, columns: Columns) -> None:
        path = row.get(str(columns.image))
        if not isinstance(path, str) or not path:
            raise ValueError(f"row {number} has {path!r:.100} in the column {columns.image!r}, which must hold paths")
        if (problem := self._add_file(path)) is not None:
            self._num_errors += 1
            if len(self._errors) < SHOWN:
                self._errors.append(f"row {number}: {problem}")
            return
        self._numbers.append(number)
        self._keys.append(self._key_of(path) if columns.key is None else row.get(columns.key))
        self.labels.append(None if columns.label is None else row.get(columns.label))
        used = (columns.image, columns.label, columns.key)
        others = {name: value for name, value in row.items() if name not in used}
        try:
            self._json += dump_json(others)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        self._json_bounds.append(len(self._json))
        self._has_json = self._has_json or bool(others)

    def finish(self, columns: Columns, *, rename_dots: bool) -> FileTable:
        if self._errors:
            num_rows = count(self._num_errors + len(self._numbers), "row")
            first = f"{self._num_errors} of {num_rows} of {self._path} cannot be packed:"
            more = [f"and {self._num_errors - SHOWN} more"] if self._num_errors > SHOWN else []
            last = f"Paths are relative to {self._root}, or absolute. Correct or remove these rows"
            raise PackError("\n".join([first, *self._errors, *more, last]))
        separated = separate_equal_stems(self._keys) if columns.key is None else {}
        self.suffixed = list(separated.values())
        keys = make_keys(
            self,
            [separated.get(path, path) for path in self._keys],
            rename_dots=rename_dots,
            where=f"in the column {columns.image if columns.key is None else columns.key!r}",
            remedy="Specify another column with --key-column (key_column)",
        )
        if columns.key is None:
            pairs = zip(self._keys, keys, strict=True)
            self.names = {path: key for path, key in pairs if without_image_suffix(path) != key}
        return FileTable(
            root=self._root,
            home="",  # Paths may be absolute.
            keys=keys,
            stems=keys if keys == self._stems else self._stems,
            kinds=tuple((kind,) for kind in self._kind_ids),
            kind_ids=np.array(self._kinds, np.int32),
            first_files=np.arange(len(keys) + 1),
            sizes=np.array(self._sizes, np.int64),
            mtimes_ns=np.array(self._mtimes, np.int64),
            json=bytes(self._json) if self._has_json else None,
            json_bounds=np.array(self._json_bounds, np.int64) if self._has_json else None,
        )

    def _add_file(self, path: str) -> str | None:
        prefix = "" if path.startswith("/") else self._root
        try:
            file = stat_file(prefix + path)
            folder, slash, name = path.rpartition("/")
            stem, suffix = split_suffix(name)
            field = suffix[1:].lower()
            if field not in self._main_fields:
                field = _find_field(prefix + path)
        except FileNotFoundError:
            if "\\" in path:
                return f"{prefix + path} does not exist: separate folders with / instead of \\"
            return f"{prefix + path} does not exist" if "://" not in path else f"{path} is a URL: download the files"
        except (OSError, ValueError) as error:
            return f"{prefix + path} cannot be read: {error}"
        if not field:
            return f"{prefix + path} is not an image (supported: {', '.join(IMAGE_FORMATS)})"
        if file.size > MAX_MEMBER:
            return f"{prefix + path} has {file.size} bytes, {TOO_LARGE}"
        kind = FileName(field, prefix, suffix)
        self._stems.append(folder + slash + stem)
        self._kinds.append(self._kind_ids.setdefault(kind, len(self._kind_ids)))
        self._sizes.append(file.size)
        self._mtimes.append(file.mtime_ns)
        return None

    def _key_of(self, path: str) -> str:
        """Return a path relative to the table's folder, or without its leading slash if the file is elsewhere."""
        if without_image_suffix(path) == path:  # The path has no image suffix.
            path = self._stems[-1]
        if path.startswith(("/", ".")) or "//" in path or "/." in path:
            path = os.path.normpath(os.path.join(self._folder, path))  # noqa: PTH118  # Paths are slower.
            inner = path.removeprefix(f"{self._folder.rstrip('/')}/")
            path = inner if inner != path else path.lstrip("/")
        return path


def _choose_columns(src: Path, names: Sequence[str], options: PackOptions) -> Columns:
    usual = [name for name in names if name.lower() in _USUAL_NAMES and name != options.column_of_source("key_column")]
    candidates = [options.image_column] if options.image_column in names else usual
    columns = choose_columns(src, names, contents=[name for name in candidates if name], labels=(), options=options)
    if columns.image is None:
        raise PackError(
            f"{src} has the columns {', '.join(map(str, names))}: specify the column of image paths with "
            "--image-column (image_column)"
        )
    return columns


def _find_field(path: str) -> str:
    """Return the field of an image whose suffix, such as .jfif, is not a field's name, or "" for other files."""
    if (found := read_format(Path(path))) is None:
        return ""
    return next((suffix for suffix, name in IMAGE_FORMATS.items() if name == found), "image")


_BATCH = 10_000
"""The number of rows that the scan reads at a time."""

_SMALL_TYPES = {"string", "large_string", "bool", "int8", "uint8", "int16", "int32", "int64", "float32", "float64"}
"""The types of columns that may name splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubRows:
    """The rows of a dataset: see :class:`~shardio.packing.sources.records.Records`."""

    path: Path
    files: tuple[SourceFile, ...]
    kind: Literal["parquet", "saved"]
    columns: Columns = field(default_factory=Columns)

    def open(self) -> _HubReader:
        return _HubReader(load_rows(self.kind, self.path, self.files), self.columns)

    def describe(self, row: int) -> str:
        return f"row {row}"


class _HubReader:
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
    """A dataset written by ``save_to_disk`` of Hugging Face's ``datasets``."""

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
            PackError: If the directory holds several splits, or its columns cannot be packed.
        """
        if (src / "dataset_dict.json").is_file():
            names = sorted(path.parent.name for path in src.glob("*/state.json"))
            if options.source_split in names:
                return self.scan(src / options.source_split, replace(options, source_split=None))
            raise PackError(
                f"{src} holds the splits {', '.join(names)}: pack each, for example {src / names[0] if names else src}"
            )
        return scan_records(_scan("saved", src, sorted(src.glob("*.arrow")), options), options)


class ParquetFiles(PackSource):
    """A Parquet file, a pattern of files, or a directory of files, usually with a column of file contents."""

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
            PackError: If the files belong to several splits, or their columns cannot be packed.
        """
        paths, others = [src], list[Path]()
        if src.is_dir():
            paths, others = _find_in_folder(src)
            if not paths and others and options.source_kind != "parquet":
                raise PackError(
                    f"{src} holds no files that can be packed, and no column of {others[0]} holds the contents of "
                    "files. If this table names the files, pass the table itself as the source. To pack its rows as "
                    "they are, pass --source-kind parquet (source_kind='parquet'). To pack texts or tokens for "
                    "PackedTokens, pass --source-kind documents (source_kind='documents')"
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
                f"{src} lacks {count(len(missing), 'Parquet file')}, such as {missing[0]}, judging by the other "
                "files' names: check whether a download is unfinished, or two versions are mixed",
                RuntimeWarning,
                stacklevel=2,
            )
        found = _scan("parquet", src, selected, options, has_selected_files=len(selected) < len(paths))
        return scan_records(replace(found, ignored=others), options)


def _find_in_folder(src: Path) -> tuple[list[Path], list[Path]]:
    others = list[Path]()
    for folder in (src, src / "data"):  # Hugging Face datasets keep their files in data/.
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
    dataset = load_rows(kind, src, files)
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
        records=_HubRows(path=src, files=files, kind=kind, columns=columns),
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
    """Return which rows belong to the chosen split, bool [n], or None for all rows."""
    small = [name for name in columns.others if getattr(dataset.features[name], "dtype", "") in _SMALL_TYPES]
    first = dataset.select_columns(small)[:1] if small else {}
    candidates = [name for name, values in first.items() if all(split_of(name, value) is not None for value in values)]
    split, selected = SplitColumn(src, options.source_split, ()), list[bool]()
    for batch in dataset.select_columns(candidates).with_format("arrow").iter(batch_size=_BATCH) if candidates else ():
        selected += map(split.selects, batch.to_pylist())
    split.check(has_selected_files=has_selected_files)
    return None if all(selected) else np.array(selected)


def load_rows(
    kind: Literal["parquet", "saved"], src: Path, files: Sequence[SourceFile], columns: Sequence[str] | None = None
) -> Any:
    """Return a dataset of the ``datasets`` package, which converts Parquet files to Arrow files in its cache.

    Args:
        kind: The kind of the source.
        src: The source.
        files: The Parquet files in order.
        columns: The columns to load from Parquet files, or None for all.

    Raises:
        PackError: If the files cannot be read, or the package is missing.
    """
    with requiring("datasets", src, "pip install 'shardio-loader[parquet]'"):
        import datasets
    with _without_progress_bars(datasets):
        try:
            if kind == "saved":
                dataset: Any = datasets.load_from_disk(str(src))
            else:
                paths = [file.path for file in files]
                dataset = datasets.load_dataset("parquet", data_files=paths, columns=columns, split="train")
        except Exception as error:  # Errors may come from pyarrow or datasets.
            raise PackError(f"{src} cannot be read by the datasets package: {error}") from error
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
    if type(feature).__name__ in ("Audio", "Image", "Pdf", "Video"):
        return True
    if isinstance(feature, Mapping):
        return {"bytes", "path"} == set(feature)
    return getattr(feature, "dtype", None) in ("binary", "large_binary")


def _sizes_of(src: Path, column: Any) -> NDArray[np.int64]:
    """Return the sizes of contents in bytes, int64 [n]. The column may contain paths instead of contents."""
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    is_struct = types.is_struct(column.type)
    contents = pc.struct_field(column, "bytes") if is_struct else column
    if types.is_null(contents.type):  # All contents are missing.
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
                        f"{src} holds the path {path} instead of the file's content, but the file cannot be read: "
                        f"{error.strerror or error}. Add the file, or remove the row"
                    ) from error
    return found


def _read_content(value: Any) -> tuple[bytes, str]:
    """Return a file's content, and its suffix or "" if the suffix is unknown. Missing content is empty."""
    if value is None or isinstance(value, bytes):
        return value or b"", ""
    content, path = value["bytes"], value["path"]
    if content is None and path is not None:
        content = parse_location(path).read_whole()
    return content or b"", PurePath(path or "").suffix[1:].lower()
