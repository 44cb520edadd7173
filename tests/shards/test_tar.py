from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, strategies as st

from shardio.errors import FormatError
from shardio.sample import Sample
from shardio.shards import END, size_in_tar, write_shard
from shardio.shards.tar import header_fits
from shardio.shards.tar_scan import TarMember, TarScan
from shardio.storage import parse_location
from tests.tars import open_file, read_members, write_tar

NAMES = st.text(st.characters(exclude_categories=["C"], exclude_characters="/."), min_size=1, max_size=120)


def scan(path: Path) -> tuple[list[TarMember], TarScan]:
    """Scan a tar; return its members, and the scan for its digest."""
    with open_file(path) as file:
        scanned = TarScan(file)
        return list(scanned.members()), scanned


def make_sample(key: str, **fields: bytes) -> Sample:
    return Sample(key=key, fields=fields, origin=key)


@given(name=NAMES, content=st.binary(max_size=2000))
def test_a_members_size_in_the_tar_is_what_tarfile_writes(name: str, content: bytes) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
        assert tar.offset == size_in_tar(name, len(content))


@pytest.mark.parametrize("num_bytes", [8**11 - 1, 8**11, 2**40])
def test_a_members_size_in_the_tar_is_right_for_huge_files(num_bytes: int) -> None:
    info = tarfile.TarInfo("a.bin")
    info.size = num_bytes
    header = len(info.tobuf(format=tarfile.PAX_FORMAT))
    assert size_in_tar("a.bin", num_bytes) == header + -(-num_bytes // 512) * 512


def test_a_shard_is_as_long_as_its_members_and_its_end(tmp_path: Path) -> None:
    samples = [make_sample("é" * 60, jpg=b"x" * 513, cls=b"7"), make_sample("n" * 130, jpg=b"")]
    write_shard(parse_location(tmp_path / "a.tar"), samples)
    expected = sum(size_in_tar(f"{s.key}.{field}", len(c)) for s in samples for field, c in s.fields.items())
    assert (tmp_path / "a.tar").stat().st_size == expected + len(END)


def test_headers_hold_no_time_and_no_owner(tmp_path: Path) -> None:
    write_shard(parse_location(tmp_path / "a.tar"), [make_sample("a", jpg=b"1"), make_sample("ü" * 200, jpg=b"2")])
    with tarfile.open(tmp_path / "a.tar") as tar:
        for info in tar:
            assert (info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) == (0, 0, 0, "", "", 0o644)
            assert set(info.pax_headers) <= {"path"}


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_scan_finds_every_member_where_tarfile_finds_it(tmp_path: Path, tar_format: int) -> None:
    path = tmp_path / "a.tar"
    prefix = "d" * 60 + "/" + "e" * 60 + "/"  # Fits no single header field, but ustar's prefix and name.
    write_tar(path, [(f"{prefix}{i}.bin", bytes([i]) * (i**5)) for i in range(20)], tar_format=tar_format)
    found, scanned = scan(path)
    whole = path.read_bytes()
    contents = [whole[member.offset : member.offset + member.size] for member in found]
    assert list(zip([member.name for member in found], contents, strict=True)) == read_members(path)
    assert [member.hash for member in found] == [xxhash.xxh3_64_intdigest(content) for content in contents]
    assert (scanned.num_bytes, scanned.digest) == (len(whole), xxhash.xxh3_128_hexdigest(whole))


@pytest.mark.parametrize("num_zeros", [1, 511, 10240, 3 << 20])
def test_a_scan_hashes_the_zeros_after_the_end_as_well(tmp_path: Path, num_zeros: int) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [("a.txt", b"abc")])
    with path.open("ab") as file:
        file.write(bytes(num_zeros))
    found, scanned = scan(path)
    assert [member.name for member in found] == ["a.txt"]
    assert scanned.digest == xxhash.xxh3_128_hexdigest(path.read_bytes())


# The second member's header lies at byte 1536, its content from 2048 to 3048, the end blocks from 3072.
@pytest.mark.parametrize("stop", [1, 511, 512, 700, 1100, 1700, 2048, 2500, 3047], ids=lambda stop: f"byte-{stop}")
def test_a_tar_truncated_inside_a_member_is_refused(tmp_path: Path, stop: int) -> None:
    path = tmp_path / "cut.tar"
    write_tar(path, [("a.txt", b"a" * 1000), ("b.txt", b"b" * 1000)])
    path.write_bytes(path.read_bytes()[:stop])
    with pytest.raises(FormatError, match=r"cut\.tar"):
        scan(path)


