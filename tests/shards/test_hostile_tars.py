"""Tars with false headers, and random hostile tars and indexes: an error that names the file, or what tarfile reads.

``tools/fuzz_tars.py`` reads millions of them.
"""

from __future__ import annotations

import gzip
import json
import random
import tarfile
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings, strategies as st

import shardio
from shardio.errors import FormatError, SampleError, StaleIndexError
from shardio.reading import KeyedShards
from shardio.sample import Sample
from shardio.shards import open_compressed, open_table, write_shard
from shardio.shards.repairing import repair
from shardio.shards.sources import index_tar
from shardio.shards.tar import END, MAX_MEMBER
from shardio.shards.tar_scan import find_member
from shardio.storage import parse_location
from tests.raising import assert_raises
from tests.shards.hostile import HostileShard, fix_checksum, make_header as make_block, make_record, make_shard, pad
from tests.shards.tar_laws import LawBrokenError, Laws
from tests.tars import index_of, open_file, open_shard, read_metadata, write_tar


def make_header(size: int, kind: bytes = tarfile.REGTYPE, name: str = "a.txt") -> bytes:
    return bytes(make_block(random.Random(0), name.encode(), size, kind[0]))


def make_pax(keyword: str, value: str, kind: bytes = tarfile.XHDTYPE) -> bytes:
    record = make_record(keyword.encode(), value.encode())
    return make_header(len(record), kind) + pad(record)


def make_sparse() -> bytes:
    """Return the header of a sparse file whose map continues in the next block."""
    block = bytearray(make_header(3, tarfile.GNUTYPE_SPARSE))
    block[482] = 1
    return bytes(fix_checksum(block))


