"""Match files in parallel folders: images/a.jpg with masks/a.png, masks/a_mask.png and annotations/masks/a.png."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from shardio.packing.sources.file_table import FileName
from shardio.storage import FolderFiles


class Pairing:
    """Finds the sample to which each file belongs, by the images.

    Names may end in the name of their top folder, with more words after it, as in Cityscapes:
    ``leftImg8bit/x_leftImg8bit.png`` and ``gtFine/x_gtFine_labelIds.png`` belong to ``x``. Between the top folder of
    companions and them may be further folders, as in Oxford Pets: ``annotations/trimaps/x.png``.

    Attributes:
        stems: The stems of the samples, relative to the folder of images.

    Args:
        folders: All files.
        images: The name of the folder of images.
        main: The suffixes of images.
    """

    def __init__(self, folders: Sequence[FolderFiles], images: str, main: Collection[str]) -> None:
        self._images = images
        found = [
            (_inner(folder.path), stem)
            for folder in folders
            if folder.path.partition("/")[0] == images
            for stem, suffix in map(split_suffix, folder.names)
            if suffix[1:].lower() in main
        ]
        self._cuts_images = all(_cut(stem, images)[1] for _, stem in found)
        self.stems = frozenset(inner + (_cut(stem, images)[0] if self._cuts_images else stem) for inner, stem in found)

    def match(self, folder: str, name: str) -> tuple[str, FileName]:
        """Return the stem of the sample to which a file belongs, and the file's name in it; no field without a suffix.

        If the sample has no image, its stem is not among ``stems``.
        """
        (stem, suffix), top, inner = split_suffix(name), folder.partition("/")[0], _inner(folder)
        field = suffix[1:].lower()
        if top == self._images and self._cuts_images:
            base, tail = _cut(stem, top)
            return inner + base, FileName(field, f"{top}/", tail + suffix)
        if not (top and field) or top == self._images:
            return inner + stem, FileName(field, f"{top}/" if top else "", suffix)
        if inner + stem in self.stems:  # Nearly always.
            return inner + stem, FileName(f"{top.lower()}.{field}", f"{top}/", suffix)
        parts = folder.split("/")
        for base, tail in dict.fromkeys(((stem, ""), _cut(stem, top))):
            for depth in range(1, len(parts) + 1):
                sample = "".join(f"{part}/" for part in parts[depth:]) + base
                if sample in self.stems:
                    prefix = parts[:depth]
                    more = tail[len(_word(tail, top)) :].strip("_-").lower()
                    kind = ".".join(prefix).lower() + (f"_{more}" if more else "")
                    return sample, FileName(f"{kind}.{field}", "/".join(prefix) + "/", tail + suffix)
        return inner + stem, FileName(f"{top.lower()}.{field}", f"{top}/", suffix)


def split_suffix(name: str) -> tuple[str, str]:
    """Split a file's name before its last dot. Like a path's suffix, it is empty if the name ends with the dot."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, dot + suffix) if stem and suffix else (name, "")


def _inner(folder: str) -> str:
    """Return the part of a folder's path below its top folder, with a slash at its end if there is any."""
    inner = folder.partition("/")[2]
    return f"{inner}/" if inner else ""


def _cut(stem: str, top: str) -> tuple[str, str]:
    """Return what precedes the name of the top folder in a stem, and the rest, which is empty without that name."""
    found = _pattern(top).search(stem)
    return (stem[: found.start()], stem[found.start() :]) if found is not None and found.start() else (stem, "")


def _word(tail: str, top: str) -> str:
    found = _pattern(top).match(tail)
    return found[0] if found is not None else ""


@lru_cache(64)
def _pattern(top: str) -> re.Pattern[str]:
    """Return the pattern of a folder's name in the names of its files, also in the singular: masks/a_mask.png."""
    words = "|".join(re.escape(word) for word in dict.fromkeys((top, top.removesuffix("s"))) if word)
    return re.compile(rf"[_-]({words})(?=[_-]|$)", re.IGNORECASE)
