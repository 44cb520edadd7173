from __future__ import annotations

import gc
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import shardio
from shardio.errors import FormatError, SampleError, StaleIndexError
from shardio.reading import SampleReader
from shardio.shards import ShardTable, open_table
from shardio.storage.local import MAX_DESCRIPTORS
from tests.files import count_open_files
from tests.tars import paths_of, read_with_webdataset, write_tar


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> ShardTable:
    """A dataset of more shards than open files are allowed, each of one or two samples."""
    folder = tmp_path_factory.mktemp("many")
    for i in range(MAX_DESCRIPTORS + 40):
        write_tar(folder / f"{i:03d}.tar", [(f"{i}-{j}.txt", b"%d %d" % (i, j)) for j in range(1 + i % 2)])
    return open_table(folder)


def indices(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_samples_have_indices_in_manifest_order(packed: Path) -> None:
    table = open_table(packed)
    reader = SampleReader(table)
    samples = reader.read(np.arange(21), ["cls", "jpg"])
    reader.close()
    assert [(s.key, dict(s.fields)) for s in samples] == read_with_webdataset(*paths_of(table.tars))


@given(st.lists(st.integers(0, 20), max_size=40))
@settings(deadline=None)
def test_samples_come_in_the_requested_order_and_may_repeat(packed: Path, asked: list[int]) -> None:
    table = open_table(packed)
    expected = read_with_webdataset(*paths_of(table.tars))
    reader = SampleReader(table)
    samples = reader.read(indices(*asked), ["jpg", "cls"])
    reader.close()
    assert [(s.key, dict(s.fields)) for s in samples] == [expected[i] for i in asked]


def test_fields_come_in_the_requested_order(packed: Path) -> None:
    reader = SampleReader(open_table(packed))
    assert list(reader.read(indices(3), ["jpg", "cls"])[0].fields) == ["jpg", "cls"]
    assert list(reader.read(indices(3), ["cls"])[0].fields) == ["cls"]
    assert list(reader.read(indices(3), ["png", "cls"])[0].fields) == ["cls"]
    assert list(reader.read(indices(3), [])[0].fields) == []
    reader.close()


def test_shards_without_samples_are_skipped(tmp_path: Path) -> None:
    for i, keys in enumerate(["", "a", "", "", "bc", ""]):
        write_tar(tmp_path / f"{i}.tar", [("README", b"")] + [(f"{key}.txt", key.encode()) for key in keys])
    reader = SampleReader(open_table(tmp_path))
    assert [sample.key for sample in reader.read(indices(2, 0, 1), ["txt"])] == ["c", "a", "b"]
    reader.close()


@pytest.mark.parametrize("max_open", [10, 1024])
def test_few_files_are_open_however_many_shards_there_are(
    many_shards: ShardTable, max_open: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.reading.reader.MAX_OPEN_SHARDS", max_open)
    gc.collect()  # Otherwise it would close files of other tests during this one.
    before = count_open_files()
    reader = SampleReader(many_shards)
    random = np.random.default_rng(0)
    total = many_shards.manifest.num_samples
    most = 0
    for _ in range(30):
        asked = random.integers(0, total, 20)
        read = reader.read(asked, ["txt"])
        assert [sample.fields["txt"].decode().replace(" ", "-") for sample in read] == [sample.key for sample in read]
        most = max(most, count_open_files() - before)
    assert min(20, max_open) <= most <= min(MAX_DESCRIPTORS, 2 * max_open)
    assert [sample.key for sample in reader.read(np.arange(total), ["txt"])] == [
        f"{i}-{j}" for i in range(len(many_shards.tars)) for j in range(1 + i % 2)
    ]
    assert count_open_files() - before <= MAX_DESCRIPTORS
    reader.close()
    assert count_open_files() <= before  # The budget is shared: files of other tests may have been closed for it.


def test_a_closed_reader_opens_again(packed: Path) -> None:
    before = count_open_files()
    reader = SampleReader(open_table(packed))
    first = list(reader.read(indices(0, 20), ["cls"]))
    reader.close()
    reader.close()
    assert list(reader.read(indices(0, 20), ["cls"])) == first
    reader.close()
    assert count_open_files() == before


def test_a_reader_that_nothing_refers_to_frees_its_descriptors(packed: Path) -> None:
    before = count_open_files()
    for _ in range(3):
        SampleReader(open_table(packed)).read(np.arange(21), ["cls"])
    assert count_open_files() == before


def test_a_pickled_reader_reads_the_same_and_carries_no_open_file(packed: Path) -> None:
    reader = SampleReader(open_table(packed))
    samples = list(reader.read(np.arange(21), ["cls", "jpg"]))
    before = count_open_files()
    copy = pickle.loads(pickle.dumps(reader))
    assert count_open_files() == before
    reader.close()
    assert list(copy.read(np.arange(21), ["cls", "jpg"])) == samples
    copy.close()


FORK = """
import os, sys
import numpy as np
from shardio.reading import SampleReader
from shardio.shards import open_table
reader, samples = SampleReader(open_table(sys.argv[1])), np.arange(21)
expected = list(reader.read(samples, ["jpg"]))
child = os.fork()
is_equal = all(list(reader.read(samples, ["jpg"])) == expected for _ in range(50))
if child == 0:
    os._exit(0 if is_equal else 1)
assert is_equal
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_reads_at_its_own_offsets(packed: Path) -> None:
    """Parent and child share descriptors, but no file offset."""
    subprocess.run([sys.executable, "-c", FORK, packed], check=True)


def test_a_tar_truncated_during_reading_names_sample_shard_and_byte(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    table = open_table(copy)
    reader = SampleReader(table)
    reader.read(indices(0), ["jpg"])
    (tar, *_) = paths_of(table.tars)
    with tar.open("r+b") as file:
        file.truncate(tar.stat().st_size // 2)
    key = read_with_webdataset(*paths_of(open_table(packed).tars))[4][0]
    with pytest.raises(SampleError, match=rf"sample {key} cannot be read from .*shard-000000\.tar at byte \d+"):
        reader.read(indices(4), ["jpg"])
    reader.close()


def test_a_tar_truncated_before_reading_is_refused(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    table = open_table(copy)
    with paths_of(table.tars)[1].open("r+b") as file:
        file.truncate(1024)
    reader = SampleReader(table)
    assert len(reader.read(indices(0), ["jpg"])) == 1
    with pytest.raises(StaleIndexError, match=r"shard-000001\.tar has changed"):
        reader.read(indices(5), ["jpg"])
    reader.close()


def test_a_shard_of_another_pack_is_refused(packed: Path, images: Path, tmp_path: Path) -> None:
    """It fits its index, but not the manifest."""
    copy = shutil.copytree(packed, tmp_path / "copy")
    shardio.pack(images, tmp_path / "other", max_shard_samples=4)
    for name in "shard-000001.tar", "shard-000001.tar.idx":
        shutil.copy(tmp_path / "other" / name, copy / name)
    reader = SampleReader(open_table(copy))
    with pytest.raises(FormatError, match=r"shard-000001\.tar"):
        reader.read(np.arange(21), ["jpg"])
    reader.close()


@pytest.mark.parametrize("sample", [-1, -21, 21, 10**6])
def test_an_index_that_no_sample_has_is_refused(packed: Path, sample: int) -> None:
    reader = SampleReader(open_table(packed))
    with pytest.raises(IndexError):
        reader.read(indices(0, sample), ["jpg"])
    reader.close()