def test_a_tar_truncated_between_members_is_refused(tmp_path: Path) -> None:
    """Only the missing end shows that members may be missing, too."""
    path = tmp_path / "cut.tar"
    write_tar(path, [("a.txt", b"a" * 1000), ("b.txt", b"b" * 1000)])
    path.write_bytes(path.read_bytes()[:1536])
    with pytest.raises(FormatError, match=r"cut\.tar"):
        scan(path)


@pytest.mark.parametrize("at", [0, 1536], ids=["first-header", "second-header"])
def test_a_tar_with_a_damaged_header_is_refused(tmp_path: Path, at: int) -> None:
    path = tmp_path / "damaged.tar"
    write_tar(path, [("a.txt", b"a" * 1000), ("b.txt", b"b" * 1000)])
    content = bytearray(path.read_bytes())
    content[at + 100 : at + 400] = b"?" * 300
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"damaged\.tar"):
        scan(path)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_refused(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]  # The overloads want literal modes.
        tar.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(FormatError, match=r"a\.tar is not a complete, uncompressed tar.*Decompress it"):
        scan(path)


@pytest.mark.parametrize("content", [b"", b"no tar at all", b"\xff" * 4096])
def test_another_file_than_a_tar_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"a\.tar is not a complete"):
        scan(path)


@pytest.mark.parametrize("num_zeros", [0, 9216, 2 << 20])
def test_a_tar_that_continues_after_its_end_is_refused(tmp_path: Path, num_zeros: int) -> None:
    """As after cat a.tar b.tar: readers stop at the first end and lose the second tar's samples."""
    path, second = tmp_path / "both.tar", tmp_path / "second.tar"
    write_tar(path, [("a.txt", b"a")])
    write_tar(second, [("b.txt", b"b")])
    first = path.read_bytes() + bytes(num_zeros)
    path.write_bytes(first + second.read_bytes())
    with pytest.raises(FormatError, match=rf"both\.tar has data after its end mark, at byte {len(first)}, .*--ignore"):
        scan(path)


def test_tars_that_gnu_tar_joined_are_read_whole(tmp_path: Path) -> None:
    path, second = tmp_path / "both.tar", tmp_path / "second.tar"
    write_tar(path, [("a.txt", b"a"), ("b.txt", b"b")])
    write_tar(second, [(f"{'c' * 150}.txt", b"c"), ("d.txt", b"d")])
    subprocess.run(["tar", "--concatenate", "-f", path, second], check=True)
    assert [member.name for member in scan(path)[0]] == ["a.txt", "b.txt", f"{'c' * 150}.txt", "d.txt"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.LNKTYPE, r"b\.jpg as a hard link to a\.jpg \(its header ends at byte 1536\).*--hard-dereference"),
        (tarfile.SYMTYPE, r"b\.jpg as a symbolic link to a\.jpg .*--dereference"),
        (tarfile.FIFOTYPE, r"b\.jpg as a special file .*create the tar again without it"),
    ],
)
def test_a_field_that_has_no_content_of_its_own_is_refused(tmp_path: Path, kind: bytes, message: str) -> None:
    path = tmp_path / "links.tar"
    write_tar_with(path, kind, "b.jpg")
    with pytest.raises(FormatError, match=message):
        scan(path)


@pytest.mark.parametrize(
    ("kind", "name"), [(tarfile.SYMTYPE, "latest"), (tarfile.DIRTYPE, "v1.0"), (b"V", "backup.2024")]
)
def test_links_and_directories_that_are_not_fields_are_skipped(tmp_path: Path, kind: bytes, name: str) -> None:
    write_tar_with(tmp_path / "a.tar", kind, name)
    assert [member.name for member in scan(tmp_path / "a.tar")[0]] == ["a.jpg"]


def write_tar_with(path: Path, kind: bytes, name: str) -> None:
    """Write a tar of one file, and of one member of another kind that refers to it."""
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
        other = tarfile.TarInfo(name)
        other.type, other.linkname = kind, "a.jpg"
        tar.addfile(other)


def test_a_header_with_another_folder_does_not_fit() -> None:
    """Long names are divided: the folder is elsewhere in the header, and what remains may be another member's name."""
    folder, name = "f" * 90, "n" * 20 + ".JPG"
    info = tarfile.TarInfo(f"{folder}/{name}")
    info.size = 35
    header = info.tobuf(tarfile.USTAR_FORMAT)
    assert header.startswith(name.encode() + b"\0")
    key = "n" * 20
    assert header_fits(header, f"{folder}/{key}".encode(), b".jpg", 35)
    assert not header_fits(header, key.encode(), b".jpg", 35)
    assert not header_fits(header, f"other/{key}".encode(), b".jpg", 35)
