"""Implement ``shardio verify``, ``repair``, ``index``, ``export-index`` and ``dups``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.options import DatasetPath, StorageOptionTexts, read_access, read_classes
from shardio.cli.terminal import ProgressReporter, echo, name_of, print_error, printable, value_errors_as_usage_errors
from shardio.errors import FormatError
from shardio.files import remove_unfinished
from shardio.shards import ExportFormat
from shardio.values import count, format_bytes
from shardio.viewer import DEFAULT_THRESHOLD, MAX_THRESHOLD

if TYPE_CHECKING:
    from shardio.shards import ContentCheck, IndexReport
    from shardio.storage import Location
    from shardio.viewer import DuplicateReport


SHOWN_GROUPS, SHOWN_UNREADABLE = 100, 8
"""The maximum numbers of groups and of unreadable images that are printed."""

SHOWN = 20
"""The maximum number of problems printed for each kind, and of keys printed for each tar."""


def _echo_some(lines: Sequence[str], others: str, *, limit: int = SHOWN, err: bool = False) -> None:
    for line in lines[:limit]:
        echo(printable(line), err=err)
    if (num_others := len(lines) - limit) > 0:
        echo(others.format(num_others), err=err)


def verify(
    source: DatasetPath,
    deep: Annotated[bool, typer.Option("--deep", help="Also decode every image.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all problems as JSON.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of shards to read at a time. Leave unset to let shardio choose.")
    ] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Compare a dataset's manifest, indexes and tars, and print every problem. Nothing is written.

    Each tar is read once. A tar's size, digest and headers, and the hashes of its contents, must match its index.
    Repeated keys, tars missing from the manifest, members missing from the index, and unfinished packs are also
    problems. The exit code is 1 if there are any problems.

    Example: shardio verify out --deep
    """
    from shardio.shards import find_problems

    check_content: ContentCheck | None = None
    if deep:
        from shardio.decoding.codecs import check_image

        check_content = check_image
    access = read_access(storage_option)
    problems, kinds = [], Counter[str]()
    with ProgressReporter("verifying", "shards") as progress:
        for problem in find_problems(
            source, access, check_content=check_content, num_workers=workers, progress=progress
        ):
            kinds[problem.kind] += 1
            if as_json:
                problems.append(problem.dump())
            elif kinds[problem.kind] <= SHOWN:
                echo(f"{problem.kind}: {printable(problem)}")
    if as_json:
        values = {
            "problems": problems,
            "kinds": dict(kinds),
            "shards": progress.num_done,
            "samples": progress.num_samples,
            "bytes": progress.num_bytes,
            "elapsed_s": progress.elapsed_s,
        }
        echo(json.dumps(values, indent=1))
    else:
        for kind, num_problems in kinds.items():
            if num_problems > SHOWN:
                echo(f"{kind}: {num_problems - SHOWN} more (--json prints all)")
        found = ", ".join(f"{num_problems} {kind}" for kind, num_problems in kinds.items())
        summary = f"{count(kinds.total(), 'problem')} ({found})" if kinds else "no problems"
        rate = f"{format_bytes(progress.num_bytes / max(progress.elapsed_s, 1e-9))}/s"
        read = f"{count(progress.num_done, 'shard')}, {count(progress.num_samples, 'sample')}"
        echo(f"{summary} in {read}, {format_bytes(progress.num_bytes)} ({progress.elapsed_s:.1f} s, {rate})")
    if kinds:
        raise typer.Exit(1)


