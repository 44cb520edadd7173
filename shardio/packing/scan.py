"""Scanning: find the samples in a directory of images, with their fields and labels. Nothing is written."""

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
    find_undotted_images,
    match_to_pair,
    refuse_ambiguous_layouts,
)
from shardio.packing.sources import SHOWN, FileProblem, SourceFile, stat_file
from shardio.shards import LABEL_FIELD, MAX_MEMBER, TOO_LARGE, join_name, split_name
from shardio.storage import read_as_utf8, walk_files


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSample:
    """A sample before packing: its key, the files that become its fields, and its label."""

    key: str
    files: Mapping[str, SourceFile]
    label: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScan:
    """The contents of a source directory.

    Attributes:
        samples: The samples to pack, sorted by key.
        classes: The class names in the order of their labels; empty for a flat directory.
        mislabelled: Images whose format does not match their suffix. They are packed anyway.
        unreadable: Files that have an image's suffix but are not images. Their samples are left out.
        ignored: Files that do not belong to an image.
    """

    samples: list[SourceSample]
    classes: tuple[str, ...]
    mislabelled: list[FileProblem]
    unreadable: list[FileProblem]
    ignored: list[Path]


def scan_directory(
    src: Path,
    dst: Path,
    *,
    layout: Layout = "auto",
    rename_dots: bool = False,
    classes: Sequence[str] | None = None,
) -> SourceScan:
    """Find the samples in ``src/class/…/name.jpg``, or in a flat directory ``src/name.jpg``.

    Args:
        src: The directory.
        dst: The destination, which error messages name.
        layout: The layout of the files. ``auto`` accepts class folders or a flat directory, and refuses a directory
            that looks different.
        rename_dots: Whether to replace each dot in a file's stem with an underscore.
        classes: The class names that define the labels; by default, the sorted names of the class folders.

    Raises:
        PackError: If the directory cannot be packed. The message names the file that prevents it.
    """
    if not src.is_dir():
        raise PackError(f"the source {src} {'is not a directory' if src.exists() else 'does not exist'}")
    try:
        paths = list(walk_files(src))
        names = [PurePosixPath(path.relative_to(src)) for path in paths]
        if layout == "auto":
            refuse_ambiguous_layouts(src, dst, names, rename_dots=rename_dots)
        images = find_images_folder(names) if layout == "pairs" else None
        groups, ignored = _group_files(paths, names, images, layout, rename_dots=rename_dots)
        if layout == "pairs":
            check_pairs(src, images, groups, ignored)
        has_classes = layout != "flat" and images is None
        found = _find_class_folders(src, groups) if has_classes else ()
        labels = _assign_labels(found, classes, src)
        samples, mislabelled, unreadable = [], list[FileProblem](), list[FileProblem]()
        for key, group in sorted(groups.items()):
            files = {field: stat_file(path) for field, path in group.items()}  # Before any of them is read.
            _check_sizes(files)
            problem, is_image = _check_image(group)
            if problem is not None:
                (mislabelled if is_image else unreadable).append(problem)
            if is_image:
                samples.append(SourceSample(key=key, files=files, label=labels.get(key.split("/", 1)[0])))
    except OSError as error:
        raise PackError(f"{error.filename or src} cannot be read: {error.strerror or error}") from error
    if not samples:
        raise PackError(f"{src} holds no images that can be packed (supported: {', '.join(IMAGE_FIELDS)})")
    return SourceScan(
        samples=samples,
        classes=found if classes is None else tuple(classes),
        mislabelled=mislabelled,
        unreadable=unreadable,
        ignored=ignored,
    )


def _assign_labels(found: Sequence[str], classes: Sequence[str] | None, src: Path) -> dict[str, int]:
    """Return the label of each class folder."""
    if classes is not None and not found:
        raise PackError(f"classes are given, but {src} is packed without class folders: omit --classes (classes=…)")
    try:
        return number_classes(found, found if classes is None else classes, str(src))
    except ValueError as error:
        raise PackError(str(error)) from error


