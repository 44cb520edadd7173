"""Read the rows of tables: CSV, JSON Lines or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardio.errors import PackError
from shardio.json_text import parse_json
from shardio.storage import parse_location

Row = dict[str, Any]
"""The values of a row by column. In CSV, all values are text."""


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a table.

    Args:
        path: The table. Its suffix is one of ``TABLE_SUFFIXES``.
        columns: The columns that the caller needs; None for all. Rows may have further ones.

    Raises:
        PackError: If a package is missing.
        OSError, ValueError, csv.Error: If the table cannot be read.
    """
    return _READERS[path.suffix.lower()](path, columns)


def _read_csv(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    text = parse_location(path).read_whole().decode("utf-8-sig")
    for number, row in enumerate(csv.DictReader(io.StringIO(text, newline=""), strict=True), 1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has more or fewer values than the header has columns")
        yield row


def _read_json_lines(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    for line in parse_location(path).read_whole().splitlines():
        if line.strip():
            if not isinstance(row := parse_json(line), dict):
                raise ValueError(f"a line is not an object: {line[:40]!r}")
            yield row


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise PackError(f"{path} is read by the package pyarrow ({error}): pip install pyarrow") from error
    content = parse_location(path).read_whole()
    table = pyarrow.parquet.read_table(io.BytesIO(content), columns=columns)
    for batch in table.to_batches():
        yield from batch.to_pylist()


def holds_contents(path: Path) -> bool:
    """Return whether a Parquet file has a column with the contents of files: bytes, or bytes with a path.

    A file that cannot be read may have one.
    """
    try:
        import pyarrow.parquet
        from pyarrow import types
    except ImportError:
        return True
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (OSError, ValueError):
        return True
    return any(
        {"bytes", "path"} <= {inner.name for inner in field.type}
        if types.is_struct(field.type)
        else types.is_binary(field.type) or types.is_large_binary(field.type)
        for field in schema
    )


_READERS: dict[str, Callable[[Path, Sequence[str] | None], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}

TABLE_SUFFIXES = tuple(_READERS)
"""The suffixes of the tables that can be read."""
