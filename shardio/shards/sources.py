"""Find the shards that a user names, and index the tars that other tools packed.

A user names a directory, a manifest, tars or a brace pattern. Tars are indexed on first use, and again after they
change. Compressed tars (gzip) are indexed only to list their contents and to extract single samples. Datasets do not
read compressed tars, because reading a member decompresses all members before it.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import numpy as np

from shardio.errors import FormatError, find_user_level
from shardio.shards.index import (
    INDEX_FORMAT,
    INDEX_SUFFIX,
    IndexColumns,
    IndexHeader,
    find_repeated,
    find_scattered,
    index_location,
    read_columns,
    read_header,
)
from shardio.shards.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    ShardEntry,
    ShardTable,
    find_gaps,
    group_by_split,
    make_pattern,
    read_manifest,
)
from shardio.shards.shard import (
    GZIP,
    DecompressedFile,
    Shard,
    cached_index_location,
    is_compressed,
    was_packed,
    write_index,
)
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
from shardio.storage import Location, RemoteAccess, StoredFile, map_locations, parse_location

_COMPRESSED = re.compile(
    r".+\.(tar\.(gz|bz2|xz|zst|zstd|lz|lz4|lzma|lzo|z|br)|tgz|tbz|tbz2|txz|tzst|taz|tlz)", re.IGNORECASE
)


def find_tars(folder: Location) -> list[Location]:
    """Return all files in a folder that are named ``*.tar``, in lower or upper case, sorted.

    Hidden files are skipped, except files that macOS adds (``._x.tar``), which the caller counts.

    Raises:
        FormatError: If the folder also holds compressed tars, whose samples would be left out.
        OSError: If the folder cannot be read.
    """
    names = [name.removesuffix("/") for name in folder.list()]
    names = [name for name in names if not name.startswith(".") or is_added_by_macos(name)]
    compressed = [name for name in names if _COMPRESSED.fullmatch(name) and not name.startswith(".")]
    if compressed:
        more = f" and other compressed tars ({len(compressed)} in all)" if len(compressed) > 1 else ", a compressed tar"
        raise FormatError(
            f"{folder} holds {compressed[0]}{more}. shardio cannot read compressed tars and would leave their samples "
            "out: decompress them (gunzip, unzstd, …), move them elsewhere, or pass a list of the tars to read"
        )
    return [folder / name for name in names if name.lower().endswith(".tar")]


def find_indexed(folder: Location) -> list[Location]:
    """Return the tars in a folder that have an index there. The tars need not exist."""
    return [folder / name.removesuffix(INDEX_SUFFIX) for name in folder.list() if name.endswith(f".tar{INDEX_SUFFIX}")]


DatasetSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A directory, a manifest, a tar, a brace pattern of tars, or a list of tars and patterns."""


MAX_BYTES = 2**63 - 1
"""The maximum size of a dataset in bytes, because bytes and samples are counted in int64."""


MAX_NAMED = 8
"""The maximum number of files that a message names."""


def open_table(source: DatasetSource, access: RemoteAccess | None = None) -> ShardTable:
    """Find the shards that ``source`` names.

    Args:
        source: A directory with a manifest, a directory with ``*.tar`` (read in sorted order), a manifest file, a
            tar, a pattern in brace notation such as ``shard-{000000..000012}.tar``, or a list of tars and patterns.
            Tars without a manifest are indexed on first use. A RuntimeWarning reports tars with equal contents, gaps
            in the numbers of a directory's tars, and samples whose members are not adjacent.
        access: The access to remote shards.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars, or a list names a directory.
        FormatError: If a file is invalid, a tar is named twice, or the dataset has no samples.
        OSError: If a tar cannot be read, or its index cannot be written.
        ValueError: If a name is empty.
    """
    if isinstance(source, str | os.PathLike):
        location = parse_location(source, access)
        if (location / MANIFEST_NAME).exists():
            return _table_of_manifest(location / MANIFEST_NAME)
        if location.name.endswith(".json"):
            return _table_of_manifest(location)
        if location.is_folder():
            return _table_of_tars(_find_tars(location))
        source = [source]
    tars = [tar for pattern in source for tar in expand_pattern(pattern, access)]
    _refuse_folders(tars)
    return _table_of_tars(tars)


def _find_tars(folder: Location) -> list[Location]:
    if (folder / UNFINISHED_NAME).exists():
        raise FormatError(
            f"{folder} holds an unfinished pack: wait until it finishes or, if it was interrupted, rerun the same "
            "pack command to resume it"
        )
    tars = find_tars(folder)
    _refuse_unfinished(folder, tars)
    names = [tar.name for tar in tars if not is_added_by_macos(tar.name)]
    if not names and (inner := _find_inner_datasets(folder)):
        raise FileNotFoundError(
            f"the directory {folder} holds neither {MANIFEST_NAME} nor any *.tar, but its folders "
            f"{', '.join(inner[:MAX_NAMED])} do: pass one of them, such as {folder / inner[0]}"
        )
    if not names:
        raise FileNotFoundError(
            f"the directory {folder} holds neither {MANIFEST_NAME} nor any *.tar: pack the images first "
            "(shardio pack IMAGES OUT) or, if they are in class folders, read them with ImageFolder"
        )
    _refuse_splits(folder, names)
    if missing := find_gaps(names):  # A list may leave tars out on purpose.
        message = f"the numbers of the tars in {folder} have gaps: {len(missing)} missing ({_name_some(missing)}). "
        warnings.warn(f"{message}Check whether a copy is unfinished", RuntimeWarning, stacklevel=find_user_level())
    return tars


