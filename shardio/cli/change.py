"""Implement ``shardio append``, ``merge``, ``split``, ``reshard``, ``tile`` and ``untile``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.options import SHARDS, DatasetPath, MaxShardSize, StorageOptionTexts, read_options
from shardio.cli.terminal import ProgressReporter, echo, name_of, print_error, printable, value_errors_as_usage_errors
from shardio.packing import DEFAULT_SHARD_SIZE, Layout, SourceKind
from shardio.packing.preparing import require_kernel
from shardio.process import WorkProgress
from shardio.values import count, format_bytes

if TYPE_CHECKING:
    from shardio.shards import Manifest


MaxShardSamples = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=SHARDS, help="Maximum number of samples in a shard.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset in OUT.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")]
OutArgument = Annotated[str, typer.Argument(metavar="OUT", help="A new or empty directory, or a URL.")]


@contextmanager
def reporting(*, as_json: bool, doing: str = "copying") -> Iterator[WorkProgress]:
    """Report progress on standard error unless ``as_json`` is set, and turn wrong settings into usage errors."""
    reporter = nullcontext(WorkProgress()) if as_json else ProgressReporter(doing)
    with value_errors_as_usage_errors(), reporter as progress:
        yield progress


def print_datasets(datasets: Mapping[str, Manifest], *, as_json: bool) -> None:
    """Print the size of the dataset that was written to each directory."""
    if as_json:
        values = [summarize(out, manifest) for out, manifest in datasets.items()]
        echo(json.dumps(values[0] if len(values) == 1 else values, indent=1))
        return
    for out, manifest in datasets.items():
        size = f"{count(len(manifest.shards), 'shard')}, {format_bytes(manifest.num_bytes)}"
        echo(f"{name_of(out)}: {count(manifest.num_samples, 'sample')} in {size}")


def summarize(out: str, manifest: Manifest) -> dict[str, Any]:
    """Return the summary of a dataset as a JSON object."""
    return {
        "out": name_of(out),
        "samples": manifest.num_samples,
        "shards": len(manifest.shards),
        "bytes": manifest.num_bytes,
        "fields": list(manifest.fields),
        "classes": len(manifest.classes),
        "digest": manifest.digest,
    }


def append(
    out: Annotated[str, typer.Argument(metavar="OUT", help="A packed directory.")],
    more: Annotated[list[str], typer.Argument(metavar="MORE", help="Packed directories, or directories of images.")],
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy shards; by default, shards are hard-linked where possible.")
    ] = False,
    source_kind: Annotated[
        SourceKind,
        typer.Option(help="Kind of each source in MORE that is not a packed directory, as for shardio pack."),
    ] = "auto",
    layout: Annotated[Layout, typer.Option(help="Layout of directories of images, as for shardio pack.")] = "auto",
    num_workers: Annotated[
        int | None, typer.Option("--num-workers", "--workers", min=1, help="Worker processes that pack images.")
    ] = None,
    as_json: AsJson = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Add the samples of other packed datasets, or of directories of images, to a packed dataset.

    Images are packed with the settings and the class names of OUT. One rename at the end changes OUT: programs that
    opened it earlier keep reading its old samples. If the command is interrupted, rerun it.

    Example: shardio append out new-images
    """
    from shardio import packing
    from shardio.shards import open_table

    # `append` refuses a missing dataset.
    num_before = open_table(out).manifest.num_samples if Path(out).exists() else 0
    with reporting(as_json=as_json, doing="packing") as progress:
        manifest = packing.append(
            out,
            more,
            copy=copy,
            source_kind=source_kind,
            layout=layout,
            num_workers=num_workers,
            progress=progress,
            storage_options=read_options(storage_option),
        )
    num_added = manifest.num_samples - num_before
    if as_json:
        echo(json.dumps({**summarize(out, manifest), "added": num_added}, indent=1))
    else:
        now = f"{count(manifest.num_samples, 'sample')} in {count(len(manifest.shards), 'shard')}"
        echo(f"{name_of(out)}: added {count(num_added, 'sample')}; now {now}")


def merge(
    out: OutArgument,
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Packed directories, tars, or directories of tars.")
    ],
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    max_shard_samples: MaxShardSamples = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the samples of several datasets, one after another, to a new dataset.

    Samples are copied byte for byte, and checked against the hashes in their indexes. Keys must differ, and labels must
    have the same class names.

    Example: shardio merge all part-1 part-2 --max-shard-size 1GB
    """
    from shardio import packing

    with reporting(as_json=as_json) as progress:
        manifest = packing.merge(
            out,
            sources,
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            overwrite=overwrite,
            progress=progress,
            storage_options=read_options(storage_option),
        )
    print_datasets({out: manifest}, as_json=as_json)


def split(
    source: DatasetPath,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The directory of the new datasets, or a URL.")],
    by: Annotated[
        str, typer.Option(metavar="FRACTIONS", help="The fraction of each part; the sum must be 1.")
    ] = "0.9,0.1",
    names: Annotated[
        str, typer.Option(metavar="NAMES", help="The name of each part, and of its directory in OUT.")
    ] = "train,val",
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    max_shard_samples: MaxShardSamples = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Split a dataset into new datasets by a hash of each sample's key.

    The hash is xxh3-64 (seed 0) of the key in UTF-8. The hash, divided by 2^64, is compared with the running sums of
    the fractions, so a sample stays in its part when other samples are added. The sizes of the parts approximate the
    fractions. Samples are copied byte for byte, and checked against the hashes in their indexes.

    Example: shardio split out parts --by 0.8,0.1,0.1 --names train,val,test
    """
    from shardio import packing

    with reporting(as_json=as_json) as progress:
        manifests = packing.split(
            source,
            out,
            by=by.split(","),
            names=names.split(","),
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            overwrite=overwrite,
            progress=progress,
            storage_options=read_options(storage_option),
        )
    print_datasets({f"{name_of(out)}/{name}": manifest for name, manifest in manifests.items()}, as_json=as_json)


