"""Pack documents for :class:`shardio.PackedTokens`: texts, or tokens that another program produced."""

from __future__ import annotations

import io
import pickle
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import IMAGE_FORMATS
from shardio.packing.pack_call import PackOptions, TokenDtype, Tokenizer
from shardio.packing.samples import encode_tokens
from shardio.packing.sources.labels import make_keys, select_files
from shardio.packing.sources.source import (
    OPTIONS_OF_DOCUMENTS,
    Evidence,
    FileChangedError,
    FileProblem,
    PackSource,
    SourceFile,
    SourceScan,
    check_unchanged,
    describe_option,
    find_change,
    read_unchanged,
    requiring,
    stat_file,
)
from shardio.packing.sources.tables import load_rows
from shardio.process import describe_error, let_through
from shardio.sample import Sample
from shardio.shards import BLOCK
from shardio.storage import absolute_path, parse_location, read_pieces, walk_files
from shardio.values import load_function, parse_json

_HEADER = 128
"""The size of the header of a document's npy file, in bytes."""

_BYTES_PER_TOKEN = 4
"""The assumed number of bytes of text, or of a JSON list, for each token. Only the sizes of shards depend on this
number."""

_USUAL_NAMES = ("input_ids", "tokens", "text", "content")
"""The usual names of columns of documents. If a table has several, the first in this list is chosen."""

