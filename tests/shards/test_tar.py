"""Writing, scanning and streaming tars.

If a header is wrong, shardio either raises an error or reads the same contents as tarfile.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import tarfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st

import shardio
from shardio.errors import FormatError, SampleError, StaleIndexError
from shardio.reading import KeyedShards, SampleReader
from shardio.sample import Sample
from shardio.shards import open_compressed, open_table, read_shards, size_in_tar, write_shard
from shardio.shards.indexing import index_tar, scan_contents
from shardio.shards.repairing import repair
from shardio.shards.shard import DecompressedFile
from shardio.shards.tar import BLOCK, END, MAX_MEMBER, StoredField, are_plain_headers, header_fits, make_header
from shardio.shards.tar_scan import IncompleteTarError, StreamedTar, TarScan, find_member
from shardio.storage import Location, parse_location
from tests.memory_store import MemoryStore
from tests.raising import assert_raises
from tests.shards.hostile import (
    HostileShard,
    damage,
    fix_checksum,
    make_header as make_random_header,
    make_record,
    make_shard,
    pad,
)
from tests.shards.tar_laws import LawBrokenError, Laws
from tests.tars import Samples, index_of, open_file, open_shard, read_metadata, read_with_webdataset, write_tar


def header_of(size: int, kind: bytes = tarfile.REGTYPE, name: str = "a.txt") -> bytes:
    return bytes(make_random_header(random.Random(0), name.encode(), size, kind[0]))


def make_pax(keyword: str, value: str, kind: bytes = tarfile.XHDTYPE) -> bytes:
    record = make_record(keyword.encode(), value.encode())
    return header_of(len(record), kind) + pad(record)


def make_sparse() -> bytes:
    """Return the header of a sparse file whose map continues in the next block."""
    block = bytearray(header_of(3, tarfile.GNUTYPE_SPARSE))
    block[482] = 1
    return bytes(fix_checksum(block))


MEMBER = header_of(3) + pad(b"abc")
LONG_NAME = header_of(6, tarfile.GNUTYPE_LONGNAME) + pad(b"b.txt\0")
HOSTILE = {
    "pax-headers-in-a-row": 3000 * make_pax("comment", "x") + MEMBER,
    "global-headers-in-a-row": 3000 * make_pax("comment", "x", tarfile.XGLTYPE) + MEMBER,
    "long-names-in-a-row": 3000 * LONG_NAME + MEMBER,
    "pax-header-huge": header_of(2**43, tarfile.XHDTYPE) + MEMBER,
    "pax-header-negative": header_of(-5, tarfile.XHDTYPE) + MEMBER,
    "long-name-huge": header_of(2**62, tarfile.GNUTYPE_LONGNAME) + MEMBER,
    "long-name-negative": header_of(-5, tarfile.GNUTYPE_LONGNAME) + MEMBER,
    "member-huge": header_of(2**80) + MEMBER,
    "member-negative": header_of(-512) + MEMBER,
    "unknown-type-huge": header_of(2**46, b"Q") + MEMBER,
    "pax-size-huge": make_pax("size", "1" + "0" * 30) + MEMBER,
    "pax-size-negative": make_pax("size", "-512") + MEMBER,
    "pax-size-negative-of-the-last": MEMBER + make_pax("size", "-512") + MEMBER,
    "pax-size-no-number": make_pax("size", "abc") + header_of(1024) + bytes(1024) + MEMBER,
    "pax-size-global": make_pax("size", "2", tarfile.XGLTYPE) + header_of(1024) + bytes(1024) + MEMBER,
    "pax-length-of-5000-digits": header_of(5010, tarfile.XHDTYPE) + pad(b"9" * 5000 + b" size=3\n\0\0") + MEMBER,
    "sparse-map-no-number": make_pax("GNU.sparse.map", "a,b") + MEMBER,
    "pax-digits": make_pax("comment", "9" * 900_000) + MEMBER,
    "pax-digits-in-a-sparse-file": make_pax("GNU.sparse.size", "9" * 900_000) + MEMBER,
    "pax-records-without-equals-sign": header_of(900_002, tarfile.XHDTYPE) + pad(b"5 aaa" * 180_000 + b"=\n") + MEMBER,
    "pax-keywords-of-many-global-headers": b"".join(
        make_pax(f"x{i}", "", tarfile.XGLTYPE) + header_of(0, name=f"{i}.txt") for i in range(1002)
    ),
    "sparse-map-is-cut": make_sparse() + MEMBER[:100],
    "sparse": header_of(3, tarfile.GNUTYPE_SPARSE) + pad(b"abc"),
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
    assert_raises(FormatError, None, stream, content, 2**16)


RIGHT = {
    "plain": MEMBER,
    "long-name": LONG_NAME + MEMBER,
    "pax-size": make_pax("size", "2") + MEMBER,
    "some-global-headers": make_pax("x", "y", tarfile.XGLTYPE) * 9 + MEMBER,
    # tarfile reports this size for the member, but continues at the offset that follows from the header.
    "global-size-of-a-skipped-member": MEMBER
    + make_pax("size", "1500", tarfile.XGLTYPE)
    + header_of(0, b"D", "README"),
    "skipped-volume": MEMBER + header_of(0, b"V", "b.txt"),
    "skipped-directory": MEMBER + header_of(0, b"D", "b.txt"),
    "skipped-unknown-type-with-content": MEMBER + header_of(512, b"Q", "README") + b"abc".ljust(512, b"\0"),
}


@pytest.mark.parametrize("content", RIGHT.values(), ids=RIGHT)
def test_a_tar_with_right_headers_is_read(tmp_path: Path, content: bytes) -> None:
    """Correct headers are accepted, so the headers above are rejected only because they are wrong."""
    (tmp_path / "a.tar").write_bytes(content + END)
    assert (open_table(tmp_path / "a.tar").manifest.num_samples, shardio.verify(tmp_path / "a.tar")) == (1, [])
    assert stream(content + END) == index(content + END)


def test_extended_headers_in_a_row_hide_a_members_name(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(HOSTILE["pax-headers-in-a-row"] + END)
    with open_file(tmp_path / "a.tar") as file:
        assert find_member(file, 3000 * 1024 + 512) is None


def test_a_member_that_is_too_large_is_refused_at_indexing(tmp_path: Path) -> None:
    """The tar is a sparse file, so its content is neither written nor read."""
    path = tmp_path / "a.tar"
    path.write_bytes(header_of(MAX_MEMBER + 1))
    os.truncate(path, 512 + MAX_MEMBER + 512 + len(END))
    message = rf"a\.tar holds a\.txt at byte 512 with {MAX_MEMBER + 1} bytes, more than"
    assert_raises(FormatError, message, open_table, path)


def test_a_field_that_is_too_large_is_refused_at_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"bin": b"12345678", "txt": b"1"}
    write_shard(parse_location(tmp_path / "a.tar"), [Sample(key=key, fields=fields, origin="") for key in "ab"])
    monkeypatch.setattr("shardio.shards.shard_reading.MAX_MEMBER", 7)
    with open_shard(tmp_path / "a.tar") as shard:
        with pytest.raises(
            SampleError, match=r"field 'bin' of sample b in .*a\.tar at byte 2560 has 8 bytes, more than"
        ):
            read_shards([(shard, np.array([1]))], ["txt", "bin"])
        assert read_shards([(shard, np.array([1]))], ["txt"]) == [[b"1"]]


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
    """The index would have an entry for each pair of a sample and a field."""
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(header_of(0, name=f"{i}.{i}") for i in range(1000)) + END)
    assert_raises(FormatError, r"a\.tar has 1000 different fields, but a sample has only 1\.0 of", open_table, path)
    path.write_bytes(b"".join(header_of(0, name=f"photo.{i}") for i in range(1025)) + END)
    assert_raises(FormatError, r"a\.tar has 1025 different fields, but an index holds at most 1024", open_table, path)
    path.write_bytes(b"".join(header_of(0, name=f"{i}.{i}") for i in range(100)) + END)
    assert open_table(path).manifest.num_samples == 100


def test_a_truncated_tar_that_holds_a_field_twice_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "shard-000000.tar"
    content = 2 * (header_of(3, name="a.txt") + pad(b"abc"))
    path.write_bytes(content)
    result = repair(parse_location(tmp_path))
    assert ([problem.kind for problem in result.problems], path.read_bytes()) == (["header"], content)


def test_a_member_that_has_another_size_for_other_tools_is_refused(tmp_path: Path) -> None:
    """Other tools read a size only up to its first NUL, so they read 0 here."""
    write_shard(parse_location(tmp_path / "a.tar"), [Sample(key="a", fields={"bin": b"1", "txt": b"22"}, origin="")])
    with open_shard(tmp_path / "a.tar") as shard:
        content = bytearray((tmp_path / "a.tar").read_bytes())
        content[1024 + 124] = 0
        fix_checksum(content, 1024)
        with (tmp_path / "a.tar").open("r+b") as file:  # Write in place, because the shard is open.
            file.write(content)
        with pytest.raises(StaleIndexError, match=r"the tar holds a\.txt there with 0 bytes instead of 2"):
            read_shards([(shard, np.array([0]))], ["txt"], np.array([True]))


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


def test_a_wrong_result_and_another_error_break_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = HostileShard(tar=MEMBER + END)
    Laws().check(shard, random.Random(0))
    for wrong in (lambda content: None, lambda content: [], lambda content: [("a.txt", 512, 2)]):
        monkeypatch.setattr("tests.shards.tar_laws.read_by_tarfile", wrong)
        assert_raises(LawBrokenError, "tarfile re", Laws().check, shard, random.Random(0))
    monkeypatch.setattr("tests.shards.tar_laws.write_index_of", {}.__getitem__)
    assert_raises(LawBrokenError, "index: KeyError", Laws().check, shard, random.Random(0))


NAMES = st.text(st.characters(exclude_categories=["C"], exclude_characters="/."), min_size=1, max_size=120)


def scan(path: Path) -> tuple[dict[str, StoredField], str]:
    with open_file(path) as file:
        scanned = TarScan(file)
        return dict(scanned.members()), scanned.digest


@given(name=NAMES, num_bytes=st.integers(0, 3000) | st.sampled_from([8**11 - 1, 8**11, 2**40]))
def test_a_members_size_in_the_tar_is_what_tarfile_writes(name: str, num_bytes: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    header = len(info.tobuf(format=tarfile.PAX_FORMAT))
    assert size_in_tar(name, num_bytes) == header + -(-num_bytes // 512) * 512


def test_a_shard_is_as_long_as_its_members_and_its_end_and_holds_no_time_and_no_owner(tmp_path: Path) -> None:
    fields = {"é" * 60: {"jpg": b"x" * 513, "cls": b"7"}, "n" * 130: {"jpg": b""}}
    samples = [Sample(key=key, fields=contents, origin=key) for key, contents in fields.items()]
    write_shard(parse_location(tmp_path / "a.tar"), samples)
    expected = sum(size_in_tar(f"{s.key}.{field}", len(c)) for s in samples for field, c in s.fields.items())
    assert (tmp_path / "a.tar").stat().st_size == expected + len(END)
    with tarfile.open(tmp_path / "a.tar") as tar:
        for info in tar:
            assert (info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) == (0, 0, 0, "", "", 0o644)
            assert set(info.pax_headers) <= {"path"}


@pytest.mark.parametrize("num_zeros", [1, 511, 10240, 3 << 20])
def test_a_scan_hashes_the_zeros_after_the_end_as_well(tmp_path: Path, num_zeros: int) -> None:
    content = MEMBER + END + bytes(num_zeros)
    (tmp_path / "a.tar").write_bytes(content)
    found, digest = scan(tmp_path / "a.tar")
    assert ([*found], digest) == (["a.txt"], xxhash.xxh3_128_hexdigest(content))


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_refused(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]  # The overloads want literal modes.
        tar.addfile(tarfile.TarInfo("a.txt"))
    assert_raises(FormatError, r"a\.tar is not a complete, uncompressed tar.*Decompress it", scan, path)


@pytest.mark.parametrize("num_zeros", [0, 9216, 2 << 20])
def test_a_tar_that_continues_after_its_end_is_refused(tmp_path: Path, num_zeros: int) -> None:
    """In the output of ``cat a.tar b.tar``, readers stop at the first end mark and lose the second tar's samples."""
    first = MEMBER + END + bytes(num_zeros)
    (tmp_path / "both.tar").write_bytes(first + MEMBER + END)
    message = rf"both\.tar has data after its end mark, at byte {len(first)}, .*--ignore"
    assert_raises(FormatError, message, scan, tmp_path / "both.tar")


