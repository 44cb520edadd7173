"""Scan a directory of images without opening files, and refuse a directory whose contents do not match the layout."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from shardio.errors import PackError
from shardio.packing.pack_call import OnIncomplete, PackOptions
from shardio.packing.sources.documents import DOCUMENT_SUFFIXES
from shardio.packing.sources.files import (
    FileName,
    FileTable,
    Pairing,
    find_main_stems,
    group_files,
    is_main,
    split_suffix,
)
from shardio.packing.sources.labels import ALL_SPLITS, find_labels
from shardio.packing.sources.source import Evidence, PackSource, SourceScan, list_some
from shardio.sample import number_classes
from shardio.shards import LABEL_FIELD, MAX_MEMBER, TOO_LARGE, is_split, words_of
from shardio.storage import FolderFiles, Location, find_url, parse_location, read_as_utf8, walk_folders
from shardio.values import count

OR_CONFIRM = "If the folders are classes, pass --layout classes (layout='classes')"

# Words in the names of folders, in lowercase.
IMAGES = re.compile(r"images?|imgs?|jpegimages|photos?|pictures?|rgb|inputs?")

COMPANIONS = re.compile(
    r"masks?|labels?|annotations?|captions?|segmentation(s|class|object)?|seg|semantic|gt|groundtruth|truth|targets?"
    r"|depths?|b?box(es)?|anno?s?|trimaps?|mattes?|disparity"
)

_NOISE = {"bit", "coarse", "dir", "fine", "folder", "left", "right", "tr", "ts"}
"""Words that may accompany ``IMAGES`` and ``COMPANIONS``, as in img_dir, leftImg8bit, gtFine and imagesTr."""

COPIES = {"s3": "aws s3 sync {} {}", "gs": "gcloud storage rsync --recursive {} {}"}
"""The command that copies a directory from a URL, by the URL's scheme."""

_TOOL_FILES = frozenset(("classes.txt", "notes.json"))
"""Files that annotation tools write into a folder of labels, such as YOLO's class names and Label Studio's notes."""


def find_main_file(src: Path, options: PackOptions) -> Path | None:
    """Return a file that shows ``src`` to be a directory of files to pack, or None if ``src`` has no such file.

    Raises:
        PackError: If a folder cannot be read.
    """
    if not src.is_dir():
        return None
    with _reading(src):
        for folder in walk_folders(src):
            if (name := next((name for name in folder.names if is_main(name, options.main_fields)), None)) is not None:
                return src / folder.path / name
    return None


class Directory(PackSource):
    """A directory of images, or of other files."""

    what = "files"
    takes = ("layout", "source_split", "fields")

    def find(self, src: Path) -> Evidence | None:
        file = find_main_file(src, PackOptions())
        return None if file is None else Evidence(file)

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        return scan_directory(src, parse_location("OUT"), options)


def _suggest_fields(suffixes: Sequence[str], options: PackOptions) -> str:
    if options.fields is not None or not suffixes:
        return ""
    text = f". To pack other files, name their suffixes: --fields {suffixes[0]} (fields=[{suffixes[0]!r}])"
    if any(f".{suffix}" in DOCUMENT_SUFFIXES for suffix in suffixes):
        text += ". To pack texts or tokens for PackedTokens, pass --source-kind documents (source_kind='documents')"
    return text


