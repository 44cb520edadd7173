"""Truncated tars: recognise them, and find the samples that are still complete."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from itertools import groupby

from shardio.errors import FormatError
from shardio.shards.index_columns import IndexColumns
from shardio.shards.names import is_added_by_macos, split_name
from shardio.shards.tar import BLOCK, END, make_padding
from shardio.shards.tar_scan import TarMember, TarScan
from shardio.storage import Location, StoredFile, read_pieces

_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""The types of headers that precede the header of the member itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedTar:
    """A tar that ends before its end mark.

    Attributes:
        end: The offset where the complete samples end, a multiple of a block. The tar may lack the last padding.
        num_samples: The number of complete samples.
        dropped: The keys of the others, as far as they are known.
    """

    end: int
    num_samples: int
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Adjacent members with the same key, as far as the tar holds them, and whether a field occurs twice."""

    key: str
    fields: dict[str, TarMember]
    is_ambiguous: bool

    @property
    def end(self) -> int:
        return max(_end(member) for member in self.fields.values())


def find_complete(file: StoredFile, columns: IndexColumns | None) -> TruncatedTar | None:
    """Return which samples of a truncated tar are complete; None if the tar is damaged in another way, or not at all.

    A tar is truncated if it has intact members up to its end, where a header, a content or the end mark is cut off. If
    the members of a sample are not adjacent, any sample may lack some, so the result is None, too.

    Args:
        file: The tar.
        columns: The index of the whole tar, which knows the fields of the last sample. Without an index, the last
            sample is complete if the next one begins, or if an earlier sample has the same fields.
    """
    scan, members = TarScan(file), list[TarMember]()
    try:
        members.extend(scan.members())
    except FormatError:
        pass
    else:
        return None
    end = _end(members[-1]) if members else 0
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
    """Replace a truncated tar by its first ``end`` bytes and an end mark. It is replaced whole or not at all."""
    with tar.write_whole() as written:
        position = 0
        for piece in read_pieces(file):
            written.write(bytes(piece[: end - position]))
            position += len(piece)
            if position >= end:
                break
        written.write(bytes(max(0, end - file.size)) + END)


def _find_cut(file: StoredFile, position: int) -> tuple[bool, str | None]:
    """Return whether the member at an offset is cut off by the end of the tar, and its key if that is known."""
    name: str | None = None
    while position + BLOCK <= file.size:
        try:
            info = tarfile.TarInfo.frombuf(file.read(position, position + BLOCK), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return False, None
        is_extended = info.type in _EXTENDED
        position += BLOCK + info.size + len(make_padding(info.size))
        name = name if is_extended else info.name
        if info.size < 0 or (not is_extended and position <= file.size):
            return False, None
    parts = None if name is None or is_added_by_macos(name) else split_name(name)
    return True, None if parts is None else parts[0]


def _group(members: list[TarMember]) -> list[_Part]:
    """Group adjacent members with the same key. Members without a key are skipped."""
    named = [(split_name(member.name), member) for member in members if not is_added_by_macos(member.name)]
    known = [(name, member) for name, member in named if name is not None]
    parts = list[_Part]()
    for key, group in groupby(known, lambda pair: pair[0][0]):
        of_key = [(name[1], member) for name, member in group]
        fields = dict(of_key)
        parts.append(_Part(key=key, fields=fields, is_ambiguous=len(fields) < len(of_key)))
    return parts


def _are_scattered(parts: list[_Part], cut_key: str | None, columns: IndexColumns | None) -> bool:
    """Return whether members of a sample are not adjacent, as far as the tar or its index shows it."""
    if columns is not None and columns.header.num_scattered:
        return True
    fields = dict[str, frozenset[str]]()
    if any(fields.setdefault(part.key, frozenset(part.fields)) != frozenset(part.fields) for part in parts):
        return True
    return any(part.key == cut_key for part in parts[:-1])


def _is_complete(parts: list[_Part], cut_key: str | None, columns: IndexColumns | None) -> bool:
    """Return whether the last sample has all its fields."""
    last, place = parts[-1], len(parts) - 1
    if columns is not None and place < len(columns.keys) and columns.keys.text(place) == last.key:
        starts = columns.starts[:, place].tolist()
        return {start for start in starts if start >= 0} == {member.offset for member in last.fields.values()}
    if cut_key is not None:
        return cut_key != last.key
    return len(parts) == 1 or any(part.fields.keys() == last.fields.keys() for part in parts[:-1])


def _end(member: TarMember) -> int:
    """Return where a member ends in the tar, with its padding."""
    return member.offset + member.size + len(make_padding(member.size))
