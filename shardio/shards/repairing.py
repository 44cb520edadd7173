"""Repair a packed dataset: rebuild indexes and the manifest from the tars, and drop truncated ends of tars."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardio.errors import FormatError
from shardio.shards.index import IndexColumns, index_location, read_columns
from shardio.shards.indexing import TarContents, scan_contents
from shardio.shards.manifest import MANIFEST_NAME, UNFINISHED_NAME, Manifest, ShardEntry, read_manifest, write_manifest
from shardio.shards.shard import PACKED_NAME, write_index
from shardio.shards.sources import find_indexed, find_tars
from shardio.shards.tar import BLOCK, END, LABEL_FIELD, StoredField, is_added_by_macos, make_padding, split_name
from shardio.shards.tar_scan import EXTENDED, TarScan
from shardio.shards.verifying import Problem, ProblemKind, ShardVerification
from shardio.storage import Location, StoredFile, parse_location, read_pieces
from shardio.values import count

_REMEDY = "Download the tar again, or pass --accept-changes if it was changed on purpose"


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedTar:
    """A tar that ends before its end mark.

    Attributes:
        end: The offset at which the complete samples end, a multiple of the block size. The tar may lack its final
            padding.
        num_samples: The number of complete samples.
        dropped: The keys of the incomplete samples, as far as they are known.
    """

    end: int
    num_samples: int
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Adjacent members with the same key in a truncated tar, and whether a field occurs twice."""

    key: str
    fields: dict[str, StoredField]
    is_ambiguous: bool

    @property
    def end(self) -> int:
        return max(_padded_end(member) for member in self.fields.values())


def find_complete(file: StoredFile, columns: IndexColumns | None) -> TruncatedTar | None:
    """Return which samples of a truncated tar are complete, or None if the tar is intact or damaged in another way.

    A tar is truncated if it has intact members up to its end, where a header, a member or the end mark is cut off. The
    result is also None if the members of a sample are not adjacent, because any sample may then lack members.

    Args:
        file: The tar.
        columns: The index of the whole tar, which lists the fields of the last sample, or None if the tar has no index.
            Without an index, the last sample is considered complete if another sample begins after it, or if an
            earlier sample has the same fields.
    """
    scan, members = TarScan(file), list[tuple[str, StoredField]]()
    try:
        members.extend(scan.members())
    except FormatError:
        pass
    else:
        return None
    end = _padded_end(members[-1][1]) if members else 0
    is_cut, cut_key = _find_cut(file, end)
    if not is_cut:
        return None
    parts = _group(members)
    if _are_scattered(parts, cut_key, columns):
        return None
    dropped = [cut_key] if cut_key is not None else []
    if parts and not _is_complete(parts, cut_key, columns):
        dropped.insert(0, parts.pop().key)
    if any(part.is_ambiguous for part in parts):
        return None
    if columns is not None and columns.header.num_bytes > file.size:
        keys = columns.keys
        dropped += [keys.text(sample) for sample in range(min(len(parts), len(keys)), len(keys))]
    return TruncatedTar(
        end=parts[-1].end if parts else 0, num_samples=len(parts), dropped=tuple(dict.fromkeys(dropped))
    )


def write_complete(tar: Location, file: StoredFile, end: int) -> None:
    """Atomically replace a truncated tar with its first ``end`` bytes and an end mark."""
    with tar.write_whole() as written:
        position = 0
        for piece in read_pieces(file):
            written.write(bytes(piece[: end - position]))
            position += len(piece)
            if position >= end:
                break
        written.write(bytes(max(0, end - file.size)) + END)


