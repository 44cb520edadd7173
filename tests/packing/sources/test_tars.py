"""Packing a folder with several kinds of sources, packing WebDataset's tars, and repacking packed datasets."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardio
from shardio.errors import PackError
from shardio.packing import append, reshard
from tests.cli.commands import run
from tests.files import flip, read_files
from tests.packing.packs import assert_refused, read_packed, write_files
from tests.raising import assert_raises
from tests.sources import encode, write_images
from tests.tars import write_tar

webdataset = pytest.importorskip("webdataset")
IMAGES = [encode(seed) for seed in range(4)]


def write_class_folders(folder: Path) -> Path:
    return write_files(folder, {"cat/a.jpg": IMAGES[0], "dog/b.jpg": IMAGES[1]}) / "cat" / "a.jpg"


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
    (folder / "train").mkdir()  # The index has the same name as that of MDS, so it is in a different folder.
    (folder / "train" / "index.json").write_text(json.dumps({"chunks": [{"chunk_bytes": 1}], "config": {}}))
    return folder / "train" / "index.json"


READABLE: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "files": (write_class_folders, {"cat/a", "dog/b"}),
    "tars": (write_tars, {"t"}),
    "parquet": (write_parquet, {"00000000"}),
    "lmdb": (write_lmdb, {"e"}),
}
"""The writer of each kind of source, and the keys of the written samples."""

KINDS = {kind: write for kind, (write, _) in READABLE.items()}
KINDS |= {"saved": write_saved, "mds": write_mds, "litdata": write_litdata}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def keys_of(out: Path) -> set[str]:
    return set(read_packed(out))


def write_tables(folder: Path) -> None:
    """Write tables that describe samples but do not contain them, like those that users keep with images and shards."""
    rows = [{"file": "cat/a.jpg", "label": 3, "hash": "ab"}, {"file": "dog/b.jpg", "label": 5, "hash": "cd"}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "labels.parquet")
    pq.write_table(pa.Table.from_pylist(rows), folder / "000.parquet")
    (folder / "metadata.csv").write_text("file,label\ncat/a.jpg,3\n")
    (folder / "rows.jsonl").write_text('{"file": "cat/a.jpg"}\n')
    (folder / "000_stats.json").write_text("{}")
    (folder / "index.json").write_text('{"__kind__": "wids-shard-index-v1", "shardlist": []}')


@pytest.mark.parametrize("kind", READABLE)
def test_tables_that_hold_no_samples_do_not_change_what_is_packed(folder: Path, tmp_path: Path, kind: str) -> None:
    write, keys = READABLE[kind]
    write(folder)
    before = shardio.pack(folder, tmp_path / "before")
    write_tables(folder)
    if kind != "tars":  # Compressed tars beside plain tars are an error.
        (folder / "images.tar.gz").write_bytes(b"\x1f\x8b")  # The files were extracted from this archive.
    after = shardio.pack(folder, tmp_path / "after")
    assert (after.digest, keys_of(tmp_path / "after")) == (before.digest, keys)
    if kind == "files":  # A table beside the images can label them.
        columns: dict[str, Any] = {"key_column": "file", "label_column": "label"}
        shardio.pack(folder, tmp_path / "out", labels=folder / "labels.parquet", **columns)
        expected = {"cat/a": {"jpg": IMAGES[0], "cls": b"3"}, "dog/b": {"jpg": IMAGES[1], "cls": b"5"}}
        assert read_packed(tmp_path / "out") == expected


def test_samples_of_two_kinds_are_refused_and_an_option_chooses(tmp_path: Path) -> None:
    for kinds in combinations(KINDS, 2):
        source = tmp_path / "-".join(kinds)
        source.mkdir()
        files = [KINDS[kind](source) for kind in kinds]
        message = assert_refused("holds samples of 2 kinds", source)
        for kind, file in zip(kinds, files, strict=True):
            assert f", such as {file}: --source-kind {kind} (source_kind={kind!r})" in message
        for kind in set(kinds) & set(READABLE):
            chosen: dict[str, Any] = {"source_kind": kind}
            out, keys = tmp_path / f"{source.name}-{kind}", READABLE[kind][1]
            if kind == "files" and "litdata" in kinds:  # In this case, the folder of the split is a class.
                (source / "train" / "c.jpg").write_bytes(IMAGES[2])
                keys = keys | {"train/c"}
            shardio.pack(source, out, **chosen)
            assert keys_of(out) == keys


def test_an_option_that_applies_to_one_kind_chooses_it(folder: Path, tmp_path: Path) -> None:
    for write in (write_class_folders, write_tars, write_parquet):
        write(folder)
    shardio.pack(folder, tmp_path / "files", layout="classes")
    shardio.pack(folder, tmp_path / "parquet", image_column="image")
    run("pack", folder, tmp_path / "tars", "--source-kind", "tars", "--quiet")
    for kind in ("files", "parquet", "tars"):
        assert keys_of(tmp_path / kind) == READABLE[kind][1]


def test_a_folder_of_tables_is_packed_only_if_that_is_chosen(folder: Path, tmp_path: Path) -> None:
    write_tables(folder)
    message = r"no column of .*000\.parquet holds the contents of files\. If this table"
    assert "--source-kind parquet (source_kind='parquet')" in assert_refused(message, folder)
    assert shardio.pack(folder, tmp_path / "out", source_kind="parquet").fields == ("cls", "json")


def test_a_kind_that_a_source_is_not_is_refused(folder: Path, tmp_path: Path) -> None:
    write_class_folders(folder)
    for kind in sorted({*KINDS, "table"} - {"files"}):
        message = rf"in is not .*: omit --source-kind {kind} \(source_kind='{kind}'\)"
        assert_refused(message, folder, source_kind=kind)
    message = "source_kind must be one of"
    assert_raises(ValueError, message, shardio.pack, folder, tmp_path / "out", source_kind="zip")


def test_images_beside_tars_are_appended_if_that_is_chosen(folder: Path, tmp_path: Path) -> None:
    write_class_folders(folder)
    shardio.pack(folder, tmp_path / "out")
    (folder / "cat" / "a.jpg").rename(folder / "cat" / "a2.jpg")
    (folder / "dog" / "b.jpg").rename(folder / "dog" / "b2.jpg")
    write_tars(folder)
    assert_raises(PackError, r"--source-kind files \(source_kind='files'\)", append, tmp_path / "out", folder)
    append(tmp_path / "out", folder, source_kind="files")
    assert keys_of(tmp_path / "out") == {"cat/a", "dog/b", "cat/a2", "dog/b2"}


@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind != "files"])
def test_a_folder_of_sources_is_refused_with_commands_that_work(folder: Path, tmp_path: Path, kind: str) -> None:
    write, keys = READABLE[kind]
    for split in ("train", "val"):
        (folder / split).mkdir()
        write(folder / split)
    out = tmp_path / "out"
    message = assert_refused("holds no samples itself, but its folders do", folder, out)
    commands = [line.split()[1:] for line in message.splitlines()[1:]]
    assert [command[-1] for command in commands] == [str(out / split) for split in ("train", "val")]
    for command in commands:
        run(*command)
    assert keys_of(out / "val") == keys
    assert_raises(FileNotFoundError, f"its folders train, val do: pass one .* {out}/train", shardio.ShardDataset, out)


NUM = 23

LONG = "folder/" * 30
"""A folder path so long that a plain header cannot hold a member's name."""


