"""The layouts of a source: pair files, select splits, and refuse sources that look like another layout."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath

import numpy as np

from shardio.errors import PackError
from shardio.packing.pack_call import OnIncomplete
from shardio.packing.sources.files import SHOWN, FileName, FileTable
from shardio.packing.sources.labels import ALL_SPLITS
from shardio.shards import is_split, words_of
from shardio.storage import FolderFiles, Location, find_url

OR_CONFIRM = "If the folders are classes, pass --layout classes (layout='classes')"

# Words in the names of folders, in lower case.
IMAGES = re.compile(r"images?|imgs?|jpegimages|photos?|pictures?|rgb|inputs?")
COMPANIONS = re.compile(
    r"masks?|labels?|annotations?|captions?|segmentation(s|class|object)?|seg|semantic|gt|groundtruth|truth|targets?"
    r"|depths?|b?box(es)?|anno?s?|trimaps?|mattes?|disparity"
)
_NOISE = {"bit", "coarse", "dir", "fine", "folder", "left", "right", "tr", "ts"}
"""Words that may stand beside these: img_dir, leftImg8bit, gtFine, imagesTr."""

COPIES = {"s3": "aws s3 sync {} {}", "gs": "gcloud storage rsync --recursive {} {}"}
"""The command that copies a directory from a URL, by the URL's scheme."""

_TOOL_FILES = frozenset(("classes.txt", "notes.json"))
"""Files that annotation tools write into the folder of labels: YOLO's class names, Label Studio's description."""


class Pairing:
    """Finds the sample of each file by means of the images.

    A name may contain the name of its top folder, and more words after it, as in Cityscapes:
    ``leftImg8bit/x_leftImg8bit.png`` and ``gtFine/x_gtFine_labelIds.png`` belong to ``x``. Companions may be in folders
    below their top folder, as in Oxford Pets: ``annotations/trimaps/x.png``.

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
        """Return the stem of a file's sample, and the file's name in it. The field is empty without a suffix.

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
    """Split a stem before the name of the top folder. The second part is empty without that name."""
    found = _pattern(top).search(stem)
    return (stem[: found.start()], stem[found.start() :]) if found is not None and found.start() else (stem, "")


def _word(tail: str, top: str) -> str:
    found = _pattern(top).match(tail)
    return found[0] if found is not None else ""


@lru_cache(64)
def _pattern(top: str) -> re.Pattern[str]:
    """Return the pattern of a folder's name, or its singular, in the names of its files, as in masks/a_mask.png."""
    words = "|".join(re.escape(word) for word in dict.fromkeys((top, top.removesuffix("s"))) if word)
    return re.compile(rf"[_-]({words})(?=[_-]|$)", re.IGNORECASE)


def refuse_url(src: Path, dst: Location) -> None:
    """Raise PackError if the source is a URL or a command."""
    if str(src).startswith("pipe:") and not src.exists():
        raise PackError(
            "the source is a pipe:, but pack reads only local directories. Write the output of the command to a file, "
            f"then pack that:\n  (the command) > images/000000.tar\n  shardio pack images {quote(dst)}"
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


def select_split(
    src: Path, folders: Sequence[FolderFiles], main: Collection[str], name: str | None
) -> Sequence[FolderFiles]:
    """Return the files in folders that have the name of a split; all files if no split is chosen.

    Raises:
        PackError: If there is no such folder.
    """
    if name in (None, ALL_SPLITS):
        return folders
    found = [folder for folder in folders if name in folder.path.split("/")]
    if not any(_has_main(folder, main) for folder in found):
        _, splits = find_splits(folders, main)
        there = f"it holds the splits {_join(splits)}" if splits else "it holds no splits: omit the option"
        raise PackError(f"no folder of {src} with files to pack is called {name!r}, as --source-split says: {there}")
    return found


def find_splits(folders: Sequence[FolderFiles], main: Collection[str]) -> tuple[str, list[str]]:
    """Return the folder that holds several splits of a dataset, "" for the source, and the names of the splits."""
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


def refuse_splits_as_classes(
    src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str], *, pairs: bool = False
) -> None:
    """Raise PackError, with the right commands, if splits of a dataset would become classes.

    Args:
        src: The source.
        dst: The destination, which the commands name.
        folders: All files.
        main: The fields that make a file a sample.
        pairs: Whether the layout is ``pairs``.
    """
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


def refuse_merged_splits(
    src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str], options: str, *, has_classes: bool
) -> None:
    """Raise PackError, with the right commands, if splits of a dataset would become one dataset.

    Args:
        src: The source.
        dst: The destination, which the commands name.
        folders: All files.
        main: The fields that make a file a sample.
        options: The options that the commands repeat.
        has_classes: Whether the source's folders are classes.
    """
    parent, splits = find_splits(folders, main)
    if not splits or (not parent and has_classes):  # Then the splits would be classes, which is another error.
        return
    options = f" {options}" if options else ""
    lines = [
        f"  shardio pack {quote(src)} {quote(dst / name)}{options} --source-split {quote(name)}" for name in splits
    ]
    if has_classes:
        lines[1:] = [f"{line} --classes {quote(dst / splits[0])}" for line in lines[1:]]
    raise PackError(
        f"{src / parent} holds {_join(splits)}: these look like the splits of a dataset, but would be packed as one. "
        "Pack each split:\n"
        + "\n".join(lines)
        + f"\nTo pack all of them as one dataset, pass --source-split {ALL_SPLITS} (source_split={ALL_SPLITS!r})"
    )