def _find_cut(file: StoredFile, position: int) -> tuple[bool, str | None]:
    name: str | None = None
    while position + BLOCK <= file.size:
        try:
            info = tarfile.TarInfo.frombuf(file.read(position, position + BLOCK), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return False, None
        is_extended = info.type in EXTENDED
        position += BLOCK + info.size + len(make_padding(info.size))
        name = name if is_extended else info.name
        if info.size < 0 or (not is_extended and position <= file.size):
            return False, None
    parts = None if name is None or is_added_by_macos(name) else split_name(name)
    return True, None if parts is None else parts[0]


def _group(members: list[tuple[str, StoredField]]) -> list[_Part]:
    named = [(split_name(name), member) for name, member in members if not is_added_by_macos(name)]
    known = [(parts, member) for parts, member in named if parts is not None]
    found = list[_Part]()
    for key, group in groupby(known, lambda pair: pair[0][0]):
        of_key = [(parts[1], member) for parts, member in group]
        fields = dict(of_key)
        found.append(_Part(key=key, fields=fields, is_ambiguous=len(fields) < len(of_key)))
    return found


def _are_scattered(parts: list[_Part], cut_key: str | None, columns: IndexColumns | None) -> bool:
    if columns is not None and columns.header.num_scattered:
        return True
    fields = dict[str, frozenset[str]]()
    if any(fields.setdefault(part.key, frozenset(part.fields)) != frozenset(part.fields) for part in parts):
        return True
    return any(part.key == cut_key for part in parts[:-1])


def _is_complete(parts: list[_Part], cut_key: str | None, columns: IndexColumns | None) -> bool:
    last, place = parts[-1], len(parts) - 1
    if columns is not None and place < len(columns.keys) and columns.keys.text(place) == last.key:
        starts = columns.starts[:, place].tolist()
        return {start for start in starts if start >= 0} == {member.offset for member in last.fields.values()}
    if cut_key is not None:
        return cut_key != last.key
    return len(parts) == 1 or any(part.fields.keys() == last.fields.keys() for part in parts[:-1])


def _padded_end(member: StoredField) -> int:
    return member.offset + member.size + len(make_padding(member.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairAction:
    """A file that was written.

    Attributes:
        where: The path of the file.
        message: A description of the action and its reason.
        dropped: The keys of samples that were dropped from a tar, as far as they are known.
    """

    where: str
    message: str
    dropped: tuple[str, ...] = ()

    def dump(self) -> dict[str, Any]:
        """Return the action as values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """The result of a repair.

    Attributes:
        manifest: The manifest of the repaired dataset, or None if no sample can be read.
        actions: The files that were written.
        problems: The problems that could not be repaired.
        are_classes_lost: Whether the samples have labels, but the class names are unknown.
    """

    manifest: Manifest | None
    actions: tuple[RepairAction, ...]
    problems: tuple[Problem, ...]
    are_classes_lost: bool


def repair(folder: Location, *, classes: Sequence[str] | None = None, accept_changes: bool = False) -> RepairResult:
    """Repair a packed dataset. If a repair is interrupted, run it again.

    Missing, stale and damaged indexes and manifests are rebuilt from the tars. If a tar is truncated, its complete
    samples are written to a new tar, which replaces the truncated tar. Other tars are never written. If a tar's
    contents have changed but its layout has not, the tar is damaged, so its index is kept as evidence.

    Args:
        folder: The packed directory.
        classes: The class names by label; by default, the class names of the old manifest.
        accept_changes: Whether to trust tars whose contents do not match the hashes in their indexes or the manifest.

    Raises:
        FileNotFoundError: If the directory does not exist or holds no tars.
        FormatError: If the directory holds an unfinished pack, tars that shardio did not pack, or compressed tars.
        OSError: If a file cannot be written.
    """
    return _Repair(folder, accept_changes=accept_changes).run(classes)


class _Repair:
    def __init__(self, folder: Location, *, accept_changes: bool) -> None:
        self._folder, self._accept_changes = folder, accept_changes
        self._manifest = folder / MANIFEST_NAME
        self._actions: list[RepairAction] = []
        self._problems: list[Problem] = []

    def run(self, classes: Sequence[str] | None) -> RepairResult:
        tars = self._find_tars()
        old = self._read_manifest()
        old_entries = {entry.name: entry for entry in old.shards} if old is not None else {}
        if old is not None:
            for tar in tars:
                if tar.name not in old_entries:
                    message = f"{MANIFEST_NAME} does not list this tar: it was left out. Move it elsewhere or append it"
                    self._add_problem("unlisted", tar, message)
            tars = [self._folder / name for name in old_entries]
        else:
            for tar in find_indexed(self._folder):
                if tar not in tars:
                    index = index_location(tar).name
                    self._add_problem("missing", tar, f"the index {index} exists, but the tar does not: download it")
        entries, fields = list[ShardEntry](), set[str]()
        for tar in tars:
            entry, fields_of_shard = self._repair_shard(tar, old_entries.get(tar.name))
            fields.update(fields_of_shard)
            if entry is not None:
                entries.append(entry)
        if old is not None and self._problems:
            fields.update(old.fields)  # Unreadable shards may have these fields.
        manifest = Manifest(
            shards=tuple(entries),
            fields=tuple(sorted(fields)),
            classes=tuple(classes) if classes is not None else old.classes if old is not None else (),
            pack=dict(old.pack) if old is not None else {},
        )
        pairs = [(entry, old_entries[entry.name]) for entry in entries if entry.name in old_entries]
        if any(new.digest != old.digest and new.num_samples != old.num_samples for new, old in pairs):
            manifest.pack.pop("num_tiled", None)  # ``num_tiled`` refers to the old samples.
        if manifest.num_samples:
            self._write(self._manifest, lambda where: write_manifest(where, manifest), "the manifest")
        return RepairResult(
            manifest=manifest if manifest.num_samples else None,
            actions=tuple(self._actions),
            problems=tuple(self._problems),
            are_classes_lost=old is None and not manifest.classes and LABEL_FIELD in fields,
        )

    def _find_tars(self) -> list[Location]:
        folder = self._folder
        if not folder.is_folder():
            raise FileNotFoundError(f"no such directory: {folder}")
        if (folder / UNFINISHED_NAME).exists():
            raise FormatError(f"{folder} holds an unfinished pack: rerun the same pack command to resume it")
        tars = [tar for tar in find_tars(folder) if not is_added_by_macos(tar.name)]
        if not tars:
            raise FileNotFoundError(f"the directory {folder} holds no *.tar")
        if not self._manifest.exists() and not any(map(_looks_packed, tars)):
            raise FormatError(
                f"shardio did not pack the tars in {folder}, so they need no manifest: index them with shardio index "
                f"{folder}"
            )
        return tars

    def _read_manifest(self) -> Manifest | None:
        try:
            found = read_manifest(self._manifest) if self._manifest.exists() else None
        except FormatError:
            return None
        return found if found is None or len({entry.name for entry in found.shards}) == len(found.shards) else None

    def _repair_shard(self, tar: Location, old: ShardEntry | None) -> tuple[ShardEntry | None, Sequence[str]]:
        index, columns = index_location(tar), None
        with suppress(FormatError):  # If the index is damaged, it is rebuilt below.
            columns = read_columns(index)
        known_fields = () if columns is None else columns.header.fields
        try:
            with closing(tar.open()) as file:
                contents = self._read_tar(tar, file, columns)
                if contents is None:
                    return old, known_fields
            with closing(tar.open()) as file:  # The tar may have been replaced.
                if not self._accept_changes and self._is_damaged(file, contents, columns, old):
                    return old, known_fields
                version = None if columns is None or columns.header.version is None else file.version
                samples, digest = contents.samples, contents.digest
                self._write(index, lambda where: write_index(where, file, samples, digest, version), "the index")
                entry = ShardEntry(name=tar.name, num_bytes=file.size, num_samples=len(samples), digest=digest)
        except FileNotFoundError:
            self._add_problem("missing", tar, "the tar does not exist: download it, or pack the dataset again")
            return old, known_fields
        return entry, sorted({field for sample in contents.samples for field in sample.fields})

    def _read_tar(self, tar: Location, file: StoredFile, columns: IndexColumns | None) -> TarContents | None:
        try:
            return scan_contents(file)
        except FormatError as error:
            why = str(error).replace(str(tar), "it", 1)
        found = find_complete(file, columns)
        if found is None or not found.num_samples:
            self._add_problem("header", tar, f"the tar cannot be read and was not changed: {why}")
            return None
        if columns is not None and not self._accept_changes and (damage := _find_damage(file, columns, found.end)):
            self._problems += damage
            message = f"the tar is truncated, and its complete samples are damaged, so it was kept. {_REMEDY}"
            self._add_problem("digest", tar, message)
            return None
        write_complete(tar, file, found.end)
        complete = count(found.num_samples, "complete sample")
        message = f"the tar was truncated at byte {file.size}: wrote a new tar with its {complete}"
        self._actions.append(RepairAction(where=str(tar), message=message, dropped=found.dropped))
        with closing(tar.open()) as new:
            return scan_contents(new)

    def _is_damaged(
        self, file: StoredFile, contents: TarContents, columns: IndexColumns | None, old: ShardEntry | None
    ) -> bool:
        digests = {old.digest} if old is not None else set[str]()
        if columns is not None:
            digests.add(columns.header.digest)
        if contents.digest in digests:
            return False
        if columns is not None and columns.header.num_bytes == file.size and _has_layout(contents, columns):
            self._problems += _find_damage(file, columns, file.size)
            message = f"the tar does not match the hashes in its index, which was kept. {_REMEDY}"
            self._add_problem("digest", file.location, message)
            return True
        if old is not None and (old.num_bytes, old.num_samples) == (file.size, len(contents.samples)):
            message = f"the tar has xxh3-128 {contents.digest}, but {MANIFEST_NAME} says {old.digest}. {_REMEDY}"
            self._add_problem("digest", file.location, message)
            return True
        return False

    def _write(self, location: Location, write: Callable[[Location], object], what: str) -> None:
        """Write a file unless it already has the same content."""
        with TemporaryDirectory() as folder:
            rendered = parse_location(Path(folder) / "rendered")
            write(rendered)
            content = rendered.read_whole()
        is_missing = not location.exists()
        if not is_missing and location.read_whole() == content:
            return
        with location.write_whole() as file:
            file.write(content)
        message = f"wrote {what}, which was missing" if is_missing else f"rebuilt {what}, which was damaged or stale"
        self._actions.append(RepairAction(where=str(location), message=message))

    def _add_problem(self, kind: ProblemKind, tar: Location, message: str) -> None:
        self._problems.append(Problem(kind=kind, where=str(tar), message=message))


def _find_damage(file: StoredFile, columns: IndexColumns, end: int) -> list[Problem]:
    found = ShardVerification(file, columns).find_problems()
    return [problem for problem in found if problem.key is not None and (problem.offset or 0) < end]


def _has_layout(contents: TarContents, columns: IndexColumns) -> bool:
    found = {(field.offset, field.size) for sample in contents.samples for field in sample.fields.values()}
    is_there = columns.starts >= 0
    indexed = zip(columns.starts[is_there].tolist(), columns.sizes[is_there].tolist(), strict=True)
    return found == set(indexed)


def _looks_packed(tar: Location) -> bool:
    if not PACKED_NAME.fullmatch(tar.name):
        return False
    with closing(tar.open()) as file:
        block = file.read(0, min(BLOCK, file.size))
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return True  # Damaged tars are reported.
    return info.mtime == 0 and info.uid == 0 and not info.uname
