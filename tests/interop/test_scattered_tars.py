"""Tars with scattered members, as ``tar`` writes them without ``--sort=name``, are read or rejected."""

from __future__ import annotations

import gzip
import random
import shutil
import tarfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from xxhash import xxh3_64_intdigest

import shardio
from shardio import FormatError, PackError, SampleError, ShardDataset, ShardMapDataset, StreamDataset
from shardio.shards import ExportFormat, export_index, open_table
from shardio.shards.repairing import repair
from shardio.shards.shard import write_index
from shardio.shards.tar import StoredField, StoredSample
from shardio.storage import parse_location
from tests.cli.commands import run
from tests.raising import assert_raises
from tests.sources import encode
from tests.tars import (
    Member,
    Samples,
    by_key,
    change_metadata,
    index_of,
    open_file,
    read_members,
    read_metadata,
    read_with_webdataset,
    write_tar,
)

pytestmark = pytest.mark.filterwarnings("ignore:the members of some samples")
NUM_SAMPLES = 12
FIELDS = ("key", "image", "json", "cls")

SAMPLES = [
    (f"./sa_{i}", {"jpg": encode(i), "json": b'{"a": %d}' % i, "cls": b"%d" % (i % 3)}) for i in range(NUM_SAMPLES)
]


def by_field() -> list[Member]:
    """Return all images and then all annotations, each kind in a different order, as in SA-1B's tars."""
    numbers = range(NUM_SAMPLES)
    orders = {"jpg": numbers, "json": numbers[::-1], "cls": numbers}
    return [(f"{SAMPLES[i][0]}.{field}", SAMPLES[i][1][field]) for field, order in orders.items() for i in order]


def mixed() -> list[Member]:
    members = [*by_field(), ("README", b"x")]
    random.Random(5).shuffle(members)
    return members


def with_a_straggler() -> list[Member]:
    members = sorted(by_field())
    return [*members[:4], *members[5:], members[4]]


def gather(tar: Path) -> Samples:
    """Return the samples of a tar, read by the standard library, in the order of their first members."""
    found = dict[str, dict[str, bytes]]()
    for name, content in read_members(tar):
        folder, _, base = name.rpartition("/")
        key, dot, field = base.partition(".")
        if dot and key:
            found.setdefault(f"{folder}/{key}", {})[field] = content
    return list(found.items())


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in" / "a.tar", by_field())
    return tmp_path / "in" / "a.tar"


@pytest.mark.parametrize("order", [by_field, mixed, with_a_straggler])
def test_the_members_of_a_sample_are_gathered(tmp_path: Path, order: Callable[[], list[Member]]) -> None:
    tar, tidy = tmp_path / "a.tar", tmp_path / "sorted.tar"
    write_tar(tar, order())
    expected = gather(tar)
    write_tar(tidy, [(f"{key}.{field}", content) for key, fields in expected for field, content in fields.items()])
    assert read_with_webdataset(tidy) == expected
    with shardio.open(tar) as samples:
        assert list(samples.values()) == [{"__key__": key, **fields} for key, fields in expected]
    tidied, gathered = (ShardMapDataset(path, fields=FIELDS) for path in (tidy, tar))
    wanted = [tidied[i] for i in range(NUM_SAMPLES)]
    for values in ([gathered[i] for i in range(len(gathered))], list(ShardDataset(tar, fields=FIELDS))):
        for (key, image, *rest), (key_too, image_too, *rest_too) in zip(values, wanted, strict=True):
            assert (key, rest, torch.equal(image, image_too)) == (key_too, rest_too, True)
    assert shardio.verify([tar, tidy])[0].kind == "duplicate", "both tars have the same keys and no other problems"
    assert shardio.verify(tar) == []
    shardio.pack(tar, tmp_path / "out", max_shard_samples=5)
    shardio.reshard(tar, tmp_path / "again")
    for name in ("out", "again"):
        assert by_key(*sorted((tmp_path / name).glob("*.tar"))) == dict(SAMPLES)
    assert [read_metadata(path)["format"] for path in sorted((tmp_path / "out").glob("*.tar"))] == [1, 1, 1]
    with pytest.raises(FormatError, match=r"not adjacent: some follow at byte \d+.*shardio index.*--sort=name"):
        list(StreamDataset(tar, fields=("key", "json", "cls"), missing=None))