def test_tars_that_gnu_tar_joined_are_read_whole(tmp_path: Path) -> None:
    path, second = tmp_path / "both.tar", tmp_path / "second.tar"
    write_tar(path, [("a.txt", b"a"), ("b.txt", b"b")])
    write_tar(second, [(f"{'c' * 150}.txt", b"c"), ("d.txt", b"d")])
    subprocess.run(["tar", "--concatenate", "-f", path, second], check=True)
    assert [*scan(path)[0]] == ["a.txt", "b.txt", f"{'c' * 150}.txt", "d.txt"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.LNKTYPE, r"b\.jpg as a hard link to a\.jpg \(its header ends at byte 1536\).*--hard-dereference"),
        (tarfile.SYMTYPE, r"b\.jpg as a symbolic link to a\.jpg .*--dereference"),
        *(
            (kind, r"b\.jpg as a special file \(its header ends at byte 1536\).*create the tar again without it")
            for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)
        ),
    ],
)
def test_a_field_that_has_no_content_of_its_own_is_refused(tmp_path: Path, kind: bytes, message: str) -> None:
    path = tmp_path / "links.tar"
    write_tar(path, [("a.jpg", b"abc")])
    with tarfile.open(path, "a") as tar:
        other = tarfile.TarInfo("b.jpg")
        other.type, other.linkname = kind, "a.jpg"
        tar.addfile(other)
    assert_raises(FormatError, message, scan, path)