def reshard(
    source: DatasetPath,
    out: OutArgument,
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    max_shard_samples: MaxShardSamples = None,
    shuffle_seed: Annotated[
        int | None, typer.Option(min=0, show_default="keep the order", help="Shuffle all samples with this seed.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Copy a dataset to a new one with shards of a different size, or with its samples in a different order.

    Samples are copied byte for byte, and checked against the hashes in their indexes.

    Example: shardio reshard out small --max-shard-size 64MiB
    """
    from shardio import packing

    with reporting(as_json=as_json) as progress:
        manifest = packing.reshard(
            source,
            out,
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            shuffle_seed=shuffle_seed,
            overwrite=overwrite,
            progress=progress,
            storage_options=read_options(storage_option),
        )
    print_datasets({out: manifest}, as_json=as_json)


Files = Annotated[list[Path], typer.Argument(metavar="FILES", help="JPEG files.", exists=True, dir_okay=False)]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Directory to write the files to, under the same names. Existing files are overwritten, so this "
        "must not be the directory of the originals. Leave unset to write nothing.",
        file_okay=False,
    ),
]


def rewrite_all(files: list[Path], out: Path | None, rewrite: Callable[[bytes], bytes]) -> None:
    """Rewrite JPEG files, and report the changes and the files that cannot be rewritten.

    Args:
        files: The files.
        out: The directory to write the results to; None to write nothing.
        rewrite: A function that returns a JPEG's new bytes, or raises a ValueError with the reason why it cannot
            rewrite the JPEG.
    """
    require_kernel()
    if out is not None:
        [(name, number)] = Counter(file.name for file in files).most_common(1)
        if number > 1:
            error = f"two files are named {name}: use a separate run and directory for each"
            raise typer.BadParameter(error, param_hint="--out")
        for file in files:
            if (target := out / file.name).exists() and target.samefile(file):
                error = f"{printable(file)} is in that directory and would be overwritten: choose another directory"
                raise typer.BadParameter(error, param_hint="--out")
        out.mkdir(parents=True, exist_ok=True)
    num_failed = sum(not _rewrite(file, out, rewrite) for file in files)
    if out is None:
        echo("nothing was written: pass --out DIRECTORY to write the files", err=True)
    if num_failed:
        raise typer.Exit(1)


def _rewrite(file: Path, out: Path | None, rewrite: Callable[[bytes], bytes]) -> bool:
    from shardio.files import write_whole
    from shardio.images.formats import find_format

    before = file.read_bytes()
    try:
        after = rewrite(before)
    except ValueError as error:
        reason = error if find_format(before) == "JPEG" else "not a JPEG"
        print_error(f"{file}: not rewritten: {reason}")
        return False
    if out is not None:
        with write_whole(out / file.name) as target:
            target.write(after)
    sizes = f"{format_bytes(len(before))} → {format_bytes(len(after))} ({len(after) / len(before) - 1:+.1%})"
    echo(f"{file}: {_describe(before)} → {_describe(after)}, {sizes}")
    return True


def _describe(content: bytes) -> str:
    """Describe a JPEG's size and how it is divided into parts, as text: ``500×375, 192 tiles of 4 MCUs``."""
    from shardio.images.jpeg import read_tiles
    from shardio.images.jpeg.head import SOF2, read_head

    head = read_head(content)
    if head.process == SOF2:
        return f"{head.width}×{head.height}, progressive"
    tiles = read_tiles(content, head)
    if tiles is not None:
        return f"{head.width}×{head.height}, {count(tiles.starts.size, 'tile')} of {count(tiles.interval, 'MCU')}"
    every = head.restart_interval
    restarts = f"restart markers every {count(every, 'MCU')}" if every else "no restart markers"
    return f"{head.width}×{head.height}, {restarts}"


def tile(files: Files, out: Out = None) -> None:
    """Show how lossless tiling would change JPEG files; pass --out to write the results.

    Progressive files become baseline files with the same pixels.

    Example: shardio tile photo.jpg --out tiled
    """
    from shardio.images.tiling import tile_jpeg

    rewrite_all(files, out, tile_jpeg)


def untile(files: Files, out: Out = None) -> None:
    """Show how removing restart markers and tile tables would change JPEG files; pass --out to write the results.

    Files that were progressive before they were tiled stay baseline files.

    Example: shardio untile tiled/photo.jpg --out plain
    """
    from shardio.images.tiling import untile_jpeg

    rewrite_all(files, out, untile_jpeg)