def _find_inner_datasets(folder: Location) -> list[str]:
    inner = [name[:-1] for name in folder.list() if name.endswith("/") and not name.startswith(".")]
    return sorted(name for name in inner[:100] if any(map(_is_shard, (folder / name).list())))


def _is_shard(name: str) -> bool:
    return name == MANIFEST_NAME or (name.lower().endswith(".tar") and not name.startswith("."))


def _refuse_splits(folder: Location, names: Sequence[str]) -> None:
    splits = group_by_split(names)
    if len(splits) > 1:
        found = "\n".join(
            f"  {split}: {len(tars)} tars, {f'{tars[0]} to {tars[-1]}' if len(tars) > 1 else tars[0]}"
            for split, tars in splits.items()
        )
        raise FormatError(
            f"{folder} holds the tars of several splits:\n{found}\nThey would be read as one dataset. Pass the tars to "
            "read as a list or as a pattern, such as "
            f"{folder / make_pattern(splits.get('train') or next(iter(splits.values())))}"
        )


def _refuse_folders(tars: Sequence[Location]) -> None:
    folders = [
        str(tar) for tar, is_folder in zip(tars, map_locations(Location.is_folder, tars), strict=True) if is_folder
    ]
    if folders:
        what, remedy = (
            ("is a directory", "pass it by itself, or list the tars in it")
            if len(folders) == 1
            else ("are directories", "pass one directory by itself, or list the tars in them")
        )
        raise FileNotFoundError(
            f"a list may name only tars and patterns of tars, but {' and '.join(folders[:MAX_NAMED])} {what}: {remedy}"
        )


def _refuse_unfinished(folder: Location, tars: Sequence[Location]) -> None:
    indexed = find_indexed(folder)
    packed = [tar for tar, is_ours in zip(indexed, map_locations(was_packed, indexed), strict=True) if is_ours]
    if packed:
        lost = [tar.name for tar in packed if tar not in tars]
        raise FormatError(
            f"{folder} holds shards or indexes that shardio packed ({len(packed)}, such as {packed[0].name}), but no "
            f"{MANIFEST_NAME}{f' and no {lost[0]}' if lost else ''}: a pack or a copy is unfinished. Wait until it "
            "finishes, or copy the missing files. To read only the tars that exist, pass a list of them"
        )


def expand_pattern(pattern: str | os.PathLike[str], access: RemoteAccess | None = None) -> list[Location]:
    """Return the locations that a pattern in brace notation names. The files need not exist."""
    from braceexpand import braceexpand

    location = parse_location(pattern, access)
    if location.exists() or location.is_folder():
        return [location]
    return [parse_location(name, access) for name in braceexpand(os.fspath(pattern))]


def _table_of_manifest(location: Location) -> ShardTable:
    if not location.exists():
        raise FileNotFoundError(f"the manifest {location} does not exist")
    manifest = read_manifest(location)
    if twice := [name for name, count in Counter(shard.name for shard in manifest.shards).items() if count > 1]:
        raise FormatError(
            f"the manifest {location} is damaged: it lists {twice[0]} twice, so its samples would be delivered twice. "
            "Download it or pack the dataset again"
        )
    _check_counts(manifest, location)
    tars = [location.folder / shard.name for shard in manifest.shards]
    return _make_table(manifest, tars, map(index_location, tars), location)


def _check_counts(manifest: Manifest, location: Location) -> None:
    """Refuse a manifest with more samples or bytes than its shards can have.

    Only the largest shard's file is checked, because the time to open a dataset must not depend on its number of
    shards. Damage to other shards is found when they are first read.
    """
    for shard in manifest.shards:
        if shard.num_samples > shard.num_bytes // BLOCK:
            raise FormatError(
                f"the manifest {location} says that {shard.name} holds {shard.num_samples} samples in "
                f"{shard.num_bytes} bytes, but each sample takes at least {BLOCK} bytes. Download the manifest "
                "or pack the dataset again"
            )
    if manifest.num_bytes > MAX_BYTES:
        raise FormatError(
            f"the manifest {location} says that its shards have {manifest.num_bytes} bytes, more than {MAX_BYTES}. "
            "Download it or pack the dataset again"
        )
    largest = max(manifest.shards, key=lambda shard: shard.num_bytes, default=None)
    tar = location.folder / (largest.name if largest else "")
    if largest and tar.exists() and (found := tar.stat().size) != largest.num_bytes:
        raise FormatError(
            f"the manifest {location} says that {tar} has {largest.num_bytes} bytes, but it has {found}: a copy may be "
            "unfinished. Download both again or pack the dataset again"
        )


