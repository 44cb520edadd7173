"""How to write the same images as each kind of source, below a folder that also has them as ``images/KEY.jpg``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardio
from shardio.libraries import import_torchvision

Write = Callable[[Mapping[str, bytes], Path], Path]
"""Writes images by key below a folder; returns what to pack."""


def write_lmdb(images: Mapping[str, bytes], folder: Path) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(folder / "in"), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for key, content in images.items():
            transaction.put(f"{key}.jpg".encode(), content)
    return folder / "in"


def write_tars(images: Mapping[str, bytes], folder: Path) -> Path:
    shardio.pack(folder / "images", folder / "in", max_shard_samples=5, check=False)
    return folder / "in"


def write_table(images: Mapping[str, bytes], folder: Path) -> Path:
    (folder / "in.csv").write_text("\n".join(["path,rank", *(f"images/{key}.jpg,{len(key)}" for key in images)]))
    return folder / "in.csv"


def write_parquet(images: Mapping[str, bytes], folder: Path) -> Path:
    pytest.importorskip("datasets")
    pq.write_table(pa.table({"image": list(images.values())}), folder / "in.parquet")
    return folder / "in.parquet"


def write_saved(images: Mapping[str, bytes], folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": content, "path": None} for content in images.values()], "key": list(images)}
    dataset = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    dataset.save_to_disk(str(folder / "in"), num_shards=2)
    return folder / "in"


def write_mds(images: Mapping[str, bytes], folder: Path) -> Path:
    import_torchvision()  # Streaming imports it.
    streaming = pytest.importorskip("streaming")
    options = {"columns": {"x": "jpeg"}, "size_limit": 1 << 12, "compression": "gz"}
    with streaming.MDSWriter(out=str(folder / "in"), **options) as mds:
        for content in images.values():
            mds.write({"x": content})
    return folder / "in"


def write_litdata(images: Mapping[str, bytes], folder: Path) -> Path:
    writers = pytest.importorskip("litdata.streaming.writer")
    (folder / "in").mkdir()
    compressed = {"compression": "zstd", "compression_level": "chunk"}
    writer = writers.BinaryWriter(str(folder / "in"), chunk_size=5, **compressed)
    for number, content in enumerate(images.values()):
        writer[number] = content
    writer.done()
    writer.merge(1)
    return folder / "in"


def write_folders(images: Mapping[str, bytes], folder: Path) -> Path:
    return folder / "images"
