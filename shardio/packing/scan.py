"""Scanning: from a directory of images to samples, their fields and labels. Nothing is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from unicodedata import category

from shardio.errors import PackError
from shardio.images import read_format
from shardio.shards import IMAGE_FIELDS, IMAGE_FORMATS, LABEL_FIELD, join_name, split_name
from shardio.storage import walk_files

SHOWN = 20
"""How many wrong names are told at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSample:
    """A sample before it is packed: its key, the files that become its fields, and its class's number."""

    key: str
    files: Mapping[str, Path]
    label: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A file that is not what its name says."""

    path: Path
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a directory holds.

    Attributes:
        samples: The samples to pack, sorted by key.
        classes: The class names, by label; empty for a flat directory.
        mislabelled: Images of another format than their names say. They are packed nonetheless.
        unreadable: Files with an image's name that are no images. They are left out, with their samples.
        ignored: Files that belong to no image.
    """

    samples: list[SourceSample]
    classes: tuple[str, ...]
    mislabelled: list[Problem]
    unreadable: list[Problem]
    ignored: list[Path]


def scan_directory(src: Path, *, rename_dots: bool = False) -> Scan:
    """Find the samples in ``src/class/…/name.jpg``, or in a flat directory ``src/name.jpg``.

    Args:
        src: The directory.
        rename_dots: Whether to write an underscore for each dot in a file's stem.

    Raises:
        PackError: If the directory cannot be packed; the message names the file that is in the way.
    """
    if not src.is_dir():
        raise PackError(f"{src} is not a directory" if src.exists() else f"there is no directory {src}")
    try:
        groups, ignored = _group_files(src, rename_dots=rename_dots)
        classes = _find_classes(src, groups)
        labels = {name: label for label, name in enumerate(classes)}
        samples, mislabelled, unreadable = [], list[Problem](), list[Problem]()
        for key, files in sorted(groups.items()):
            problem, is_image = _check_image(key, files)
            if problem is not None:
                (mislabelled if is_image else unreadable).append(problem)
            if is_image:
                samples.append(SourceSample(key=key, files=files, label=labels.get(key.split("/", 1)[0])))
    except OSError as error:
        raise PackError(f"{error.filename or src} cannot be read: {error.strerror or error}") from error
    if not samples:
        raise PackError(f"{src} holds no image that could be packed ({', '.join(IMAGE_FIELDS)})")
    return Scan(samples=samples, classes=classes, mislabelled=mislabelled, unreadable=unreadable, ignored=ignored)


def _group_files(src: Path, *, rename_dots: bool) -> tuple[dict[str, dict[str, Path]], list[Path]]:
    """Return the files of each key that has an image, by field, and the files that belong to none."""
    by_stem: defaultdict[Path, list[Path]] = defaultdict(list)
    ignored = []
    for path in walk_files(src):
        if not _field(path):
            ignored.append(path)
            continue
        by_stem[path.parent / path.stem].append(path)
    groups: dict[str, dict[str, Path]] = {}
    errors: list[str] = []
    for stem, paths in by_stem.items():
        if not any(_field(path) in IMAGE_FORMATS for path in paths):
            ignored += paths
            continue
        try:
            files = _files_by_field(paths)
            key = _make_key(stem.relative_to(src), files, rename_dots=rename_dots)
            if key in groups:
                other = next(iter(groups[key].values()))
                raise PackError(f"{paths[0]} and {other} get the same key {key!r} when dots are renamed: rename one")
            groups[key] = files
        except PackError as error:
            errors.append(str(error))
    if errors:
        more = [f"and {len(errors) - SHOWN} more"] if len(errors) > SHOWN else []
        raise PackError("\n".join([*errors[:SHOWN], *more]))
    return groups, ignored


def _files_by_field(paths: list[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        field = _field(path)
        if field in files:
            raise PackError(f"{files[field]} and {path} are both the field {field!r} of one sample: keep one of them")
        files[field] = path
    images = [str(path) for field, path in files.items() if field in IMAGE_FORMATS]
    if len(images) > 1:
        raise PackError(f"{' and '.join(images)} are two images of one key: keep one of them, or rename one")
    return files


def _make_key(stem: Path, files: Mapping[str, Path], *, rename_dots: bool) -> str:
    if rename_dots:
        stem = stem.with_name(stem.name.replace(".", "_"))
    key = str(PurePosixPath(stem))
    for field, path in files.items():
        if "." in stem.name:
            raise PackError(
                f"{path} has a dot in its stem, and a key ends at the first dot, so it would be read as another field: "
                "rename the file, or pack with --rename-dots (rename_dots=True)"
            )
        if any(category(letter) in ("Cc", "Cs") for letter in key) or split_name(join_name(key, field)) != (key, field):
            raise PackError(
                f"{str(path)!r} has a name that readers of tar shards would take otherwise: rename the file"
            )
    return key


def _find_classes(src: Path, groups: Mapping[str, Mapping[str, Path]]) -> tuple[str, ...]:
    """Return the names of the class folders, sorted; none for a flat directory."""
    flat = [key for key in groups if "/" not in key]
    if flat and len(flat) < len(groups):
        path = next(iter(groups[flat[0]].values()))
        raise PackError(f"{src} holds class folders, and images beside them such as {path}: move those into a class")
    if flat or not groups:
        return ()
    used = {key.split("/", 1)[0] for key in groups}
    for folder in sorted(src.iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and folder.name not in used:
            raise PackError(f"the class folder {folder} holds no image: remove it, or add its images")
    for files in groups.values():
        if LABEL_FIELD in files:
            raise PackError(f"{files[LABEL_FIELD]} is a label, and so is its class folder: remove one of them")
    return tuple(sorted(used))


def _check_image(key: str, files: Mapping[str, Path]) -> tuple[Problem | None, bool]:
    """Return what is wrong with a sample's image file, if anything, and whether it is an image at all."""
    field, path = next((field, path) for field, path in files.items() if field in IMAGE_FORMATS)
    found = read_format(path)
    if found is None:
        return Problem(path=path, what="is not an image"), False
    if found != IMAGE_FORMATS[field]:
        return Problem(path=path, what=f"is named {path.suffix} and is a {found}"), True
    return None, True


def _field(path: Path) -> str:
    return path.suffix[1:].lower()
