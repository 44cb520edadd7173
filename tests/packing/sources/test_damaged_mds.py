"""Damaged datasets of MosaicML Streaming: each is refused with an error that says where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import PackError
from tests.packing.sources.changes import assert_change_is_refused
from tests.packing.sources.mds_datasets import write_simple


def _cut_a_shard(source: Path) -> None:
    path = source / "shard.00001.mds"
    path.write_bytes(path.read_bytes()[:-9])


def _cut_a_compressed_shard(source: Path) -> None:
    shutil.rmtree(source)
    path = write_simple(source, compression="gz") / "shard.00001.mds.gz"
    index = json.loads((source / "index.json").read_text())
    content = path.read_bytes()[:-30]
    index["shards"][1]["zip_data"]["bytes"] = len(content)
    path.write_bytes(content)
    (source / "index.json").write_text(json.dumps(index))


def _change_a_size(source: Path) -> None:
    content = bytearray((source / "shard.00001.mds").read_bytes())
    start = int.from_bytes(content[4:8], "little")
    content[start] ^= 8  # The least significant byte of the image's size.
    (source / "shard.00001.mds").write_bytes(content)


def _change_an_offset(source: Path) -> None:
    content = bytearray((source / "shard.00001.mds").read_bytes())
    content[11] ^= 128
    (source / "shard.00001.mds").write_bytes(content)


def _cut_the_index(source: Path) -> None:
    (source / "index.json").write_text((source / "index.json").read_text()[:-9])


def _edit_the_index(**changes: Any) -> Any:
    def edit(source: Path) -> None:
        index = json.loads((source / "index.json").read_text())
        for name, value in changes.items():
            if value is None:
                del index["shards"][1][name]
            else:
                index["shards"][1][name] = value
        (source / "index.json").write_text(json.dumps(index))

    return edit


_OUTSIDE = {"basename": "../secret", "bytes": 1, "hashes": {}}

DAMAGES = {
    "a cut shard": (_cut_a_shard, r"shard\.00001\.mds has \d+ bytes, but \d+ according to .*index\.json: download"),
    "a missing shard": (lambda source: (source / "shard.00001.mds").unlink(), r"00001\.mds, which .* cannot be read"),
    "a cut compressed shard": (_cut_a_compressed_shard, r"shard\.00001\.mds\.gz cannot be decompressed: .*Download"),
    "a changed size": (_change_a_size, r"00001\.mds cannot be read: .*columns of sample 0 do not have \d+ bytes"),
    "a changed size, without labels": (_change_a_size, r"sample 0 of shard\.00001\.mds of .* cannot be read: .*do not"),
    "a changed offset": (_change_an_offset, r"00001\.mds cannot be read: .*positions of its samples are invalid"),
    "a cut index": (_cut_the_index, r"index\.json cannot be read: .*Download or create it again"),
    "no raw_data": (_edit_the_index(raw_data=None), r"index\.json is invalid: it has no 'raw_data'"),
    "no sizes": (_edit_the_index(column_sizes=None), r"shard 1 in .*index\.json is invalid: TypeError"),
    "other columns": (_edit_the_index(column_encodings=["png", "int"]), r"shards 0 and 1 in .* different columns"),
    "unknown columns": (_edit_the_index(column_encodings="x"), r"different columns"),
    "a file elsewhere": (_edit_the_index(raw_data=_OUTSIDE), r"names the file '\.\./secret', which is not below"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_dataset_is_an_error_that_says_where(damage: str, tmp_path: Path) -> None:
    source = write_simple(tmp_path / "mds")
    change, message = DAMAGES[damage]
    change(source)
    (tmp_path / "labels.csv").write_text("key,label\n" + "".join(f"{row:08d},1\n" for row in range(12)))
    options: dict[str, Any] = {"labels": tmp_path / "labels.csv"} if damage.endswith("without labels") else {}
    with pytest.raises(PackError, match=message):
        shardio.pack(source, tmp_path / "out", num_workers=1, **options)
    assert not (tmp_path / "out" / "shardio.json").exists()


def test_a_shard_that_changed_after_the_scan_is_refused(tmp_path: Path) -> None:
    source, message = write_simple(tmp_path / "mds"), r"shard\.00001\.mds changed from \d+ to \d+ bytes"
    assert_change_is_refused(source, tmp_path / "out", _cut_a_shard, message)