MEMBER = make_header(3) + pad(b"abc")
LONG_NAME = make_header(6, tarfile.GNUTYPE_LONGNAME) + pad(b"b.txt\0")
HOSTILE = {
    "pax-headers-in-a-row": 3000 * make_pax("comment", "x") + MEMBER,
    "global-headers-in-a-row": 3000 * make_pax("comment", "x", tarfile.XGLTYPE) + MEMBER,
    "long-names-in-a-row": 3000 * LONG_NAME + MEMBER,
    "pax-header-huge": make_header(2**43, tarfile.XHDTYPE) + MEMBER,
    "pax-header-negative": make_header(-5, tarfile.XHDTYPE) + MEMBER,
    "long-name-huge": make_header(2**62, tarfile.GNUTYPE_LONGNAME) + MEMBER,
    "long-name-negative": make_header(-5, tarfile.GNUTYPE_LONGNAME) + MEMBER,
    "member-huge": make_header(2**80) + MEMBER,
    "member-negative": make_header(-512) + MEMBER,
    "unknown-type-huge": make_header(2**46, b"Q") + MEMBER,
    "pax-size-huge": make_pax("size", "1" + "0" * 30) + MEMBER,
    "pax-size-negative": make_pax("size", "-512") + MEMBER,
    "pax-size-negative-of-the-last": MEMBER + make_pax("size", "-512") + MEMBER,
    "pax-size-no-number": make_pax("size", "abc") + make_header(1024) + bytes(1024) + MEMBER,
    "pax-size-global": make_pax("size", "2", tarfile.XGLTYPE) + make_header(1024) + bytes(1024) + MEMBER,
    "pax-length-of-5000-digits": make_header(5010, tarfile.XHDTYPE) + pad(b"9" * 5000 + b" size=3\n\0\0") + MEMBER,
    "sparse-map-no-number": make_pax("GNU.sparse.map", "a,b") + MEMBER,
    "pax-digits": make_pax("comment", "9" * 900_000) + MEMBER,
    "pax-digits-in-a-sparse-file": make_pax("GNU.sparse.size", "9" * 900_000) + MEMBER,
    "pax-records-without-equals-sign": make_header(900_002, tarfile.XHDTYPE)
    + pad(b"5 aaa" * 180_000 + b"=\n")
    + MEMBER,
    "pax-keywords-of-many-global-headers": b"".join(
        make_pax(f"x{i}", "", tarfile.XGLTYPE) + make_header(0, name=f"{i}.txt") for i in range(1002)
    ),
    "sparse-map-is-cut": make_sparse() + MEMBER[:100],
    "sparse": make_header(3, tarfile.GNUTYPE_SPARSE) + pad(b"abc"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tar_with_false_headers_is_refused_and_has_problems(tmp_path: Path, name: str) -> None:
    path, compressed, content = tmp_path / "a.tar", tmp_path / "a.tar.gz", HOSTILE[name] + END
    path.write_bytes(content)
    assert_raises(FormatError, r"a\.tar", open_table, path)
    assert not index_of(path).exists()
    compressed.write_bytes(gzip.compress(content, 1))
    assert_raises(FormatError, r"a\.tar\.gz", index_tar, parse_location(compressed))
    path.write_bytes((MEMBER + END).ljust(len(content), b"\0"))
    open_table(path)
    path.write_bytes(content)
    assert "digest" in [problem.kind for problem in shardio.verify(path)]


RIGHT = {
    "plain": MEMBER,
    "long-name": LONG_NAME + MEMBER,
    "pax-size": make_pax("size", "2") + MEMBER,
    "some-global-headers": make_pax("x", "y", tarfile.XGLTYPE) * 9 + MEMBER,
    # tarfile says that the member has this size, and goes on where the header says.
    "global-size-of-a-skipped-member": MEMBER
    + make_pax("size", "1500", tarfile.XGLTYPE)
    + make_header(0, b"D", "README"),
    "skipped-volume": MEMBER + make_header(0, b"V", "b.txt"),
    "skipped-directory": MEMBER + make_header(0, b"D", "b.txt"),
    "skipped-unknown-type-with-content": MEMBER + make_header(512, b"Q", "README") + b"abc".ljust(512, b"\0"),
}


@pytest.mark.parametrize("content", RIGHT.values(), ids=RIGHT)
def test_a_tar_with_right_headers_is_read(tmp_path: Path, content: bytes) -> None:
    """The test above proves something only if such headers can be right."""
    (tmp_path / "a.tar").write_bytes(content + END)
    assert (open_table(tmp_path / "a.tar").manifest.num_samples, shardio.verify(tmp_path / "a.tar")) == (1, [])


def test_extended_headers_in_a_row_hide_a_members_name(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(HOSTILE["pax-headers-in-a-row"] + END)
    with open_file(tmp_path / "a.tar") as file:
        assert find_member(file, 3000 * 1024 + 512) is None


def test_a_member_that_is_too_large_is_refused_at_indexing(tmp_path: Path) -> None:
    """It is sparse: none of it is written, and none of it may be read."""
    path = tmp_path / "a.tar"
    path.write_bytes(make_header(MAX_MEMBER + 1))
    with path.open("r+b") as file:
        file.truncate(512 + MAX_MEMBER + 512 + len(END))
    with pytest.raises(FormatError, match=rf"a\.tar holds a\.txt at byte 512 with {MAX_MEMBER + 1} bytes, more than"):
        open_table(path)


def test_a_field_that_is_too_large_is_refused_at_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"bin": b"12345678", "txt": b"1"}
    write_shard(parse_location(tmp_path / "a.tar"), [Sample(key=key, fields=fields, origin="") for key in "ab"])
    monkeypatch.setattr("shardio.shards.shard.MAX_MEMBER", 7)
    with open_shard(tmp_path / "a.tar") as shard:
        with pytest.raises(
            SampleError, match=r"field 'bin' of sample b in .*a\.tar at byte 2560 has 8 bytes, more than"
        ):
            shard.read_many(np.array([1]), ["txt", "bin"])
        assert shard.read_many(np.array([1]), ["txt"]) == [[b"1"]]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_that_lead_outside_are_keys_like_others(tmp_path: Path, tar_format: int) -> None:
    keys = ["/etc/x", "../../x", "a/../../x", "C:\\x", "d" * 90 + "/" + "e" * 60 + "/../x", "\u202ex"]
    write_tar(tmp_path / "a.tar", [(f"{key}.txt", key.encode()) for key in keys], tar_format=tar_format)
    with shardio.open(tmp_path / "a.tar") as samples:
        assert {key: sample["txt"].decode() for key, sample in samples.items()} == {key: key for key in keys}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.idx"]
    assert shardio.verify(tmp_path / "a.tar") == []


@pytest.mark.parametrize("claimed", [2**31, 2**20])
def test_an_index_that_claims_more_than_a_compressed_tar_needs_little_memory(tmp_path: Path, claimed: int) -> None:
    tar = tmp_path / "a.tar.gz"
    tar.write_bytes(gzip.compress(MEMBER + END))
    index_tar(parse_location(tar))
    tensors, values = safetensors.numpy.load_file(index_of(tar)), {**read_metadata(tar), "num_bytes": 2**32}
    tensors["size"][:] = claimed
    index_of(tar).write_bytes(safetensors.numpy.save(tensors, {"shardio": json.dumps(values)}))
    tracemalloc.start()
    try:
        with (
            KeyedShards(open_compressed(parse_location(tar))) as samples,
            pytest.raises(SampleError, match=r"a cannot be read from .*a\.tar\.gz ends at byte 2048 of the decomp"),
        ):
            samples.read("a")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_tar_of_many_fields_that_hardly_any_sample_has_is_refused(tmp_path: Path) -> None:
    """Its index would have an entry for each pair of a sample and a field."""
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(make_header(0, name=f"{i}.{i}") for i in range(1000)) + END)
    with pytest.raises(FormatError, match=r"a\.tar has 1000 different fields, but a sample has only 1\.0 of them"):
        open_table(path)
    path.write_bytes(b"".join(make_header(0, name=f"photo.{i}") for i in range(1025)) + END)
    assert_raises(FormatError, r"a\.tar has 1025 different fields, but an index holds at most 1024", open_table, path)
    path.write_bytes(b"".join(make_header(0, name=f"{i}.{i}") for i in range(100)) + END)
    assert open_table(path).manifest.num_samples == 100


def test_a_truncated_tar_that_holds_a_field_twice_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "shard-000000.tar"
    content = 2 * (make_header(3, name="a.txt") + pad(b"abc"))
    path.write_bytes(content)
    result = repair(parse_location(tmp_path))
    assert ([problem.kind for problem in result.problems], path.read_bytes()) == (["header"], content)


def test_a_member_that_has_another_size_for_other_tools_is_refused(tmp_path: Path) -> None:
    """They read a size up to the first NUL, so that this one is 0."""
    write_shard(parse_location(tmp_path / "a.tar"), [Sample(key="a", fields={"bin": b"1", "txt": b"22"}, origin="")])
    with open_shard(tmp_path / "a.tar") as shard:
        content = bytearray((tmp_path / "a.tar").read_bytes())
        content[1024 + 124] = 0
        fix_checksum(content, 1024)
        with (tmp_path / "a.tar").open("r+b") as file:  # In place: the shard is open.
            file.write(content)
        with pytest.raises(StaleIndexError, match=r"the tar holds a\.txt there with 0 bytes instead of 2"):
            shard.read_many(np.array([0]), ["txt"], np.array([True]))


@given(st.integers(0, 2**31))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_hostile_files_are_refused_or_read_as_tarfile_reads_them(seed: int) -> None:
    rng = random.Random(seed)
    Laws().check(make_shard(rng), rng)


@given(st.binary(max_size=2000), st.sampled_from("TIZJ"))
def test_any_bytes_are_files_to_check(content: bytes, kind: str) -> None:
    Laws().check(HostileShard.load(kind.encode() + content), random.Random(0))


@pytest.mark.parametrize("seed", range(12))
def test_hostile_files_on_disk_are_refused_or_read(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Laws().check_folder(make_shard(random.Random(seed)), tmp_path)


def test_shards_are_those_of_their_seeds_and_neither_all_refused_nor_all_read() -> None:
    shards, laws = [make_shard(random.Random(seed)) for seed in range(200)], Laws()
    assert shards == [make_shard(random.Random(seed)) for seed in range(200)]
    assert [HostileShard.load(shard.dump()) for shard in shards] == shards
    assert len(Counter((shard.is_compressed, shard.index is not None) for shard in shards)) == 4
    for seed, shard in enumerate(shards):
        laws.check(shard, random.Random(seed))
    for what in ("index", "read", "read columns"):
        assert laws.outcomes[f"{what}: done"] > 20
        assert laws.outcomes[f"{what}: FormatError"] > 20


def test_a_wrong_result_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    tar = MEMBER + END
    Laws().check(HostileShard(tar=tar), random.Random(0))
    for wrong in (lambda content: None, lambda content: [], lambda content: [("a.txt", 512, 2)]):
        monkeypatch.setattr("tests.shards.tar_laws.read_by_tarfile", wrong)
        assert_raises(LawBrokenError, "tarfile re", Laws().check, HostileShard(tar=tar), random.Random(0))


def test_an_error_that_is_not_shardios_own_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.shards.tar_laws.write_index_of", {}.__getitem__)
    assert_raises(LawBrokenError, "index: KeyError", Laws().check, HostileShard(tar=b""), random.Random(0))
