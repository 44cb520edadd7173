"""What a folder is packed as, if it holds files of several kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import shardio
from shardio import PackError
from shardio.cli.main import app
from shardio.packing import append
from tests.sources import encode
from tests.tars import by_key, write_tar

IMAGES = [encode(seed) for seed in range(4)]


def write_files(folder: Path) -> Path:
    for name, content in {"cat/a.jpg": IMAGES[0], "dog/b.jpg": IMAGES[1]}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / "cat" / "a.jpg"


def write_tars(folder: Path) -> Path:
    write_tar(folder / "000.tar", [("t.jpg", IMAGES[2])])
    return folder / "000.tar"


def write_parquet(folder: Path) -> Path:
    pq.write_table(pa.table({"image": [IMAGES[3]], "n": [1]}), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_lmdb(folder: Path) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(folder), map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"e.jpg", IMAGES[0])
    return folder / "data.mdb"


def write_saved(folder: Path) -> Path:
    for name in ("state.json", "dataset_info.json"):
        (folder / name).write_text("{}")
    return folder / "dataset_info.json"


def write_mds(folder: Path) -> Path:
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [{"column_encodings": ["jpeg"]}]}))
    return folder / "index.json"


def write_litdata(folder: Path) -> Path:
    (folder / "train").mkdir()  # In a split: it has the same name as the index of MDS.
    (folder / "train" / "index.json").write_text(json.dumps({"chunks": [{"chunk_bytes": 1}], "config": {}}))
    return folder / "train" / "index.json"


READABLE: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "files": (write_files, {"cat/a", "dog/b"}),
    "tars": (write_tars, {"t"}),
    "parquet": (write_parquet, {"00000000"}),
    "lmdb": (write_lmdb, {"e"}),
}
"""How to write a source of each kind, and its keys."""

KINDS = {kind: write for kind, (write, _) in READABLE.items()} | {
    "saved": write_saved,
    "mds": write_mds,
    "litdata": write_litdata,
}


def keys_of(out: Path) -> set[str]:
    return set(by_key(*out.glob("*.tar")))


def write_tables(folder: Path) -> None:
    """Write tables that lie beside images and shards: they name or describe samples, but do not hold them."""
    rows = [{"file": "cat/a.jpg", "label": 3, "hash": "ab"}, {"file": "dog/b.jpg", "label": 5, "hash": "cd"}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "labels.parquet")
    pq.write_table(pa.Table.from_pylist(rows), folder / "000.parquet")
    (folder / "metadata.csv").write_text("file,label\ncat/a.jpg,3\n")
    (folder / "rows.jsonl").write_text('{"file": "cat/a.jpg"}\n')
    (folder / "000_stats.json").write_text("{}")
    (folder / "index.json").write_text('{"__kind__": "wids-shard-index-v1", "shardlist": []}')


@pytest.mark.parametrize("kind", READABLE)
def test_tables_that_hold_no_samples_do_not_change_what_is_packed(tmp_path: Path, kind: str) -> None:
    write, keys = READABLE[kind]
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    before = shardio.pack(tmp_path / "in", tmp_path / "before")
    write_tables(tmp_path / "in")
    if kind != "tars":  # Compressed tars beside others cannot be read.
        (tmp_path / "in" / "images.tar.gz").write_bytes(b"\x1f\x8b")  # What the files were unpacked from.
    after = shardio.pack(tmp_path / "in", tmp_path / "after")
    assert after.digest == before.digest
    assert keys_of(tmp_path / "after") == keys


def test_a_table_beside_the_images_labels_them(tmp_path: Path) -> None:
    write_files(tmp_path / "in")
    write_tables(tmp_path / "in")
    columns: dict[str, Any] = {"key_column": "file", "label_column": "label"}
    shardio.pack(tmp_path / "in", tmp_path / "out", labels=tmp_path / "in" / "labels.parquet", **columns)
    found = by_key(*(tmp_path / "out").glob("*.tar"))
    assert found == {"cat/a": {"jpg": IMAGES[0], "cls": b"3"}, "dog/b": {"jpg": IMAGES[1], "cls": b"5"}}


def test_samples_of_two_kinds_are_refused_and_an_option_chooses(tmp_path: Path) -> None:
    """The error names a file of each kind, and the options."""
    for kinds in combinations(KINDS, 2):
        source = tmp_path / "-".join(kinds)
        source.mkdir()
        files = [KINDS[kind](source) for kind in kinds]
        with pytest.raises(PackError, match="holds samples of 2 kinds") as caught:
            shardio.pack(source, tmp_path / "out")
        for kind, file in zip(kinds, files, strict=True):
            assert f", such as {file}: --source-kind {kind} (source_kind={kind!r})" in str(caught.value)
        assert not (tmp_path / "out").exists()
        for kind in set(kinds) & set(READABLE):
            chosen: dict[str, Any] = {"source_kind": kind}
            out = tmp_path / f"{source.name}-{kind}"
            if kind == "files" and "litdata" in kinds:  # The split's folder would be a class.
                (source / "train" / "c.jpg").write_bytes(IMAGES[2])
                shardio.pack(source, out, **chosen)
                assert keys_of(out) == READABLE[kind][1] | {"train/c"}
            else:
                shardio.pack(source, out, **chosen)
                assert keys_of(out) == READABLE[kind][1]


def test_an_option_that_applies_to_one_kind_chooses_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for write in (write_files, write_tars, write_parquet):
        write(tmp_path / "in")
    shardio.pack(tmp_path / "in", tmp_path / "files", layout="classes")
    assert keys_of(tmp_path / "files") == READABLE["files"][1]
    shardio.pack(tmp_path / "in", tmp_path / "rows", image_column="image")
    assert keys_of(tmp_path / "rows") == READABLE["parquet"][1]
    command = ["pack", str(tmp_path / "in"), str(tmp_path / "tars"), "--source-kind", "tars", "--quiet"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert keys_of(tmp_path / "tars") == READABLE["tars"][1]


def test_a_folder_of_tables_is_packed_only_if_that_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_tables(tmp_path / "in")
    with pytest.raises(
        PackError, match=r"no column of .*000\.parquet holds the contents of files\. If this table"
    ) as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out")
    assert "--source-kind parquet (source_kind='parquet')" in str(caught.value)
    assert shardio.pack(tmp_path / "in", tmp_path / "out", source_kind="parquet").fields == ("cls", "json")


def test_a_kind_that_a_source_is_not_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "in")
    for kind in sorted({*KINDS, "table"} - {"files"}):
        with pytest.raises(PackError, match=rf"in is not .*: omit --source-kind {kind} \(source_kind='{kind}'\)"):
            shardio.pack(tmp_path / "in", tmp_path / "out", source_kind=kind)  # type: ignore[arg-type]  # mypy sees str
    with pytest.raises(ValueError, match="source_kind must be one of"):
        shardio.pack(tmp_path / "in", tmp_path / "out", source_kind="zip")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(ValueError, match="source_kind does not apply to an iterable"):
        shardio.pack([{"jpg": IMAGES[0]}], tmp_path / "out", source_kind="files")


def test_images_beside_tars_are_appended_if_that_is_chosen(tmp_path: Path) -> None:
    write_files(tmp_path / "in")
    shardio.pack(tmp_path / "in", tmp_path / "out")
    for name in ("a", "b"):
        (tmp_path / "in" / ("cat", "dog")[name == "b"] / f"{name}.jpg").rename(tmp_path / "in" / "cat" / f"{name}2.jpg")
    (tmp_path / "in" / "dog").rmdir()
    write_tars(tmp_path / "in")
    with pytest.raises(PackError, match=r"--source-kind files \(source_kind='files'\)"):
        append(tmp_path / "out", tmp_path / "in")
    append(tmp_path / "out", tmp_path / "in", source_kind="files")
    assert keys_of(tmp_path / "out") == {"cat/a", "dog/b", "cat/a2", "cat/b2"}


@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind != "files"])
def test_a_folder_of_sources_is_refused_with_commands_that_work(tmp_path: Path, kind: str) -> None:
    """As validation/0000.parquet and test/0000.parquet, or train/000.tar and val/000.tar."""
    write, keys = READABLE[kind]
    for split in ("train", "val"):
        (tmp_path / "in" / split).mkdir(parents=True)
        write(tmp_path / "in" / split)
    with pytest.raises(PackError, match="holds no samples itself, but in its folders") as caught:
        shardio.pack(tmp_path / "in", tmp_path / "out")
    commands = [line.split()[1:] for line in str(caught.value).splitlines()[1:]]
    assert [command[-1] for command in commands] == [str(tmp_path / "out" / split) for split in ("train", "val")]
    for command in commands:
        assert CliRunner().invoke(app, command).exit_code == 0
    assert keys_of(tmp_path / "out" / "val") == keys
    with pytest.raises(FileNotFoundError, match=rf"its folders train, val do: pass one .* {tmp_path}/out/train"):
        shardio.ShardDataset(tmp_path / "out")
