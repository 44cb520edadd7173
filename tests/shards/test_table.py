"""Manifests and tables of tars: valid ones, errors and warnings."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

import shardio
from shardio.errors import FormatError
from shardio.reading import SampleReader
from shardio.shards import (
    DatasetSource,
    Manifest,
    ShardEntry,
    find_gaps,
    join_name,
    open_table,
    read_manifest,
    split_name,
    write_manifest,
)
from shardio.storage import parse_location
from tests.files import find_open_files, read_files
from tests.raising import assert_raises
from tests.sources import encode
from tests.tars import write_tar

base_plus_ext = pytest.importorskip("webdataset.tariterators").base_plus_ext
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

ENTRIES = st.builds(
    ShardEntry,
    name=st.integers(0, 999).map(lambda i: f"shard-{i:06d}.tar"),
    num_bytes=st.integers(0, 2**50),
    num_samples=st.integers(0, 2**40),
    digest=st.text("0123456789abcdef", min_size=32, max_size=32),
)

MANIFESTS = st.builds(
    Manifest,
    shards=st.lists(ENTRIES, max_size=4).map(tuple),
    fields=st.lists(TEXT, max_size=4).map(tuple),
    classes=st.lists(TEXT, max_size=4).map(tuple),
    pack=st.dictionaries(TEXT, TEXT | st.integers(0, 2**62) | st.none(), max_size=4),
)


def entry(name: str = "a.tar", digest: str = "00ff") -> ShardEntry:
    return ShardEntry(name=name, num_bytes=10, num_samples=3, digest=digest)


@given(MANIFESTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_written_is_read(tmp_path: Path, manifest: Manifest) -> None:
    write_manifest(parse_location(tmp_path / "shardio.json"), manifest)
    assert read_manifest(parse_location(tmp_path / "shardio.json")) == manifest
    settings = dict(reversed(manifest.pack.items()))
    write_manifest(parse_location(tmp_path / "other"), dataclasses.replace(manifest, pack=settings))
    assert (tmp_path / "other").read_bytes() == (tmp_path / "shardio.json").read_bytes()


def test_the_digest_depends_on_contents_and_their_order_only() -> None:
    first, second = entry(name="a.tar", digest="00"), entry(name="b.tar", digest="11")
    digest = Manifest(shards=(first, second)).digest
    renamed = dataclasses.replace(first, name="other.tar"), dataclasses.replace(second, name="y.tar")
    settings_changed = Manifest(shards=renamed, classes=("c",), fields=("jpg",), pack={"shuffle_seed": 9})
    assert settings_changed.digest == digest
    assert Manifest(shards=(second, first)).digest != digest
    assert Manifest(shards=(first,)).digest != digest
    assert Manifest(shards=(first, dataclasses.replace(second, digest="12"))).digest != digest
    assert Manifest(shards=(first, dataclasses.replace(second, num_samples=4))).digest != digest


def change(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update(values)


def change_shard(**values: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["shards"][0].update(values)


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "newer": change(format=2),
    "format-text": change(format="1"),
    "no-format": lambda manifest: manifest.pop("format"),
    "no-shards": lambda manifest: manifest.pop("shards"),
    "shards-null": change(shards=None),
    "shards-text": change(shards="shard-000000.tar"),
    "shards-of-numbers": change(shards=[1]),
    "fields-number": change(fields=7),
    "classes-of-numbers": change(classes=[1]),
    "pack-list": change(pack=[1]),
    "shard-no-name": lambda manifest: manifest["shards"][0].pop("name"),
    "shard-name-number": change_shard(name=1),
    **{f"shard-name-{name!r}": change_shard(name=name) for name in ("", ".", "..", "../a", "/a", "a/b", "a/", "a\0b")},
    "samples-text": change_shard(num_samples="many"),
    "samples-fraction": change_shard(num_samples=1.5),
    "samples-negative": change_shard(num_samples=-3),
    "bytes-negative": change_shard(num_bytes=-3),
    "name-with-lone-surrogate": change_shard(name="a\ud800.tar"),
    "no-digest": lambda manifest: manifest["shards"][0].pop("digest"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_manifest_with_wrong_values_is_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    path = tmp_path / "shardio.json"
    write_manifest(parse_location(path), Manifest(shards=(entry(), entry(name="b.tar")), fields=("jpg",)))
    values = json.loads(path.read_bytes())
    damage(values)
    path.write_text(json.dumps(values))
    for read in (lambda: read_manifest(parse_location(path)), lambda: open_table(tmp_path)):
        assert_raises(FormatError, r"shardio\.json", read)


@pytest.mark.parametrize("values", [{"num_samples": 2**62}, {"num_samples": 2**50, "num_bytes": 2**62},
                                    {"num_bytes": 2**20}, {"num_bytes": 2**70}, {"num_samples": 10**30}])  # fmt: skip
@pytest.mark.parametrize("number", [0, 1])
def test_a_manifest_with_impossible_counts_is_refused(out: Path, number: int, values: dict[str, int]) -> None:
    path = out / "shardio.json"
    manifest = json.loads(path.read_bytes())
    manifest["shards"][number].update(values)
    path.write_text(json.dumps(manifest))
    assert_raises(FormatError, r"shardio\.json", open_table, out)


CONTENTS: list[tuple[bytes | int, str]] = [
    *((stop, "cannot be read") for stop in (0, 1, 20, 100, -3)),
    *((content, "") for content in (b"[]", b"null", b"1", b'"text"', b"\xff\xfe\xfd", b"{} {}", b"{'format': 1}")),
    (b"[" * 100_000 + b"]" * 100_000, "cannot be read"),
    (b'{"format": 1, "shards": [], "shards": []}', "cannot be read"),
    (b'{"images": []}', "is not a shardio manifest"),
    (
        b'{"format": 1, "shards": [{"name": "a.tar", "num_bytes": 1, "num_samples": 1}]}',
        r".*shards\.0\.digest: Field required",
    ),
]


@pytest.mark.parametrize(("content", "message"), CONTENTS, ids=range(len(CONTENTS)))
def test_another_file_than_a_manifest_is_refused(tmp_path: Path, content: bytes | int, message: str) -> None:
    """If ``content`` is a number, the manifest is truncated to this size."""
    path = tmp_path / "shardio.json"
    write_manifest(parse_location(path), Manifest(shards=(entry(), entry(name="b.tar")), fields=("jpg",)))
    path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    assert_raises(FormatError, rf"shardio\.json.*{message}", read_manifest, parse_location(path))


NAMES = st.lists(st.sampled_from(["a", "B", "é", "0", ".", "..", "/", "__", "_", " ", "jpg", "JPG"]), max_size=9).map(
    "".join
) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=30)


def is_meta(name: str) -> bool:
    """Return whether WebDataset skips a name because its first component begins and ends with two underscores."""
    first = name.split("/", 1)[0]
    return first.startswith("__") and first.endswith("__") and len(first) >= 4


@given(NAMES)
@example("a.jpg")
@example("a/b.c/d.tar.GZ")
@example("a/.jpg")
@example(".jpg")
@example("a.")
@example("__meta__/a.jpg")
@example("__a.jpg__")
@example("x/__meta__/a.jpg")
@example("README")
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    key, field = base_plus_ext(name)
    expected = None if key is None or is_meta(name) else (key, field.lower())
    assert split_name(name) == expected


@pytest.mark.parametrize("name", ["/" * 2**20, "a/" * 2**19, "./" * 2**19, "__" + "_/" * 2**19])
def test_a_long_name_without_a_key_is_split_in_linear_time(name: str) -> None:
    """A simple regular expression would take hours."""
    assert split_name(name) is None
    assert split_name(f"{name}x.txt") == (f"{name}x", "txt")


@given(NAMES)
def test_splitting_and_joining_keeps_a_name_except_for_letter_case(name: str) -> None:
    split = split_name(name)
    if split is not None:
        key, field = split
        assert split_name(join_name(key, field)) == (key, field)
        assert join_name(key, field)[: len(key) + 1] == name[: len(key) + 1]


def shard_names(source: DatasetSource) -> list[str]:
    table = open_table(source)
    assert [tar.name for tar in table.tars] == [shard.name for shard in table.manifest.shards]
    assert all(location.exists() for location in table.tars + table.indexes)
    return [tar.name for tar in table.tars]


def test_a_packed_directory_and_its_manifest_are_the_same_dataset(packed: Path, out: Path) -> None:
    table = open_table(packed)
    assert table == open_table(packed / "shardio.json") == open_table(str(packed))
    tars = sorted(packed.glob("*.tar"))
    listed = open_table(list(tars)).manifest
    assert (listed.shards, listed.digest) == (table.manifest.shards, table.manifest.digest)
    (out / "shardio.json").rename(out / "train.json")
    assert open_table(out / "train.json").manifest == table.manifest
    backwards = dataclasses.replace(table.manifest, shards=table.manifest.shards[::-1])
    write_manifest(parse_location(out / "shardio.json"), backwards)
    assert shard_names(out) == sorted((path.name for path in tars), reverse=True)


def test_a_directory_of_tars_is_read_in_sorted_order(tars: Path) -> None:
    (tars / "x-000003.tar").rename(tars / "x-000003.TAR")
    shutil.copy(tars / "x-000000.tar", tars / ".x-000000.tar")
    (tars / ".x.tar.gz").write_bytes(b"compressed")
    names, before = [*(f"x-{i:06d}.tar" for i in range(3)), "x-000003.TAR"], find_open_files()
    assert shard_names(tars) == names
    assert shard_names(tars) == names  # The tars have indexes now.
    assert find_open_files() <= before
    write_tar(tars / "y.tar", [("a.jpg", b"1"), ("a.cls", b"0")])
    write_tar(tars / "w.tar", [("README", b"no sample")])
    manifest = open_table(tars).manifest
    assert manifest.shard_sizes.tolist() == [0, 1, 2, 3, 4, 1]
    assert (manifest.fields, manifest.classes, manifest.pack) == (("cls", "jpg", "txt"), (), {})


SOURCES: list[tuple[list[str] | str, list[int]]] = [
    ("x-000002.tar", [2]),
    (["x-000003.tar", "x-000000.tar"], [3, 0]),
    ("x-{000001..000003}.tar", [1, 2, 3]),
    (["x-00000{2,1}.tar", "x-000000.tar"], [2, 1, 0]),
]


@pytest.mark.parametrize(("source", "numbers"), SOURCES)
def test_tars_are_named_by_paths_lists_and_braces(tars: Path, source: list[str] | str, numbers: list[int]) -> None:
    paths: Any = str(tars / source) if isinstance(source, str) else [str(tars / name) for name in source]
    assert shard_names(paths) == [f"x-{number:06d}.tar" for number in numbers]


def test_a_wildcard_names_the_tars_that_there_are_and_warns_of_gaps(tmp_path: Path) -> None:
    for number in (2, 0, 1, 4):
        write_tar(tmp_path / f"train-{number}.tar", [(f"{number}.txt", b"%d" % number)])
    write_tar(tmp_path / "val-0.tar", [("v.txt", b"v")])
    (tmp_path / "train-notes.txt").touch()
    with pytest.warns(RuntimeWarning, match=r"gaps: 1 missing \(train-3\.tar\)\. Check") as warned:
        table = open_table(tmp_path / "train-*.tar")
    assert len(warned) == 1
    assert [tar.name for tar in table.tars] == [f"train-{number}.tar" for number in (0, 1, 2, 4)]
    both = open_table([tmp_path / "{val-*,train-0*}"])
    assert [tar.name for tar in both.tars] == ["val-0.tar", "train-0.tar"]
    for name, error, message in (
        ("test-*.tar", FileNotFoundError, r"no tar matches .*/test-\*\.tar"),
        ("*/x.tar", FileNotFoundError, "for a part of a tar's name"),
        ("*.tar", FormatError, "the tars of several splits"),
    ):
        assert_raises(error, message, open_table, tmp_path / name)
    (tmp_path / "train-5.tar.gz").touch()
    assert_raises(FormatError, r"train-5\.tar\.gz, a compressed tar", open_table, tmp_path / "train-*")
    write_tar(tmp_path / "a[1]-0.tar", [("a.txt", b"a")])
    assert len(open_table(tmp_path / "a[1]-*.tar").tars) == 1


def test_an_existing_tar_with_a_brace_in_its_path_is_not_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "a{b"
    folder.mkdir()
    write_tar(folder / "{x,y}.tar", [("a.txt", b"")])
    assert shard_names(folder / "{x,y}.tar") == shard_names(folder) == ["{x,y}.tar"]


def test_missing_sources_are_not_found(tars: Path, tmp_path: Path) -> None:
    for name in ("nothing", "nothing.tar", "nothing.json", "x-{000003..000005}.tar"):
        assert_raises(FileNotFoundError, r"nothing|x-000004\.tar, .*x-000005\.tar", open_table, tars / name)
    (tmp_path / "empty").mkdir()
    for folder, remedy in ((tmp_path / "empty", ": pack the images first"), (tmp_path, ", but its folders tars do")):
        assert_raises(FileNotFoundError, rf"holds neither shardio\.json nor any \*\.tar{remedy}", open_table, folder)
    assert_raises(FileNotFoundError, None, open_table, [])
    assert_raises(FileNotFoundError, re.escape(f"but {tars} is a directory: pass it by itself"), open_table, [tars])


@pytest.mark.parametrize("pattern", [["{0}/one", "{0}/two"], ["{0}/{{one,two}}"], ["{0}/x.tar", "{0}/one", "{0}/two"]])
def test_directories_in_a_list_are_refused(tmp_path: Path, pattern: list[str]) -> None:
    write_tar(tmp_path / "x.tar", [("0.txt", b"")])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "x.tar", [("0.txt", b"")])
    caught = assert_raises(FileNotFoundError, None, open_table, [name.format(tmp_path) for name in pattern])
    assert str(caught) == (
        f"a list may name only tars and patterns of tars, but {tmp_path}/one and {tmp_path}/two are directories: pass "
        "one directory by itself, or list the tars in them"
    )


def test_a_dataset_without_samples_is_refused(tmp_path: Path) -> None:
    write_manifest(parse_location(tmp_path / "shardio.json"), Manifest(shards=()))
    assert_raises(FormatError, r"shardio\.json has no samples", open_table, tmp_path)
    for members in ([], [("README", b"no sample")], [("__meta__/a.json", b"{}")]):
        write_tar(tmp_path / "a.tar", members)
        assert_raises(FormatError, "no samples", open_table, tmp_path / "a.tar")


@pytest.mark.parametrize("lost", [["shardio.json"], ["shardio.json", "shard-000001.tar"]])
def test_a_packed_directory_without_its_manifest_is_unfinished(out: Path, tmp_path: Path, lost: list[str]) -> None:
    before = read_files(out)
    for name in lost:
        (out / name).unlink()
    message = rf"holds shards or indexes that shardio packed \(\d, .* no {' and no '.join(lost)}: a pack or a copy is"
    assert_raises(FormatError, message, open_table, out)
    assert_raises(FormatError, "a pack or a copy is unfinished", open_table, out / "shard-*.tar")
    assert read_files(out) == {name: content for name, content in before.items() if name not in lost}
    (tmp_path / "index").mkdir()
    shutil.copy(out / "shard-000000.tar.idx", tmp_path / "index")
    assert_raises(FormatError, r"no shardio\.json and no shard-000000\.tar", open_table, tmp_path / "index")


def test_tars_that_shardio_packed_are_read_from_a_list(out: Path) -> None:
    (out / "shardio.json").unlink()
    before = read_files(out)
    assert shard_names(f"{out}/shard-{{000001..000002}}.tar") == ["shard-000001.tar", "shard-000002.tar"]
    assert read_files(out) == before


def test_foreign_tars_may_be_called_shards(tars: Path) -> None:
    for tar in sorted(tars.glob("*.tar")):
        tar.rename(tar.with_name(tar.name.replace("x", "shard")))
    names = [f"shard-{i:06d}.tar" for i in range(4)]
    assert (shard_names(tars), shard_names(tars)) == (names, names)


@pytest.mark.parametrize("source", ["", ["x.tar", ""]])
def test_an_empty_name_is_not_the_working_directory(
    tars: Path, monkeypatch: pytest.MonkeyPatch, source: DatasetSource
) -> None:
    monkeypatch.chdir(tars)
    write_tar(tars / "x.tar", [("a.txt", b"")])
    assert_raises(ValueError, r"the path is empty: pass a file or a directory, or '\.'", open_table, source)


GAPS = {
    "a b d": "",
    "x-3 x-4 x-5": "",
    "x-00 x-01 x-03 x-06": "x-02 x-04 x-05",
    "x-08 x-9 x-10": "",
    "photo-1234 photo-99887 photo-777": "",
    "2024-01-30 2024-02-02 2024-02-05": "",
    "cats-0 cats-1 dogs-0 dogs-1": "",
    "x-00000-of-00003 x-00001-of-00003 x-00002-of-00003": "",
    "x-00000-of-00005 x-00001-of-00005 x-00002-of-00005": "x-00003-of-00005 x-00004-of-00005",
}


@pytest.mark.parametrize(("names", "missing"), GAPS.items())
def test_only_numbered_names_have_gaps(names: str, missing: str) -> None:
    assert find_gaps(names.split()) == missing.split()


def test_files_that_macos_added_are_not_tars(tmp_path: Path) -> None:
    files = [tmp_path / f"._{number}.tar" for number in (0, 1, 3)]
    for file in files:
        file.write_bytes(b"")
    assert_raises(FileNotFoundError, r"holds neither shardio\.json nor any \*\.tar", open_table, tmp_path)
    message = f"{re.escape(str(files[0]))} is a file that macOS added, not a tar"
    assert_raises(FileNotFoundError, message, open_table, files)


def test_files_that_macos_added_are_skipped_and_counted_once(tmp_path: Path) -> None:
    apple_double = bytes.fromhex("0005160700020000") + bytes(100)
    for i in range(2):
        members = [(f"cats/{prefix}{i}-{j}.{field}", b"%d" % j) for j in range(3) for field in ("jpg", "cls")
                   for prefix in ("._", "")]  # fmt: skip
        write_tar(tmp_path / f"{i}.tar", [("cats/.DS_Store", b"\0\0\0\1Bud1"), ("._cats", apple_double), *members])
        (tmp_path / f"._{i}.tar").write_bytes(apple_double)
    with pytest.warns(RuntimeWarning) as warned:
        table = open_table(tmp_path)
    assert [str(warning.message) for warning in warned] == [
        "skipped files that macOS added (._* and .DS_Store): 16 in tars, and 2 next to them"
    ]
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["jpg", "cls"])
    assert [(sample.key, dict(sample.fields)) for sample in samples] == [
        (f"cats/{i}-{j}", {"jpg": b"%d" % j, "cls": b"%d" % j}) for i in range(2) for j in range(3)
    ]
    assert table.manifest.fields == ("cls", "jpg")


def test_a_tar_that_is_named_twice_is_refused(tars: Path) -> None:
    tar = tars / "x-000001.tar"
    (tars / "link.tar").symlink_to(tar.name)
    os.link(tar, tars / "hard.tar")
    for again in (tar, tars / ".." / tars.name / tar.name, tars / "link.tar", tars / "hard.tar"):
        message = r"x-000001\.tar.* so each of its samples would be delivered twice: name it once"
        assert_raises(FormatError, message, open_table, [tar, tars / "x-000002.tar", again])


def test_copies_of_a_tar_give_a_warning(tars: Path) -> None:
    shutil.copy(tars / "x-000001.tar", tars / "copy.tar")
    with pytest.warns(RuntimeWarning, match=r"equal contents: .*copy\.tar, .*x-000001\.tar\. Each .* 2 times"):
        assert open_table(tars).manifest.num_samples == 12
    (tars / "copy.tar").unlink()
    for name in "a", "b":
        write_tar(tars / f"{name}.tar", [])
    assert len(open_table(tars).tars) == 6  # Empty tars do not count as copies of each other.


def test_a_manifest_that_lists_a_shard_twice_is_refused(out: Path) -> None:
    shards = open_table(out).manifest.shards
    write_manifest(parse_location(out / "shardio.json"), Manifest(shards=(*shards, shards[1])))
    assert_raises(FormatError, r"shardio\.json is damaged: it lists shard-000001\.tar twice", open_table, out)


@pytest.mark.parametrize("name", ["y.tar.gz", "y.tgz", "y.tar.zst", "Y.TAR.GZ"])
def test_compressed_tars_are_not_silently_left_out(tars: Path, name: str) -> None:
    for folder in (tars, tars.parent):
        (folder / name).write_bytes(b"compressed")
        message = rf"holds {re.escape(name)}, a compressed tar.*: decompress them"
        assert_raises(FormatError, message, open_table, folder)
    assert len(open_table(sorted(tars.glob("*.tar"))).tars) == 4


def test_the_tars_of_several_splits_are_not_read_as_one_dataset(tmp_path: Path) -> None:
    for name in ("train-000", "train-001", "train-002", "val-000"):
        write_tar(tmp_path / f"x-{name}.tar", [(f"{name}.jpg", encode(0)), (f"{name}.txt", name.encode())])
    for read in (open_table, shardio.open):
        message = r"train: 3 tars, x-train-000.tar to x-train-002.tar\n  val: 1"
        caught = assert_raises(FormatError, message, read, tmp_path)
    pattern = str(caught).split()[-1]
    assert pattern == str(tmp_path / "x-train-{000..002}.tar")
    assert list(shardio.ShardDataset(pattern, fields="key")) == ["train-000", "train-001", "train-002"]
    assert len(open_table(sorted(tmp_path.glob("*.tar"))).tars) == 4
