"""Index the tars that other tools packed.

Tars are indexed on first use, and again after they change. Compressed tars (gzip) are indexed only to list their
contents and to extract single samples. Datasets do not read compressed tars, because reading a member decompresses all
members before it.

A folder of tars has a list, ``shardio-index.json``, with the headers of the indexes of its tars. A dataset of many
tars can therefore be opened without opening each tar.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field

import numpy as np

from shardio.errors import FormatError
from shardio.shards.index import (
    INDEX_FORMAT,
    IndexColumns,
    IndexHeader,
    find_repeated,
    find_scattered,
    index_location,
    make_header,
    read_columns,
    read_header,
)
from shardio.shards.manifest import Manifest, ShardTable, make_entry
from shardio.shards.shard import GZIP, DecompressedFile, cached_index_location, is_compressed, was_packed, write_index
from shardio.shards.tar import (
    BLOCK,
    StoredField,
    StoredSample,
    gather_members,
    group_members,
    is_added_by_macos,
    split_name,
)
from shardio.shards.tar_scan import TarScan
from shardio.storage import Location, StoredFile
from shardio.values import parse_json

TAR_LIST_NAME = "shardio-index.json"

_TAR_LIST_FORMAT = 1

MAX_SKIPPED = 20
"""The maximum number of skipped members to name."""


@dataclass(slots=True, kw_only=True)
class TarContents:
    """The contents of a tar.

    Attributes:
        samples: The tar's samples, in the order of their first members.
        digest: The xxh3-128 of the tar, in hexadecimal.
        num_added_by_macos: The number of skipped files that macOS added.
        num_without_key: The number of files that were skipped because their names have no key.
        skipped: The names of the first skipped files.
        headers: The plain headers of the first and the last run of adjacent members with the same key, by the contents'
            offsets. The headers of the first and the last sample are included, unless these samples are scattered.
    """

    samples: list[StoredSample] = field(default_factory=list)
    digest: str = ""
    num_added_by_macos: int = 0
    num_without_key: int = 0
    skipped: list[str] = field(default_factory=list)
    headers: dict[int, bytes] = field(default_factory=dict)


def find_or_make_index(tar: Location) -> tuple[Location, TarContents | None]:
    """Return the index of a tar, and the tar's contents if the index had to be created.

    If no index exists, or the tar may have changed since the index was created, a new index is written next to the tar.
    If this process may not write next to the tar, the index is written to the user's cache folder. Several processes
    can create the same index in parallel, because each process writes a temporary file of its own and renames it.

    Raises:
        FormatError: If the tar cannot be indexed, or a file that is not an index has the index's name.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    places = index_location(tar), cached_index_location(tar)
    current = next((index for index in places if index.exists() and _is_current(index, tar)), None)
    return (current, None) if current is not None else _make_index(tar)


