"""Which files of a directory are tars to read, and which ones must not be passed over without a word."""

from __future__ import annotations

import re
from pathlib import Path

from shardio.errors import FormatError
from shardio.shards.names import is_added_by_macos

_COMPRESSED = re.compile(
    r".+\.(tar\.(gz|bz2|xz|zst|zstd|lz|lz4|lzma|lzo|z|br)|tgz|tbz|tbz2|txz|tzst|taz|tlz)", re.IGNORECASE
)


def find_tars(folder: Path) -> list[Path]:
    """Return the tars of a directory in sorted order: ``*.tar``, in capitals as well.

    Hidden files are passed over, save for those of macOS (``._x.tar``), which whoever reads the tars counts.

    Raises:
        FormatError: If compressed tars lie beside them: their samples would be left out.
        OSError: If the directory cannot be read.
    """
    names = sorted(path.name for path in folder.iterdir())
    names = [name for name in names if not name.startswith(".") or is_added_by_macos(name)]
    compressed = [name for name in names if _COMPRESSED.fullmatch(name) and not name.startswith(".")]
    if compressed:
        more = f" and {len(compressed) - 1} more" if len(compressed) > 1 else ""
        raise FormatError(
            f"{folder} holds {compressed[0]}{more}, a compressed tar, which cannot be read in place and would be left "
            "out: decompress it (gunzip, unzstd, …), move it elsewhere, or name the tars to read in a list"
        )
    return [folder / name for name in names if name.lower().endswith(".tar")]
