"""Samples are compared with their index when they are first read, unless ``verify`` is off."""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st

import shardio
from shardio import DataLoader, EpochSampler, SampleError, ShardDataset, ShardMapDataset
from shardio.reading import SampleReader, Verify
from shardio.reading.reader import SeenSamples
from shardio.shards import open_table
from shardio.storage.local import LocalFile
from tests.files import flip
from tests.tars import read_members, write_tar

CROP = shardio.transforms.RandomResizedCrop(32)


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "copy")


def find(tar: Path, name: str) -> int:
    with tarfile.open(tar) as file:
        return file.getmember(name).offset_data


@pytest.fixture
def damaged(copy: Path) -> tuple[str, str]:
    """Flip a bit of the second shard's third label; return its key, and a pattern for the error."""
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
    for _ in range(2):  # Reading it again fails, too.
        with pytest.raises(SampleError, match=damaged[1]) as error_info:
            reader.read(np.arange(5, 10), ["cls"])
        assert (error_info.value.row, error_info.value.key) == (2, damaged[0])
    reader = SampleReader(open_table(copy))
    reader.read(np.arange(21), ["jpg"])
    with pytest.raises(SampleError, match=damaged[1]):  # Fields that were not read before are compared, too.
        reader.read(np.arange(21), ["cls"])


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
def test_loaders_raise_or_skip_as_for_any_bad_sample(
    kind: str, num_workers: int, copy: Path, damaged: tuple[str, str]
) -> None:
    with pytest.raises(SampleError, match=damaged[1]):
        list(make_loader(kind, copy, num_workers))
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
    with pytest.raises(SampleError, match="is damaged"):
        ShardMapDataset(copy, fields="label").__getitems__(range(21))


TEXTS = [(f"{i}.txt", b"text %d" % i) for i in range(6)]
CHANGED = [TEXTS[0], *[(name, b"TEXT" + content[4:]) for name, content in TEXTS[1:5]], TEXTS[5]]
"""These have the same size, and the same first and last member."""


def write_again(tar: Path, *, is_replaced: bool) -> None:
    """Change a tar: in place at a later time, or by another file of the same time."""
    before = tar.stat()
    if is_replaced:
        write_tar(tar.with_name("new"), CHANGED)
        tar.with_name("new").replace(tar)
    else:
        write_tar(tar, CHANGED)
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns + (0 if is_replaced else 10**9)))


@pytest.mark.parametrize(("is_replaced", "num_workers"), [(False, 0), (True, 0), (False, 1)])
def test_a_tar_that_was_written_again_is_compared_again(is_replaced: bool, num_workers: int, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", TEXTS)
    dataset = ShardDataset(tmp_path, fields="txt")
    loader = DataLoader(dataset, 6, num_workers=num_workers, persistent_workers=num_workers > 0)
    assert list(loader) == [[content.decode() for _, content in TEXTS]]
    write_again(tmp_path / "a.tar", is_replaced=is_replaced)
    with pytest.raises(SampleError, match=r"field 'txt' of sample 1 in .* is damaged"):
        list(loader)


def test_a_damaged_tar_header_is_an_error_that_names_the_sample(copy: Path) -> None:
    tar = copy / "shard-000000.tar"
    name = read_members(tar)[2][0]
    offset = find(tar, name)
    flip(tar, offset - 512)
    key, field = name.split(".")
    message = f"the tar header before field {field!r} of sample {key} in {tar} at byte {offset} is damaged"
    with pytest.raises(SampleError, match=re.escape(message)):
        SampleReader(open_table(copy)).read(np.arange(5), ["cls", "jpg"])


@pytest.mark.parametrize("lacks", [None, 6])
def test_comparing_costs_no_more_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: int | None) -> None:
    """A header lies between its content and the previous field, and is read with the smaller of the two."""
    members = [(f"{number}.{field}", b"1") for number in range(5) for field in ("cls", "json")]
    members = [*members, *((f"{number}.jpg", bytes(100_000)) for number in range(5))]
    members.sort(key=lambda member: member[0].partition(".")[0])  # Stable: cls, json, jpg of each sample.
    write_tar(tmp_path / "a.tar", [member for row, member in enumerate(members) if row != lacks])
    table = open_table(tmp_path)
    num_reads = list[int]()
    read = LocalFile.read

    def count_and_read(file: LocalFile, start: int, stop: int) -> bytes:
        num_reads[-1] += 1
        return read(file, start, stop)

    monkeypatch.setattr(LocalFile, "read", count_and_read)
    choices: list[Verify] = ["off", "first"]
    for verify in choices:
        reader = SampleReader(table, verify)
        num_reads.append(0)
        reader.read(np.arange(5), ["cls", "json", "jpg"])
    assert num_reads[0] == num_reads[1] >= 10  # For each sample, the small fields together, and the image.


def test_names_in_extended_headers_win(tmp_path: Path) -> None:
    """Some archivers write them where none are needed, and something else into the plain header."""
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(5):
            info = tarfile.TarInfo(f"@PaxHeader-{number}")
            info.size, info.pax_headers = 3, {"path": f"{number}.txt"}
            tar.addfile(info, io.BytesIO(b"%03d" % number))
    samples = SampleReader(open_table(tmp_path)).read(np.arange(5), ["txt"])
    assert [(sample.key, sample.fields["txt"]) for sample in samples] == [(str(i), b"%03d" % i) for i in range(5)]


@pytest.mark.parametrize("verify", ["always", True, None, ""])
def test_verify_is_first_or_off(packed: Path, verify: Any) -> None:
    for kind in ShardDataset, ShardMapDataset:
        with pytest.raises(ValueError, match="verify must be one of 'first', 'off', got"):
            kind(packed, verify=verify)


VERSION = "1"


@given(st.integers(0, 40), st.data())
def test_samples_are_unseen_until_they_are_seen(num_samples: int, data: st.DataObject) -> None:
    seen = SeenSamples(num_samples, VERSION)
    noted = set[int]()
    numbers = st.lists(st.integers(0, max(num_samples - 1, 0)), max_size=12 if num_samples else 0)
    for asked in [*data.draw(st.lists(numbers, max_size=12)), list(range(num_samples))]:
        unseen = seen.find_unseen(np.array(asked, np.int64))
        assert ([False] * len(asked) if unseen is None else unseen.tolist()) == [each not in noted for each in asked]
        seen.add(np.array(asked, np.int64))
        noted |= set(asked)
    assert seen.find_unseen(np.arange(num_samples)) is None


class DroppedAfterReading(SeenSamples):
    """Its bits can be read once: then another thread has seen the last samples and drops them."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "_bits":
            self._bits = value[:0]
        return value


def test_bits_may_be_dropped_while_another_thread_reads_them() -> None:
    unseen = DroppedAfterReading(9, VERSION).find_unseen(np.arange(9))
    assert unseen is not None
    assert unseen.all()
