"""The names of a tar's members, matched with the contents that an index knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.shards.forward import ForwardFile
from shardio.shards.names import is_added_by_macos, split_name
from shardio.shards.tar_scan import TAR_ERRORS, WITHOUT_CONTENT, check_end, read_headers
from shardio.storage import StoredFile


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMember:
    """A member that is named like a field.

    Attributes:
        place: The place of its content among the known ones; None if it is not known.
        name: The member's name.
        parts: Its key and its field.
        offset: The offset of its content.
        size: The size of its content in bytes.
    """

    place: int | None
    name: str
    parts: tuple[str, str] | None
    offset: int
    size: int


class MemberNames:
    """Reads the headers of a tar as far as they are intact.

    Attributes:
        end: The offset where reading ended.
        failure: Why the tar is damaged or incomplete; None if reading ended at an intact end mark.

    Args:
        file: The tar.
        starts: int64 [n], the known offsets of contents, sorted.
    """

    def __init__(self, file: StoredFile, starts: NDArray[np.int64]) -> None:
        self._file, self._starts = file, starts
        self.end = 0
        self.failure: str | None = None

    def read(self) -> Iterator[NamedMember]:
        """Yield all members with a known content, and the others that are named like a field."""
        forward, starts = ForwardFile(self._file), self._starts
        try:
            for info, end in read_headers(forward):
                offset = info.offset_data
                i = int(np.searchsorted(starts, offset))
                is_known = i < len(starts) and starts[i] == offset and info.isreg()
                parts = split_name(info.name)
                if is_known or (
                    parts is not None and info.type not in WITHOUT_CONTENT and not is_added_by_macos(info.name)
                ):
                    yield NamedMember(
                        place=i if is_known else None, name=info.name, parts=parts, offset=offset, size=info.size
                    )
                self.end = end
            check_end(self._file, self.end)
        except TAR_ERRORS as error:
            self.failure = f"the tar is damaged: {error}"
        except FormatError as error:
            self.failure = str(error).replace(str(self._file.location), "the tar", 1)