def repair(
    out: Annotated[str, typer.Argument(metavar="OUT", help="A packed directory.")],
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DATASET",
            help="The class names, if the manifest that had them is lost: a text file with one name per line, a packed "
            "directory, or class folders.",
        ),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Trust tars whose contents have changed since packing, instead of reporting them as damaged.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Rebuild the manifest and missing, stale or damaged indexes of a packed dataset from its tars.

    If a tar is truncated, a new tar with its complete samples replaces it, and the dropped keys are printed.
    Other tars are never changed. If the command is interrupted, rerun it. Run shardio verify afterwards. The exit code
    is 1 if a problem, such as an unreadable tar, remains.

    Example: shardio repair out --classes classes.txt
    """
    from shardio.shards import MANIFEST_NAME, repair as repair_folder
    from shardio.storage import find_path, parse_location

    access = read_access(storage_option)
    with value_errors_as_usage_errors():
        names = None if classes is None else read_classes(classes, access)
    folder = parse_location(out, access)
    result = repair_folder(folder, classes=names, accept_changes=accept_changes)
    if result.manifest is not None and (path := find_path(folder)) is not None:
        names_of_tars = [shard.name for shard in result.manifest.shards]
        targets = {MANIFEST_NAME, *names_of_tars, *(name + ".idx" for name in names_of_tars)}
        remove_unfinished(path, targets)  # An earlier repair may have been killed.
    if as_json:
        values = {
            "actions": [action.dump() for action in result.actions],
            "problems": [problem.dump() for problem in result.problems],
            "classes_lost": result.are_classes_lost,
        }
        echo(json.dumps(values, indent=1))
    else:
        for action in result.actions:
            echo(printable(f"{action.where}: {action.message}"))
            dropped = [f"  dropped sample {key}" for key in action.dropped]
            _echo_some(dropped, "  and {} more samples (--json prints all)")
        lines = [f"{problem.kind}: {problem}" for problem in result.problems]
        _echo_some(lines, "and {} more problems (--json prints all)", err=True)
        if (manifest := result.manifest) is not None:
            size = f"{count(len(manifest.shards), 'shard')}, {count(manifest.num_samples, 'sample')}"
            done = count(len(result.actions), "file") + " written" if result.actions else "nothing to repair"
            echo(f"{done}: {size}, {format_bytes(manifest.num_bytes)}")
    if result.are_classes_lost:
        echo(
            "warning: the class names were in the lost manifest. To restore them, run: shardio repair "
            f"{name_of(out)} --classes FILE (one name per line, by label), or --classes DATASET",
            err=True,
        )
    if result.problems:
        raise typer.Exit(1)


def index(
    tars: Annotated[
        list[str], typer.Argument(metavar="TARS", help="Tars, compressed tars (.tar.gz, .tgz), or directories of them.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all keys.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Index tars that other tools packed, and report what they contain. The tars are not changed.

    The index is written next to the tar if possible, or else to the user's cache folder.
    Tars compressed with gzip are also indexed: ls, cat and extract can then read them, but datasets cannot.
    Members with the same key become one sample, even if they are not adjacent in the tar.
    If all tars of a directory are indexed, a list of them is written there, so datasets open faster.
    The exit code is 1 if a tar cannot be indexed, or if several of its samples have the same key.

    Example: shardio index data/*.tar
    """
    from shardio.shards import IndexReport, index_tar, write_tar_lists
    from shardio.storage import parse_location

    access = read_access(storage_option)
    found = _find_tars([parse_location(source, access) for source in tars])
    reports, dumped, failures = list[IndexReport](), list[dict[str, Any]](), dict[str, str]()
    has_repeated = False
    with ProgressReporter("indexing", "tars") as progress:
        progress.start(len(found))
        for tar in found:
            try:
                report = index_tar(tar)
            except (FormatError, OSError) as error:
                failures[str(tar)] = str(error)
                progress.advance(1)
                print_error(error)
                continue
            progress.advance(1, tar.stat().size)
            has_repeated = has_repeated or bool(report.repeated)
            reports.append(report)
            if as_json:
                dumped.append(_dump(report))
            else:
                _print(report)
    write_tar_lists(reports)
    if as_json:
        echo(json.dumps({"tars": dumped, "failures": failures}, indent=1))
    if failures or has_repeated:
        raise typer.Exit(1)


def _find_tars(sources: list[Location]) -> list[Location]:
    from shardio.shards import MANIFEST_NAME, is_compressed

    found: list[Location] = []
    for location in sources:
        if (location / MANIFEST_NAME).exists():
            raise FormatError(
                f"{location} is a packed dataset, whose indexes were written with it. To rebuild missing or damaged "
                f"ones, run: shardio repair {location}"
            )
        if location.is_folder():
            names = [name for name in location.list() if not name.startswith(".")]
            inside = [location / name for name in names]
            inside = [tar for tar in inside if tar.name.lower().endswith(".tar") or is_compressed(tar)]
            if not inside:
                raise FileNotFoundError(f"the directory {location} holds no *.tar, *.tar.gz or *.tgz")
            found += inside
        elif location.exists():
            found.append(location)
        else:
            raise FileNotFoundError(f"no such tar or directory: {location}")
    return list(dict.fromkeys(found))