def test_a_header_with_another_folder_does_not_fit() -> None:
    folder, key = "f" * 90, "n" * 20
    info = tarfile.TarInfo(f"{folder}/{key}.JPG")
    info.size = 35
    header = info.tobuf(tarfile.USTAR_FORMAT)
    assert header.startswith(f"{key}.JPG\0".encode())
    fits = [header_fits(header, name.encode(), b".jpg", 35) for name in (f"{folder}/{key}", key, f"other/{key}")]
    assert fits == [True, False, False]


UTF8_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=130)
SIZES = st.integers(0, 2**34)
Format = Literal[0, 1, 2]
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def compare(headers: list[bytes], names: list[bytes], sizes: list[int]) -> list[bool]:
    blocks = np.frombuffer(b"".join(header[-BLOCK:] for header in headers), np.uint8).reshape(-1, BLOCK)
    found: list[bool] = are_plain_headers(blocks, names, np.array(sizes, np.int64)).tolist()
    return found


def dump(name: str, size: int, tar_format: Format) -> bytes:
    """Return tarfile's header, or an empty block if the format cannot hold the name or the size."""
    info = tarfile.TarInfo(name)
    info.size = size
    try:
        return info.tobuf(tar_format, errors="surrogateescape")
    except ValueError:
        return bytes(BLOCK)


