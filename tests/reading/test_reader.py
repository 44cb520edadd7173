"""Samples are read by index and by key, with few open files, and compared with the index when first read."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st

import shardio
from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.errors import FormatError, SampleError, StaleIndexError
from shardio.reading import SampleReader, Verify
from shardio.shards import ShardTable, open_table
from shardio.shards.shard_reading import SeenSamples, Unseen
from shardio.storage.local import MAX_DESCRIPTORS, LocalFile
from tests.files import find_open_files, flip
from tests.raising import assert_raises
from tests.shards.conftest import tars as tars  # A fixture.
from tests.tars import index_of, paths_of, read_members, read_with_webdataset, write_tar


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "copy")


@given(st.lists(st.integers(0, 20), max_size=40), st.permutations(["jpg", "cls", "png"]), st.integers(0, 3))
def test_samples_and_fields_come_in_the_requested_order(
    packed: Path, asked: list[int], fields: list[str], num_fields: int
) -> None:
    table = open_table(packed)
    expected = read_with_webdataset(*paths_of(table.tars))
    reader = SampleReader(table)
    samples = reader.read(np.array(asked, np.int64), fields[:num_fields])
    reader.close()
    wanted = [name for name in fields[:num_fields] if name != "png"]
    assert [(sample.key, list(sample.fields.items())) for sample in samples] == [
        (expected[i][0], [(name, expected[i][1][name]) for name in wanted]) for i in asked
    ]


def read_keys(table: ShardTable, *indices: int) -> list[str]:
    with closing(SampleReader(table)) as reader:
        return [sample.key for sample in reader.read(np.array(indices), table.manifest.fields)]


def test_shards_without_samples_are_skipped(tmp_path: Path) -> None:
    for i, keys in enumerate(["", "a", "", "", "bc", ""]):
        write_tar(tmp_path / f"{i}.tar", [("README", b"")] + [(f"{key}.txt", key.encode()) for key in keys])
    assert read_keys(open_table(tmp_path), 2, 0, 1) == ["c", "a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("max_open", [10, 1024])
def test_few_files_are_open_for_many_shards(tmp_path: Path, max_open: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"{i}-{j}" for i in range(MAX_DESCRIPTORS + 40) for j in range(1 + i % 2)]
    for i in range(MAX_DESCRIPTORS + 40):
        write_tar(tmp_path / f"{i:03d}.tar", [(f"{i}-{j}.txt", b"%d-%d" % (i, j)) for j in range(1 + i % 2)])
    table = open_table(tmp_path)
    monkeypatch.setattr("shardio.reading.reader.MAX_OPEN_SHARDS", max_open)
    before, most = find_open_files(), 0
    reader = SampleReader(table)
    for asked in np.random.default_rng(0).integers(0, len(keys), (30, 20)):
        read = reader.read(asked, ["txt"])
        assert [sample.fields["txt"].decode() for sample in read] == [sample.key for sample in read]
        most = max(most, len(find_open_files() - before))
    assert min(20, max_open) <= most <= min(MAX_DESCRIPTORS, 2 * max_open)
    assert [sample.key for sample in reader.read(np.arange(len(keys)), ["txt"])] == keys
    assert len(find_open_files() - before) <= MAX_DESCRIPTORS
    reader.close()
    assert find_open_files() <= before


def test_a_reader_frees_its_descriptors_and_opens_again_also_after_pickling(packed: Path) -> None:
    before = find_open_files()
    reader = SampleReader(open_table(packed))
    first = list(reader.read(np.arange(21), ["cls", "jpg"]))
    copy = pickle.loads(pickle.dumps(reader))
    for each in (reader, reader, copy):
        each.close()
        each.close()
        assert find_open_files() <= before
        assert list(each.read(np.arange(21), ["cls", "jpg"])) == first
        each.close()
    for _ in range(3):
        SampleReader(open_table(packed)).read(np.arange(21), ["cls"])
    assert find_open_files() <= before, "nothing refers to the open files"


def test_a_forked_process_reads_at_its_own_offsets(packed: Path) -> None:
    reader, samples = SampleReader(open_table(packed)), np.arange(21)
    expected = list(reader.read(samples, ["jpg"]))
    child = os.fork()
    is_equal = all(list(reader.read(samples, ["jpg"])) == expected for _ in range(50))
    if child == 0:
        os._exit(0 if is_equal else 1)
    assert (is_equal, os.waitpid(child, 0)[1]) == (True, 0)


def test_a_tar_that_is_truncated_or_missing_is_named(copy: Path) -> None:
    table = open_table(copy)
    reader = SampleReader(table)
    key = reader.read(np.arange(5), ["jpg"])[4].key
    tars = paths_of(table.tars)
    for tar in tars[:2]:
        os.truncate(tar, tar.stat().st_size // 2)
    message = rf"sample {key} cannot be read from .*shard-000000\.tar at byte \d+"
    assert_raises(SampleError, message, reader.read, np.array([4]), ["jpg"])
    assert_raises(StaleIndexError, r"shard-000001\.tar has changed", reader.read, np.array([5]), ["jpg"])
    tars[1].unlink()
    assert_raises(FileNotFoundError, r"shard-000001\.tar", reader.read, np.array([5]), ["jpg"])


def test_a_shard_or_an_index_of_another_pack_is_refused(copy: Path, images: Path, tmp_path: Path) -> None:
    shutil.copy(index_of(copy / "shard-000000.tar"), index_of(copy / "shard-000004.tar"))
    message = r"shard-000004.tar.idx has 5 samples, but the manifest says 1"
    assert_raises(FormatError, message, shardio.open(copy).__getitem__, "x")
    shardio.pack(images, tmp_path / "other", max_shard_samples=4)
    for name in "shard-000001.tar", "shard-000001.tar.idx":
        shutil.copy(tmp_path / "other" / name, copy / name)
    assert_raises(FormatError, r"shard-000001\.tar", read_keys, open_table(copy), *range(10))


@pytest.mark.parametrize("sample", [-1, -21, 21, 10**6])
def test_an_index_that_no_sample_has_is_refused(packed: Path, sample: int) -> None:
    assert_raises(IndexError, None, read_keys, open_table(packed), 0, sample)


# Samples by key


def test_samples_are_those_that_tarfile_reads(packed: Path) -> None:
    expected: dict[str, dict[str, object]] = {}
    for tar in sorted(packed.glob("*.tar")):
        for name, content in read_members(tar):
            key, _, field = name.partition(".")
            expected.setdefault(key, {"__key__": key})[field] = content
    with shardio.open(packed) as samples:
        assert list(samples) == list(samples.keys()) == list(expected)
        assert (dict(samples), len(samples), samples.fields) == (expected, len(expected), ("cls", "jpg"))
        assert samples.manifest == open_table(packed).manifest
        assert "class-0/name-000" in samples
        for unknown in ("", "class-0/name", "class-0/name-000.jpg", "\udc80", 3):
            assert unknown not in samples
        assert_raises(KeyError, r"no sample has the key 'dogs/1' in .*packed", lambda: samples["dogs/1"])
        assert samples.get("dogs/1") is None
        copy = pickle.loads(pickle.dumps(samples))
        assert dict(copy) == expected
        samples.close()
        assert "class-0/name-000" in samples, "the reader opens the shards again"


class Reads:
    """A spy that records the file name and the size of each read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, original = list[tuple[str, int]](), LocalFile.read_apart

        def spy(file: LocalFile, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
            self.reads.extend((file.location.name, stop - start) for start, stop in zip(starts, stops, strict=True))
            return original(file, starts, stops)

        monkeypatch.setattr(LocalFile, "read_apart", spy)


def test_lookups_read_no_tar(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Reads(monkeypatch)
    samples = shardio.open(packed)
    assert spy.reads == []
    assert "class-1/name-001" in samples
    in_tars = [(name, num_bytes) for name, num_bytes in spy.reads if name.endswith(".tar")]
    # One read includes the content between the two headers.
    assert ({num_bytes for _, num_bytes in in_tars}, len({name for name, _ in in_tars})) == ({1536}, 1)


def test_samples_may_lack_fields_and_keys_may_be_any_text(tmp_path: Path) -> None:
    members = [("ключ.txt", b"1"), ("b/c.seg.png", b"2"), ("b/c.txt", b""), ("\udc80.txt", b"4")]
    write_tar(tmp_path / "a.tar", members)
    with shardio.open(tmp_path / "a.tar") as samples:
        assert samples["ключ"] == {"__key__": "ключ", "txt": b"1"}
        assert samples["b/c"] == {"__key__": "b/c", "seg.png": b"2", "txt": b""}
        assert samples["\udc80"]["txt"] == b"4"
        assert samples.read("b/c", ["txt"]) == {"__key__": "b/c", "txt": b""}


def test_keys_with_equal_hashes_are_told_apart(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.reading.reader.hash_key", lambda key: 7)
    monkeypatch.setattr("shardio.shards.index.KeyColumn.hash_all", lambda keys: np.full(len(keys), 7, np.uint64))
    with shardio.open(tars) as samples:
        assert {key: sample["txt"] for key, sample in samples.items()} == {
            f"{i}-{j}": b"%d" % j for i in range(4) for j in range(i + 1)
        }
        assert "4-0" not in samples


def test_a_key_that_occurs_twice_is_an_error_with_both_places(tars: Path) -> None:
    write_tar(tars / "x-000004.tar", [("new.txt", b"0"), ("2-1.txt", b"9")])
    samples = shardio.open(tars)
    assert len(samples) == 12
    message = r"key '2-1', in .*x-000002.tar at byte 1536 and in .*x-000004.tar at byte 15"
    assert_raises(FormatError, message, samples.__getitem__, "0-0")


def test_a_damaged_sample_is_an_error(tmp_path: Path) -> None:
    tar = tmp_path / "shard-000000.tar"
    write_tar(tar, [("a.txt", b"abc"), ("b.txt", b"abc")])
    samples = shardio.open(tar)
    flip(tar, 1536)
    assert samples["a"]["txt"] == b"abc"
    assert_raises(SampleError, "sample b", samples.__getitem__, "b")
    assert shardio.open(tar, verify="off")["b"]["txt"] == b"`bc"


CROP = shardio.transforms.RandomResizedCrop(32)


def find(tar: Path, name: str) -> int:
    with tarfile.open(tar) as file:
        return file.getmember(name).offset_data


@pytest.fixture
def damaged(copy: Path) -> tuple[str, str]:
    """Flip a bit of the second shard's third label. Return the sample's key, and a pattern for the error."""
    tar = copy / "shard-000001.tar"
    name, content = [member for member in read_members(tar) if member[0].endswith(".cls")][2]
    offset = find(tar, name)
    flip(tar, offset)
    key, other = name.removesuffix(".cls"), bytes([content[0] ^ 1])
    message = (
        f"field 'cls' of sample {key} in {tar} at byte {offset} is damaged: its 1 bytes have xxh3-64 "
        f"{xxhash.xxh3_64_hexdigest(other)}, expected {xxhash.xxh3_64_hexdigest(content)}"
    )
    return key, re.escape(message)


def test_a_flipped_bit_in_a_label_is_an_error_that_names_it(copy: Path, damaged: tuple[str, str]) -> None:
    reader = SampleReader(open_table(copy))
    assert len(reader.read(np.arange(7), ["cls", "jpg"])) == 7
    for _ in range(2):  # The second read also fails.
        error_info = assert_raises(SampleError, damaged[1], reader.read, np.arange(5, 10), ["cls"])
        assert (error_info.row, error_info.key) == (2, damaged[0])
    reader = SampleReader(open_table(copy))
    reader.read(np.arange(21), ["jpg"])
    # Fields that are read later are also compared.
    assert_raises(SampleError, damaged[1], reader.read, np.arange(21), ["cls"])


def make_loader(kind: str, source: Path, num_workers: int, **options: Any) -> DataLoader:
    options = {"batch_size": 4, "num_workers": num_workers, "timeout": 60.0 if num_workers else 0, **options}
    verify = {"verify": options.pop("verify")} if "verify" in options else {}
    fields = ("key", "label", "image")
    if kind == "shards":
        return DataLoader(ShardDataset(source, fields=fields, shuffle=True, transform=CROP, **verify), **options)
    mapped = ShardMapDataset(source, fields=fields, transform=CROP, **verify)
    return DataLoader(mapped, sampler=EpochSampler(mapped), **options)


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("shards", 0), ("map", 0), pytest.param("shards", 2, marks=pytest.mark.slow)]
)
def test_loaders_raise_or_skip_the_bad_sample(
    kind: str, num_workers: int, copy: Path, damaged: tuple[str, str]
) -> None:
    assert_raises(SampleError, damaged[1], lambda: list(make_loader(kind, copy, num_workers)))
    unverified = [key for keys, _, _ in make_loader(kind, copy, num_workers, verify="off") for key in keys]
    assert len(set(unverified)) == 21
    loader = make_loader(kind, copy, num_workers, on_error="skip", quarantine=copy / "quarantine")
    with pytest.warns(RuntimeWarning, match="skipped in epoch 0: 1"):
        kept = [key for keys, _, _ in loader for key in keys]
    assert kept == [key for key in unverified if key != damaged[0]]


def test_a_sample_is_compared_once_in_a_process(copy: Path) -> None:
    dataset = ShardMapDataset(copy, fields="label")
    labels = dataset.__getitems__(range(21))
    tar = copy / "shard-000001.tar"
    flip(tar, find(tar, next(name for name, _ in read_members(tar) if name.endswith(".cls"))))
    found = dataset.__getitems__(range(21))
    assert sum(one != other for one, other in zip(labels, found, strict=True)) == 1
    assert_raises(SampleError, "is damaged", lambda: ShardMapDataset(copy, fields="label").__getitems__(range(21)))


TEXTS = [(f"{i}.txt", b"text %d" % i) for i in range(6)]
CHANGED = [TEXTS[0], *[(name, b"TEXT" + content[4:]) for name, content in TEXTS[1:5]], TEXTS[5]]
"""Members whose tar has the same size, first member and last member as the tar of TEXTS."""


def write_again(tar: Path, *, is_replaced: bool) -> None:
    """Change a tar in place, with a later modification time, or replace it with a file that has the same time."""
    before = tar.stat()
    new = tar.with_name("new") if is_replaced else tar
    write_tar(new, CHANGED)
    new.replace(tar)
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns + (0 if is_replaced else 10**9)))


