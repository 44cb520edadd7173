"""Interrupted packs of other tools' datasets are resumed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardio
from shardio.libraries import import_torchvision
from shardio.packing import PackSettings, RunOptions, pack_source
from shardio.progress import WorkProgress
from tests.files import read_files
from tests.sources import write_images

SETTINGS = PackSettings(max_shard_size=1 << 20, max_shard_samples=4)


def make_lmdb(images: dict[str, bytes], folder: Path) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(folder / "in"), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for key, content in images.items():
            transaction.put(f"{key}.jpg".encode(), content)
    return folder / "in"


def make_tars(images: dict[str, bytes], folder: Path) -> Path:
    shardio.pack(folder / "images", folder / "in", max_shard_samples=5)
    return folder / "in"


def make_table(images: dict[str, bytes], folder: Path) -> Path:
    (folder / "in.csv").write_text("\n".join(["path", *(f"images/{key}.jpg" for key in images)]))
    return folder / "in.csv"


def make_parquet(images: dict[str, bytes], folder: Path) -> Path:
    pytest.importorskip("datasets")
    pq.write_table(pa.table({"image": list(images.values())}), folder / "in.parquet")
    return folder / "in.parquet"


def make_mds(images: dict[str, bytes], folder: Path) -> Path:
    if find_spec("streaming") is not None:
        import_torchvision()  # Streaming imports it.
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(folder / "in"), columns={"image": "jpeg"}, size_limit=1 << 12) as writer:
        for content in images.values():
            writer.write({"image": content})
    return folder / "in"


@pytest.mark.parametrize("make", [make_lmdb, make_tars, make_table, make_parquet, make_mds])
def test_an_interrupted_pack_is_resumed(tmp_path: Path, make: Any) -> None:
    source = make(write_images(tmp_path / "images"), tmp_path)
    run = RunOptions(num_workers=1)

    class Interrupt(WorkProgress):
        num_packed = 0

        def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
            self.num_packed += num_done
            if self.num_packed > 10:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_source(source, tmp_path / "out", SETTINGS, None, run, Interrupt())
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2
    assert pack_source(source, tmp_path / "out", SETTINGS, None, run).num_kept == 8
    pack_source(source, tmp_path / "whole", SETTINGS, None, run)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")