@given(
    members=st.lists(st.tuples(UTF8_NAMES, SIZES, FORMATS), min_size=1, max_size=5), other=st.tuples(UTF8_NAMES, SIZES)
)
def test_tarfile_agrees_with_headers_that_fit(members: list[tuple[str, int, Format]], other: tuple[str, int]) -> None:
    headers = [dump(*member) for member in members]
    for expected in ([member[:2] for member in members], [other] * len(members)):
        names, sizes = [name.encode() for name, _ in expected], [size for _, size in expected]
        for header, name, size, is_plain in zip(headers, names, sizes, compare(headers, names, sizes), strict=True):
            if is_plain:
                read = tarfile.TarInfo.frombuf(header[-BLOCK:], "utf-8", "strict")
                assert (read.name.encode(), read.size) == (name, size)
                assert header_fits(header[-BLOCK:], name, b"", size)


def test_only_equal_names_of_up_to_99_bytes_and_equal_sizes_are_plain() -> None:
    names = ["a", "b/c.jpg", *("n" * length for length in range(95, 104))]
    headers = [make_header(name, size) for size, name in enumerate(names)]
    found = compare(headers, [*map(str.encode, names)], [*range(len(names))])
    assert found == [len(name) < 100 for name in names]
    for size in (0, 1, 511, 2**31, 8**11 - 1):
        others = [size, size + 1, size + 8**11]
        assert compare([make_header("a.bin", size)] * 3, [b"a.bin"] * 3, others) == [True, False, False]
    other_names = [b"a.jp", b"a.jpg.", b"b.jpg", b"A.jpg", b"", b"a.jpg" + b"x" * 200]
    assert compare([make_header("a.jpg", 5)] * 7, [b"a.jpg", *other_names], [5] * 7) == [True, *[False] * 6]
    assert compare([], [], []) == []


FIELDS = ("txt", "cls", "seg.png", "")


def stream(content: bytes, piece: int = 1000) -> Samples:
    """Return the samples of a tar that arrives in pieces."""
    file = io.BytesIO(content)
    tar = StreamedTar("a.tar", lambda: file.read(piece), FIELDS)
    return [(sample.key, sample.contents) for sample in tar.samples()]