@pytest.mark.parametrize(("is_replaced", "num_workers"), [(False, 0), (True, 0), (False, 1)])
def test_a_tar_that_was_written_again_is_compared_again(is_replaced: bool, num_workers: int, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", TEXTS)
    dataset = ShardDataset(tmp_path, fields="txt")
    loader = DataLoader(dataset, 6, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert list(loader) == [[content.decode() for _, content in TEXTS]]
    write_again(tmp_path / "a.tar", is_replaced=is_replaced)
    assert_raises(SampleError, r"field 'txt' of sample 1 in .* is damaged", list, loader)


def test_a_damaged_tar_header_is_an_error_that_names_the_sample(copy: Path) -> None:
    tar = copy / "shard-000000.tar"
    name = read_members(tar)[2][0]
    offset = find(tar, name)
    flip(tar, offset - 512)
    key, field = name.split(".")
    message = f"the tar header before field {field!r} of sample {key} in {tar} at byte {offset} is damaged"
    assert_raises(SampleError, re.escape(message), SampleReader(open_table(copy)).read, np.arange(5), ["cls", "jpg"])


def test_the_first_damaged_sample_is_reported(tmp_path: Path) -> None:
    with shardio.ShardWriter(tmp_path) as writer:
        for number in range(6):
            writer.write({"__key__": str(number), "a": b"a-%d" % number, "b": b"b-%d" % number})
    tar = next(tmp_path.glob("*.tar"))
    tar.write_bytes(tar.read_bytes().replace(b"a-4", b"A-4").replace(b"b-1", b"B-1"))
    caught = assert_raises(
        SampleError, "'b' of sample 1 in", SampleReader(open_table(tmp_path)).read, np.arange(6), ["a", "b"]
    )
    assert isinstance(caught, SampleError)
    assert caught.row == 1


def test_a_shard_from_which_nothing_is_read_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.storage.local.MAX_DESCRIPTORS", 1)
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", [("0.txt", name.encode())])
    reader = SampleReader(open_table(tmp_path))
    reader.read(np.arange(2), ["txt"])
    (tmp_path / "a.tar").unlink()
    assert reader.read(np.arange(2), ["json"]).columns == {"json": [None, None]}


@pytest.mark.parametrize("lacks", [None, 6])
def test_comparing_costs_no_more_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: int | None) -> None:
    contents = {"cls": b"1", "json": b"1", "jpg": bytes(100_000)}
    members = [(f"{number}.{field}", content) for number in range(5) for field, content in contents.items()]
    write_tar(tmp_path / "a.tar", [member for row, member in enumerate(members) if row != lacks])
    table, spy, num_reads = open_table(tmp_path), Reads(monkeypatch), list[int]()
    choices: list[Verify] = ["off", "first"]
    for verify in choices:
        spy.reads.clear()
        SampleReader(table, verify).read(np.arange(5), [*contents])
        num_reads.append(len(spy.reads))
    assert num_reads[0] == num_reads[1] >= 10  # Each sample takes one read for the small fields and one for the image.


@pytest.mark.parametrize("verify", ["always", True, None, ""])
def test_verify_is_first_or_off(packed: Path, verify: Any) -> None:
    for kind in ShardDataset, ShardMapDataset:
        assert_raises(ValueError, "verify must be one of 'first', 'off', got", kind, packed, verify=verify)


VERSION = "1"


@given(st.integers(0, 40), st.data())
def test_samples_are_unseen_until_they_are_seen(num_samples: int, data: st.DataObject) -> None:
    seen = SeenSamples(num_samples, VERSION)
    noted = set[int]()
    numbers = st.lists(st.integers(0, max(num_samples - 1, 0)), max_size=12 if num_samples else 0)
    for asked in [*data.draw(st.lists(numbers, max_size=12)), list(range(num_samples))]:
        unseen = Unseen([seen], [np.array(asked, np.int64)])
        found = [False] * len(asked) if unseen.mask is None else unseen.mask.tolist()
        assert found == [each not in noted for each in asked]
        unseen.mark_seen()
        noted |= set(asked)
    assert Unseen([seen], [np.arange(num_samples)]).mask is None


def test_forked_processes_share_what_has_been_compared(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, samples, compared = SampleReader(open_table(packed)), np.arange(21), list[int]()
    reader.read(samples[:1], ("jpg", "cls"))
    monkeypatch.setattr(
        "shardio.shards.shard_reading._Request._compare",
        lambda request, pieces, headers, columns: compared.extend(np.flatnonzero((headers >= 0).any(axis=1))),
    )
    for fields in (("jpg", "cls"), ("cls",), ("jpg", "cls")):
        if os.fork() == 0:
            reader.read(samples[::2], fields)
            os._exit(0)
        os.wait()
    reader.read(samples, ("jpg", "cls"))
    assert len(compared) == 10  # The children compared the other 11 of 21 samples.
    reader.read(samples, ("jpg",))  # The jpg field was never compared by itself.
    assert len(compared) == 31


class DroppedAfterReading(SeenSamples):
    """A SeenSamples that drops its bits after one read, as if another thread had recorded the last samples."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "_bits":
            self._bits = value[:0]
        return value


def test_bits_may_be_dropped_while_another_thread_reads_them() -> None:
    assert np.array_equal(DroppedAfterReading(9, VERSION).read(np.array([0, 1])), [0, 254])


def test_indexes_of_open_shards_take_limited_memory(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, indices = open_table(packed), np.arange(21)
    expected = SampleReader(table).read(indices, ["jpg"]).columns
    reader = SampleReader(table)
    reader.read(indices, ["jpg"])
    num_bytes = [opened.index.num_bytes for opened in reader._open.values()]
    assert len(num_bytes) == 5
    assert min(num_bytes) > 0
    for limit, num_open in ((0, 1), (max(num_bytes), 1), (sum(num_bytes), 5)):
        monkeypatch.setattr("shardio.reading.reader.MAX_INDEX_BYTES", limit)
        reader = SampleReader(table)
        assert reader.read(indices, ["jpg"]).columns == expected
        assert len(reader._open) == num_open