def _dump(report: IndexReport) -> dict[str, Any]:
    header, contents = report.columns.header, report.contents
    return {
        "tar": str(report.tar),
        "index": str(report.index),
        "was_current": contents is None,
        "samples": header.num_samples,
        "fields": report.fields,
        "bytes": header.num_bytes,
        "compression": header.compression,
        "added_by_macos": None if contents is None else contents.num_added_by_macos,
        "without_key": None if contents is None else contents.num_without_key,
        "skipped": [] if contents is None else contents.skipped,
        "not_adjacent": report.scattered,
        "repeated": report.repeated,
    }


def _print(report: IndexReport) -> None:
    header, contents = report.columns.header, report.contents
    fields = ", ".join(f"{field} ({num_samples})" for field, num_samples in report.fields.items())
    size = format_bytes(header.num_bytes) + (" decompressed" if header.compression else "")
    echo(printable(f"{report.tar}: {count(header.num_samples, 'sample')}, {size}, fields: {fields or 'none'}"))
    if contents is not None and (num_skipped := contents.num_added_by_macos + contents.num_without_key):
        names = ", ".join(contents.skipped) + (", …" if num_skipped > len(contents.skipped) else "")
        echo(printable(f"  skipped {count(num_skipped, 'member')} that have no key or were added by macOS: {names}"))
    if scattered := report.scattered:
        text = (
            f"  the members of {count(len(scattered), 'sample')}, such as {scattered[0]}, are not adjacent (tar "
            "without --sort=name?): datasets gather them, but streams and WebDataset cannot"
        )
        echo(printable(text))
    lines = [f"  several samples have the key {key}" for key in report.repeated]
    _echo_some(lines, "  and {} more such keys (--json prints all)")
    echo(printable(f"  index: {report.index}{' (already current)' if contents is None else ''}"))


def export_index(
    source: DatasetPath,
    format: Annotated[  # noqa: A002  # It names the option.
        ExportFormat,
        typer.Option(
            help="wids: wids.json, for WebDataset's wids. dali: a NAME.idx for each NAME.tar. timm: _info.json. "
            "energon: .nv-meta and NAME.tar.idx, for Megatron-Energon, in a different directory. webdataset-sizes: "
            "sizes.json, for open_clip."
        ),
    ],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", show_default="the shards' directory", help="The directory to write to.")
    ] = None,
    split: Annotated[str, typer.Option(help="The name of the split, for timm and energon.")] = "train",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths of the files as JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the index that another tool needs to read a dataset. The shards are unchanged.

    Megatron-Energon's index of a tar has the same name as shardio's, so it needs a different directory. The tars are
    hard-linked into that directory, or copied if linking is impossible.

    Example: shardio export-index out --format dali
    """
    from shardio import shards
    from shardio.storage import parse_location

    access = read_access(storage_option)
    with value_errors_as_usage_errors():
        table, into = shards.open_table(source, access), None if out is None else parse_location(out, access)
        written = shards.export_index(table, format, into, split=split, overwrite=overwrite)
    if as_json:
        echo(json.dumps({"files": [str(location) for location in written]}, indent=1))
    else:
        echo(f"wrote {count(len(written), 'file')} to {printable(written[0].folder if out is None else name_of(out))}")


def check_html_path(path: str | None) -> str | None:
    """Return the path of a page to write; raise a usage error unless it ends in .html."""
    if path is not None and not path.endswith(".html"):
        raise typer.BadParameter(f"{path!r} must end in .html")
    return path


def dups(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Packed directories, manifests, tars, patterns of tars, or directories of images, e.g. TRAIN VAL.",
        ),
    ],
    near: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_THRESHOLD,
            metavar="BITS",
            help="Also find similar images: their 64-bit perceptual hashes differ in at most BITS bits. "
            "A value of 8 also finds most copies with cropped margins.",
        ),
    ] = DEFAULT_THRESHOLD,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Find only images with the same bytes: decode no images, and read only the indexes of shards.",
        ),
    ] = False,
    between: Annotated[
        bool, typer.Option("--between", help="Report only groups with images from several sources.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", callback=check_html_path, metavar="FILE.html", help="Also write a page with the images."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Find images that occur several times in one or more datasets, such as training and validation data.

    A group is a set of samples with the same image, or with similar images. The report points out groups whose samples
    have different classes. Only the brightness of images is compared, not their colors: check the groups on the page
    before you remove anything.

    The exit code is 0 if there are no duplicates, and 1 if there are any, or if the command fails.

    Example: shardio dups TRAIN VAL --between -o leaks.html
    """
    from shardio.storage import parse_location
    from shardio.viewer import find_duplicates, make_duplicates_page, open_source

    if between and len(names) < 2:
        raise typer.BadParameter("needs several sources, such as TRAIN VAL", param_hint="--between")
    access = read_access(storage_option)
    with ExitStack() as stack, value_errors_as_usage_errors():
        page_location = None if out is None else parse_location(out, access)
        resolved = [parse_location(name, access).resolve() for name in names]
        if len(set(resolved)) < len(resolved):
            raise ValueError("a source is named twice, so all its images would be duplicates: name it once")
        sources = [stack.enter_context(open_source(name, access)) for name in names]
        opened = stack.pop_all()
    with opened:
        with ProgressReporter("hashing", "images") as reporter:
            report = find_duplicates(sources, threshold=None if exact else near, is_between=between, progress=reporter)
        if page_location is not None:
            page = make_duplicates_page(report, sources)
            with page_location.write_whole() as file:
                file.write(page)
    if as_json:
        echo(json.dumps(_dump_groups(report, names, is_between=between), indent=1))
    else:
        _print_groups(report, names)
        _print_counts(report, names, is_between=between)
        if out is not None:
            echo(f"wrote {out}", err=True)
    if report.groups:
        raise typer.Exit(1)


