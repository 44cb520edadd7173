"""Each kind of source passes the conformance tests of sources."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from shardio.packing import PackSource
from shardio.packing.sources import directory, litdata, lmdb, mds, tables, tars
from shardio.testing.pack_source import PackSourceTests
from tests.packing import packs
from tests.packing.packs import pack
from tests.sources import write_images


class OfImages(PackSourceTests):
    """Tests of one kind of source, which holds the images of class folders."""

    kind: ClassVar[PackSource]
    write: ClassVar[packs.Write]
    own_files = "*"

    @pytest.fixture
    def source(self) -> PackSource:
        return self.kind

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Path:
        home = tmp_path / "home"
        images = write_images(home / "images", classes=2, per_class=4, width=32, height=24)
        return type(self).write(images, home)

    @pytest.fixture
    def files(self, dataset: Path) -> Sequence[Path]:
        return sorted(dataset.glob(self.own_files)) if dataset.is_dir() else [dataset]


class TestDirectory(OfImages):
    kind, write, own_files = directory.Directory(), packs.write_folders, "*/*3.jpg"


class TestTableOfPaths(OfImages):
    kind, write = tables.TableOfPaths(), packs.write_table

    @pytest.fixture
    def files(self, dataset: Path) -> Sequence[Path]:
        return sorted((dataset.parent / "images").glob("*/*3.jpg"))

    @pytest.fixture
    def change_label(self) -> Callable[[Path], object]:
        return lambda path: path.write_text(path.read_text().replace(".jpg,", ".jpg,1"))


class TestParquetFiles(OfImages):
    kind, write = tables.ParquetFiles(), packs.write_parquet


class TestSavedDataset(OfImages):
    kind, write, own_files = tables.SavedDataset(), packs.write_saved, "*.arrow"


class TestMdsShards(OfImages):
    kind, write = mds.MdsShards(), packs.write_mds


class TestLitDataChunks(OfImages):
    kind, write = litdata.LitDataChunks(), packs.write_litdata


class TestTars(OfImages):
    kind, write, own_files = tars.Tars(), packs.write_tars, "*.tar"


class TestLmdbEnvironment(OfImages):
    kind, write, own_files = lmdb.LmdbEnvironment(), packs.write_lmdb, "data.mdb"


PLACES: dict[packs.Write, str] = {
    packs.write_folders: "cannot be decoded",
    packs.write_table: "cannot be decoded",
    packs.write_parquet: "row 2, field 'jpg': cannot be decoded",
    packs.write_saved: "row 2, field 'jpg': cannot be decoded",
    packs.write_mds: r"sample \d of shard.0000\d.mds, field 'jpg': cannot be decoded",
    packs.write_litdata: r"sample 2 of chunk-0-0.bin, field 'jpg': cannot be decoded",
    packs.write_tars: r"sample \d of shard-000000.tar, field 'jpg': cannot be decoded",
    packs.write_lmdb: r"sample 2 \('.*'\), field 'jpg': cannot be decoded",
}


@pytest.mark.parametrize("write", PLACES)
def test_an_image_that_cannot_be_decoded_is_left_out_with_its_place(write: packs.Write, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", classes=1, per_class=5)
    images["class-0/name-002"] = images["class-0/name-002"][:200]
    (tmp_path / "images" / "class-0" / "name-002.jpg").write_bytes(images["class-0/name-002"])
    result = pack(write(images, tmp_path), tmp_path / "out")
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert result.manifest.num_samples == 4
    assert json.loads(line) == result.rejected[0]._asdict()
    assert re.match(PLACES[write], result.rejected[0].reason)