def scan_directory(src: Path, dst: Location, options: PackOptions) -> SourceScan:
    """Find the samples in ``src/class/…/name.jpg``, or in a flat directory ``src/name.jpg``.

    Error messages name the file that prevents packing, and suggest commands that pack into ``dst``. If the options
    have no class names, the sorted names of the class folders, or the names in the label file, define the labels.
    """
    if not src.is_dir():
        raise PackError(f"the source {src} {'is not a directory' if src.exists() else 'does not exist'}")
    layout, rename_dots, classes, labels = options.layout, options.rename_dots, options.classes, options.label_file
    with _reading(src):
        main = options.main_fields
        folders = _select_split(src, list(walk_folders(src)), main, options.source_split)
        _refuse_lost_folders(src, folders)
        if layout == "auto" and labels is None:
            _refuse_ambiguous_layouts(src, dst, folders, main, rename_dots=rename_dots)
        images = _find_images_folder(folders) if layout == "pairs" else None
        has_classes = layout != "flat" and images is None and labels is None
        _refuse_splits(src, dst, folders, options, has_classes=has_classes)
        table, ignored, suffixed = group_files(src, folders, images, options)
        if layout == "pairs":
            table = _check_pairs(src, images, table, ignored, main, options.on_incomplete)
        found = _find_class_folders(src, table, options) if has_classes else ()
        _check_sizes(table)
    if not len(table):
        suffixes = sorted({PurePosixPath(path).suffix[1:] for path in ignored} - {""})
        raise PackError(f"{src} holds no {options.description}{_suggest_fields(suffixes, options)}")
    if labels is None:
        samples, classes = _with_labels(table, found, classes, src), found if classes is None else classes
    else:
        _refuse_label_fields(table, f"{labels.path} already defines one")
        numbers, classes = find_labels(labels, table.keys, classes, _find_names(table, suffixed))
        samples = replace(table, labels=numbers)
    return SourceScan(
        samples=samples, classes=tuple(classes), ignored=[src / path for path in ignored], suffixed=suffixed
    )