_TENSOR_TYPES = {f"{kind.upper()}{8 * size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
"""The types of integers in safetensors files, with their names in numpy."""

_NEEDS_TOKENIZER = (
    "To pack text, pass a function that returns its tokens, such as --tokenizer encoding.py:encode "
    "(tokenizer='encoding.py:encode')"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Settings:
    """The settings with which all documents of a source are read. Settings are compared by identity.

    Attributes:
        dtype: The type of the packed tokens.
        tokenizer: A pickled function or a function's name; None if the documents are tokens.
        column: The column of the documents; "" if the files have no columns.
        key_column: The column of the keys, or None.
        parquet: All Parquet files of the source.
    """

    dtype: TokenDtype
    tokenizer: bytes | str | None
    column: str = ""
    key_column: str | None = None
    parquet: tuple[SourceFile, ...] = ()

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


class _Part(NamedTuple):
    """Documents from one file that are read in the same way.

    Attributes:
        file: The file.
        suffix: The file's suffix, in lowercase.
        tensor_type: The type of the tensors of a safetensors file.
        first_row: The number of rows in the Parquet files before this one.
    """

    file: SourceFile
    suffix: str
    tensor_type: str = ""
    first_row: int = 0


class _Place(NamedTuple):
    """The place of a document in its file: the number of its row or line, and the range of its bytes."""

    row: int = 0
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A document before packing: see :class:`~shardio.packing.sources.source.SourceSample`."""

    settings: _Settings
    part: _Part
    place: _Place
    key: str

    def read(self) -> Sample:
        try:
            values = _FORMATS[self.part.suffix].read(self)
            if values is None:
                raise ValueError("it is null: remove it, or choose another --token-column (token_column)")
            if isinstance(values, str):
                values = _tokenize(self.settings.tokenizer, values)
            elif self.settings.tokenizer is not None:
                raise ValueError("it holds tokens instead of text: omit --tokenizer (tokenizer=…)")
            content = encode_tokens(values, self.settings.dtype)
        except (OSError, ValueError) as error:
            where = _describe(self.part, self.place)
            raise PackError(f"the document {self.key} ({where}) cannot be packed: {error}") from error
        return Sample(key=self.key, fields={"npy": content}, origin=self.key)

    def read_bytes(self) -> bytes:
        return read_unchanged(self.part.file, self.place.start, self.place.stop)

    def problem(self, field: str, what: str) -> FileProblem:
        return FileProblem(Path(self.part.file.path), f"the document {self.key}, field {field!r}: {what}")


def _describe(part: _Part, place: _Place) -> str:
    lines = f"line {place.row + 1} of "
    return {".json": lines, ".jsonl": lines, ".parquet": f"row {place.row} of "}.get(part.suffix, "") + part.file.path


def _tokenize(tokenizer: bytes | str | None, text: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"it is text, not tokens. {_NEEDS_TOKENIZER}")
    function = _load_tokenizer(tokenizer)
    try:
        return function(text)
    except Exception as error:  # The user's function may raise any error.
        let_through(error)
        raise ValueError(f"the tokenizer raised {describe_error(error)}") from error


def _prepare_tokenizer(tokenizer: Tokenizer | str | None) -> bytes | str | None:
    """Return a tokenizer in a form that another process can load.

    Raises:
        PackError: If the tokenizer cannot be loaded or pickled.
    """
    if tokenizer is None:
        return None
    try:
        if isinstance(tokenizer, str):
            file, _, name = tokenizer.rpartition(":")
            # Ray tasks run in different directories.
            prepared: bytes | str = f"{absolute_path(Path(file))}:{name}" if file.endswith(".py") else tokenizer
        else:
            import cloudpickle  # The import takes 30 ms.

            prepared = cloudpickle.dumps(tokenizer)
        _load_tokenizer.cache_clear()  # The file may have changed since an earlier pack.
        _load_tokenizer(prepared)
    except Exception as error:  # The user's code may raise any error.
        let_through(error)
        raise PackError(f"the tokenizer cannot be loaded in worker processes: {describe_error(error)}") from error
    return prepared


@lru_cache(maxsize=1)
def _load_tokenizer(tokenizer: bytes | str) -> Any:
    # Unpickling is safe because `_prepare_tokenizer` made the pickle.
    return load_function(tokenizer) if isinstance(tokenizer, str) else pickle.loads(tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DocumentTable:
    """The documents of a source in order: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        root: The prefix of file names.
        settings: The settings of all documents.
        parts: The parts of the source.
        part_ids: int32 [n], the number of each document's part.
        places: int64 [n, 3], the row, the start and the stop of each document.
        sizes: int64 [n], the size of each document's array in bytes, estimated unless the source has the tokens.
        keys: The keys of the documents.
    """

    root: str
    settings: _Settings
    parts: Sequence[_Part]
    part_ids: NDArray[np.int32]
    places: NDArray[np.int64]
    sizes: NDArray[np.int64]
    keys: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def sizes_in_tar(self) -> NDArray[np.int64]:
        return BLOCK + -(-self.sizes // BLOCK) * BLOCK

    def digest(self) -> bytes:
        texts = (repr(self.parts), self.settings.column, *self.keys)
        digest = xxhash.xxh3_128("\n".join(texts).encode(errors="surrogateescape"))
        for column in self.part_ids, self.places, self.sizes:
            digest.update(column.data)
        return digest.digest()

    def take(self, rows: NDArray[np.int64]) -> list[_Document]:
        found = zip(rows.tolist(), self.part_ids[rows].tolist(), self.places[rows].tolist(), strict=True)
        return [
            _Document(settings=self.settings, part=self.parts[part_id], place=_Place(*place), key=self.keys[row])
            for row, part_id, place in found
        ]

    def find_changes(self) -> Iterator[FileProblem]:
        yield from filter(None, map(find_change, dict.fromkeys(part.file for part in self.parts)))

    def describe(self, row: int) -> str:
        return _describe(self.parts[self.part_ids[row]], _Place(*self.places[row].tolist()))


class _Batch(NamedTuple):
    """Documents of one part.

    Attributes:
        part: The part.
        names: The documents' keys before they are checked.
        num_bytes: int64 [n], the size of each document's packed tokens in bytes, possibly estimated.
        places: int64 [n, 3], the row, the start and the stop of each document.
    """

    part: _Part
    names: Iterable[object]
    num_bytes: NDArray[np.int64]
    places: NDArray[np.int64]


_Files = Mapping[SourceFile, str]
"""The files of a source, in order, each with the prefix of its documents' keys."""

_ColumnTypes = Mapping[str, bool | None]
"""For each column of a table: True if it holds text, False if it holds tokens, None if it holds other values."""


def _scan_files(files: _Files, settings: _Settings) -> Iterator[_Batch]:
    bytes_per_token, suffix = _BYTES_PER_TOKEN, _suffix_of(next(iter(files)))
    if suffix == ".npy":
        with suppress(ValueError):  # The tokens of all files probably have the same type as those in the first file.
            bytes_per_token = _parse_array(read_unchanged(next(iter(files)))).itemsize
    for file, stem in files.items():
        num_bytes = file.size * settings.itemsize // bytes_per_token
        yield _Batch(_Part(file, suffix), [stem], np.array([num_bytes]), np.array([_Place(stop=file.size)]))


def _suffix_of(file: SourceFile) -> str:
    return Path(file.path).suffix.lower()


def _scan_tensors(files: _Files, settings: _Settings) -> Iterator[_Batch]:
    from safetensors import SafetensorError, safe_open

    for file, stem in files.items():
        try:
            with safe_open(file.path, "numpy"):  # This call checks the header and the size of the file.
                length = int.from_bytes(read_unchanged(file, 0, 8), "little")
        except SafetensorError as error:
            raise ValueError(f"{file.path} is not an intact safetensors file: {error}") from error
        tensors = parse_json(read_unchanged(file, 8, 8 + length))
        for name in sorted(tensors.keys() - {"__metadata__"}):
            dtype, shape = tensors[name]["dtype"], tensors[name]["shape"]
            if dtype not in _TENSOR_TYPES or len(shape) != 1:
                raise ValueError(
                    f"the tensor {name!r} of {file.path} has the shape {tuple(shape)} and the type {dtype}, but a "
                    "document must be one-dimensional and hold integers"
                )
            start, stop = (8 + length + offset for offset in tensors[name]["data_offsets"])
            part, place = _Part(file, ".safetensors", tensor_type=_TENSOR_TYPES[dtype]), _Place(start=start, stop=stop)
            yield _Batch(part, [f"{stem}/{name}"], np.array([shape[0] * settings.itemsize]), np.array([place]))


def _scan_lines(files: _Files, settings: _Settings) -> Iterator[_Batch]:
    for file, stem in files.items():
        part = _Part(file, _suffix_of(file))
        for places in _find_lines(file):
            if settings.key_column is None:
                names: list[object] = [f"{stem}/{row:08d}" for row in places[:, 0].tolist()]
            else:
                lines = (_parse_line(part, _Place(*place)) for place in places.tolist())
                names = [line.get(settings.key_column) for line in lines]
            num_bytes = (places[:, 2] - places[:, 1]) * settings.itemsize // _BYTES_PER_TOKEN
            yield _Batch(part, names, num_bytes, places)


def _find_lines(file: SourceFile) -> Iterator[NDArray[np.int64]]:
    """Yield the places of a file's lines, excluding line feeds and empty lines, int64 [n, 3] for each MiB."""
    row = start = offset = 0
    with closing(parse_location(file.path).open()) as opened:
        for piece in read_pieces(opened):
            stops = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + offset
            offset += len(piece)
            if offset == opened.size:
                stops = np.append(stops, offset)
            starts = np.concatenate([[start], stops + 1])
            places = np.stack([np.arange(row, row + len(stops)), starts[:-1], stops], axis=1)
            yield places[stops - starts[:-1] > 1]  # A one-byte line may be a carriage return, but cannot be an object.
            row, start = row + len(stops), int(starts[-1])


def _parse_line(part: _Part, place: _Place) -> dict[str, Any]:
    content = read_unchanged(part.file, place.start, place.stop)
    try:
        row = parse_json(content)
        if not isinstance(row, dict):
            raise ValueError(f"it must be a JSON object, got {content[:40]!r}")
    except ValueError as error:
        raise PackError(f"{_describe(part, place)} cannot be read: {error}") from error
    return row


def _find_columns_of_lines(files: _Files) -> _ColumnTypes:
    for file in files:
        for place in chain.from_iterable(places.tolist() for places in _find_lines(file)):
            row = _parse_line(_Part(file, _suffix_of(file)), _Place(*place))
            return {name: _holds_text(value) for name, value in row.items()}
    return {}


def _holds_text(value: object) -> bool | None:
    if isinstance(value, list) and all(type(each) is int for each in value):
        return False
    return True if isinstance(value, str) else None


def _scan_rows(files: _Files, settings: _Settings) -> Iterator[_Batch]:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from pyarrow import types

    table = _open_rows(settings)
    column = table.column(settings.column)
    is_text = types.is_string(column.type) or types.is_large_string(column.type)
    lengths = pc.binary_length(column) if is_text else pc.list_value_length(column)
    num_bytes = lengths.fill_null(0).to_numpy().astype(np.int64) * settings.itemsize
    num_bytes //= _BYTES_PER_TOKEN if is_text else 1
    first = 0
    for file, stem in files.items():
        num_rows = pq.read_metadata(file.path).num_rows
        own = slice(first, first + num_rows)
        names: Iterable[object] = (f"{stem}/{row:08d}" for row in range(num_rows))
        if settings.key_column is not None:
            names = table.column(settings.key_column)[own].to_pylist()
        places = np.zeros((num_rows, 3), np.int64)
        places[:, 0] = np.arange(num_rows)
        yield _Batch(_Part(file, ".parquet", first_row=first), names, num_bytes[own], places)
        first = own.stop


def _find_columns_of_rows(files: _Files) -> _ColumnTypes:
    file = next(iter(files))
    with requiring("datasets", Path(file.path), "pip install 'shardio-loader[parquet]'"):
        import pyarrow.parquet as pq
        from pyarrow import types
    found = dict[str, bool | None]()
    for column in pq.read_schema(file.path):
        is_list = any(check(column.type) for check in (types.is_list, types.is_large_list, types.is_fixed_size_list))
        is_text = types.is_string(column.type) or types.is_large_string(column.type)
        found[column.name] = is_text or (False if is_list and types.is_integer(column.type.value_type) else None)
    return found


@lru_cache(maxsize=1)
def _open_rows(settings: _Settings) -> Any:
    """Return the Arrow table of all Parquet files. It stays open until another source or shard is read."""
    columns = [name for name in (settings.column, settings.key_column) if name is not None]
    return load_rows("parquet", Path(settings.parquet[0].path), settings.parquet, columns).data


def _parse_array(content: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


def _read_text(document: _Document) -> str:
    try:
        return document.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not in UTF-8 ({error}): save it in UTF-8") from error


def _read_line(document: _Document) -> Any:
    row, name = _parse_line(document.part, document.place), document.settings.column
    if name not in row:
        raise ValueError(f"it has no {name!r}: it has {', '.join(row)}")
    return row[name]


def _read_row(document: _Document) -> Any:
    column = _open_rows(document.settings).column(document.settings.column)
    check_unchanged(document.part.file)
    value = column[document.part.first_row + document.place.row]
    if not value.is_valid:
        return None
    return value.values.to_numpy(zero_copy_only=False) if hasattr(value, "values") else value.as_py()


class _Format(NamedTuple):
    """A format of documents.

    Attributes:
        scan: Finds the documents in files.
        read: Returns a document's text or tokens, or None if it is null.
        holds_text: Whether files hold text rather than tokens; in formats with columns, the function that finds them.
    """

    scan: Callable[[_Files, _Settings], Iterator[_Batch]]
    read: Callable[[_Document], Any]
    holds_text: bool | Callable[[_Files], _ColumnTypes]


_FORMATS = {
    ".npy": _Format(_scan_files, lambda each: _parse_array(each.read_bytes()), holds_text=False),
    ".safetensors": _Format(
        _scan_tensors, lambda each: np.frombuffer(each.read_bytes(), each.part.tensor_type), holds_text=False
    ),
    ".txt": _Format(_scan_files, _read_text, holds_text=True),
    ".jsonl": _Format(_scan_lines, _read_line, _find_columns_of_lines),
    ".json": _Format(_scan_lines, _read_line, _find_columns_of_lines),
    ".parquet": _Format(_scan_rows, _read_row, _find_columns_of_rows),
}

DOCUMENT_SUFFIXES = tuple(_FORMATS)
"""The suffixes of the files that may hold documents."""


class Documents(PackSource):
    """Texts or tokens for language models, in a file, a directory, or files that match a pattern."""

    what = "a set of documents"
    takes = ("source_split", "key_column", *OPTIONS_OF_DOCUMENTS)

    def find(self, src: Path) -> Evidence | None:
        """Recognize files that hold nothing but tokens. For all other files, the user must choose this kind."""
        first, are_tokens = None, True
        with suppress(OSError, ValueError):
            for path in _list_files(src, _find_root(src)):
                suffix = path.suffix.lower()
                if first is None and suffix in _FORMATS:
                    first = path
                are_tokens = are_tokens and suffix in _FORMATS and _FORMATS[suffix].holds_text is False
                if not are_tokens and (first is not None or suffix[1:] in IMAGE_FORMATS):
                    break  # Directories of images may be large.
        return None if first is None else Evidence(first, are_tokens)

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Find the documents in files of one format. A document's key is the path of its file without the suffix.

        Each row of a table and each tensor of a safetensors file is a document, whose key continues with the number of
        the row or the name of the tensor. The scan reads tables, the headers of safetensors files, and the first npy
        file.

        Raises:
            PackError: If the files have several formats or belong to several splits, a file cannot be read, a key is
                invalid, or there are texts but no tokenizer.
        """
        try:
            return _scan(src, options)
        except OSError as error:
            raise PackError(f"{error.filename or src} cannot be read: {error.strerror or error}") from error
        except (FileChangedError, ValueError) as error:
            raise PackError(f"{src} cannot be packed: {error}") from error


def _scan(src: Path, options: PackOptions) -> SourceScan:
    root = _find_root(src)
    paths = list(_list_files(src, root))
    suffix = _choose_format(src, paths)
    scan, _, holds_text = _FORMATS[suffix]
    _refuse_options(suffix, options)
    own = [path for path in paths if path.suffix.lower() == suffix]
    selected = select_files(src, own, options.source_split, root=root)
    files = {stat_file(str(path)): path.relative_to(root).with_suffix("").as_posix() for path in selected}
    settings = _Settings(
        dtype=options.token_dtype,
        tokenizer=_prepare_tokenizer(options.tokenizer),
        column=_choose_column(src, holds_text(files), options) if callable(holds_text) else "",
        key_column=options.key_column,
        parquet=tuple(files) if suffix == ".parquet" else (),
    )
    parts, names = dict[_Part, int](), list[Any]()
    part_ids, sizes, places = array("i"), array("q"), array("q")
    for batch in scan(files, settings):
        part_ids.extend(repeat(parts.setdefault(batch.part, len(parts)), len(batch.places)))
        names.extend(batch.names)
        sizes.frombytes((batch.num_bytes + _HEADER).tobytes())
        places.frombytes(batch.places.tobytes())
    if not names:
        raise PackError(f"{src} holds no documents: there is nothing to pack")
    table = _DocumentTable(
        root=f"{root}/".replace("//", "/"),
        settings=settings,
        parts=tuple(parts),
        part_ids=np.array(part_ids, np.int32),
        sizes=np.array(sizes, np.int64),
        places=np.array(places, np.int64).reshape(-1, 3),
    )
    phrases = {} if options.key_column else {"where": "as its name", "remedy": "Rename the file or the tensor"}
    table = replace(table, keys=make_keys(table, names, rename_dots=options.rename_dots, **phrases))
    return SourceScan(samples=table, classes=(), ignored=[path for path in paths if path.suffix.lower() != suffix])


def _find_root(src: Path) -> Path:
    """Return the directory that the paths in keys are relative to."""
    return src if src.is_dir() else next(parent for parent in src.parents if not re.search(r"[*?[]", str(parent)))


def _list_files(src: Path, root: Path) -> Iterator[Path]:
    if src.is_dir():
        return walk_files(src)
    if not src.exists():
        return filter(Path.is_file, sorted(root.glob(str(src.relative_to(root)))))
    return iter([src])


def _choose_format(src: Path, paths: Sequence[Path]) -> str:
    """Return the documents' suffix, in lowercase."""
    suffixes = {path.suffix.lower() for path in paths} & _FORMATS.keys()
    if len(suffixes) > 1:
        suffixes.discard(".json")  # JSON files beside other documents usually describe them.
    if len(suffixes) == 1:
        return suffixes.pop()
    if not suffixes:
        raise PackError(f"{src} holds no documents: pass files with the suffixes {', '.join(_FORMATS)}")
    raise PackError(
        f"{src} holds documents in several formats ({', '.join(sorted(suffixes))}): pass a pattern that matches one "
        f"format, such as '{src / '**' / f'*{max(suffixes)}'}'"
    )


def _refuse_options(suffix: str, options: PackOptions) -> None:
    holds_text = _FORMATS[suffix].holds_text
    refused = ["labels", "classes"] + ([] if callable(holds_text) else ["token_column", "key_column"])
    refused += ["tokenizer"] if holds_text is False else []
    if (name := options.find_given(refused)) is not None:
        raise PackError(f"{describe_option(name)} does not apply to {suffix} files: omit it")
    if holds_text is True and options.tokenizer is None:
        raise PackError(f"{suffix} files hold text, not tokens. {_NEEDS_TOKENIZER}")


def _choose_column(src: Path, columns: _ColumnTypes, options: PackOptions) -> str:
    """Return the column of the documents: a column of text with a tokenizer, or a column of tokens without one."""
    chosen, wants_text = options.token_column, options.tokenizer is not None
    for option in ("token_column", "key_column"):
        if (name := getattr(options, option)) is not None and name not in columns:
            raise PackError(
                f"{describe_option(option)} names column {name!r}, but the columns of {src} are {', '.join(columns)}"
            )
    columns = columns if chosen is None else {chosen: columns[chosen]}
    candidates = [name for name, is_text in columns.items() if is_text is wants_text]
    if usual := [name for name in _USUAL_NAMES if name in candidates]:
        return usual[0]
    if len(candidates) == 1:
        return candidates[0]
    what, names = "text" if wants_text else "lists of integers", ", ".join(candidates or columns)
    if candidates:
        raise PackError(
            f"{src} has several columns of {what} ({names}): choose one with {describe_option('token_column')}"
        )
    remedy = "To pack lists of integers, omit --tokenizer (tokenizer=…)" if wants_text else _NEEDS_TOKENIZER
    raise PackError(f"{src} has no column of {what} among {names}. {remedy}")
