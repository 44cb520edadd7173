"""Find the tars in a folder, and refuse files that must not be skipped or merged silently."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from shardio.errors import FormatError
from shardio.shards.names import is_added_by_macos
from shardio.storage import Location

_COMPRESSED = re.compile(
    r".+\.(tar\.(gz|bz2|xz|zst|zstd|lz|lz4|lzma|lzo|z|br)|tgz|tbz|tbz2|txz|tzst|taz|tlz)", re.IGNORECASE
)

_SPLITS = frozenset(
    ("train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval", "evaluation", "holdout")
)
"""The usual names of splits, in lower case."""

_WITH_SPLITS = {"set", "data", "image", "images", "img", "split", "a", "b"}
"""Words that may follow or precede these."""

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
