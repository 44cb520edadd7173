"""The indexes of other tools, made from shardio's: WebDataset's wids, DALI, timm, Megatron-Energon and open_clip.

Each function returns the content of one file, or of a few, and reads or writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.shards.index_columns import IndexColumns
from shardio.shards.manifest import Manifest
from shardio.shards.names import LABEL_FIELD, join_name
from shardio.shards.tar import BLOCK

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
    """Return the lines of Megatron-Energon's ``dataset.yaml`` for some fields."""
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
    """Yield the name, the offset and the size of each field that a sample has."""
    starts, sizes = columns.starts[:, sample].tolist(), columns.sizes[:, sample].tolist()
    for field, start, size in zip(columns.header.fields, starts, sizes, strict=True):
        if start >= 0:
            yield field, start, size


def _to_json(values: Any) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"


def _to_yaml(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()
