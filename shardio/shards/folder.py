"""Which files of a folder are tars to read, and which ones must not be skipped silently."""

from __future__ import annotations

import re

from shardio.errors import FormatError
from shardio.shards.names import is_added_by_macos
from shardio.storage import Location

_COMPRESSED = re.compile(
    r".+\.(tar\.(gz|bz2|xz|zst|zstd|lz|lz4|lzma|lzo|z|br)|tgz|tbz|tbz2|txz|tzst|taz|tlz)", re.IGNORECASE
)


def find_tars(folder: Location) -> list[Location]:
    """Return the tars of a folder in sorted order: ``*.tar``, in upper case as well.

    Hidden files are skipped, except those that macOS adds (``._x.tar``), which the caller counts.

    Raises:
        FormatError: If the folder also holds compressed tars: their samples would be left out.
        OSError: If the folder cannot be read.
    """
    names = [name.removesuffix("/") for name in folder.list()]
    names = [name for name in names if not name.startswith(".") or is_added_by_macos(name)]
    compressed = [name for name in names if _COMPRESSED.fullmatch(name) and not name.startswith(".")]
    if compressed:
        more = f" and {len(compressed) - 1} more" if len(compressed) > 1 else ""
        raise FormatError(
            f"{folder} holds {compressed[0]}{more}, a compressed tar, which cannot be read in place and would be left "
            "out: decompress it (gunzip, unzstd, …), move it elsewhere, or pass a list of the tars to read"
        )
    return [folder / name for name in names if name.lower().endswith(".tar")]
