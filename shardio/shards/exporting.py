"""Write the indexes of other tools: WebDataset's wids, DALI, timm, Megatron-Energon and open_clip.

The ``make_`` functions return the contents of files, and read or write nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.shards.index import INDEX_SUFFIX, IndexColumns, read_columns, read_header
from shardio.shards.manifest import MANIFEST_NAME, Manifest, ShardTable
from shardio.shards.sources import DatasetSource, open_table
from shardio.shards.tar import BLOCK, LABEL_FIELD, join_name
from shardio.storage import Location, RemoteAccess, link_or_copy, map_locations, parse_location
from shardio.values import check_choice, check_flag

ExportFormat = Literal["wids", "dali", "timm", "energon", "webdataset-sizes"]
"""The formats of other tools' indexes."""

ENERGON_FOLDER = ".nv-meta"
"""The folder of Megatron-Energon's files."""

_IMAGES = ("jpg", "jpeg", "png", "webp")


def make_wids(manifest: Manifest, prefix: str = "") -> bytes:
    """Return the shard index that WebDataset's ``wids.ShardListDataset`` reads, as JSON.

    The format is that of ``wids-index create`` in https://github.com/webdataset/webdataset (``wids/wids_index.py`` and
    ``wids_specs.py``), without the optional MD5 sums. Names are relative to the file.

    Args:
        manifest: The dataset's manifest.
        prefix: The path from the file to the shards, "" or one that ends in a slash.
    """
    shards = [
        {"url": prefix + entry.name, "nsamples": entry.num_samples, "filesize": entry.num_bytes}
        for entry in manifest.shards
    ]
    return _to_json({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards})


def make_timm(manifest: Manifest, split: str, prefix: str = "") -> bytes:
    """Return the ``_info.json`` that timm's reader of WebDatasets reads.

    The format is that of ``timm/data/readers/reader_wds.py`` in https://github.com/huggingface/pytorch-image-models.

    Args:
        manifest: The dataset's manifest.
        split: The name of the split that has all shards.
        prefix: The path from the file to the shards, "" or one that ends in a slash.
    """
    info = {
        "name": split,
        "num_samples": manifest.num_samples,
        "filenames": [prefix + entry.name for entry in manifest.shards],
        "shard_lengths": [entry.num_samples for entry in manifest.shards],
    }
    return _to_json({"splits": {split: info}})


def make_sizes(manifest: Manifest) -> bytes:
    """Return the ``sizes.json`` of a WebDataset: the number of samples of each shard by its file name.

    open_clip reads it (``get_dataset_size`` in ``src/open_clip_train/data.py`` of
    https://github.com/mlfoundations/open_clip).
    """
    return _to_json({entry.name: entry.num_samples for entry in manifest.shards})


def make_dali(columns: IndexColumns) -> bytes:
    """Return the index of one tar for DALI's ``fn.readers.webdataset``.

    The format is version 1.2 of ``tools/wds2idx.py`` in https://github.com/NVIDIA/DALI: a line with the version and the
    number of samples, then a line for each sample with the extension, offset, size and name of each member.

    Args:
        columns: The content of the tar's index.

    Raises:
        FormatError: If a key contains white space, which separates the values in this format.
    """
    lines = [f"v1.2 {len(columns.keys)}"]
    for sample in range(len(columns.keys)):
        key = columns.keys.text(sample)
        if any(letter.isspace() for letter in key):
            raise FormatError(
                f"the key {key!r} contains white space, which DALI's index cannot hold: write the dataset again with "
                "other keys"
            )
        parts = sorted(_fields_of(columns, sample), key=lambda part: part[1])
        lines.append(" ".join(f"{field} {start} {size} {join_name(key, field)}" for field, start, size in parts))
    return ("\n".join(lines) + "\n").encode(errors="surrogateescape")


def make_energon_index(columns: IndexColumns) -> bytes:
    """Return the index of one tar for Megatron-Energon, ``NAME.tar.idx``: where each sample starts, and the last ends.

    The format is that of ``TarIndexWriter`` in ``src/megatron/energon/flavors/webdataset/itar.py`` of
    https://github.com/NVIDIA/Megatron-Energon: little-endian uint64 [n + 1]. It has the name of shardio's own index, so
    the two cannot be in one folder.

    Args:
        columns: The content of the tar's index.
    """
    stops = np.where(columns.starts >= 0, columns.starts + columns.sizes, 0).max(axis=0, initial=0)
    ends: NDArray[np.int64] = -(-stops // BLOCK) * BLOCK  # A sample's header follows the end of the one before.
    return np.concatenate([[0], ends]).astype("<u8").tobytes()


def make_energon_meta(manifest: Manifest, split: str) -> dict[str, bytes]:
    """Return the files in ``.nv-meta`` that describe a dataset for Megatron-Energon, by name.

    The format is documented in https://nvidia.github.io/Megatron-Energon/data_on_disk.html. Names are relative to the
    folder that holds ``.nv-meta``. The strings are quoted as in JSON, which is YAML.

    Args:
        manifest: The dataset's manifest.
        split: The name of the split that has all shards.
    """
    names = [json.dumps(entry.name) for entry in manifest.shards]
    counts = [f"  {name}: {entry.num_samples}" for name, entry in zip(names, manifest.shards, strict=True)]
    return {
        ".info.yaml": _to_yaml(["shard_counts:", *counts]),
        "split.yaml": _to_yaml(
            ["exclude: []", "split_parts:", f"  {json.dumps(split)}:", *(f"  - {name}" for name in names)]
        ),
        "dataset.yaml": _to_yaml(_describe_samples(manifest.fields)),
    }


def _describe_samples(fields: Sequence[str]) -> list[str]:
    image = next((field for field in _IMAGES if field in fields), None)
    if image is None:  # A crude dataset: the user's program converts the samples.
        return ["__module__: megatron.energon", "__class__: CrudeWebdataset"]
    members = {"image": image}
    if LABEL_FIELD in fields:
        kind, members["label"] = "ImageClassificationSample", LABEL_FIELD
    elif "txt" in fields:
        kind, members["caption"] = "CaptioningSample", "txt"
    else:
        kind = "ImageSample"
    return [
        "sample_type:",
        "  __module__: megatron.energon",
        f"  __class__: {kind}",
        "field_map:",
        *(f"  {member}: {field}" for member, field in members.items()),
    ]


def _fields_of(columns: IndexColumns, sample: int) -> Iterator[tuple[str, int, int]]:
    starts, sizes = columns.starts[:, sample].tolist(), columns.sizes[:, sample].tolist()
    for field, start, size in zip(columns.header.fields, starts, sizes, strict=True):
        if start >= 0:
            yield field, start, size


def _to_json(values: Any) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"


def _to_yaml(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


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
    shardio's own index has the same name, so ``energon`` needs another folder, ``out``, to which the tars are
    hard-linked, or copied if that is impossible.

    Args:
        src: A packed directory, or tars of any tool.
        format: The format.
        out: The folder to write to; by default, that of the shards.
        split: The name of the split, for ``timm`` and ``energon``.
        overwrite: Whether to replace files that exist.
        access: The access to remote shards and to a remote ``out``.

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
    """Return the path from a folder to the shards' folder: "", or a path or URL that ends in a slash."""
    if folder.store != home.store:
        return f"{home}/"
    path = os.path.relpath(home.resolve(), folder.resolve())
    return "" if path == "." else f"{path}/"