@contextmanager
def _reading(src: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PackError(f"{error.filename or src} cannot be read: {error.strerror or error}") from error


def _refuse_lost_folders(src: Path, folders: Sequence[FolderFiles]) -> None:
    for folder in folders:
        for number in np.flatnonzero(folder.sizes < 0).tolist():
            if not split_suffix(name := folder.names[number])[1]:
                raise PackError(
                    f"{src / folder.path / name} is a symbolic link whose target does not exist. If the link was "
                    "meant to lead to a folder of samples, the samples would be left out: correct or remove the link"
                )


def _refuse_splits(
    src: Path, dst: Location, folders: Sequence[FolderFiles], options: PackOptions, *, has_classes: bool
) -> None:
    if has_classes and options.layout == "pairs":
        _refuse_splits_as_classes(src, dst, folders, options.main_fields, pairs=True)
    name, file = options.source_split, options.label_file
    if name is None:
        given: dict[str, str | None] = {"--layout": options.layout if options.layout != "auto" else None}
        if file is not None:
            given["--labels"] = str(file.path)
            given |= {"--key-column": file.key_column, "--label-column": file.label_column}
        text = " ".join(f"{option} {quote(value)}" for option, value in given.items() if value is not None)
        _refuse_merged_splits(src, dst, folders, options.main_fields, text, has_classes=has_classes)
    elif has_classes and all(folder.path.partition("/")[0] == name for folder in folders):
        raise PackError(
            f"the split {name!r} of {src} would be treated as a class, because its folder is at the level of the "
            f"class folders. Pack this folder:\n  shardio pack {quote(src / name)} {quote(dst)}"
        )


def _with_labels(table: FileTable, found: Sequence[str], classes: Sequence[str] | None, src: Path) -> FileTable:
    if classes is not None and not found:
        raise PackError(f"classes are given, but {src} is packed without class folders: omit --classes (classes=…)")
    try:
        labels = number_classes(found, found if classes is None else classes, str(src))
    except ValueError as error:
        raise PackError(str(error)) from error
    if not found:
        return table
    numbers = (labels[key.split("/", 1)[0]] for key in table.keys)
    return replace(table, labels=np.fromiter(numbers, np.int64, len(table)))


def _find_names(table: FileTable, suffixed: Collection[str]) -> dict[str, str]:
    """Return the keys that differ from their files' stems, by path, and by stem if no other key has that stem."""
    if table.stems is table.keys:
        return {}
    found, suffixed = dict[str, str](), set(suffixed)
    for key, stem, kind_id in zip(table.keys, table.stems, table.kind_ids.tolist(), strict=True):
        if key != stem:
            found |= {f"{name.prefix}{stem}{name.suffix}": key for name in table.kinds[kind_id]}
            if key not in suffixed:
                found[stem] = key
    return found


def _find_class_folders(src: Path, table: FileTable, options: PackOptions) -> tuple[str, ...]:
    """Return the sorted names of the class folders. A flat directory has no class folders."""
    flat = next((row for row, key in enumerate(table.keys) if "/" not in key), None)
    used = {key.split("/", 1)[0] for key in table.keys if "/" in key}
    if flat is not None and used:
        path = next(iter(table.sample(flat).files.values())).path
        raise PackError(f"{src} holds both class folders and images such as {path}: move the images into class folders")
    if not used:
        return ()
    for folder in sorted(src.iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and read_as_utf8(folder.name) not in used:
            raise PackError(f"the class folder {folder} holds no {options.description}: add files or remove the folder")
    _refuse_label_fields(table, "its class folder already defines one")
    return tuple(sorted(used))


def _refuse_label_fields(table: FileTable, why: str) -> None:
    labeled = next((row for row, kind in enumerate(table.kinds) if LABEL_FIELD in {name.field for name in kind}), None)
    if labeled is not None:
        row = int(np.flatnonzero(table.kind_ids == labeled)[0])
        raise PackError(f"{table.sample(row).files[LABEL_FIELD].path} is a label, but {why}: remove the file")


def _check_sizes(table: FileTable) -> None:
    for file_index in np.flatnonzero((table.sizes > MAX_MEMBER) | (table.sizes < 0))[:1].tolist():
        row = int(np.searchsorted(table.first_files, file_index, side="right")) - 1
        for file in table.sample(row).files.values():
            if file.size < 0:
                os.stat(file.path)  # noqa: PTH116  # os.stat raises the error.
            elif file.size > MAX_MEMBER:
                raise PackError(f"{file.path} has {file.size} bytes, {TOO_LARGE}")


def refuse_url(src: Path, dst: Location) -> None:
    """Raise PackError if the source is a URL or a command."""
    if str(src).startswith("pipe:") and not src.exists():
        raise PackError(
            "the source is a command (pipe:), but pack reads only local directories. Write its output to a file, "
            f"then pack the file:\n  (the command) > images/000000.tar\n  shardio pack images {quote(dst)}"
        )
    if (url := find_url(src)) is not None:
        copy = COPIES.get(url.partition(":")[0], "# download {} into {}").format(quote(url), "images")
        raise PackError(
            f"the source {url} is a URL, but pack reads only local directories. Download it, then pack the copy:\n"
            f"  {copy}\n  shardio pack images {quote(dst)}"
        )


def quote(path: str | Path | Location) -> str:
    """Return a path quoted for a shell."""
    return shlex.quote(str(path))


def _select_split(
    src: Path, folders: Sequence[FolderFiles], main: Collection[str], name: str | None
) -> Sequence[FolderFiles]:
    """Return the files in folders that have the name of a split, or all files if no split is chosen."""
    if name in (None, ALL_SPLITS):
        return folders
    found = [folder for folder in folders if name in folder.path.split("/")]
    if not any(_has_main(folder, main) for folder in found):
        _, splits = _find_splits(folders, main)
        there = f"it holds the splits {_join(splits)}" if splits else "it holds no splits: omit the option"
        raise PackError(f"{src} has no folder named {name!r} with files to pack (--source-split): {there}")
    return found


def _find_splits(folders: Sequence[FolderFiles], main: Collection[str]) -> tuple[str, list[str]]:
    """Return the folder that holds several splits of a dataset ("" for the source itself), and the splits' names."""
    children = defaultdict[str, set[str]](set)
    for folder in folders:
        if folder.path and _has_main(folder, main):
            parts = folder.path.split("/")
            for depth, name in enumerate(parts):
                children["/".join(parts[:depth])].add(name)
    for parent in sorted(children):
        splits = [name for name in children[parent] if is_split(name)]
        if len(splits) > 1:
            return parent, sorted(splits, key=_training_first)
    return "", []


def _refuse_splits_as_classes(
    src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str], *, pairs: bool = False
) -> None:
    """Raise a PackError that shows the right commands if splits of a dataset would become classes."""
    tops = {_top(folder) for folder in folders if folder.path and _has_main(folder, main)}
    splits = {name for name in tops if is_split(name)}
    if not splits or (len(splits) == 1 and splits != tops):  # A single "train" among other folders may be a class.
        return
    names = sorted(tops, key=_training_first)
    has_classes = any("/" in folder.path and folder.names for folder in folders)
    options = " --layout pairs" if pairs else ""
    lines = [f"  shardio pack {quote(src / name)} {quote(dst / name)}{options}" for name in names]
    if has_classes:
        lines[1:] = [f"{line} --classes {quote(dst / names[0])}" for line in lines[1:]]
    raise PackError(
        f"{src} holds {_join(names)}: these look like the splits of a dataset, not classes. Pack each split:\n"
        + "\n".join(lines)
        + ("" if pairs else f"\n{OR_CONFIRM}")
    )


def _refuse_merged_splits(
    src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str], options: str, *, has_classes: bool
) -> None:
    """Raise a PackError that shows the right commands if splits of a dataset would become one dataset."""
    parent, splits = _find_splits(folders, main)
    if not splits or (not parent and has_classes):  # Splits among class folders raise a different error.
        return
    options = f" {options}" if options else ""
    lines = [
        f"  shardio pack {quote(src)} {quote(dst / name)}{options} --source-split {quote(name)}" for name in splits
    ]
    if has_classes:
        lines[1:] = [f"{line} --classes {quote(dst / splits[0])}" for line in lines[1:]]
    raise PackError(
        f"{src / parent} holds {_join(splits)}: these look like the splits of a dataset, but would be packed as one "
        "dataset. Pack each split:\n"
        + "\n".join(lines)
        + f"\nTo pack all of them as one dataset, pass --source-split {ALL_SPLITS} (source_split={ALL_SPLITS!r})"
    )