def test_opening_says_what_it_costs(tar: Path, tmp_path: Path) -> None:
    for _ in range(2):  # In the second pass, the index exists.
        with pytest.warns(RuntimeWarning, match=rf"some samples \({NUM_SAMPLES}\) are not adjacent in .*--sort=name"):
            open_table(tar)
    tidy = tmp_path / "a.tar"
    write_tar(tidy, [("a.jpg", b""), ("README", b"x"), ("a.cls", b""), ("b.jpg", b""), ("c.cls", b"")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_table(tidy)
    found = [(read_metadata(path)["format"], read_metadata(path)["num_scattered"]) for path in (tar, tidy)]
    assert found == [(2, NUM_SAMPLES), (2, 0)]


@pytest.mark.filterwarnings("error")
def test_whole_samples_with_the_same_key_stay_separate(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    members = [(f"{key}.{field}", key.encode()) for key in "abacb" for field in ("txt", "cls")]
    write_tar(tar, members)
    expected = read_with_webdataset(tar)
    found = list(ShardDataset(tar, fields=("key", "txt"), decoders={"txt": bytes}))
    assert found == [(key, fields["txt"]) for key, fields in expected]
    assert list(StreamDataset(tar, fields=("key", "txt"), decoders={"txt": bytes})) == found
    assert [problem.kind for problem in shardio.verify(tar)] == ["duplicate", "duplicate"]
    assert_raises(PackError, "two samples have the key 'a'", shardio.pack, tar, tmp_path / "out")
    with shardio.open(tar) as samples, pytest.raises(FormatError, match="two samples have the key"):
        samples["a"]


@pytest.mark.parametrize("names", ["a.jpg b.jpg a.jpg a.cls", "a.jpg b.jpg a.cls b.cls a.jpg"])
def test_members_that_may_belong_to_several_samples_are_refused(tmp_path: Path, names: str) -> None:
    tar = tmp_path / "x.tar"
    write_tar(tar, [(name, b"") for name in names.split()])
    message = r"x\.tar holds field 'jpg' of sample a twice, at bytes 512 and \d+, and .* not adjacent"
    assert_raises(FormatError, message, open_table, tar)
    assert_raises(PackError, message, shardio.pack, tar, tmp_path / "out")
    with pytest.raises(FormatError, match="not adjacent"):
        list(StreamDataset(tar, fields=("jpg",), decoders={"jpg": bytes}, missing=None))
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar"]
    write_tar(tar, [("a.jpg", encode(0)), ("b.json", b"{}")])
    for field in ("json", "image"):
        with pytest.raises(SampleError, match=r"sample [ab] in .* has no .*--sort=name.*shardio index"):
            list(StreamDataset(tar, fields=(field,)))


def test_an_index_of_an_early_version_is_created_again(tar: Path) -> None:
    """In an index from an early version of shardio, each run of members is a sample."""
    open_table(tar)
    new = index_of(tar).read_bytes()
    with tarfile.open(tar) as opened:
        offsets = {info.name: info.offset_data for info in opened}
    runs = list[StoredSample]()
    for key, fields in read_with_webdataset(tar):
        found = {name: (offsets[f"{key}.{name}"], content) for name, content in fields.items()}
        hashed = {name: StoredField(at, len(each), xxh3_64_intdigest(each)) for name, (at, each) in found.items()}
        runs.append(StoredSample(key, hashed))
    with open_file(tar) as file:
        write_index(parse_location(index_of(tar)), file, runs, read_metadata(tar)["digest"], file.version)
    parts = index_of(tar).read_bytes()
    old = change_metadata(parts, lambda values: [values.pop("num_scattered"), values.update(format=1)])
    index_of(tar).write_bytes(old)
    problem, *_ = shardio.verify(tar)
    assert (problem.kind, "create it again with shardio index" in problem.message) == ("index", True)
    for create in (open_table, partial(run, "index")):
        index_of(tar).write_bytes(old)
        create(tar)
        assert index_of(tar).read_bytes() == new


def test_a_compressed_tar_is_gathered_too(tar: Path) -> None:
    path = tar.with_name("a.tar.gz")
    path.write_bytes(gzip.compress(tar.read_bytes()))
    assert f"{NUM_SAMPLES} samples" in run("index", path).stdout
    for key, fields in SAMPLES[::5]:
        for field, content in fields.items():
            assert run("cat", path, key, "--field", field).stdout_bytes == content
    assert shardio.verify(path) == []


def test_indexes_that_only_know_adjacent_members_are_not_exported(tar: Path, tmp_path: Path) -> None:
    for name in get_args(ExportFormat):
        if name == "dali":
            continue
        message = rf"not adjacent, but readers of the format {name} expect .*pack the tars"
        assert_raises(FormatError, message, export_index, open_table(tar), name, parse_location(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_dalis_index_locates_each_member(tar: Path) -> None:
    export_index(open_table(tar), "dali")
    with tarfile.open(tar) as file:
        infos = {info.name: info for info in file}
    lines = tar.with_name("a.idx").read_text().splitlines()
    assert lines[0] == f"v1.2 {NUM_SAMPLES}"
    for line, (key, fields) in zip(lines[1:], gather(tar), strict=True):
        members = [(field, infos[f"{key}.{field}"]) for field in fields]
        assert line == " ".join(f"{field} {info.offset_data} {info.size} {info.name}" for field, info in members)


def test_repair_gathers_whole_tars_and_keeps_truncated_ones(tar: Path, tmp_path: Path) -> None:
    shardio.pack(tar, tmp_path / "out", shuffle_seed=None)
    shard = tmp_path / "out" / "shard-000000.tar"
    shutil.copy(tar, shard)
    result = repair(parse_location(tmp_path / "out"))
    assert (result.problems, read_metadata(shard)["num_scattered"]) == ((), NUM_SAMPLES)
    assert [sample[0] for sample in ShardDataset(tmp_path / "out", fields=FIELDS)] == [key for key, _ in SAMPLES]
    assert_raises(FormatError, "not adjacent", export_index, open_table(tmp_path / "out"), "wids")
    content = tar.read_bytes()
    write_tar(tar, [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3"), ("b.cls", b"4")])
    small = tar.read_bytes()[:2560], tar.read_bytes()[:3072]  # Cut within the content of a.cls, and after that content.
    for number, cut in enumerate((content[:3000], content[:-11_000], content[:-11_000], *small)):
        shard.write_bytes(cut)
        if number > 1:
            index_of(shard).unlink(missing_ok=True)
        assert [problem.kind for problem in repair(parse_location(tmp_path / "out")).problems] == ["header"]
        assert shard.read_bytes() == cut
