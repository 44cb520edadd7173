"""Each kind of source passes the conformance tests for sources."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardio.packing import PackSource
from shardio.packing.sources import directory, litdata, lmdb, mds, tables, tars
from shardio.testing.pack_source import PackSourceTests
from tests.packing import packs
from tests.packing.packs import pack
from tests.sources import write_images

ROW = "row 2, field 'jpg': cannot be decoded"
IMAGES = "images/*/*3.jpg"

Kind = tuple[PackSource, packs.Write, str, str]
"""A kind of source; a function that writes it; patterns for its files and for messages about a damaged image."""

KINDS: list[Kind] = [
    (directory.Directory(), packs.write_folders, IMAGES, "cannot be decoded"),
    (tables.TableOfPaths(), packs.write_table, IMAGES, "cannot be decoded"),
    (tables.ParquetFiles(), packs.write_parquet, "", ROW),
    (tables.SavedDataset(), packs.write_saved, "*.arrow", ROW),
    (mds.MdsShards(), packs.write_mds, "*", r"sample \d of shard.0000\d.mds, field 'jpg': cannot be decoded"),
    (litdata.LitDataChunks(), packs.write_litdata, "*", "sample 2 of chunk-0-0.bin, field 'jpg': cannot be decoded"),
    (tars.Tars(), packs.write_tars, "*.tar", r"sample \d of shard-000000.tar, field 'jpg': cannot be decoded"),
    (lmdb.LmdbEnvironment(), packs.write_lmdb, "data.mdb", r"sample 2 \('.*'\), field 'jpg': cannot be decoded"),
]

NAMES = [type(kind[0]).__name__ for kind in KINDS]


class TestSources(PackSourceTests):
    @pytest.fixture(params=KINDS, ids=NAMES)
    def kind(self, request: pytest.FixtureRequest) -> Kind:
        kind: Kind = request.param
        return kind

    @pytest.fixture
    def source(self, kind: Kind) -> PackSource:
        return kind[0]

    @pytest.fixture
    def dataset(self, kind: Kind, tmp_path: Path) -> Path:
        images = write_images(tmp_path / "home" / "images", classes=2, per_class=4, width=32, height=24)
        return kind[1](images, tmp_path / "home")

    @pytest.fixture
    def files(self, kind: Kind, dataset: Path) -> Sequence[Path]:
        if kind[2] == IMAGES:
            return sorted(dataset.parent.glob(IMAGES))
        return sorted(dataset.glob(kind[2])) if dataset.is_dir() else [dataset]

    @pytest.fixture
    def change_label(self, source: PackSource) -> Callable[[Path], object] | None:
        if not isinstance(source, tables.TableOfPaths):
            return None
        return lambda path: path.write_text(path.read_text().replace(".jpg,", ".jpg,1"))


@pytest.mark.parametrize(("write", "reason"), [(write, reason) for _, write, _, reason in KINDS], ids=NAMES)
def test_an_image_that_cannot_be_decoded_is_left_out_with_its_place(
    write: packs.Write, reason: str, tmp_path: Path
) -> None:
    images = write_images(tmp_path / "images", classes=1, per_class=5)
    images["class-0/name-002"] = images["class-0/name-002"][:200]
    (tmp_path / "images" / "class-0" / "name-002.jpg").write_bytes(images["class-0/name-002"])
    result = pack(write(images, tmp_path), tmp_path / "out")
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert result.manifest.num_samples == 4
    assert json.loads(line) == result.rejected[0]._asdict()
    assert re.match(reason, result.rejected[0].reason)