def find_or_make_compressed_index(tar: Location) -> tuple[Location, TarContents | None]:
    """Return the index of a compressed tar, and the tar's contents if the index had to be created.

    The tar is decompressed twice: once to find its size, and once to read it. Its size does not affect memory use.

    Raises:
        FormatError: If the file is not a complete tar in a complete gzip file, or cannot be indexed.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    current = find_compressed_index(tar)
    return (current, None) if current is not None else _make_index(tar, GZIP)


def _make_index(tar: Location, compression: str | None = None) -> tuple[Location, TarContents]:
    file = tar.open() if compression is None else DecompressedFile(tar)
    with closing(file):
        file.discard(0, file.size)  # Cached bytes may be damaged, and no hash exists to detect the damage.
        contents = scan_contents(file)
        if isinstance(file, DecompressedFile):
            file.remember(contents.headers)
        if tar.stat().version != file.version:
            raise FormatError(f"{tar} changed while it was being indexed: open it again when nothing is writing to it")

        def write(index: Location) -> None:
            write_index(index, file, contents.samples, contents.digest, file.version, compression)

        return _write_where_allowed(tar, write), contents


def scan_contents(file: StoredFile) -> TarContents:
    """Read a whole tar and return its contents.

    Raises:
        FormatError: If the tar cannot be indexed.
    """
    scan, location, contents = TarScan(file), str(file.location), TarContents()
    runs = list(group_members(location, _list_members(scan, contents)))
    contents.samples = [StoredSample(key, fields) for key, fields in gather_members(location, runs)]
    contents.digest = scan.digest
    return contents


def _list_members(scan: TarScan, contents: TarContents) -> Iterator[tuple[tuple[str, str], StoredField]]:
    """Yield the members of a tar that have a key, and record the other members and the headers."""
    key, first, last = None, dict[int, bytes](), dict[int, bytes]()
    for name, content in scan.members():
        is_added = is_added_by_macos(name)
        parts = None if is_added else split_name(name)
        if parts is None:  # WebDataset also skips files without a key.
            contents.num_added_by_macos += is_added
            contents.num_without_key += not is_added
            if len(contents.skipped) < MAX_SKIPPED:
                contents.skipped.append(name)
            continue
        if parts[0] != key:
            first = first or last
            key, last = parts[0], {}
        last[content.offset] = scan.last_header
        yield parts, content
    contents.headers = {**first, **last}


def _write_where_allowed(tar: Location, write: Callable[[Location], object]) -> Location:
    beside, cached = index_location(tar), cached_index_location(tar)
    try:
        if beside.can_write():
            with suppress(PermissionError):  # Only an attempt shows whether an object store allows writes.
                write(beside)
                return beside
        write(cached)
    except OSError as error:
        message = (
            f"{error.strerror or error}: cannot write the index of {tar}. Free some disk space, make the tar's folder "
            "writable, or set XDG_CACHE_HOME to a writable folder"
        )
        raise OSError(error.errno, message, error.filename) from error
    return cached


def find_index(tar: Location) -> Location | None:
    """Return the index of a tar, next to the tar or in the cache, or None. The index may be outdated."""
    return next((index for index in (index_location(tar), cached_index_location(tar)) if index.exists()), None)


def _is_current(index: Location, tar: Location) -> bool:
    header = read_header(index)
    if header.compression is not None:  # Datasets do not read compressed tars.
        return False
    if header.version is not None:
        return header.version == tar.stat().version and not has_split_samples(index, header)
    return index == index_location(tar) and was_packed(tar)


def has_split_samples(index: Location, header: IndexHeader) -> bool:
    """Return whether an index from an early version of shardio lists the parts of scattered samples as samples."""
    if header.format != INDEX_FORMAT or header.version is None:  # Packed tars have no scattered samples.
        return False
    columns = read_columns(index)
    is_there = columns.starts >= 0
    if is_there.all():  # Each part of a split sample lacks a field.
        return False
    return any(np.any(is_there[:, rows] != is_there[:, rows[:1]]) for rows in find_repeated(columns.keys).values())


def find_compressed_index(tar: Location) -> Location | None:
    """Return the index of a compressed tar, or None if the tar has no index or has changed since it was indexed."""
    index = find_index(tar)
    if index is None:
        return None
    header = read_header(index)
    is_current = header.compression == GZIP and header.version == tar.stat().version
    return index if is_current and not has_split_samples(index, header) else None


def open_compressed(tar: Location) -> ShardTable:
    """Return an indexed, compressed tar as a dataset, for one thread that reads the samples in tar order.

    Raises:
        FormatError: If the tar has no current index.
    """
    index = find_compressed_index(tar)
    if index is None:
        raise FormatError(f"{tar} has no current index: create one with shardio index {tar}")
    header = read_header(index)
    manifest = Manifest(shards=(make_entry(tar.name, header),), fields=header.fields)
    return ShardTable(manifest=manifest, tars=(tar,), indexes=(index,))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """A report on the contents of a tar.

    Attributes:
        tar: The tar.
        index: The tar's index.
        columns: The content of the index.
        contents: The contents of the tar, or None if the index already existed.
    """

    tar: Location
    index: Location
    columns: IndexColumns
    contents: TarContents | None

    @property
    def fields(self) -> dict[str, int]:
        """The number of samples that have each field, by the field's name."""
        counts = np.count_nonzero(self.columns.starts >= 0, axis=1).tolist()
        return dict(zip(self.columns.header.fields, counts, strict=True))

    @property
    def scattered(self) -> list[str]:
        """The keys of samples whose members are not adjacent."""
        return [self.columns.keys.text(i) for i in np.flatnonzero(find_scattered(self.columns.starts)).tolist()]

    @property
    def repeated(self) -> list[str]:
        """The keys that several samples have."""
        return list(find_repeated(self.columns.keys))


