"""Scanning: from a directory of images to samples, their fields and labels. Nothing is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from unicodedata import category

from shardio.classes import number_classes
from shardio.errors import PackError
from shardio.images import IMAGE_FIELDS, IMAGE_FORMATS, read_format
from shardio.packing.layouts import (
    Layout,
    check_pairs,
    find_images_folder,
    find_plain_images,
    place_in_pair,
    refuse_lookalikes,
)
from shardio.packing.sources import SHOWN, Problem, SourceFile, see_file
from shardio.shards import LABEL_FIELD, MAX_MEMBER, TOO_LARGE, join_name, split_name
from shardio.storage import read_as_utf8, walk_files


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSample:
    """A sample before it is packed: its key, the files that become its fields, and its class's number."""

    key: str
    files: Mapping[str, SourceFile]
    label: int | None


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


def scan_directory(
    src: Path,
    dst: Path,
    *,
    layout: Layout = "auto",
    rename_dots: bool = False,
    classes: Sequence[str] | None = None,
) -> Scan:
    """Find the samples in ``src/class/…/name.jpg``, or in a flat directory ``src/name.jpg``.

    Args:
        src: The directory.
        dst: Where it is to be packed, for messages.
        layout: How the files lie; ``auto`` takes class folders or a flat directory, and refuses what looks otherwise.
        rename_dots: Whether to write an underscore for each dot in a file's stem.
        classes: The class names by which labels are numbered; by default those of the class folders, sorted.

    Raises:
        PackError: If the directory cannot be packed; the message names the file that is in the way.
    """
    if not src.is_dir():
        raise PackError(f"{src} is not a directory" if src.exists() else f"there is no directory {src}")
    try:
        paths = list(walk_files(src))
        names = [PurePosixPath(path.relative_to(src)) for path in paths]
        if layout == "auto":
            refuse_lookalikes(src, dst, names, rename_dots=rename_dots)
        images = find_images_folder(names) if layout == "pairs" else None
        groups, ignored = _group_files(paths, names, images, layout, rename_dots=rename_dots)
        if layout == "pairs":
            check_pairs(src, images, groups, ignored)
        has_classes = layout != "flat" and images is None
        found = _find_classes(src, groups) if has_classes else ()
        labels = _number(found, classes, src)
        samples, mislabelled, unreadable = [], list[Problem](), list[Problem]()
        for key, group in sorted(groups.items()):
            files = {field: see_file(path) for field, path in group.items()}  # Before anything of them is read.
            _check_sizes(files)
            problem, is_image = _check_image(group)
            if problem is not None:
                (mislabelled if is_image else unreadable).append(problem)
            if is_image:
                samples.append(SourceSample(key=key, files=files, label=labels.get(key.split("/", 1)[0])))
    except OSError as error:
        raise PackError(f"{error.filename or src} cannot be read: {error.strerror or error}") from error
    if not samples:
        raise PackError(f"{src} holds no image that could be packed ({', '.join(IMAGE_FIELDS)})")
    return Scan(
        samples=samples,
        classes=found if classes is None else tuple(classes),
        mislabelled=mislabelled,
        unreadable=unreadable,
        ignored=ignored,
    )


def _number(found: Sequence[str], classes: Sequence[str] | None, src: Path) -> dict[str, int]:
    """Return the label of each class folder."""
    if classes is not None and not found:
        raise PackError(f"{src} is packed without classes, and labels are to follow a list of them: leave classes out")
    try:
        return number_classes(found, found if classes is None else classes, str(src))
    except ValueError as error:
        raise PackError(str(error)) from error


def _group_files(
    paths: Sequence[Path], names: Sequence[PurePosixPath], images: str | None, layout: Layout, *, rename_dots: bool
) -> tuple[dict[str, dict[str, Path]], list[Path]]:
    """Return the files of each key that has an image, by field, and the files that belong to none."""
    plain = find_plain_images(names)
    by_stem: defaultdict[PurePosixPath, list[tuple[str, Path]]] = defaultdict(list)
    ignored = []
    for path, name in zip(paths, names, strict=True):
        place = place_in_pair(name, images, plain) if layout == "pairs" else None
        stem, field = place or (name.with_suffix(""), name.suffix[1:].lower())
        if field.rpartition(".")[2]:
            by_stem[stem].append((field, path))
        else:
            ignored.append(path)
    groups: dict[str, dict[str, Path]] = {}
    errors: list[str] = []
    for stem, fields in by_stem.items():
        if not any(field in IMAGE_FORMATS for field, _ in fields):
            ignored += [path for _, path in fields]
            continue
        try:
            files = _files_by_field(fields)
            is_dotted = "." in stem.name
            if is_dotted and not rename_dots and stem.parent / stem.name.partition(".")[0] in plain:
                raise PackError(_explain_companion(next(iter(files.values())), layout))
            key = _make_key(stem, files, rename_dots=rename_dots)
            if key in groups:
                other = next(iter(groups[key].values()))
                raise PackError(
                    f"{fields[0][1]} and {other} get the same key {key!r} when dots are renamed: rename one"
                )
            groups[key] = files
        except PackError as error:
            errors.append(str(error))
    if errors:
        more = [f"and {len(errors) - SHOWN} more"] if len(errors) > SHOWN else []
        raise PackError("\n".join([*errors[:SHOWN], *more]))
    return groups, ignored


def _explain_companion(path: Path, layout: Layout) -> str:
    alone = "flat" if layout == "flat" else "classes"
    return (
        f"{path} has a dot in its stem, and lies beside the image of the same name up to that dot: pack with --layout "
        f"pairs (layout='pairs') to make them fields of one sample, or with --layout {alone} --rename-dots to make "
        "them two samples"
    )


def _files_by_field(fields: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for field, path in fields:
        if field in files:
            raise PackError(f"{files[field]} and {path} are both the field {field!r} of one sample: keep one of them")
        files[field] = path
    images = [str(path) for field, path in files.items() if field in IMAGE_FORMATS]
    if len(images) > 1:
        raise PackError(f"{' and '.join(images)} are two images of one key: keep one of them, or rename one")
    return files


def _make_key(stem: PurePosixPath, files: Mapping[str, Path], *, rename_dots: bool) -> str:
    if rename_dots:
        stem = stem.with_name(stem.name.replace(".", "_"))
    key = read_as_utf8(str(stem))
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
        if folder.is_dir() and not folder.name.startswith(".") and read_as_utf8(folder.name) not in used:
            raise PackError(f"the class folder {folder} holds no image: remove it, or add its images")
    for files in groups.values():
        if LABEL_FIELD in files:
            raise PackError(f"{files[LABEL_FIELD]} is a label, and so is its class folder: remove one of them")
    return tuple(sorted(used))


def _check_sizes(files: Mapping[str, SourceFile]) -> None:
    for file in files.values():
        if file.size > MAX_MEMBER:
            raise PackError(f"{file.path} has {file.size} bytes, {TOO_LARGE}")


def _check_image(files: Mapping[str, Path]) -> tuple[Problem | None, bool]:
    """Return what is wrong with a sample's image file, if anything, and whether it is an image at all."""
    field, path = next((field, path) for field, path in files.items() if field in IMAGE_FORMATS)
    found = read_format(path)
    if found is None:
        return Problem(path=path, what="is not an image"), False
    if found != IMAGE_FORMATS[field]:
        return Problem(path=path, what=f"is named {path.suffix} and is a {found}"), True
    return None, True