def _table_of_tars(tars: list[Location]) -> ShardTable:
    named, tars = tars, [tar for tar in tars if not is_added_by_macos(tar.name)]
    if not tars:
        raise FileNotFoundError(
            f"{named[0]} is a file that macOS added, not a tar: pass a tar instead"
            if named
            else "the list of tars is empty"
        )
    missing = [str(tar) for tar, exists in zip(tars, map_locations(Location.exists, tars), strict=True) if not exists]
    if missing:
        raise FileNotFoundError(f"no such directory, manifest or tar: {', '.join(missing[:5])}")
    _refuse_same(tars)
    found = map_locations(find_or_make_index, tars)
    num_skipped = sum(contents.num_added_by_macos for _, contents in found if contents is not None)
    indexes = [index for index, _ in found]
    index_of = dict(zip(tars, indexes, strict=True))
    described = map_locations(lambda tar: _describe(tar, index_of[tar]), tars)
    entries = [entry for entry, _ in described]
    warned = (
        _describe_skipped(len(named) - len(tars), num_skipped),
        _describe_copies(tars, entries),
        _describe_scattered({tar: header.num_scattered or 0 for tar, (_, header) in zip(tars, described, strict=True)}),
    )
    for message in filter(None, warned):
        warnings.warn(message, RuntimeWarning, stacklevel=find_user_level())
    fields = {field for _, header in described for field in header.fields}
    manifest = Manifest(shards=tuple(entries), fields=tuple(sorted(fields)))
    return _make_table(manifest, tars, indexes, tars[0].folder)


def _describe(tar: Location, index: Location) -> tuple[ShardEntry, IndexHeader]:
    with Shard(tar, index) as shard:
        return shard.entry, shard.index.header


def _make_table(
    manifest: Manifest, tars: Iterable[Location], indexes: Iterable[Location], where: Location
) -> ShardTable:
    if manifest.num_samples == 0:
        raise FormatError(f"the dataset {where} has no samples")
    return ShardTable(manifest=manifest, tars=tuple(tars), indexes=tuple(indexes))


def _refuse_same(tars: Sequence[Location]) -> None:
    seen = dict[str, Location]()
    for tar, stat in zip(tars, map_locations(Location.stat, tars), strict=True):
        if (other := seen.setdefault(stat.identity, tar)) is not tar:
            how = f"{tar} is named twice" if other == tar else f"{other} and {tar} are the same file"
            raise FormatError(f"{how}, so each of its samples would be delivered twice: name it once")


def _name_some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")


def _describe_copies(tars: Sequence[Location], entries: Sequence[ShardEntry]) -> str:
    groups = defaultdict[str, list[str]](list)
    for tar, entry in zip(tars, entries, strict=True):
        if entry.num_samples:
            groups[entry.digest].append(str(tar))
    copies = [names for names in groups.values() if len(names) > 1]
    if not copies:
        return ""
    return (
        f"these tars have equal contents: {', '.join(copies[0][:MAX_NAMED])}. Each of their samples is delivered "
        f"{len(copies[0])} times per epoch: omit the copies unless this is intended"
        f"{f' (there are {len(copies)} such groups)' if len(copies) > 1 else ''}"
    )


def _describe_scattered(counts: Mapping[Location, int]) -> str:
    tars = [str(tar) for tar, count in counts.items() if count]
    if not tars:
        return ""
    return (
        f"the members of some samples ({sum(counts.values())}) are not adjacent in {_name_some(tars)}, as happens "
        "without tar --sort=name. shardio gathers them by key, but needs a read for each part of such a sample. "
        "WebDataset reads the parts as samples, and streams reject them. To get adjacent members, pack the tars "
        "(shardio pack), or create them with tar --sort=name"
    )


def _describe_skipped(num_tars: int, num_members: int) -> str:
    where = f"{num_members} in tars, and {num_tars} next to them"
    return f"skipped files that macOS added (._* and .DS_Store): {where}" if num_tars or num_members else ""


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
        headers: The plain headers of the first and the last run of adjacent members with one key, by the offsets of the
            contents. The headers of the first and the last sample are included, unless these samples are scattered.
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

    The tar is decompressed twice: once to find its size, and once to read it. Memory use does not depend on the size.

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
    """Return whether an index from an early version of shardio lists the parts of scattered samples as samples.

    Args:
        index: The location of the index.
        header: The index's metadata.
    """
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
    entry = ShardEntry(name=tar.name, num_bytes=header.num_bytes, num_samples=header.num_samples, digest=header.digest)
    return ShardTable(manifest=Manifest(shards=(entry,), fields=header.fields), tars=(tar,), indexes=(index,))


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