def _group_files(
    paths: Sequence[Path], names: Sequence[PurePosixPath], images: str | None, layout: Layout, *, rename_dots: bool
) -> tuple[dict[str, dict[str, Path]], list[Path]]:
    """Return the files of each key that has an image, by field, and the files that do not belong to an image."""
    undotted = find_undotted_images(names)
    by_stem: defaultdict[PurePosixPath, list[tuple[str, Path]]] = defaultdict(list)
    ignored = []
    for path, name in zip(paths, names, strict=True):
        match = match_to_pair(name, images, undotted) if layout == "pairs" else None
        stem, field = match or (name.with_suffix(""), name.suffix[1:].lower())
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
            if is_dotted and not rename_dots and stem.parent / stem.name.partition(".")[0] in undotted:
                raise PackError(_explain_companion(next(iter(files.values())), layout))
            key = _make_key(stem, files, rename_dots=rename_dots)
            if key in groups:
                other = next(iter(groups[key].values()))
                raise PackError(
                    f"{fields[0][1]} and {other} have the same key {key!r} after renaming dots: rename one of them"
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
        f"{path} has a dot in its stem, and the part before the dot is the name of an image in the same folder: pass "
        f"--layout pairs (layout='pairs') to make them fields of one sample, or --layout {alone} --rename-dots to make "
        "them separate samples"
    )


def _files_by_field(fields: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for field, path in fields:
        if field in files:
            raise PackError(f"{files[field]} and {path} are both field {field!r} of one sample: keep only one of them")
        files[field] = path
    images = [str(path) for field, path in files.items() if field in IMAGE_FORMATS]
    if len(images) > 1:
        raise PackError(f"{' and '.join(images)} are images with the same key: rename or remove all but one")
    return files


def _make_key(stem: PurePosixPath, files: Mapping[str, Path], *, rename_dots: bool) -> str:
    if rename_dots:
        stem = stem.with_name(stem.name.replace(".", "_"))
    key = read_as_utf8(str(stem))
    for field, path in files.items():
        if "." in stem.name:
            raise PackError(
                f"{path} has a dot in its stem, but a key ends at the first dot, so the rest would be read as part of "
                "the field's name: rename the file, or pass --rename-dots (rename_dots=True)"
            )
        if any(category(letter) in ("Cc", "Cs") for letter in key) or split_name(join_name(key, field)) != (key, field):
            raise PackError(
                f"{str(path)!r} cannot be packed, because its path contains a control character or invalid UTF-8, or "
                "its name has no stem before the suffix: rename the file or the folder"
            )
    return key


def _find_class_folders(src: Path, groups: Mapping[str, Mapping[str, Path]]) -> tuple[str, ...]:
    """Return the sorted names of the class folders; none for a flat directory."""
    flat = [key for key in groups if "/" not in key]
    if flat and len(flat) < len(groups):
        path = next(iter(groups[flat[0]].values()))
        raise PackError(f"{src} holds both class folders and images such as {path}: move the images into class folders")
    if flat or not groups:
        return ()
    used = {key.split("/", 1)[0] for key in groups}
    for folder in sorted(src.iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and read_as_utf8(folder.name) not in used:
            raise PackError(
                f"the class folder {folder} holds no images that can be packed (supported: {', '.join(IMAGE_FIELDS)}): "
                "add images or remove the folder"
            )
    for files in groups.values():
        if LABEL_FIELD in files:
            raise PackError(
                f"{files[LABEL_FIELD]} is a label, but its class folder already defines one: remove the file"
            )
    return tuple(sorted(used))


def _check_sizes(files: Mapping[str, SourceFile]) -> None:
    for file in files.values():
        if file.size > MAX_MEMBER:
            raise PackError(f"{file.path} has {file.size} bytes, {TOO_LARGE}")


def _check_image(files: Mapping[str, Path]) -> tuple[FileProblem | None, bool]:
    """Return the problem with a sample's image file, if there is one, and whether the file is an image."""
    field, path = next((field, path) for field, path in files.items() if field in IMAGE_FORMATS)
    found = read_format(path)
    if found is None:
        return FileProblem(path=path, what="is not an image"), False
    if found != IMAGE_FORMATS[field]:
        return FileProblem(path=path, what=f"has the suffix {path.suffix} but is in {found} format"), True
    return None, True
