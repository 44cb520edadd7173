"""Merged, split, resharded and appended datasets, and packs in parts, hold the same samples, byte for byte.

Appends depend on each option that affects the output, and each option is available on the command line.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import shutil
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import xxhash

import shardio
from shardio.cli.main import load_command
from shardio.errors import FormatError, PackError, SampleError
from shardio.packing import PackOptions, PackResult, make_parts, pack_parts, pack_source, rewriting
from shardio.packing.pack_call import OPTIONS_OF_SHARDS, deciding_options, kinds_of_options
from shardio.packing.sources import tars
from shardio.packing.sources.source import OPTIONS_OF_DOCUMENTS
from shardio.shards import UNFINISHED_NAME, open_table
from tests.cli.commands import run, usage_error
from tests.files import read_files, read_parts
from tests.packing.packs import Interrupt, exit_code_if_killed, read_packed, write_all, write_files
from tests.raising import assert_raises
from tests.sources import encode, write_images
from tests.tars import Samples, read_with_webdataset, write_tar


def samples_of(folder: Path) -> Samples:
    return read_with_webdataset(*sorted(folder.glob("*.tar")))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Two tars from another tool, with a long name, a non-ASCII name, a name in capitals, and a missing field."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    long = "d/" * 80 + "ü"
    write_tar(folder / "a.tar", [("1.JPG", b"1" * 700), ("1.cls", b"0"), ("README", b""), (f"{long}.jpg", b"2")])
    write_tar(folder / "b.tar", [("3.seg.png", b""), ("3.jpg", b"3")])
    return folder


@pytest.mark.parametrize(
    "limits", [{"max_shard_samples": 5}, {"max_shard_size": 20000}, {"max_shard_size": "1MiB"}, {"max_shard_size": 1}]
)
def test_resharding_keeps_the_samples_and_their_order(packed: Path, tmp_path: Path, limits: dict[str, Any]) -> None:
    before = open_table(packed).manifest
    manifest = shardio.reshard(packed, tmp_path / "out", **limits)
    assert samples_of(tmp_path / "out") == samples_of(packed)
    assert (manifest.fields, manifest.classes) == (before.fields, before.classes)
    assert (manifest.pack["jpeg"], manifest.pack["num_tiled"]) == ("copy", 0)
    assert max(entry.num_samples for entry in manifest.shards) <= limits.get("max_shard_samples", 21)
    assert shardio.verify(tmp_path / "out", deep=True) == []
    if limits == {"max_shard_samples": 5}:  # The limit of the original pack.
        before_files, after = read_files(packed), read_files(tmp_path / "out")
        assert before_files.keys() == after.keys()
        assert {name for name in after if before_files[name] != after[name]} <= {"shardio.json"}


def test_shuffling_does_not_depend_on_buffers(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, num_together in enumerate((256, 3)):
        monkeypatch.setattr(tars, "MAX_SAMPLES", num_together)
        monkeypatch.setattr(tars, "MAX_BYTES", 4000 if i else 2**25)
        monkeypatch.setattr(tars, "MAX_OPEN", 2)
        shardio.reshard(packed, tmp_path / str(i), max_shard_samples=8, shuffle_seed=3)
    assert read_files(tmp_path / "0") == read_files(tmp_path / "1")
    assert samples_of(tmp_path / "0") != samples_of(packed)
    assert sorted(samples_of(tmp_path / "0")) == sorted(samples_of(packed))


def test_merging_puts_one_dataset_after_another(packed: Path, foreign: Path, tmp_path: Path) -> None:
    (foreign / "a.tar").unlink()  # This tar has labels without class names.
    manifest = shardio.merge(tmp_path / "out", [packed, foreign / "b.tar"], max_shard_samples=100)
    assert samples_of(tmp_path / "out") == samples_of(packed) + read_with_webdataset(foreign / "b.tar")
    assert len(manifest.shards) == 1
    assert manifest.classes == open_table(packed).manifest.classes
    assert "num_tiled" not in manifest.pack


def test_datasets_that_do_not_fit_are_not_merged(packed: Path, foreign: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    assert_raises(PackError, "two samples have the key 'class-", shardio.merge, tmp_path / "out", [packed, copy])
    assert_raises(PackError, "labels without class names", shardio.merge, tmp_path / "out", [packed, foreign])
    assert_raises(ValueError, "a list", shardio.merge, tmp_path / "out", packed)
    assert_raises(PackError, "holds tars of a source", shardio.merge, packed, [packed], overwrite=True)
    assert not (tmp_path / "out").exists()
    assert shardio.verify(packed) == []


def test_damage_is_found_while_copying(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "MAX_SAMPLES", 3)
    damaged = Path(shutil.copytree(packed, tmp_path / "damaged"))
    tar = damaged / "shard-000003.tar"
    content = bytearray(tar.read_bytes())
    content[content.index(b"\xff\xd9\0")] ^= 1
    tar.write_bytes(content)
    message = r"shard-000003\.tar.*xxh3-64"
    assert_raises(SampleError, message, shardio.reshard, damaged, tmp_path / "out", max_shard_samples=5)
    assert not (tmp_path / "out" / "shardio.json").exists()
    assert_raises(FormatError, "unfinished", open_table, tmp_path / "out")
    shardio.reshard(packed, tmp_path / "out", max_shard_samples=5, overwrite=True)
    assert shardio.verify(tmp_path / "out") == []


def test_a_split_depends_on_keys_alone(packed: Path, tmp_path: Path) -> None:
    manifests = shardio.split(packed, tmp_path / "out", by=[0.6, 0.4], names=["train", "val"])
    parts = {name: samples_of(tmp_path / "out" / name) for name in manifests}
    for key, _ in parts["train"]:
        assert xxhash.xxh3_64(key.encode()).intdigest() < 0.6 * 2**64
    whole = samples_of(packed)
    assert parts["train"] == [sample for sample in whole if sample in parts["train"]]  # In the same order.
    assert sorted(parts["train"] + parts["val"]) == sorted(whole)
    assert {manifest.classes for manifest in manifests.values()} == {open_table(packed).manifest.classes}
    assert shardio.verify(tmp_path / "out" / "val") == []
    write_all(tmp_path / "more", ({"__key__": f"new/{i}", "txt": ""} for i in range(20)))
    shardio.merge(tmp_path / "both", [tmp_path / "more", packed])
    shardio.split(tmp_path / "both", tmp_path / "again", by=["0.6", "0.4"], names=["train", "val"])
    for name, samples in parts.items():
        after = samples_of(tmp_path / "again" / name)
        assert [sample for sample in after if not sample[0].startswith("new/")] == samples
        assert len(after) > len(samples)


@pytest.mark.parametrize(
    ("by", "names", "message"),
    [
        ([0.9, 0.2], ["a", "b"], "sum to 1"),
        ([1.0, 0.0], ["a", "b"], "positive"),
        ([1.0], ["a"], "at least 2"),
        ([0.5, 0.5], ["a"], "same length"),
        ([0.5, 0.5], ["a", "a"], "must differ"),
        ([0.5, 0.5], ["a", "../b"], "directory name"),
        (["half", 0.5], ["a", "b"], "must be numbers such as"),
        (["0.999999", "0.000001"], ["a", "b"], r"none of the 21 samples .* in b"),
    ],
)
def test_wrong_parts_are_refused(packed: Path, tmp_path: Path, by: list[Any], names: list[str], message: str) -> None:
    assert_raises((ValueError, PackError), message, shardio.split, packed, tmp_path / "out", by=by, names=names)
    assert not (tmp_path / "out").exists()


SETTINGS = PackOptions(max_shard_size=1 << 30, max_shard_samples=7, num_workers=1)
PARTS = make_parts(["0.7", "0.2", "0.1"], ["train", "val", "test"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("parts") / "in"
    write_images(source, classes=3, per_class=40, width=8, height=8)
    return source


@pytest.fixture(scope="module")
def in_parts(source: Path) -> Path:
    pack_parts(source, source.parent / "parts", PARTS, SETTINGS)
    return source.parent / "parts"


def test_parts_are_those_of_a_split_of_the_whole_dataset(source: Path, in_parts: Path, tmp_path: Path) -> None:
    pack_source(source, tmp_path / "whole", SETTINGS)
    shardio.split(tmp_path / "whole", tmp_path / "split", by=[0.7, 0.2, 0.1], names=PARTS.names)
    together = dict[str, dict[str, bytes]]()
    for name in PARTS.names:
        found = read_packed(in_parts / name)
        assert found == read_packed(tmp_path / "split" / name)
        assert shardio.open(in_parts / name).manifest.classes == ("class-0", "class-1", "class-2")
        assert not together.keys() & found.keys()
        together |= found
    assert together == read_packed(tmp_path / "whole")


@pytest.mark.parametrize("after", [20, 105, 119])
def test_an_interrupted_pack_resumes_in_all_parts(source: Path, in_parts: Path, tmp_path: Path, after: int) -> None:
    interrupt = Interrupt(after)
    assert_raises(KeyboardInterrupt, None, pack_parts, source, tmp_path / "out", PARTS, SETTINGS, progress=interrupt)
    for name in PARTS.names:
        assert_raises((shardio.FormatError, FileNotFoundError), None, shardio.open, tmp_path / "out" / name)
    results = pack_parts(source, tmp_path / "out", PARTS, SETTINGS)
    assert sum(result.num_kept for result in results.values()) > after - 3 * 7
    assert read_parts(tmp_path / "out") == read_parts(in_parts)


@pytest.mark.parametrize("num_unmarked", [1, 2])
def test_a_pack_that_was_killed_at_its_end_is_ended(
    source: Path, in_parts: Path, tmp_path: Path, num_unmarked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, marks = Path.unlink, list[Path]()

    def unlink_some(path: Path, missing_ok: bool = False) -> None:
        if path.name == UNFINISHED_NAME:
            marks.append(path)
            if len(marks) > num_unmarked:
                raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_some)
        assert_raises(KeyboardInterrupt, None, pack_parts, source, tmp_path / "out", PARTS, SETTINGS)
    message, other = "different images or with different settings", PackOptions(max_shard_size=1 << 20)
    assert_raises(PackError, message, pack_parts, source, tmp_path / "out", PARTS, other)
    pack_parts(source, tmp_path / "out", PARTS, SETTINGS)
    assert read_parts(tmp_path / "out") == read_parts(in_parts)
    assert_raises(PackError, "already holds a packed dataset", pack_parts, source, tmp_path / "out", PARTS, SETTINGS)


def test_the_command_divides_with_usual_names_or_writes_nothing(source: Path, tmp_path: Path) -> None:
    train, val = json.loads(run("pack", source, tmp_path / "out", "--split", "0.8,0.2", "--json").stdout)
    assert (train["out"], val["out"]) == (str(tmp_path / "out" / "train"), str(tmp_path / "out" / "val"))
    assert train["samples"] + val["samples"] == 120
    assert "must be positive and sum to 1" in usage_error("pack", source, tmp_path / "other", "--split", "0.8,0.3")
    parts, message = make_parts(["0.9999", "0.0001"], ["train", "val"]), r"none of the 120 .*in val: choose larger frac"
    assert_raises(PackError, message, pack_parts, source, tmp_path / "other", parts, SETTINGS)
    assert not (tmp_path / "other").exists()


@pytest.fixture
def out(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "out"))


def write_more(folder: Path, keys: list[str], classes: Any = None, **fields: Any) -> Path:
    write_all(folder, ({"__key__": key, "txt": key, **fields} for key in keys), max_shard_samples=2, classes=classes)
    return folder


def test_shards_are_linked_or_copied_under_the_next_names(out: Path, tmp_path: Path) -> None:
    before, other = shardio.open(out).manifest, Path(shutil.copytree(out, tmp_path / "other"))
    more = write_more(tmp_path / "more", ["x/1", "x/2", "x/3"])
    manifest = shardio.append(out, more)
    first = len(before.shards)
    assert manifest.shards[:first] == before.shards
    assert [entry.name for entry in manifest.shards[first:]] == [f"shard-{first + i:06d}.tar" for i in range(2)]
    assert (out / f"shard-{first:06d}.tar").samefile(more / "shard-000000.tar")
    assert (manifest.fields, manifest.classes) == (("cls", "jpg", "txt"), before.classes)
    assert manifest.pack == {name: value for name, value in before.pack.items() if name != "num_tiled"}
    assert (shardio.open(out).manifest, shardio.verify(out)) == (manifest, [])
    found = samples_of(out)
    assert found[before.num_samples :] == [(key, {"txt": key.encode()}) for key in ("x/1", "x/2", "x/3")]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    shardio.append(other, [more], copy=True)
    assert read_files(out) == read_files(other)
    assert not (other / "shard-000005.tar").samefile(more / "shard-000000.tar")


def test_an_open_reader_goes_on_with_the_old_dataset(out: Path, tmp_path: Path) -> None:
    with shardio.open(out) as before:
        keys = list(before)
        shardio.append(out, write_more(tmp_path / "more", ["x/1"]))
        assert list(before) == keys
        assert {key: len(before[key]) for key in keys} == dict.fromkeys(keys, 3)
    with shardio.open(out) as after:
        assert list(after) == [*keys, "x/1"]


def test_images_are_packed_with_the_same_settings_and_classes(images: Path, out: Path, tmp_path: Path) -> None:
    contents = write_images(tmp_path / "new", classes=2, per_class=4, width=8, height=8)
    for key in list(contents):
        path = tmp_path / "new" / f"{key}.jpg"
        path.rename(path.with_name(f"new-{path.name}"))
    (tmp_path / "new" / "class-0").rename(tmp_path / "new" / "class-2")
    manifest = shardio.append(out, tmp_path / "new", num_workers=1)
    assert [entry.num_samples for entry in manifest.shards[5:]] == [5, 3]
    with shardio.open(out) as opened:
        assert opened["class-2/new-name-001"]["cls"] == b"2"
        assert opened["class-1/new-name-001"]["jpg"] == contents["class-1/name-001"]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    (tmp_path / "new" / "class-1").rename(tmp_path / "new" / "class-9")
    assert_raises(PackError, "class-9", shardio.append, out, tmp_path / "new")
    assert_raises(PackError, "two samples have the key 'class-", shardio.append, out, images, num_workers=1)
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_images_that_are_not_appended_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1, width=8, height=8)
    write_files(tmp_path / "more" / "class-0", {"large.jpg": encode(1, width=40, height=40), "small.jpg": encode(2)})
    shardio.pack(tmp_path / "in", tmp_path / "out", max_pixels=1599)
    with caplog.at_level(logging.WARNING):
        assert shardio.append(tmp_path / "out", tmp_path / "more").num_samples == 2
    (message,) = caplog.messages
    assert re.match(rf"{tmp_path}/more: class-0/large\.jpg .*40×40.* left out", message)


def test_images_are_appended_to_merged_datasets_of_different_settings(tmp_path: Path) -> None:
    for name in ("png", "webp"):
        write_files(tmp_path / f"in-{name}", {f"{name}.jpg": encode(1)})
        shardio.pack(tmp_path / f"in-{name}", tmp_path / name, convert_to=name, max_side=20, check=False)
    same = shardio.merge(tmp_path / "same", [tmp_path / "png"])
    assert [same.pack[name] for name in ("convert_to", "max_side", "quality", "check")] == ["png", 20, 90, False]
    shardio.merge(tmp_path / "out", [tmp_path / "png", tmp_path / "webp"])
    write_files(tmp_path / "more", {"more.jpg": encode(2)})
    assert shardio.append(tmp_path / "out", tmp_path / "more").num_samples == 3


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (["class-0", "class-1"], 3),
        (["class-0", "class-1", "class-2", "new"], 4),
        (["class-1"], "label 0 is 'class-0'"),
        (["class-0", "class-2"], "label 1 is 'class-1'"),
        (None, "labels without class names"),
    ],
)
def test_class_names_must_agree(out: Path, tmp_path: Path, classes: list[str] | None, expected: int | str) -> None:
    before, more = read_files(out), write_more(tmp_path / "more", ["x"], classes, cls=0)
    if isinstance(expected, int):
        assert len(shardio.append(out, more).classes) == expected
        return
    assert_raises(PackError, expected, shardio.append, out, more)
    assert read_files(out) == before


def test_repeated_keys_are_refused(out: Path, tmp_path: Path) -> None:
    before, more = read_files(out), write_more(tmp_path / "more", ["x", "y", "class-1/name-003"])
    message = rf"'class-1/name-003': one in {out}/.* one in {more}/shard-000001"
    assert_raises(PackError, message, shardio.append, out, more)
    others = [write_more(tmp_path / name, ["x"]) for name in ("other", "third")]
    assert_raises(PackError, "'x'", shardio.append, out, others)
    assert read_files(out) == before


def test_what_cannot_be_appended_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    write_tar(tmp_path / "foreign" / "a.tar", [("a.txt", b"")])
    more = write_more(tmp_path / "more", ["x"])
    assert_raises(PackError, "shardio reshard", shardio.append, out, tmp_path / "foreign")
    assert_raises(PackError, "not a packed directory", shardio.append, tmp_path / "foreign", more)
    assert_raises(FileNotFoundError, "does not exist", shardio.append, out, tmp_path / "nothing")
    assert_raises(ValueError, "is empty", shardio.append, out, [])
    (out / "shard-000005.tar").write_bytes(b"mine")
    assert_raises(PackError, "exists but is not in the manifest", shardio.append, out, more)
    assert (out / "shard-000005.tar").read_bytes() == b"mine"
    (out / "shard-000005.tar").unlink()
    for suffix in "", ".idx":
        shutil.copy(write_more(tmp_path / f"z{suffix}", ["z"]) / f"shard-000000.tar{suffix}", more)
    assert_raises(PackError, "not the shard that its manifest lists", shardio.append, out, more)


@pytest.mark.slow
def test_wherever_it_is_killed_the_dataset_is_the_old_or_the_new_one(packed: Path, tmp_path: Path) -> None:
    more = write_more(tmp_path / "more", ["x/1", "x/2", "x/3"])
    old = shardio.open(packed).manifest
    expected = Path(shutil.copytree(packed, tmp_path / "expected"))
    new = shardio.append(expected, more)
    for n in range(1, 7):  # Six files are renamed or linked: the record, two tars, their indexes, and the manifest.
        out = Path(shutil.copytree(packed, tmp_path / f"out-{n}"))
        assert exit_code_if_killed(n, "after", shardio.append, out, more) == -signal.SIGKILL
        assert shardio.open(out).manifest == (new if n == 6 else old)
        assert all(problem.kind == "unlisted" for problem in shardio.verify(out))
        if n == 4:  # A different append starts from the old dataset.
            copy = Path(shutil.copytree(out, tmp_path / "copy"))
            shardio.append(copy, write_more(tmp_path / "other", ["y"]))
            assert [entry.num_samples for entry in shardio.open(copy).manifest.shards] == [5, 5, 5, 5, 1, 1]
            assert shardio.verify(copy) == []
        assert shardio.append(out, more) == new
        assert read_files(out) == read_files(expected)
    assert exit_code_if_killed(7, "after", shardio.append, shutil.copytree(packed, tmp_path / "out-7"), more) == 0


OTHER_VALUES: dict[str, Any] = {
    "fields": ("jpg", "cls"),
    "classes": ("class-0",),
    "labels": Path("labels.csv"),
    "tokenizer": "encoding.py:encode",
    "storage_options": {"retries": 1},
}
"""Values other than the defaults. For options that this table lacks, ``other_value`` chooses the values."""

NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"convert_to": "png"} for name in ("max_side", "min_side", "quality", "to_srgb")},
    "on_incomplete": {"layout": "pairs"},
}
"""For each option that needs other options, those options."""


def write_sample(folder: Path, name: str, seed: int) -> None:
    """Write an image, or a document if an option applies only to documents."""
    if name in OPTIONS_OF_DOCUMENTS:
        folder.mkdir()
        (folder / f"{seed}.jsonl").write_text(json.dumps({"text": [seed]}))
    else:
        write_files(folder, {f"class-0/{seed}.jpg": encode(seed, width=8, height=8)})


def other_value(name: str) -> Any:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    kind, default = kinds_of_options()[name][0], getattr(PackOptions(), name)
    kinds = [each for each in (get_args(kind) if get_origin(kind) is not Literal else ()) if each is not type(None)]
    kind = kinds[0] if kinds else kind
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value != default)
    return {bool: not default, int: 100, str: "text"}[kind]


def options_with(name: str) -> dict[str, Any]:
    return {**NEEDED.get(name, {}), name: other_value(name)}


def test_a_manifest_records_few_options_at_their_defaults() -> None:
    always = {"max_shard_size": 2**28, "max_shard_samples": None, "shuffle_seed": 0, "jpeg": "copy", "num_tiled": 3}
    assert PackOptions().describe(3) == always
    encoding = {"jpeg": "reencode", "max_side": None, "quality": 90}
    assert PackOptions(jpeg="reencode").describe(3) == always | encoding


@pytest.mark.parametrize("name", kinds_of_options())
def test_an_option_identifies_a_pack_if_it_decides_the_output(name: str) -> None:
    options = options_with(name)
    identity = PackOptions(**options).identify([])
    if type(options[name]) is int:
        assert PackOptions(**options | {name: np.int64(options[name])}).identify([]) == identity
    assert (identity != PackOptions(**NEEDED.get(name, {})).identify([])) == (name in deciding_options())


def test_each_option_is_in_the_signature_the_docstring_and_the_command() -> None:
    parameters = dict(list(inspect.signature(shardio.pack).parameters.items())[2:])
    options = {each.name: each.default for each in fields(PackOptions)}
    assert {name: each.default for name, each in parameters.items()} == options
    text = (inspect.getdoc(shardio.pack) or "").partition("Returns:")[0]
    assert re.findall(r"^    (\w+): ", text, re.MULTILINE) == ["src", "dst", *options]
    of_command: dict[str | None, Any] = {each.name: each for each in load_command("pack").params}
    assert all(of_command[name].opts[0].startswith("--") and of_command[name].help for name in options)


@pytest.mark.parametrize("is_resharded", [False, True])
@pytest.mark.parametrize("name", [name for name in deciding_options() if name != "tokenizer"])
def test_append_uses_the_deciding_options(
    tmp_path: Path, name: str, is_resharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = list[PackOptions]()

    def pack_and_note(source: Path, out: Path, options: PackOptions, *others: Any) -> PackResult:
        used.append(options)
        return pack_source(source, out, options, *others)

    write_sample(tmp_path / "in", name, 0)
    write_sample(tmp_path / "more", name, 1)
    out = tmp_path / "out"
    shardio.pack(tmp_path / "in", out, num_workers=1, **options_with(name))
    if is_resharded:
        out = tmp_path / "resharded"
        shardio.reshard(tmp_path / "out", out)
    monkeypatch.setattr(rewriting, "pack_source", pack_and_note)
    shardio.append(out, tmp_path / "more", num_workers=1)
    assert [getattr(options, name) == other_value(name) for options in used] == [
        not is_resharded or name not in OPTIONS_OF_SHARDS
    ]