def _print_groups(report: DuplicateReport, names: Sequence[str]) -> None:
    from shardio.viewer import describe_distance, describe_labels

    if report.groups:
        echo("group\tdiffers in\tsource\tkey\tclass\tshard\toffset")
    for number, group in enumerate(report.groups[:SHOWN_GROUPS], 1):
        for copy in group.copies:
            differs = "" if copy is group.copies[0] else describe_distance(copy)
            offset = "" if copy.place.offset is None else copy.place.offset
            cells = (number, differs, names[copy.source_index], copy.key, copy.label or "", copy.place.shard, offset)
            echo("\t".join(printable(cell) for cell in cells))
        if warning := describe_labels(group):
            echo(f"{number}\t{printable(warning)}")
    if (num_others := len(report.groups) - SHOWN_GROUPS) > 0:
        echo(f"and {count(num_others, 'more group')}: --json prints all of them")


def _print_counts(report: DuplicateReport, names: Sequence[str], *, is_between: bool) -> None:
    for number, name in enumerate(names):
        num_groups, num_extra = report.count_within(number)
        if not is_between:
            extra = count(num_extra, "extra copy", "extra copies")
            images = count(report.num_images[number], "image")
            echo(f"within {printable(name)}: {count(num_groups, 'group')}, {extra} among {images}")
    for first, second, num_groups, in_first, in_second in report.list_between():
        echo(
            f"between {printable(names[first])} and {printable(names[second])}: {count(num_groups, 'group')}, "
            f"{count(in_first, 'sample')} of the first and {in_second} of the second"
        )
    if report.num_conflicts:
        echo(f"with different classes: {count(report.num_conflicts, 'group')}")
    if report.num_even:
        echo(f"{count(report.num_even, 'image')} with hardly any contrast: compared only by their bytes", err=True)
    lines = [
        f"cannot be decoded: {each.key} in {names[each.source_index]}: {each.reason}" for each in report.unreadable
    ]
    num_others = count(max(0, len(lines) - SHOWN_UNREADABLE), "more image")
    others = f"and {num_others} that cannot be decoded: --json names all of them"
    _echo_some(lines, others, limit=SHOWN_UNREADABLE, err=True)


def _dump_groups(report: DuplicateReport, names: Sequence[str], *, is_between: bool) -> dict[str, Any]:
    within = {} if is_between else {name: report.count_within(number) for number, name in enumerate(names)}
    return {
        "images": dict(zip(names, report.num_images, strict=True)),
        "within": {name: {"groups": groups, "extra_copies": extra} for name, (groups, extra) in within.items()},
        "between": [
            {"sources": [names[first], names[second]], "groups": groups, "samples": samples}
            for first, second, groups, *samples in report.list_between()
        ],
        "different_classes": report.num_conflicts,
        "groups": [
            {
                "same_bytes": group.is_exact,
                "classes": group.labels,
                "samples": [
                    {
                        "source": names[copy.source_index],
                        "key": copy.key,
                        "class": copy.label,
                        "shard": copy.place.shard or None,
                        "offset": copy.place.offset,
                        "bits": copy.distance,
                    }
                    for copy in group.copies
                ],
            }
            for group in report.groups
        ],
        "undecodable": [
            {"source": names[each.source_index], "key": each.key, "reason": each.reason} for each in report.unreadable
        ],
        "even": report.num_even,
    }
