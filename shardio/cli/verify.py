"""``shardio verify``, ``repair``, ``index`` and ``export-index``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.options import StorageOptionTexts, read_access, read_classes
from shardio.cli.terminal import ProgressReporter, count, echo, name_of, printable, value_errors_as_usage_errors
from shardio.errors import FormatError
from shardio.files import remove_unfinished
from shardio.shards import ExportFormat
from shardio.values import format_bytes

if TYPE_CHECKING:
    from shardio.shards.foreign import IndexReport
    from shardio.shards.verifying import ContentCheck
    from shardio.storage import Location


SHOWN = 20
"""The maximum number of problems of each kind, and of keys of each tar, to print."""


def verify(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
    ],
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all problems as JSON.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of shards to read at a time. Leave unset to let shardio choose."),
    ] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Compare a dataset's manifest, indexes and tars, and print every problem. Nothing is written.

    Each tar is read once. Its size, digest, headers and the hashes of its contents must match its index.
    Repeated keys, tars that the manifest lacks, members that the index lacks, and unfinished packs are problems, too.
    The exit code is 1 if there is any problem.

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
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A packed directory.")],
    classes: Annotated[
        Path | None,
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
            help="Trust tars whose contents changed since they were packed. By default, they are reported as damaged.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Rebuild missing, stale and damaged indexes and the manifest of a packed dataset from its tars.

    If a tar is truncated, a new tar with its complete samples replaces it, and the dropped keys are printed.
    Other tars are never changed. Rerun the command if it is interrupted, and run shardio verify afterwards.
    The exit code is 1 if a problem remains, such as a tar that cannot be read.

    Example: shardio repair out --classes classes.txt
    """
    from shardio.shards import MANIFEST_NAME
    from shardio.shards.repairing import repair as repair_folder
    from shardio.storage import find_path, parse_location

    access = read_access(storage_option)
    with value_errors_as_usage_errors():
        names = None if classes is None else read_classes(classes, access)
    folder = parse_location(out, access)
    result = repair_folder(folder, classes=names, accept_changes=accept_changes)
    if result.manifest is not None and find_path(folder) is not None:
        names_of_tars = [shard.name for shard in result.manifest.shards]
        targets = {MANIFEST_NAME, *names_of_tars, *(name + ".idx" for name in names_of_tars)}
        remove_unfinished(out, targets)  # An earlier repair may have been killed.
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
            for key in action.dropped[:SHOWN]:
                echo(printable(f"  dropped sample {key}"))
            if len(action.dropped) > SHOWN:
                echo(f"  and {len(action.dropped) - SHOWN} more samples (--json prints all)")
        for problem in result.problems[:SHOWN]:
            echo(f"{problem.kind}: {printable(problem)}", err=True)
        if len(result.problems) > SHOWN:
            echo(f"and {len(result.problems) - SHOWN} more problems (--json prints all)", err=True)
        if (manifest := result.manifest) is not None:
            size = f"{count(len(manifest.shards), 'shard')}, {count(manifest.num_samples, 'sample')}"
            done = count(len(result.actions), "file") + " written" if result.actions else "nothing to repair"
            echo(f"{done}: {size}, {format_bytes(manifest.num_bytes)}")
    if result.are_classes_lost:
        echo(
            "warning: the class names were in the lost manifest. To give them again: shardio repair "
            f"{name_of(out)} --classes FILE (one name per line, by label), or --classes DATASET",
            err=True,
        )
    if result.problems:
        raise typer.Exit(1)