def _refuse_ambiguous_layouts(
    src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str], *, rename_dots: bool
) -> None:
    """Raise a PackError that shows the right command if the files appear to have a layout other than class folders.

    Images in different class folders may have the same names, so files are treated as pairs only if the names of
    their folders also suggest pairs.
    """
    _refuse_splits_as_classes(src, dst, folders, main)
    _refuse_companions_of_split(src, folders, main)
    _refuse_parallel_folders(src, dst, folders, main)
    _refuse_one_folder_of_folders(src, dst, folders, main)
    if rename_dots:
        _refuse_companions(src, dst, folders, main)


def _find_images_folder(folders: Sequence[FolderFiles]) -> str | None:
    """Return the name of the folder of images, or None if there are no other folders, such as masks/."""
    names = sorted({_top(folder) for folder in folders if folder.path and folder.names})
    found = [name for name in names if _is_named(IMAGES, name)]
    if len(names) < 2 or not found:
        return None
    if len(found) > 1:
        raise PackError(
            f"several folders are named like folders of images ({', '.join(found)}), but the layout 'pairs' allows "
            "only one: move the other folders out of the source"
        )
    return found[0]


def _check_pairs(
    src: Path,
    images: str | None,
    samples: FileTable,
    ignored: list[str],
    main: Collection[str],
    on_incomplete: OnIncomplete,
) -> FileTable:
    num_samples = np.bincount(samples.kind_ids, minlength=len(samples.kinds)).tolist()
    companions = [{name.field.rpartition(".")[0] for name in kind} - {""} for kind in samples.kinds]
    counts = Counter[str]()
    for kind, num_of_kind in zip(companions, num_samples, strict=True):
        counts.update(dict.fromkeys(kind, num_of_kind))
    if not counts:
        where = f"{images}/a.jpg and masks/a.png" if images else "images/a.jpg and masks/a.png, or a.jpg and a.mask.png"
        raise PackError(f"{src} holds no pairs: the files of a sample must have matching names, such as {where}")
    if on_incomplete == "keep":
        return samples
    if on_incomplete == "skip":
        complete = np.isin(
            samples.kind_ids, [kind_id for kind_id, kind in enumerate(companions) if kind == set(counts)]
        )
        for sample in samples.take(np.flatnonzero(~complete)):
            ignored += (file.path.removeprefix(samples.root) for file in sample.files.values())
        if not complete.any():
            raise PackError(f"no sample of {src} has all companions, {', '.join(sorted(counts))}: none can be packed")
        return samples.select(np.flatnonzero(complete))
    for kind_id, kind in enumerate(companions):
        if missing := sorted(set(counts) - kind):
            files = samples.sample(int(np.flatnonzero(samples.kind_ids == kind_id)[0])).files
            image = next(file.path for field, file in files.items() if field in main)
            num_found = counts[missing[0]]
            raise PackError(
                f"{image} has no {missing[0]!r} file, but {num_found} of {count(len(samples), 'sample')} "
                f"{'has' if num_found == 1 else 'have'} one: add the file, or remove all files of this sample. To pack "
                "only samples that have all files, pass --on-incomplete skip (on_incomplete='skip'). To pack all "
                "samples, each with the files that it has, pass --on-incomplete keep"
            )
    names = {name for kind in samples.kinds for name in kind if "." in name.field}
    orphans = [path for path in ignored if _is_companion(PurePosixPath(path), images, names, main)]
    if orphans:
        found = count(len(orphans), "file belongs to an image that is", "files belong to images that are")
        remedy = (
            "Add the images or remove these files. To ignore them, pass --on-incomplete skip (on_incomplete='skip')"
        )
        raise PackError("\n".join([f"{found} missing:", *list_some([str(src / path) for path in orphans]), remedy]))
    return samples


