"""Find the shards that a user names as a directory, a manifest, tars or a brace pattern."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardio.errors import FormatError, find_user_level
from shardio.shards.foreign import find_index, find_or_make_index, was_packed
from shardio.shards.index import INDEX_SUFFIX, IndexHeader, index_location
from shardio.shards.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    Problem,
    ShardEntry,
    ShardTable,
    find_gaps,
    make_pattern,
    read_manifest,
)
from shardio.shards.shard import Shard
from shardio.shards.tar import BLOCK, is_added_by_macos
from shardio.storage import Location, RemoteAccess, map_locations, parse_location

_COMPRESSED = re.compile(
    r".+\.(tar\.(gz|bz2|xz|zst|zstd|lz|lz4|lzma|lzo|z|br)|tgz|tbz|tbz2|txz|tzst|taz|tlz)", re.IGNORECASE
)

_SPLITS = frozenset(
    ("train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval", "evaluation", "holdout")
)
"""The usual names of splits, in lower case."""

_WITH_SPLITS = {"set", "data", "image", "images", "img", "split", "a", "b"}
"""Words that may stand beside one of ``_SPLITS`` in the name of a split."""

_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(sorted(_SPLITS))})(?![a-z])", re.IGNORECASE)


def find_tars(folder: Location) -> list[Location]:
    """Return the tars in a folder, sorted: all files named ``*.tar`` in lower or upper case.

    Hidden files are skipped, except those that macOS adds (``._x.tar``), which the caller counts.

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