def index(
    tars: Annotated[
        list[Path],
        typer.Argument(metavar="TARS", help="Tars, compressed tars (.tar.gz, .tgz), or directories of them."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all keys.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Index tars that other tools packed, and report what they contain. The tars are not changed.

    The index is written next to the tar if possible, otherwise to the user's cache folder.
    Tars compressed with gzip are indexed, too: ls, cat and extract then read them. Datasets do not.
    Members with the same key become one sample, even if they are not adjacent in the tar.
    The exit code is 1 if a tar cannot be indexed, or if several of its samples have the same key.

    Example: shardio index data/*.tar
    """
    from shardio.shards.foreign import index_tar
    from shardio.storage import parse_location

    access = read_access(storage_option)
    found = _find_tars([parse_location(source, access) for source in tars])
    reports, failures = list[dict[str, Any]](), dict[str, str]()
    has_repeated = False
    with ProgressReporter("indexing", "tars") as progress:
        progress.start(len(found))
        for tar in found:
            try:
                report = index_tar(tar)
            except (FormatError, OSError) as error:
                failures[str(tar)] = str(error)
                progress.advance(1)
                echo(f"error: {error}", err=True)
                continue
            progress.advance(1, tar.stat().size)
            has_repeated = has_repeated or bool(report.repeated)
            if as_json:
                reports.append(_dump(report))
            else:
                _print(report)
    if as_json:
        echo(json.dumps({"tars": reports, "failures": failures}, indent=1))
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
    return {
        "tar": str(report.tar),
        "index": str(report.index),
        "was_current": report.was_current,
        "samples": report.num_samples,
        "fields": report.fields,
        "bytes": report.num_bytes,
        "compression": report.compression,
        "added_by_macos": report.num_added_by_macos,
        "without_key": report.num_without_key,
        "skipped": list(report.skipped),
        "not_adjacent": list(report.scattered),
        "repeated": list(report.repeated),
    }


def _print(report: IndexReport) -> None:
    fields = ", ".join(f"{field} ({num_samples})" for field, num_samples in report.fields.items())
    size = format_bytes(report.num_bytes) + (" decompressed" if report.compression else "")
    echo(printable(f"{report.tar}: {count(report.num_samples, 'sample')}, {size}, fields: {fields or 'none'}"))
    if num_skipped := (report.num_added_by_macos or 0) + (report.num_without_key or 0):
        names = ", ".join(report.skipped) + (", …" if num_skipped > len(report.skipped) else "")
        echo(printable(f"  skipped {count(num_skipped, 'member')} without a key, or added by macOS: {names}"))
    if report.scattered:
        echo(
            printable(
                f"  the members of {count(len(report.scattered), 'sample')} are not adjacent (tar without "
                f"--sort=name?), such as those of {report.scattered[0]}: datasets gather them, streams and WebDataset "
                "cannot"
            )
        )
    for key in report.repeated[:SHOWN]:
        echo(printable(f"  several samples have the key {key}"))
    if len(report.repeated) > SHOWN:
        echo(f"  and {len(report.repeated) - SHOWN} more such keys (--json prints all)")
    echo(printable(f"  index: {report.index}{' (already current)' if report.was_current else ''}"))


def export_index(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
    ],
    format: Annotated[  # noqa: A002  # The name of the option.
        ExportFormat,
        typer.Option(
            help="wids: wids.json, for WebDataset's wids. dali: a NAME.idx for each NAME.tar. timm: _info.json. "
            "energon: .nv-meta and NAME.tar.idx, for Megatron-Energon, in another directory. webdataset-sizes: "
            "sizes.json, for open_clip."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", show_default="that of the shards", help="The directory to write to.")
    ] = None,
    split: Annotated[str, typer.Option(help="The name of the split, for timm and energon.")] = "train",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths of the files as JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the index that another tool needs to read a dataset. The shards are unchanged.

    Megatron-Energon's index of a tar has the same name as shardio's, so it needs another directory, to which the tars
    are hard-linked, or copied if that is impossible.

    Example: shardio export-index out --format dali
    """
    from shardio import shards

    access = read_access(storage_option)
    with value_errors_as_usage_errors():
        written = shards.export_index(source, format, out, split=split, overwrite=overwrite, access=access)
    if as_json:
        echo(json.dumps({"files": [str(location) for location in written]}, indent=1))
    else:
        echo(f"wrote {count(len(written), 'file')} to {printable(written[0].folder if out is None else out)}")