def _is_companion(file: PurePosixPath, images: str | None, names: Collection[FileName], main: Collection[str]) -> bool:
    if file.name in _TOOL_FILES:
        return False
    if images is not None:
        path, suffix = str(file), file.suffix[1:].lower()
        return any(
            path.startswith(name.prefix) and (path.endswith(name.suffix) or suffix in main)
            for name in names
            if name.prefix
        )
    field = file.name.partition(".")[2].lower()
    kind, _, suffix = field.rpartition(".")
    fields = {name.field for name in names}
    return field in fields or (suffix in main and any(kind == other.rpartition(".")[0] for other in fields))


def _refuse_parallel_folders(src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str]) -> None:
    tops = list(dict.fromkeys(_top(folder) for folder in folders if folder.path and folder.names))
    images = [name for name in tops if _is_named(IMAGES, name)]
    companions = [name for name in tops if _is_named(COMPANIONS, name)]
    with_images = {_top(folder) for folder in folders if _has_main(folder, main)}
    others = defaultdict[str, set[str]](set)
    for folder in folders:
        top, _, inner = folder.path.partition("/")
        if top and top not in (*images, *companions):
            others[top].update(f"{inner}/{split_suffix(name)[0]}".lstrip("/") for name in folder.names)
    for image in images:
        pairing = Pairing(folders, image, main)
        for companion in companions:
            of_companion = [folder for folder in folders if _top(folder) == companion]
            stems = {pairing.match(folder.path, name)[0] for folder in of_companion for name in folder.names}
            shared = pairing.stems & stems
            is_pair = 2 * len(shared) >= len(stems) and not _are_common_numbers(shared, [*others.values()])
            if is_pair or (not others and companion in with_images):
                raise PackError(
                    f"{src} holds {_join([image, companion])}: these look like two files for each sample, not two "
                    "classes. To combine each pair of files with the same name into one sample, run:\n"
                    f"  shardio pack {quote(src)} {quote(dst)} --layout pairs\n{OR_CONFIRM}"
                )