def write_foreign(folder: Path) -> dict[str, dict[str, bytes]]:
    folder.mkdir()
    samples = {}
    for part in range(2):
        with webdataset.TarWriter(str(folder / f"train-{part:06d}.tar")) as tar:
            for number in range(part * NUM // 2, (part + 1) * NUM // 2 + part):
                fields = {"jpg": encode(number), "json": json.dumps({"number": number}).encode()}
                fields |= {"cls": str(number % 5).encode()} if number % 4 else {"seg.png": encode(number, suffix="png")}
                key = f"{(LONG, './')[number % 2] if number % 7 < 2 else ''}ü{number:04d}"
                tar.write({"__key__": key, **fields})
                samples[key] = fields
    return samples


def tars_and_indexes(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in read_files(folder).items() if name.startswith("shard-")}


@pytest.mark.parametrize("source", ["", "train-{000000..000001}.tar", "train-*.tar"])
def test_tars_are_packed_as_they_are_resharded(tmp_path: Path, source: str) -> None:
    samples = write_foreign(tmp_path / "in")
    limits: dict[str, Any] = {"max_shard_size": 20_000, "shuffle_seed": None}
    shardio.pack(tmp_path / "in" / source, tmp_path / "1", **limits, check=False, num_workers=1)
    reshard(tmp_path / "in", tmp_path / "resharded", **limits)
    assert read_packed(tmp_path / "1") == samples
    assert len(tars_and_indexes(tmp_path / "1")) > 4
    assert tars_and_indexes(tmp_path / "1") == tars_and_indexes(tmp_path / "resharded")


def test_a_packed_dataset_keeps_its_classes_when_it_is_tiled(packed: Path, tmp_path: Path) -> None:
    before, samples = shardio.open(packed).manifest, read_packed(packed)
    for source in (packed, packed / "shardio.json"):
        manifest = shardio.pack(source, tmp_path / source.name, jpeg="tile")
        assert manifest.classes == before.classes
        assert manifest.pack["num_tiled"] == manifest.num_samples == before.num_samples
        for key, sample in read_packed(tmp_path / source.name).items():
            assert sample["cls"] == samples[key]["cls"]
            assert sample["jpg"] != samples[key]["jpg"]


def test_labels_are_replaced_or_renumbered(packed: Path, tmp_path: Path) -> None:
    names = ["class-2", "other", "class-0", "class-1"]
    manifest = shardio.pack(packed, tmp_path / "renumbered", classes=names)
    assert list(manifest.classes) == names
    for key, sample in read_packed(tmp_path / "renumbered").items():
        assert names[int(sample["cls"])] == key.partition("/")[0]
    assert_refused("has classes that are not among the given ones", packed, classes=names[:3])
    lines = [f"class-{i}/name-{j:03d}.jpg,odd {j % 2}" for i in range(3) for j in range(7)]
    (tmp_path / "labels.csv").write_text("\n".join(["key,label", *lines]))
    manifest = shardio.pack(packed, tmp_path / "labeled", labels=tmp_path / "labels.csv")
    assert manifest.classes == ("odd 0", "odd 1")
    for key, sample in read_packed(tmp_path / "labeled").items():
        assert int(sample["cls"]) == int(key[-1]) % 2


def test_class_names_of_foreign_tars_name_their_labels(tmp_path: Path) -> None:
    samples = write_foreign(tmp_path / "in")
    names = [f"class {label}" for label in range(5)]
    assert list(shardio.pack(tmp_path / "in", tmp_path / "out", classes=names).classes) == names
    assert read_packed(tmp_path / "out") == samples
    message = r"sample \d+ of train-00000\d\.tar of .*its label is b'4', .* integer below 4"
    assert_refused(message, tmp_path / "in", classes=names[:4])
    write_tar(tmp_path / "unlabeled.tar", [("a.jpg", encode(0))])
    assert_refused(r"classes are given, but .* has no labels", tmp_path / "unlabeled.tar", classes=names)


def test_a_damaged_tar_is_refused(packed: Path, tmp_path: Path) -> None:
    tar = Path(shutil.copytree(packed, tmp_path / "packed")) / "shard-000000.tar"
    flip(tar, tar.read_bytes().index(b"\xff\xd8\xff") + 300)
    assert_refused(r"sample \d+ of shard-000000\.tar of .* cannot be read: .*class-", tar.parent, check=False)


def test_tars_with_the_same_keys_are_packed_with_prefixes(tmp_path: Path) -> None:
    expected = dict[str, dict[str, bytes]]()
    for part in ("a", "b.c"):
        (tmp_path / "in" / part).mkdir(parents=True)
        for camera in ("left", "right"):
            samples = {f"{i}": {field: f"{part} {camera} {i} {field}".encode() for field in "xy"} for i in range(3)}
            members = [(f"./{i}.{field}", value) for i, fields in samples.items() for field, value in fields.items()]
            write_tar(tmp_path / "in" / part / f"{camera}-0.tar", members)
            expected |= {f"{part}/{camera}-0/{i}": fields for i, fields in samples.items()}
    remedy = r"two samples have the key '\./0'.*put the tar's name before each key: shardio pack --prefix-keys"
    assert_refused(remedy, tmp_path / "in" / "a")
    shardio.pack(tmp_path / "in" / "a", tmp_path / "1", prefix_keys=True, max_shard_samples=2)
    found = read_packed(tmp_path / "1")
    assert found == {key.removeprefix("a/"): fields for key, fields in expected.items() if key.startswith("a/")}
    run("pack", f"{tmp_path}/in/{{a,b.c}}/left-0.tar", tmp_path / "out", "--prefix-keys")
    assert read_packed(tmp_path / "out") == {key: fields for key, fields in expected.items() if "left" in key}


def test_prefixes_do_not_help_where_one_tar_has_a_key_twice_or_there_are_no_tars(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x.jpg", encode(0)), ("y.jpg", encode(1)), ("x.jpg", encode(2))])
    assert_refused(r"several samples have the key 'a/x', even with prefixes", tmp_path / "a.tar", prefix_keys=True)
    (tmp_path / "a.tar").rename(tmp_path / "__a__.tar")
    assert_refused(r"the key '__a__/0' starts with a name such as __meta__", tmp_path / "__a__.tar", prefix_keys=True)
    write_images(tmp_path / "images", per_class=1)
    (tmp_path / "paths.csv").write_text("path\nimages/class-0/name-000.jpg\n")
    for source in ("images", "paths.csv"):
        assert_refused(r"--prefix-keys \(prefix_keys\) does not apply", tmp_path / source, prefix_keys=True)


def test_what_cannot_be_packed_is_refused_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x.jpg", encode(0)), ("y.jpg", encode(1)), ("x.jpg", encode(2))])
    assert_refused(r"two samples have the key 'x'", tmp_path / "a.tar")
    (folder / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    for source in (folder, folder / "a.tar.gz"):
        assert_refused(r"compressed tar.*decompress", source)
    assert_refused(r"no such directory, manifest or tar: .*missing\.tar", tmp_path / "missing.tar")
    assert_refused(r"--rename-dots \(rename_dots\) does not apply", tmp_path / "a.tar", rename_dots=True)


def test_tars_of_several_splits_are_refused_with_what_to_pack(folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_tar(folder / f"pets-{split}-0.tar", [(f"{split}.jpg", encode(0))])
    for source in (folder, folder / "*.tar"):
        assert_refused(r"files of the splits train, val\. Pack each split .*--source-split train", source)
        shardio.pack(source, tmp_path / f"{source.name} one", source_split="train")
        assert list(read_packed(tmp_path / f"{source.name} one")) == ["train"]
        assert shardio.pack(source, tmp_path / f"{source.name} all", source_split="all").num_samples == 2
    for source, split in ((folder, "test"), (folder / "pets-val-0.tar", "val")):
        assert_refused(rf"has the split {split!r} \(--source-split\) in its name", source, source_split=split)
    shardio.pack(folder / "pets-val*.tar", tmp_path / "out")
    assert list(read_packed(tmp_path / "out")) == ["val"]
