"""Tars of WebDataset and packed datasets as the source of a pack."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardio
from shardio import PackError
from shardio.cli.main import app
from shardio.packing import PackSettings, pack_source, reshard
from shardio.progress import WorkProgress
from tests.files import read_files
from tests.sources import encode, write_images
from tests.tars import by_key, write_tar

webdataset = pytest.importorskip("webdataset")

NUM = 23
LONG = "folder/" * 30
"""With it, a member's name does not fit a plain header."""


def write_foreign(folder: Path) -> dict[str, dict[str, bytes]]:
    """Write two tars as WebDataset does; return the fields of each sample by key."""
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
    assert by_key(*(tmp_path / "1").glob("*.tar")) == samples
    assert len(tars_and_indexes(tmp_path / "1")) > 4
    assert tars_and_indexes(tmp_path / "1") == tars_and_indexes(tmp_path / "resharded")
    if not source:
        shardio.pack(tmp_path / "in", tmp_path / "2", **limits, check=False, num_workers=2)
        assert read_files(tmp_path / "1") == read_files(tmp_path / "2")


def test_a_packed_dataset_keeps_its_classes_when_it_is_tiled(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    before = shardio.pack(tmp_path / "images", tmp_path / "packed", max_shard_samples=5)
    for source in (tmp_path / "packed", tmp_path / "packed" / "shardio.json"):
        manifest = shardio.pack(source, tmp_path / f"tiled-{source.name}", jpeg="tile")
        assert manifest.classes == before.classes
        assert manifest.pack["num_tiled"] == manifest.num_samples == before.num_samples
        found = by_key(*(tmp_path / f"tiled-{source.name}").glob("*.tar"))
        for key, sample in by_key(*(tmp_path / "packed").glob("*.tar")).items():
            assert found[key]["cls"] == sample["cls"]
            assert found[key]["jpg"] != sample["jpg"]


def test_labels_are_replaced_or_renumbered(tmp_path: Path) -> None:
    write_images(tmp_path / "images", per_class=2)
    shardio.pack(tmp_path / "images", tmp_path / "packed", max_shard_samples=5)
    names = ["class-2", "other", "class-0", "class-1"]
    manifest = shardio.pack(tmp_path / "packed", tmp_path / "renumbered", classes=names)
    assert list(manifest.classes) == names
    for key, sample in by_key(*(tmp_path / "renumbered").glob("*.tar")).items():
        assert names[int(sample["cls"])] == key.partition("/")[0]
    with pytest.raises(PackError, match="has classes that are not among the given ones"):
        shardio.pack(tmp_path / "packed", tmp_path / "bad", classes=names[:3])
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        rows = [(f"class-{i}/name-{j:03d}.jpg", f"odd {j % 2}") for i in range(3) for j in range(2)]
        csv.writer(file).writerows([("key", "label"), *rows])
    manifest = shardio.pack(tmp_path / "packed", tmp_path / "labelled", labels=tmp_path / "labels.csv")
    assert manifest.classes == ("odd 0", "odd 1")
    for key, sample in by_key(*(tmp_path / "labelled").glob("*.tar")).items():
        assert int(sample["cls"]) == int(key[-1]) % 2


def test_class_names_of_foreign_tars_name_their_labels(tmp_path: Path) -> None:
    samples = write_foreign(tmp_path / "in")
    names = [f"class {label}" for label in range(5)]
    assert list(shardio.pack(tmp_path / "in", tmp_path / "out", classes=names).classes) == names
    assert by_key(*(tmp_path / "out").glob("*.tar")) == samples
    with pytest.raises(PackError, match=r"sample \d+ of train-00000\d\.tar of .*its label is b'4', .* integer below 4"):
        shardio.pack(tmp_path / "in", tmp_path / "bad", classes=names[:4])
    write_tar(tmp_path / "unlabelled.tar", [("a.jpg", encode(0))])
    with pytest.raises(PackError, match=r"classes are given, but .* has no labels"):
        shardio.pack(tmp_path / "unlabelled.tar", tmp_path / "bad", classes=names)


def test_an_image_that_cannot_be_decoded_is_left_out_with_its_tar(tmp_path: Path) -> None:
    write_tar(tmp_path / "in.tar", [("a.jpg", encode(0)), ("b.jpg", encode(1)[:200]), ("c.jpg", encode(2))])
    result = pack_source(tmp_path / "in.tar", tmp_path / "out", PackSettings(max_shard_size=1 << 20))
    (rejected,) = result.rejected
    assert rejected.key == "b"
    assert rejected.reason.startswith("sample 1 of in.tar, field 'jpg': cannot be decoded")


def test_a_damaged_tar_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    shardio.pack(tmp_path / "images", tmp_path / "packed")
    tar = tmp_path / "packed" / "shard-000000.tar"
    content = bytearray(tar.read_bytes())
    content[content.index(b"\xff\xd8\xff") + 300] ^= 1
    tar.write_bytes(content)
    with pytest.raises(PackError, match=r"sample \d+ of shard-000000\.tar of .* cannot be read: .*class-"):
        shardio.pack(tmp_path / "packed", tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()


def test_a_tar_that_changes_during_the_pack_is_refused(tmp_path: Path) -> None:
    write_foreign(tmp_path / "in")

    class Rewrite(WorkProgress):
        def start(self, total: int, num_bytes: int | None = None) -> None:
            write_tar(tmp_path / "in" / "train-000001.tar", [("a.jpg", encode(0))])

    with pytest.raises(PackError, match=r"train-000001\.tar changed from \d+ to \d+ bytes"):
        pack_source(tmp_path / "in", tmp_path / "out", PackSettings(max_shard_size=1 << 20), progress=Rewrite())


def test_tars_with_the_same_keys_are_packed_with_prefixes(tmp_path: Path) -> None:
    expected = dict[str, dict[str, bytes]]()
    for part in ("a", "b.c"):
        for camera in ("left", "right"):
            tar = tmp_path / "in" / part / f"{camera}-0.tar"
            tar.parent.mkdir(parents=True, exist_ok=True)
            members = [
                (f"./{i}.{field}", f"{part} {camera} {i} {field}".encode()) for i in range(3) for field in ("a", "b")
            ]
            write_tar(tar, members)
            expected |= {
                f"{part}/{camera}-0/{i}": {field: f"{part} {camera} {i} {field}".encode() for field in ("a", "b")}
                for i in range(3)
            }
    remedy = r"two samples have the key '\./0'.*put the tar's name before each key: shardio pack --prefix-keys"
    with pytest.raises(PackError, match=remedy):
        shardio.pack(tmp_path / "in" / "a", tmp_path / "out")
    for name, workers in (("1", 1), ("2", 2)):
        options: dict[str, Any] = {"prefix_keys": True, "max_shard_samples": 2, "num_workers": workers}
        shardio.pack(tmp_path / "in" / "a", tmp_path / name, **options)
    assert read_files(tmp_path / "1") == read_files(tmp_path / "2")
    found = by_key(*(tmp_path / "1").glob("*.tar"))
    assert found == {key.removeprefix("a/"): fields for key, fields in expected.items() if key.startswith("a/")}
    with shardio.open(tmp_path / "1") as samples:
        assert len(samples) == len(found)
    done = CliRunner().invoke(
        app, ["pack", f"{tmp_path}/in/{{a,b.c}}/left-0.tar", str(tmp_path / "out"), "--prefix-keys"]
    )
    assert done.exit_code == 0, done.output
    assert by_key(*(tmp_path / "out").glob("*.tar")) == {
        key: fields for key, fields in expected.items() if "left" in key
    }


def test_prefixes_do_not_help_where_one_tar_has_a_key_twice_or_there_are_no_tars(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x.jpg", encode(0)), ("y.jpg", encode(1)), ("x.jpg", encode(2))])
    with pytest.raises(PackError, match=r"several samples have the key 'a/x', even with prefixes"):
        shardio.pack(tmp_path / "a.tar", tmp_path / "out", prefix_keys=True)
    (tmp_path / "a.tar").rename(tmp_path / "__a__.tar")
    with pytest.raises(PackError, match=r"the key '__a__/0' starts with a name such as __meta__"):
        shardio.pack(tmp_path / "__a__.tar", tmp_path / "out", prefix_keys=True)
    write_images(tmp_path / "images", per_class=1)
    (tmp_path / "paths.csv").write_text("path\nimages/class-0/name-000.jpg\n")
    for source in ("images", "paths.csv"):
        with pytest.raises(PackError, match=r"--prefix-keys \(prefix_keys\) does not apply"):
            shardio.pack(tmp_path / source, tmp_path / "out", prefix_keys=True)
    with pytest.raises(ValueError, match="prefix_keys does not apply to an iterable"):
        shardio.pack([{"jpg": encode(0)}], tmp_path / "out", prefix_keys=True)


def test_what_cannot_be_packed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x.jpg", encode(0)), ("y.jpg", encode(1)), ("x.jpg", encode(2))])
    with pytest.raises(PackError, match=r"two samples have the key 'x'"):
        shardio.pack(tmp_path / "a.tar", tmp_path / "out")
    (tmp_path / "zipped").mkdir()
    packed = tmp_path / "zipped" / "a.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    for source in (packed, packed.parent):
        with pytest.raises(PackError, match=r"compressed tar.*decompress"):
            shardio.pack(source, tmp_path / "out")
    with pytest.raises(PackError, match=r"no such directory, manifest or tar: .*missing\.tar"):
        shardio.pack(tmp_path / "missing.tar", tmp_path / "out")
    with pytest.raises(PackError, match=r"--rename-dots \(rename_dots\) does not apply"):
        shardio.pack(tmp_path / "a.tar", tmp_path / "out", rename_dots=True)
    assert not (tmp_path / "out").exists()


def test_tars_of_several_splits_are_refused_with_what_to_pack(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for split in ("train", "val"):
        write_tar(tmp_path / "in" / f"pets-{split}-0.tar", [(f"{split}.jpg", encode(0))])
    for source in (tmp_path / "in", tmp_path / "in" / "*.tar"):
        with pytest.raises(PackError, match=r"files of the splits train, val\. Pack each one, .*--source-split train"):
            shardio.pack(source, tmp_path / "out")
        shardio.pack(source, tmp_path / f"{source.name} one", source_split="train")
        assert list(by_key(*(tmp_path / f"{source.name} one").glob("*.tar"))) == ["train"]
        assert shardio.pack(source, tmp_path / f"{source.name} all", source_split="all").num_samples == 2
    for source, split in ((tmp_path / "in", "test"), (tmp_path / "in" / "pets-val-0.tar", "val")):
        with pytest.raises(PackError, match=f"has {split!r} in its name, as --source-split says"):
            shardio.pack(source, tmp_path / "out", source_split=split)
    shardio.pack(tmp_path / "in" / "pets-val*.tar", tmp_path / "out")
    assert list(by_key(*(tmp_path / "out").glob("*.tar"))) == ["val"]
