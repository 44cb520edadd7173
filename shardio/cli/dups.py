"""``shardio dups``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.console import count, value_errors_as_usage_errors
from shardio.cli.progress import ProgressReporter
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo, printable
from shardio.looking import DEFAULT_THRESHOLD, MAX_THRESHOLD

if TYPE_CHECKING:
    from shardio.looking import DuplicateReport

SHOWN_GROUPS, SHOWN_UNREADABLE = 100, 8
"""The maximum numbers of groups and of unreadable images to print."""


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
            help="Packed directories, manifests, tars, patterns of tars, or directories of images, such as TRAIN VAL.",
        ),
    ],
    near: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_THRESHOLD,
            metavar="BITS",
            help="Also find images that look alike: their 64-bit perceptual hashes differ in at most BITS bits. 8 also "
            "finds most copies with cropped margins.",
        ),
    ] = DEFAULT_THRESHOLD,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Find only images with the same bytes. Decode no image; of shards, read only the indexes."
        ),
    ] = False,
    between: Annotated[
        bool, typer.Option("--between", help="Report only groups that have images of several sources.")
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
    """Find images that occur several times in a dataset, or in several, such as training and validation data.

    A group is a set of samples with the same image, or with images that look alike. Samples of a group with different
    classes are pointed out. Whether images look alike depends on their brightness alone, not on their colours: check
    the groups on the page before you remove anything.

    The exit code is 0 if there are no duplicates, and 1 if there are any, or if the command fails.

    Example: shardio dups TRAIN VAL --between -o leaks.html
    """
    from shardio.looking import find_duplicates, make_duplicates_page, open_source
    from shardio.storage import parse_location

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
            report = find_duplicates(
                sources,
                threshold=None if exact else near,
                is_between=between,
                start=reporter.start,
                advance=reporter.advance,
            )
        if page_location is not None:
            page = make_duplicates_page(report, sources)
            with page_location.write_whole() as file:
                file.write(page)
    if as_json:
        echo(json.dumps(_dump(report, names, is_between=between), indent=1))
    else:
        _print_groups(report, names)
        _print_counts(report, names, is_between=between)
        if out is not None:
            echo(f"wrote {out}", err=True)
    if report.groups:
        raise typer.Exit(1)


def _print_groups(report: DuplicateReport, names: Sequence[str]) -> None:
    """Print a line for each sample of the groups, with tabs between the columns."""
    from shardio.looking import describe_labels

    if report.groups:
        echo("group\tdiffers in\tsource\tkey\tclass\tshard\toffset")
    for number, group in enumerate(report.groups[:SHOWN_GROUPS], 1):
        for copy in group.copies:
            differs = (
                "" if copy is group.copies[0] else "same bytes" if copy.distance is None else f"{copy.distance} bits"
            )
            offset = "" if copy.place.offset is None else copy.place.offset
            cells = (number, differs, names[copy.source_index], copy.key, copy.label or "", copy.place.shard, offset)
            echo("\t".join(printable(cell) for cell in cells))
        if warning := describe_labels(group):
            echo(f"{number}\t{printable(warning)}")
    if (num_others := len(report.groups) - SHOWN_GROUPS) > 0:
        echo(f"and {count(num_others, 'more group')}: --json prints all of them")


def _print_counts(report: DuplicateReport, names: Sequence[str], *, is_between: bool) -> None:
    """Print how many duplicates there are, and name unreadable images on standard error."""
    for number, name in enumerate(names):
        num_groups, num_extra = report.count_within(number)
        if not is_between:
            extra = count(num_extra, "extra copy", "extra copies")
            images = count(report.num_images[number], "image")
            echo(f"within {printable(name)}: {count(num_groups, 'group')}, {extra} among {images}")
    for first, second in combinations(range(len(names)), 2):
        num_groups, in_first, in_second = report.count_between(first, second)
        echo(
            f"between {printable(names[first])} and {printable(names[second])}: {count(num_groups, 'group')}, "
            f"{count(in_first, 'sample')} of the first and {in_second} of the second"
        )
    if num_conflicts := sum(len(group.labels) > 1 for group in report.groups):
        echo(f"with different classes: {count(num_conflicts, 'group')}")
    if report.num_even:
        echo(f"{count(report.num_even, 'image')} with hardly any contrast: compared only by their bytes", err=True)
    for each in report.unreadable[:SHOWN_UNREADABLE]:
        echo(f"cannot be decoded: {printable(f'{each.key} in {names[each.source_index]}: {each.reason}')}", err=True)
    if (num_others := len(report.unreadable) - SHOWN_UNREADABLE) > 0:
        echo(f"and {count(num_others, 'more image')} that cannot be decoded: --json names all of them", err=True)


def _dump(report: DuplicateReport, names: Sequence[str], *, is_between: bool) -> dict[str, Any]:
    """Return a report as values for JSON."""
    within = {} if is_between else {name: report.count_within(number) for number, name in enumerate(names)}
    return {
        "images": dict(zip(names, report.num_images, strict=True)),
        "within": {name: {"groups": groups, "extra_copies": extra} for name, (groups, extra) in within.items()},
        "between": [
            {"sources": [names[first], names[second]], "groups": groups, "samples": samples}
            for first, second in combinations(range(len(names)), 2)
            for groups, *samples in [report.count_between(first, second)]
        ],
        "different_classes": sum(len(group.labels) > 1 for group in report.groups),
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