def group_by_split(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of files by the split that each contains, sorted. Names without a split are left out.

    >>> group_by_split(["train-0.tar", "train-1.tar", "x-val-0.tar", "other.tar"])
    {'train': ['train-0.tar', 'train-1.tar'], 'val': ['x-val-0.tar']}
    """
    splits = defaultdict[str, list[str]](list)
    for name in sorted(names):
        if (found := _SPLIT.search(name)) is not None:
            splits[found[0].lower()].append(name)
    return dict(splits)


def words_of(name: str) -> list[str]:
    """Return the words of a name, in lower case.

    >>> words_of("leftImg8bit_train")
    ['left', 'img', 'bit', 'train']
    """
    return [word.lower() for word in re.findall(r"[A-Z]*[a-z]+|[A-Z]+", name)]


def is_split(name: str) -> bool:
    """Return whether a name is that of a split, such as ``val2017`` or ``trainA``."""
    words = set(words_of(name))
    return bool(words & _SPLITS) and words <= _SPLITS | _WITH_SPLITS


DatasetSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A directory, a manifest, a tar, a brace pattern of tars, or a list of tars and patterns."""

MAX_BYTES = 2**63 - 1
"""The maximum size of a dataset in bytes, because bytes and samples are counted in int64."""

MAX_NAMED = 8
"""The maximum number of files that a message names."""


def open_table(source: DatasetSource, access: RemoteAccess | None = None) -> ShardTable:
    """Find the shards that ``source`` names.

    Args:
        source: A directory (with a manifest, or with ``*.tar``, read in sorted order), a manifest file, a
            tar, a pattern in brace notation such as ``shard-{000000..000012}.tar``, or a list of tars and patterns.
            Tars without a manifest are indexed on first use. A RuntimeWarning reports tars with equal contents, gaps
            in the numbers of a directory's tars, and samples whose members are not adjacent.
        access: How remote shards are reached.

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
    """Return the tars in a folder without a manifest, if they can be read as a dataset."""
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
    _warn_of_gaps(folder, names)  # Not for a list, which may leave tars out on purpose.
    return tars


def _find_inner_datasets(folder: Location) -> list[str]:
    inner = [name[:-1] for name in folder.list() if name.endswith("/") and not name.startswith(".")]
    found = [name for name in inner[:100] if any(_is_shard(each) for each in (folder / name).list())]
    return sorted(found)


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
    """Raise FormatError if a folder without a manifest holds shards that shardio packed, or their indexes."""
    indexed = [name.removesuffix(INDEX_SUFFIX) for name in folder.list() if name.endswith(f".tar{INDEX_SUFFIX}")]
    named = [folder / name for name in indexed]
    packed = [tar for tar, is_ours in zip(named, map_locations(was_packed, named), strict=True) if is_ours]
    if packed:
        lost = [tar.name for tar in packed if tar not in tars]
        raise FormatError(
            f"{folder} holds shards or indexes that shardio packed ({len(packed)}, such as {packed[0].name}), but no "
            f"{MANIFEST_NAME}{f' and no {lost[0]}' if lost else ''}: a pack or a copy is unfinished. Wait until it "
            "finishes, or copy the missing files. To read only the tars that exist, pass a list of them"
        )


def expand_pattern(pattern: str | os.PathLike[str], access: RemoteAccess | None = None) -> list[Location]:
    """Return the locations that a pattern in brace notation names. They need not exist."""
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
    tars = tuple(location.folder / shard.name for shard in manifest.shards)
    return _make_table(manifest, tars, tuple(map(index_location, tars)), location)


def _check_counts(manifest: Manifest, location: Location) -> None:
    """Raise FormatError if a manifest has more samples or bytes than its shards can have.

    Only the largest shard's file is checked, because the time to open a dataset must not depend on the number of its
    shards. Defects of other shards are found when they are first read.
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
    _warn_of_skipped(len(named) - len(tars), sum(each.num_skipped for each in found))
    indexes = [each.location for each in found]
    index_of = dict(zip(tars, indexes, strict=True))
    described = map_locations(lambda tar: _describe(tar, index_of[tar]), tars)
    entries = [entry for entry, _ in described]
    _warn_of_copies(tars, entries)
    _warn_of_scattered({tar: header.num_scattered or 0 for tar, (_, header) in zip(tars, described, strict=True)})
    fields = {field for _, header in described for field in header.fields}
    manifest = Manifest(shards=tuple(entries), fields=tuple(sorted(fields)))
    return _make_table(manifest, tuple(tars), tuple(indexes), tars[0].folder)


def _describe(tar: Location, index: Location) -> tuple[ShardEntry, IndexHeader]:
    with Shard(tar, index) as shard:
        return shard.entry, shard.index.header


def _make_table(
    manifest: Manifest, tars: tuple[Location, ...], indexes: tuple[Location, ...], where: Location
) -> ShardTable:
    if manifest.num_samples == 0:
        raise FormatError(f"the dataset {where} has no samples")
    return ShardTable(manifest=manifest, tars=tars, indexes=indexes)


def _refuse_same(tars: Sequence[Location]) -> None:
    """Raise FormatError if two names refer to the same file."""
    seen = dict[str, Location]()
    for tar, stat in zip(tars, map_locations(Location.stat, tars), strict=True):
        if (other := seen.setdefault(stat.identity, tar)) is not tar:
            how = f"{tar} is named twice" if other == tar else f"{other} and {tar} are the same file"
            raise FormatError(f"{how}, so each of its samples would be delivered twice: name it once")


def _warn_of_copies(tars: Sequence[Location], entries: Sequence[ShardEntry]) -> None:
    groups = defaultdict[str, list[str]](list)
    for tar, entry in zip(tars, entries, strict=True):
        if entry.num_samples:
            groups[entry.digest].append(str(tar))
    if copies := [names for names in groups.values() if len(names) > 1]:
        message = (
            f"these tars have equal contents: {', '.join(copies[0][:MAX_NAMED])}. Each of their samples is delivered "
            f"{len(copies[0])} times per epoch: omit the copies unless this is intended"
        )
        more = f" (there are {len(copies)} such groups)" if len(copies) > 1 else ""
        warnings.warn(message + more, RuntimeWarning, stacklevel=find_user_level())


def _warn_of_scattered(counts: Mapping[Location, int]) -> None:
    if tars := [str(tar) for tar, count in counts.items() if count]:
        message = (
            f"the members of some samples ({sum(counts.values())}) are not adjacent in {', '.join(tars[:MAX_NAMED])}"
            f"{', …' if len(tars) > MAX_NAMED else ''}, as after tar without --sort=name. shardio gathers them by key, "
            "but needs a read for each part of such a sample. WebDataset takes the parts for samples, and streams "
            "refuse them. To get adjacent members, pack the tars (shardio pack), or create them with tar --sort=name"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=find_user_level())


def _warn_of_gaps(folder: Location, names: Sequence[str]) -> None:
    if missing := find_gaps(names):
        named = ", ".join(missing[:MAX_NAMED]) + (", …" if len(missing) > MAX_NAMED else "")
        message = (
            f"the numbers of the tars in {folder} have gaps: {len(missing)} missing ({named}). Check whether a "
            "copy is unfinished"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=find_user_level())


def _warn_of_skipped(num_tars: int, num_members: int) -> None:
    if num_tars or num_members:
        message = (
            f"skipped files that macOS added (._* and .DS_Store): {num_members} in tars, and {num_tars} next to them"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=find_user_level())


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShard:
    """A shard that may be damaged or incomplete.

    Attributes:
        tar: The location of its tar.
        index: The location of its index; None if it has none.
        num_bytes: The size of the tar in bytes; 0 if it does not exist.
        manifest: The location of the manifest that lists the shard; None if there is none.
        entry: Its entry there.
        fields: The fields of the whole dataset, according to the manifest.
    """

    tar: Location
    index: Location | None
    num_bytes: int
    manifest: Location | None = None
    entry: ShardEntry | None = None
    fields: tuple[str, ...] = ()


def find_shards(source: DatasetSource, access: RemoteAccess | None = None) -> tuple[list[NamedShard], list[Problem]]:
    """Find the shards that a source names, and the problems that show without opening them.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
    """
    if not isinstance(source, str | os.PathLike):
        return _name_tars([tar for pattern in source for tar in expand_pattern(pattern, access)])
    location = parse_location(source, access)
    if location.is_folder():
        return _find_in_folder(location, location / MANIFEST_NAME)
    if location.name.endswith(".json"):
        if not location.exists():
            raise FileNotFoundError(f"the manifest {location} does not exist")
        return _find_in_folder(location.folder, location)
    return _name_tars(expand_pattern(source, access))


def _name_tars(tars: list[Location]) -> tuple[list[NamedShard], list[Problem]]:
    shards, problems = [_name_shard(tar) for tar in tars], list[Problem]()
    missing = [tar for tar in tars if not tar.exists()]
    if tars == missing:
        raise FileNotFoundError(
            f"no such directory, manifest or tar: {', '.join(map(str, tars[:5])) or '(an empty list)'}"
        )
    problems += [Problem(kind="missing", where=str(tar), message="the tar does not exist") for tar in missing]
    return [shard for shard in shards if shard.tar not in missing], problems


def _find_in_folder(folder: Location, manifest: Location) -> tuple[list[NamedShard], list[Problem]]:
    names = [name for name in folder.list() if not name.endswith("/")]
    problems = list[Problem]()
    if (folder / UNFINISHED_NAME).exists():
        message = "the pack into this directory is unfinished: rerun the same pack command to resume it"
        problems.append(Problem(kind="unfinished", where=str(folder), message=message))
    try:
        tars = [tar for tar in find_tars(folder) if not is_added_by_macos(tar.name)]
    except FormatError as error:
        problems.append(Problem(kind="unlisted", where=str(folder), message=str(error)))
        tars = [folder / name for name in names if name.lower().endswith(".tar") and not name.startswith(".")]
    entries, fields, unlisted = dict[str, ShardEntry](), tuple[str, ...](), tars
    if manifest.exists():
        try:
            found = read_manifest(manifest)
        except FormatError as error:
            message = str(error).replace(str(manifest), "it", 1).removeprefix("the manifest ")
            problems.append(Problem(kind="manifest", where=str(manifest), message=message))
        else:
            problems += _check_manifest(manifest, found, tars)
            entries, fields, unlisted = {entry.name: entry for entry in found.shards}, found.fields, []
    elif any(map(_was_packed, tars)):
        message = "the manifest does not exist, but shardio packed the tars: rebuild it with shardio repair"
        problems.append(Problem(kind="manifest", where=str(manifest), message=message))
    shards = [_name_shard(folder / entry.name, manifest, entry, fields) for entry in entries.values()]
    shards += [_name_shard(tar) for tar in unlisted]
    tar_names = {*entries, *(tar.name for tar in tars)}
    for name in names:
        if name.endswith(f".tar{INDEX_SUFFIX}") and name.removesuffix(INDEX_SUFFIX) not in tar_names:
            message = f"there is an index, {name}, but no such tar"
            where = str(folder / name.removesuffix(INDEX_SUFFIX))
            problems.append(Problem(kind="missing", where=where, message=message))
    if not shards and not problems:
        raise FileNotFoundError(f"the directory {folder} holds neither {MANIFEST_NAME} nor any *.tar")
    return shards, problems


def _check_manifest(location: Location, manifest: Manifest, tars: list[Location]) -> list[Problem]:
    where, problems = str(location), list[Problem]()
    counts = Counter(entry.name for entry in manifest.shards)
    problems += [
        Problem(kind="manifest", where=where, message=f"it lists {name} {num_times} times")
        for name, num_times in counts.items()
        if num_times > 1
    ]
    problems += [
        Problem(kind="unlisted", where=str(tar), message=f"the tar is not in {location.name}, so nothing reads it")
        for tar in tars
        if tar.name not in counts
    ]
    return problems


def _name_shard(
    tar: Location,
    manifest: Location | None = None,
    entry: ShardEntry | None = None,
    fields: tuple[str, ...] = (),
) -> NamedShard:
    index = find_index(tar)
    if manifest is not None and index != index_location(tar):  # Readers of packed shards look nowhere else.
        index = None
    try:
        num_bytes = tar.stat().size
    except OSError:
        num_bytes = 0
    return NamedShard(tar=tar, index=index, num_bytes=num_bytes, manifest=manifest, entry=entry, fields=fields)


def _was_packed(tar: Location) -> bool:
    """Return whether ``pack`` wrote a tar; False if its files cannot be read."""
    with suppress(FormatError, OSError):
        return was_packed(tar)
    return False