def refuse_ambiguous_layouts(
    src: Path, dst: Location, folders: Sequence[FolderFiles], main: Collection[str], *, rename_dots: bool
) -> None:
    """Raise PackError, with the right command, if the files look like a layout other than class folders.

    Without this check, folders that are not classes would become classes. Images in different class folders may have
    the same names, so files count as pairs only if the names of their folders also suggest it.

    Args:
        src: The source.
        dst: The destination, which the command names.
        folders: All files.
        main: The fields that make a file a sample.
        rename_dots: Whether dots in stems become underscores.
    """
    refuse_splits_as_classes(src, dst, folders, main)
    _refuse_companions_of_split(src, folders, main)
    _refuse_parallel_folders(src, dst, folders, main)
    _refuse_one_folder_of_folders(src, dst, folders, main)
    if rename_dots:
        _refuse_companions(src, dst, folders, main)


def is_main(name: str, main: Collection[str]) -> bool:
    """Return whether a file's suffix is one of the fields that make a file a sample."""
    return split_suffix(name)[1][1:].lower() in main


def find_images_folder(folders: Sequence[FolderFiles]) -> str | None:
    """Return the name of the folder of images if there are other folders, such as masks/; otherwise None.

    Raises:
        PackError: If several folders are named like a folder of images.
    """
    names = sorted({_top(folder) for folder in folders if folder.path and folder.names})
    found = [name for name in names if _is_named(IMAGES, name)]
    if len(names) < 2 or not found:
        return None
    if len(found) > 1:
        raise PackError(
            f"several folders are named like a folder of images ({', '.join(found)}), but the layout 'pairs' allows "
            "only one: move the others out of the source"
        )
    return found[0]


def find_main_stems(folder: FolderFiles, main: Collection[str]) -> frozenset[str]:
    """Return the stems of a folder's main files without a dot in their stem: a.mask.png can belong to a.jpg."""
    stems = (split_suffix(name)[0] for name in folder.names if is_main(name, main))
    return frozenset(stem for stem in stems if "." not in stem)


def check_pairs(
    src: Path,
    images: str | None,
    samples: FileTable,
    ignored: list[str],
    main: Collection[str],
    on_incomplete: OnIncomplete,
) -> FileTable:
    """Return the samples to pack, after checking that they have the same companions (masks, labels, captions).

    Args:
        src: The source.
        images: The name of the folder of images, if there is one.
        samples: The samples.
        ignored: The paths of files that do not belong to a sample, relative to the source. The paths of samples that
            are left out are added to it.
        main: The fields that make a file a sample.
        on_incomplete: The treatment of a sample that lacks a companion. Unless it is ``raise``, companions without an
            image are ignored.

    Raises:
        PackError: If there are no pairs, or companions or their images are missing.
    """
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
                f"{image} has no {missing[0]!r} file, but {num_found} of {len(samples)} samples "
                f"{'has' if num_found == 1 else 'have'} one: add the file, or remove all files of this sample. To pack "
                "only samples that have all files, pass --on-incomplete skip (on_incomplete='skip'). To pack all "
                "samples, each with the files that it has, pass --on-incomplete keep"
            )
    names = {name for kind in samples.kinds for name in kind if "." in name.field}
    orphans = [path for path in ignored if _is_companion(PurePosixPath(path), images, names, main)]
    if orphans:
        more = [f"and {len(orphans) - SHOWN} more"] if len(orphans) > SHOWN else []
        one, several = "1 file belongs to an image that is", f"{len(orphans)} files belong to images that are"
        raise PackError(
            "\n".join(
                [
                    f"{one if len(orphans) == 1 else several} missing:",
                    *(str(src / path) for path in orphans[:SHOWN]),
                    *more,
                    "Add the images or remove these files. To ignore them, pass --on-incomplete skip "
                    "(on_incomplete='skip')",
                ]
            )
        )
    return samples


def _is_companion(file: PurePosixPath, images: str | None, names: Collection[FileName], main: Collection[str]) -> bool:
    """Return whether a file looks like a companion without its image: samples have its field, or its kind of image."""
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
                    "classes. To make each pair of files with the same name one sample, run:\n"
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
                    f"Move them into a folder of their own, rename {split}/ to images/ and {other}/ to masks/ there, "
                    f"and pass --layout pairs. {OR_CONFIRM}"
                )


def _are_common_numbers(stems: frozenset[str], others: Sequence[set[str]]) -> bool:
    """Return whether stems differ only in numbers and most other folders have them, so that they do not show pairs."""
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
        # photo.1.jpg is a separate photo. So is photo.edited.jpg if there are few such files.
        is_rare = 2 * len(dotted) < num_undotted
        if middle.isdigit() or (is_rare and not COMPANIONS.fullmatch(_last_word(middle))):
            continue
        more = f" and {len(dotted) - 1} more are" if len(dotted) > 1 else " is"
        raise PackError(
            f"{src / dotted[0]}{more} named like an image in the same folder, with .{middle} added. These look like "
            "two files for each sample, but --rename-dots would make them two samples. To make each pair one sample, "
            "run:\n"
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
