"""Write the indexes of other tools next to the shards of a dataset, or to a folder of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from shardio.errors import FormatError
from shardio.shards.exporting import (
    ENERGON_FOLDER,
    ExportFormat,
    make_dali,
    make_energon_index,
    make_energon_meta,
    make_sizes,
    make_timm,
    make_wids,
)
from shardio.shards.index import INDEX_SUFFIX
from shardio.shards.index_columns import read_columns
from shardio.shards.manifest import MANIFEST_NAME
from shardio.shards.open_index import read_header
from shardio.shards.sources import DatasetSource, open_table
from shardio.shards.table import ShardTable
from shardio.storage import Location, RemoteAccess, link_or_copy, map_locations, parse_location
from shardio.values import check_choice, check_flag


def export_index(
    src: DatasetSource,
    format: ExportFormat,  # noqa: A002  # The command has the option --format.
    out: str | os.PathLike[str] | None = None,
    *,
    split: str = "train",
    overwrite: bool = False,
    access: RemoteAccess | None = None,
) -> list[Location]:
    """Write another tool's index of a dataset. The shards and their own indexes are unchanged.

    ``wids`` writes ``wids.json``; ``dali`` a ``NAME.idx`` for each ``NAME.tar``; ``timm`` ``_info.json``;
    ``webdataset-sizes`` ``sizes.json``. ``energon`` writes ``.nv-meta`` and a ``NAME.tar.idx`` for each tar.
    Because that is the name of shardio's own index, too, it needs another folder, ``out``, to which the tars are
    hard-linked, or copied if that is impossible.

    Args:
        src: A packed directory, or tars of any tool.
        format: The format.
        out: The folder to write to; by default, that of the shards.
        split: The name of the split, for ``timm`` and ``energon``.
        overwrite: Whether to replace files that exist.
        access: How remote shards and a remote ``out`` are reached.

    Returns:
        The files that were written.

    Raises:
        FileExistsError: If a file exists, and ``overwrite`` is off.
        FileNotFoundError: If the source does not exist or holds no tars.
        FormatError: If the source is damaged, or the format cannot describe it.
        ValueError: If an argument is invalid.
    """
    chosen: ExportFormat = check_choice("format", format, ExportFormat)
    overwrite = check_flag("overwrite", overwrite)
    if not split or split != split.strip() or "tar" in split or ".." in split:  # timm takes such names for patterns.
        raise ValueError(f"split must be a name such as 'train', and not contain 'tar' or '..', got {split!r}")
    table = open_table(src, access)
    home = _find_home(table)
    folder = home if out is None else parse_location(out, access)
    if chosen == "energon" and folder.resolve() == home.resolve():
        raise ValueError(
            "Megatron-Energon's index of NAME.tar is NAME.tar.idx, which is also shardio's: pass another directory as "
            "--out (out=…), to which the tars are linked"
        )
    if chosen != "dali":  # Its index has an offset for each member.
        _refuse_scattered(table, chosen)
    files = _list_files(chosen, table, split, _find_prefix(folder, home))
    links = [(tar, folder / tar.name) for tar in table.tars] if chosen == "energon" else []
    if chosen == "energon" and (folder / MANIFEST_NAME).exists():
        raise FileExistsError(f"{folder} holds a packed dataset, whose indexes would be replaced: choose another --out")
    links = [(tar, target) for tar, target in links if not _is_link(tar, target)]
    for location in (folder / name for name, _ in files):
        if location.exists() and not overwrite:
            raise FileExistsError(f"{location} exists: pass --overwrite (overwrite=True) to replace it")
    for tar, target in links:
        link_or_copy(tar, target)
    for name, make in files:
        content = make()
        with (folder / name).write_whole() as file:
            file.write(content)
    return [folder / name for name, _ in files]


def _list_files(
    chosen: ExportFormat, table: ShardTable, split: str, prefix: str
) -> list[tuple[str, Callable[[], bytes]]]:
    """Return the path of each file to write, relative to the folder, and a function that makes its content."""
    manifest = table.manifest
    if chosen == "wids":
        return [("wids.json", partial(make_wids, manifest, prefix))]
    if chosen == "timm":
        return [("_info.json", partial(make_timm, manifest, split, prefix))]
    if chosen == "webdataset-sizes":
        return [("sizes.json", partial(make_sizes, manifest))]
    if chosen == "dali":
        names = [tar.name.partition(".")[0] + INDEX_SUFFIX for tar in table.tars]
        if len(set(names)) < len(names):
            raise FormatError(
                "DALI's indexes of some tars would have the same name: rename tars that differ after a dot"
            )
        return [(name, partial(_make_dali, index)) for name, index in zip(names, table.indexes, strict=True)]
    files: list[tuple[str, Callable[[], bytes]]] = [
        (tar.name + INDEX_SUFFIX, partial(_make_energon_index, index))
        for tar, index in zip(table.tars, table.indexes, strict=True)
    ]
    meta = make_energon_meta(manifest, split)
    return [*files, *((f"{ENERGON_FOLDER}/{name}", partial(bytes, content)) for name, content in meta.items())]


def _refuse_scattered(table: ShardTable, chosen: ExportFormat) -> None:
    """Raise FormatError if the members of a sample are not adjacent. Readers of the format expect that they are."""
    for tar, header in zip(table.tars, map_locations(read_header, table.indexes), strict=True):
        if header.num_scattered:
            raise FormatError(
                f"the members of {header.num_scattered} samples of {tar} are not adjacent, but readers of the format "
                f"{chosen} expect them to be: pack the tars first (shardio pack), then export the index of the new ones"
            )


def _is_link(tar: Location, target: Location) -> bool:
    """Return whether a tar was linked before; raise FileExistsError if another file is there."""
    if not target.exists():
        return False
    if target.stat().identity != tar.stat().identity:
        raise FileExistsError(f"{target} exists, and is not a link to {tar}: choose another directory (--out)")
    return True


def _make_dali(index: Location) -> bytes:
    return make_dali(read_columns(index))


def _make_energon_index(index: Location) -> bytes:
    return make_energon_index(read_columns(index))


def _find_home(table: ShardTable) -> Location:
    """Return the folder of all shards; raise ValueError if there are several."""
    homes = {tar.folder for tar in table.tars}
    if len(homes) > 1:
        raise ValueError("the tars are in several directories: merge them first (shardio merge)")
    return homes.pop()


def _find_prefix(folder: Location, home: Location) -> str:
    """Return the path from a folder to the one of the shards: "", or a path or URL that ends in a slash."""
    if folder.store != home.store:
        return f"{home}/"
    path = os.path.relpath(home.resolve(), folder.resolve())
    return "" if path == "." else f"{path}/"