def _refuse_companions_of_split(src: Path, folders: Sequence[FolderFiles], main: Collection[str]) -> None:
    """Raise PackError for folders such as train and train_masks, which are not two classes."""
    tops = {_top(folder) for folder in folders if folder.path and _has_main(folder, main)}
    for split in sorted(filter(is_split, tops)):
        for other in sorted(tops):
            if other.startswith(split) and _is_named(COMPANIONS, other):
                raise PackError(
                    f"{src} holds {_join([split, other])}: these look like two files for each sample, not two classes. "
                    f"Move both folders into a separate folder, rename {split}/ to images/ and {other}/ to masks/ "
                    f"there, and pass --layout pairs. {OR_CONFIRM}"
                )


def _are_common_numbers(stems: frozenset[str], others: Sequence[set[str]]) -> bool:
    """Return whether stems differ only in numbers and occur in most other folders, and so do not indicate pairs."""
    num_with_same = sum(2 * len(stems & other) >= min(len(stems), len(other)) for other in others)
    return len({re.sub(r"[0-9]+", "", stem) for stem in stems}) == 1 and 2 * num_with_same > len(others)


def _refuse_one_folder_of_folders(
    src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str]
) -> None:
    paths = [folder.path for folder in folders if _has_main(folder, main)]
    tops, seconds = {path.split("/")[0] for path in paths}, {path.split("/")[1] for path in paths if "/" in path}
    if len(tops) == 1 and any(IMAGES.fullmatch(word) or word in main for word in words_of(*tops)) and len(seconds) < 2:
        inner = src / tops.pop()
        raise PackError(
            f"{src} holds images only in {inner.name}/, which does not look like a class: all images would get label "
            f"0. Pack the inner folder:\n  shardio pack {quote(inner)} {quote(dst)}\n{OR_CONFIRM}"
        )
    if len(tops) == 1 and all("/" in path for path in paths) and len(seconds) > 1:
        inner = src / tops.pop()
        raise PackError(
            f"{src} holds only the folder {inner.name}/, which holds folders of images: all images would get label "
            f"0. Pack the inner folder:\n  shardio pack {quote(inner)} {quote(dst)}\n{OR_CONFIRM}"
        )


def _refuse_companions(src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str]) -> None:
    num_undotted, companions = 0, defaultdict[str, list[str]](list)
    for folder in folders:
        undotted = find_main_stems(folder, main)
        num_undotted += len(undotted)
        for name in folder.names:
            base, _, middle = split_suffix(name)[0].partition(".")
            if middle and is_main(name, main) and base in undotted:
                companions[middle.lower()].append(f"{folder.path}/{name}" if folder.path else name)
    for middle, dotted in companions.items():
        # photo.1.jpg is a separate photo, and so is photo.edited.jpg if few files have such names.
        is_rare = 2 * len(dotted) < num_undotted
        if middle.isdigit() or (is_rare and not COMPANIONS.fullmatch(_last_word(middle))):
            continue
        more = f" and {len(dotted) - 1} more are" if len(dotted) > 1 else " is"
        raise PackError(
            f"{src / dotted[0]}{more} named like an image in the same folder, with .{middle} added. These look like "
            "two files for each sample, but --rename-dots would make them two samples. To combine each pair into one "
            "sample, run:\n"
            f"  shardio pack {quote(src)} {quote(dst)} --layout pairs\n"
            "To make them separate samples, add --layout classes (layout='classes')"
        )


def _training_first(name: str) -> tuple[bool, str]:
    return not name.lower().startswith("train"), name


def _top(folder: FolderFiles) -> str:
    return folder.path.partition("/")[0]


def _has_main(folder: FolderFiles, main: Collection[str]) -> bool:
    return any(is_main(name, main) for name in folder.names)


def _is_named(pattern: re.Pattern[str], name: str) -> bool:
    words = [word for word in words_of(name) if word not in _NOISE]
    return any(pattern.fullmatch(word) is not None for word in (_last_word(name), *words[-1:]))


def _last_word(name: str) -> str:
    return next(reversed(words_of(name.lower())), "")


def _join(names: Sequence[str]) -> str:
    shown = [f"{name}/" for name in names[:5]]
    return ", ".join(shown[:-1]) + (" and " if len(shown) > 1 else "") + shown[-1]
