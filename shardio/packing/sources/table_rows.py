"""Read the rows of tables: CSV, JSON Lines or Parquet."""

from __future__ import annotations

import csv
import io
import threading
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from shardio.errors import PackError
from shardio.forks import hold_during_forks
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
    rows = _split_csv(_decode(parse_location(path).read_whole()))
    names = [name.strip() for name in next(rows, ())]
    if twice := sorted(name for name, number in Counter(names).items() if number > 1):
        raise ValueError(f"two columns have the name {twice[0]!r}: rename one")
    for number, values in enumerate(rows, 1):
        if len(values) != len(names):
            raise ValueError(f"row {number} has more or fewer values than the header has columns")
        yield dict(zip(names, values, strict=True))


def _decode(content: bytes) -> str:
    """Return a text in UTF-8, or in UTF-16 as Excel writes it."""
    try:
        return content.decode("utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not in UTF-8 ({error}): save it in UTF-8") from error


def _split_csv(text: str) -> Iterator[list[str]]:
    """Yield the rows of a CSV text, with fields of any size, without empty rows.

    Semicolons or tabs separate the fields if the header has no comma: Excel writes semicolons in many countries.
    """
    header = text[: text.find("\n")]
    delimiter = next((letter for letter in ",;\t" if letter in header), ",")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    while rows := _read_some(reader, len(text)):
        yield from filter(None, rows)


def _read_some(reader: Iterator[list[str]], longest: int) -> list[list[str]]:
    """Return the next rows. Python's limit of a field's size, which is the process's, is raised only meanwhile."""
    with _limit_lock():
        limit = csv.field_size_limit(longest)
        try:
            return list(islice(reader, 1000))
        finally:
            csv.field_size_limit(limit)


@cache
def _limit_lock() -> threading.RLock:
    """Return the lock that a thread holds while it has raised the limit."""
    lock = threading.RLock()
    hold_during_forks(lock)
    return lock


def _read_json_lines(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    for number, line in enumerate(parse_location(path).read_whole().splitlines(), 1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not an object: {line[:40]!r}")
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
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}

TABLE_SUFFIXES = tuple(_READERS)
"""The suffixes of the tables that can be read."""