def index(content: bytes) -> Samples:
    """Return the samples that the tar's index would have."""
    location = Location(store=MemoryStore({"a.tar": content}), key="a.tar")
    with closing(location.open()) as file:
        found = scan_contents(file).samples
    samples = list[tuple[str, dict[str, bytes]]]()
    for key, fields in found:
        kept = {name: field for name, field in fields.items() if name in FIELDS}
        samples.append((key, {name: content[start : start + size] for name, (start, size, _) in kept.items()}))
    return samples


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    members = [(f"k/{i}.{field}", bytes([i]) * (i * 300)) for i in range(8) for field in ("txt", "CLS", "seg.png")]
    write_tar(path, [("README", b"x"), ("._a.txt", b"x"), *members, ("k/" + "ü" * 150 + ".txt", b"long")])
    return path


@pytest.mark.parametrize("piece", [1, 511, 512, 2**20])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_samples_are_those_of_webdataset(tar: Path, piece: int, is_compressed: bool) -> None:
    content = gzip.compress(tar.read_bytes()) if is_compressed else tar.read_bytes()
    expected = [each for each in read_with_webdataset(tar) if each[0] != "._a"]
    assert stream(content, piece) == expected == index(tar.read_bytes())


def unless_refused(read: Callable[[], Samples]) -> Samples | None:
    try:
        return read()
    except FormatError:
        return None


def test_a_tar_that_is_cut_anywhere_is_refused_and_a_stream_ends_after_complete_samples(tar: Path) -> None:
    content = tar.read_bytes()
    whole = stream(content)
    end = len(content.rstrip(b"\0")) // 512 * 512 + 1024  # The end of the first block of the end mark.
    for cut in (block + offset for block in range(512, len(content), 512) for offset in (-1, 0, 100)):
        file, seen = io.BytesIO(content[:cut]), list[tuple[str, dict[str, bytes]]]()
        samples = StreamedTar("a.tar", partial(file.read, 700), FIELDS).samples()
        with pytest.raises(IncompleteTarError) if cut < end else nullcontext():
            seen += [(sample.key, sample.contents) for sample in samples]
        assert seen == whole[: len(seen)]
        assert (unless_refused(partial(index, file.getvalue())) is None) == (cut < end), cut
    compressed = gzip.compress(content)
    for cut in (1, 9, len(compressed) // 2, len(compressed) - 5, len(compressed) - 1):
        assert_raises(IncompleteTarError, None, stream, compressed[:cut])


@given(st.integers(0, 2**32), st.integers(1, 3000))
def test_a_damaged_tar_is_read_or_refused_as_by_the_index(seed: int, piece: int) -> None:
    rng = random.Random(seed)
    content = bytearray(
        b"".join(LONG_NAME * (i % 3 == 0) + MEMBER.replace(b"a.txt", b"%d.txt" % i, 1) for i in range(4)) + END
    )
    damage(content, rng)
    assert unless_refused(lambda: index(bytes(content))) == unless_refused(lambda: stream(bytes(content), piece))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"<html>" * 200, "not a complete tar"),
        (b"\xff" * 4096, "not a complete tar"),
        (2 * (MEMBER + END), r"a.tar has data after its end mark, at byte 2048"),
        (2 * MEMBER + END, r"a.tar holds field 'txt' of sample a twice, the second time at byte 1536"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), r"compressed with zstd.* zstd -dc"),
    ],
)
def test_what_is_no_tar_of_samples_is_refused(content: bytes, message: str) -> None:
    assert_raises(FormatError, message, stream, content)
    assert unless_refused(partial(index, content)) is None


def test_a_compressed_tar_is_decompressed_once_in_any_order_of_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [(f"{number:03d}.{field}", b"1") for number in range(200) for field in ("ab" if number % 2 else "ba")]
    write_tar(tmp_path / "a.tar", members)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    index_tar(parse_location(tmp_path / "a.tar.gz"))
    restarts, restart = list[DecompressedFile](), DecompressedFile._restart

    def count_and_restart(file: DecompressedFile) -> None:
        restarts.append(file)
        restart(file)

    monkeypatch.setattr(DecompressedFile, "_restart", count_and_restart)
    SampleReader(open_compressed(parse_location(tmp_path / "a.tar.gz"))).read(np.arange(200), ["a", "b"])
    assert len(restarts) <= 1