def index_tar(tar: Location) -> IndexReport:
    """Create the index of a tar if it has no current index, and report what the tar contains. The tar is unchanged.

    Raises:
        FormatError: If the tar cannot be indexed, or shardio packed the tar and its index is missing.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    index, contents = (find_or_make_compressed_index if is_compressed(tar) else find_or_make_index)(tar)
    return IndexReport(tar=tar, index=index, columns=read_columns(index), contents=contents)


def write_tar_list(folder: Location, headers: Mapping[Location, IndexHeader]) -> None:
    """Write the list of a folder's tars, given the headers of their indexes, which are next to the tars."""
    tars = {tar.name: asdict(header) for tar, header in headers.items() if _can_list(header)}
    values = {"format": _TAR_LIST_FORMAT, "is_local": folder.store.is_local, "tars": tars}
    with (folder / TAR_LIST_NAME).write_whole() as file:
        file.write(json.dumps(values, indent=1, sort_keys=True).encode() + b"\n")


def _can_list(header: IndexHeader) -> bool:
    return header.version is not None and header.compression is None


def write_tar_lists(reports: Iterable[IndexReport]) -> list[Location]:
    """For each folder whose tars are all reported and have indexes next to them, write the list of its tars.

    Folders in which this process may not write are left out. Return the folders whose lists were written.
    """
    headers = {report.tar: report.columns.header for report in reports if report.index == index_location(report.tar)}
    headers = {tar: header for tar, header in headers.items() if _can_list(header)}
    written = list[Location]()
    for folder in dict.fromkeys(tar.folder for tar in headers):
        if not (folder / TAR_LIST_NAME).can_write():
            continue
        names = [name for name in folder.list() if name.lower().endswith(".tar") and not name.startswith(".")]
        if all(folder / name in headers for name in names):
            with suppress(PermissionError):  # Only an attempt shows whether an object store allows writes.
                write_tar_list(folder, {folder / name: headers[folder / name] for name in names})
                written.append(folder)
    return written


def read_tar_list(folder: Location) -> dict[str, IndexHeader]:
    """Return the header of the index of each tar that a folder's list names, or {} if the folder has no list.

    If a local folder was copied to a store, its list is ignored there, because the copied tars have different versions.

    Raises:
        FormatError: If the list is damaged.
    """
    location = folder / TAR_LIST_NAME
    try:
        content = location.read_whole()
    except (FileNotFoundError, PermissionError):  # Without list permission, missing objects cause PermissionError.
        return {}
    try:
        values = parse_json(content)
        if values["format"] != _TAR_LIST_FORMAT:
            raise ValueError(f"it has format {values['format']}, expected {_TAR_LIST_FORMAT}")
        if values["is_local"] != folder.store.is_local:
            return {}
        headers = {name: make_header(header) for name, header in values["tars"].items()}
        for name, header in headers.items():
            entry = make_entry(name, header)  # Checks the name.
            if entry.num_samples > entry.num_bytes // BLOCK or not _can_list(header):
                raise ValueError(f"{name} cannot have the header {header}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"the list of tars {location} cannot be read: {error!r}. Delete it, or write it again: run shardio index "
            f"{folder}"
        ) from error
    return headers


def find_known(tars: list[Location]) -> dict[Location, IndexHeader]:
    """Return the headers of the indexes of tars that are in their folders' lists.

    Local tars that have changed, or have lost their indexes, are left out. Remote tars are not examined: a tar that has
    changed is rejected when it is opened.
    """
    by_folder = defaultdict[Location, list[Location]](list)
    for tar in tars:
        by_folder[tar.folder].append(tar)
    known = dict[Location, IndexHeader]()
    for folder, inside in by_folder.items():
        headers = read_tar_list(folder)
        present = set(folder.list()) if headers and folder.store.is_local else None
        for tar in inside:
            header = headers.get(tar.name)
            if header is not None and (present is None or _is_unchanged(tar, header, present)):
                known[tar] = header
    return known


def _is_unchanged(tar: Location, header: IndexHeader, present: Container[str]) -> bool:
    has_both = tar.name in present and index_location(tar).name in present
    return has_both and tar.stat().version == header.version
