"""Verification finds every problem and says where it is."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, example, given, settings, strategies as st

import shardio
from shardio.shards import DatasetSource, Problem, open_table
from shardio.shards.manifest import UNFINISHED_NAME
from shardio.shards.shard import write_index
from shardio.shards.tar import StoredField, StoredSample
from shardio.storage import parse_location, read_pieces
from tests.files import flip, read_files
from tests.sources import encode
from tests.tars import index_of, open_file, write_tar


def kinds(problems: list[Problem]) -> list[str]:
    return [problem.kind for problem in problems]


def contents_of(tar: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(tar) as opened:
        return opened.getmembers()


def test_an_intact_pack_has_no_problems_and_nothing_is_written(out: Path) -> None:
    before = read_files(out)
    for source in (out, out / "shardio.json", out / "shard-000001.tar", out / "shard-{000000..000003}.tar"):
        assert shardio.verify(source, deep=True) == []
    assert read_files(out) == before


def test_intact_tars_of_other_tools_have_no_problems(tmp_path: Path) -> None:
    """Whatever precedes, follows or separates the members: extended headers, directories, skipped members, zeros."""
    long, unicode = "d/" * 80 + "a.txt", "ключ/ü.txt"
    members = [("README", b"1"), (long, b"2"), ("._x.txt", b"3"), (unicode, b"4"), ("b.TXT", b"5" * 700)]
    for name, tar_format in (("pax", tarfile.PAX_FORMAT), ("gnu", tarfile.GNU_FORMAT)):
        write_tar(
            tmp_path / f"{name}.tar", [(f"{name}/{key}", content) for key, content in members], tar_format=tar_format
        )
        with tarfile.open(tmp_path / f"{name}.tar", "a", format=tar_format) as tar:
            folder = tarfile.TarInfo("folder.txt")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    with pytest.warns(RuntimeWarning, match="macOS"):
        open_table(tmp_path)
    assert shardio.verify(tmp_path, deep=True) == []


def test_no_index_is_created(tars: Path) -> None:
    problems = shardio.verify(tars)
    assert kinds(problems) == ["missing"] * 4
    assert "shardio index" in problems[0].message
    assert not list(tars.glob("*.idx"))


def test_a_damaged_content_is_named_by_key_and_offset(out: Path) -> None:
    tar = out / "shard-000001.tar"
    members = [member for member in contents_of(tar) if member.name.endswith(".jpg")]
    for member in members[0], members[-1]:
        flip(tar, member.offset_data + 7)
    found = [problem for problem in shardio.verify(out) if problem.kind == "content"]
    assert [(problem.key, problem.field, problem.offset) for problem in found] == [
        (member.name.removesuffix(".jpg"), "jpg", member.offset_data) for member in (members[0], members[-1])
    ]


def test_each_damaged_header_is_named(out: Path) -> None:
    """tarfile stops at the first one."""
    tar = out / "shard-000001.tar"
    members = contents_of(tar)
    for member in members[0], members[3], members[-1]:
        flip(tar, member.offset_data - 512)
    found = [problem.offset for problem in shardio.verify(out) if problem.kind == "header"]
    assert found == [member.offset_data for member in (members[0], members[3], members[-1])]


def test_the_name_in_an_extended_header_is_compared(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("d" * 120 + "/a.txt", b"1"), ("d" * 120 + "/b.txt", b"2")])
    open_table(tmp_path)
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content.replace(b"/b.txt\n", b"/c.txt\n"))
    found = [problem for problem in shardio.verify(tmp_path) if problem.kind == "header"]
    assert [(problem.key, problem.field) for problem in found] == [("d" * 120 + "/b", "txt")]
    assert "/c.txt" in found[0].message


def test_a_truncated_tar_names_the_lost_contents(out: Path) -> None:
    tar = out / "shard-000000.tar"
    members = contents_of(tar)
    with tar.open("r+b") as file:
        file.truncate(members[-2].offset_data + 1)
    problems = shardio.verify(out)
    assert {"stale", "digest", "content"} <= set(kinds(problems))
    lost = [problem.offset for problem in problems if problem.kind == "content"]
    assert lost == [member.offset_data for member in members[-2:] if member.size > 1 or member is members[-1]]


def test_members_that_the_index_lacks_are_named(tmp_path: Path) -> None:
    """Such as those appended to a tar whose index was then made by hand; here the index is made without them."""
    tar = tmp_path / "a.tar"
    write_tar(tar, [("a.txt", b"1"), ("b.txt", b"2"), ("c.txt", b"3"), ("d.txt", b"4")])
    table = open_table(tar)
    digest = table.manifest.shards[0].digest
    assert shardio.verify(tar) == []
    with open_file(tar) as file:
        members = {member.name[0]: member for member in contents_of(tar)}
        samples = [
            StoredSample(key=key, fields={"txt": StoredField(offset=members[key].offset_data, size=1, hash=0)})
            for key in "bc"
        ]
        write_index(parse_location(index_of(tar)), file, samples, digest, file.version)
    problems = shardio.verify(tar)
    assert kinds(problems) == ["unindexed", "content", "content", "unindexed"]
    assert "a.txt" in problems[0].message
    assert problems[-1].offset == members["d"].offset_data


def test_an_index_with_impossible_offsets_is_reported(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    write_tar(tar, [(f"{i}.txt", b"1" * 600) for i in range(7)])
    digest = open_table(tar).manifest.shards[0].digest
    fields = [(512, 600), (800, 600), (2**50, 5), (-7, 3), (100, 3), (2**62, 2**62), (2**63 - 1, 1)]
    with open_file(tar) as file:
        samples = [
            StoredSample(key=str(i), fields={"txt": StoredField(offset=512 + 1536 * i, size=600, hash=0)})
            for i in range(7)
        ]
        write_index(parse_location(index_of(tar)), file, samples, digest)
    tensors = safetensors.numpy.load_file(index_of(tar))
    content = index_of(tar).read_bytes()
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    tensors["offset"] = np.array([[start for start, _ in fields]])
    tensors["size"] = np.array([[size for _, size in fields]])
    safetensors.numpy.save_file(tensors, index_of(tar), metadata)
    problems = shardio.verify(tar)
    named = {problem.key for problem in problems if problem.kind in ("index", "content")}
    assert named == {*"012456", None}  # None: there is a size without an offset.


@pytest.mark.parametrize("name", ["shard-000001.tar", "shard-000001.tar.idx"])
def test_a_missing_file_is_reported(out: Path, name: str) -> None:
    (out / name).unlink()
    (problem,) = shardio.verify(out)
    assert problem.kind == "missing"
    assert problem.where == str(out / "shard-000001.tar")


def test_a_manifest_that_differs_is_reported(out: Path) -> None:
    manifest = out / "shardio.json"
    values = json.loads(manifest.read_bytes())
    values["shards"][1] |= {"num_samples": 4, "digest": "0"}
    values["shards"] += [values["shards"][0]]
    manifest.write_text(json.dumps({**values, "fields": ["jpg"]}))
    problems = shardio.verify(out)
    assert kinds(problems) == ["manifest"] * 8
    assert next(problem.message for problem in problems if "fields" in problem.message) == (
        "it lacks the fields cls, which shard-000000.tar.idx has"
    )
    assert "shard-000000.tar 2 times" in problems[0].message


@pytest.mark.parametrize(("name", "kind"), [("shardio.json", "manifest"), ("shard-000001.tar.idx", "index")])
def test_an_unreadable_file_does_not_hide_the_problems_of_others(out: Path, name: str, kind: str) -> None:
    (out / name).write_text("{")
    flip(out / "shard-000003.tar", 600)
    assert kinds(shardio.verify(out))[:2] == [kind, "digest"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(is_tar=st.booleans(), place=st.floats(0, 1, exclude_max=True), mask=st.sampled_from([1, 128]))
@example(
    is_tar=False, place=0.9, mask=128
)  # A key that is no longer ASCII, which a plain header might encode otherwise.
def test_every_changed_bit_is_found(packed: Path, tmp_path: Path, is_tar: bool, place: float, mask: int) -> None:
    """Also those in the header of an index, which only opening the shard reads."""
    folder = tmp_path / "copy"
    shutil.copytree(packed, folder, dirs_exist_ok=True)
    tar = folder / "shard-000002.tar"
    changed = tar if is_tar else index_of(tar)
    flip(changed, int(place * changed.stat().st_size), mask)
    problems = shardio.verify(folder)
    assert problems
    if is_tar:
        assert "digest" in kinds(problems)
        assert {problem.where for problem in problems} == {str(tar)}


def test_a_missing_manifest_and_bytes_after_an_index_are_reported(out: Path) -> None:
    (out / "shardio.json").unlink()
    index = index_of(out / "shard-000003.tar")
    index.write_bytes(index.read_bytes() + b"x")
    assert kinds(shardio.verify(out)) == ["manifest", "index"]


def test_other_tars_and_unfinished_packs_are_reported(out: Path) -> None:
    write_tar(out / "other.tar", [("a.txt", b"1")])
    write_tar(out / ".hidden.tar", [("a.txt", b"1")])
    (out / UNFINISHED_NAME).write_text("0")
    (out / "x.tgz").write_bytes(b"")
    problems = shardio.verify(out)
    assert sorted(kinds(problems)) == ["unfinished", "unlisted", "unlisted"]


def test_keys_that_occur_twice_are_named_with_both_places(tars: Path) -> None:
    write_tar(tars / "x-000009.tar", [("3-0.txt", b"9"), ("new.txt", b"9"), ("2-1.txt", b"9")])
    open_table(tars)
    problems = shardio.verify(tars)
    assert [(problem.kind, problem.key) for problem in problems] == [("duplicate", "3-0"), ("duplicate", "2-1")]
    assert "x-000003.tar at byte 512" in problems[0].message
    assert problems[0].where == str(tars / "x-000009.tar")


def test_images_are_decoded_only_if_wanted(tmp_path: Path) -> None:
    tar, good = tmp_path / "a.tar", encode(0)
    members = [("a.jpg", good), ("b.jpg", good[:-200]), ("b.txt", b"x"), ("c.png", b"no image"), ("d.mask.png", b"")]
    members += [("e.mask.png", encode(1, suffix="png", mode="I;16"))]
    write_tar(tar, members)
    open_table(tar)
    assert shardio.verify(tar) == []
    problems = shardio.verify(tar, deep=True)
    assert [(problem.kind, problem.key, problem.field) for problem in problems] == [
        ("undecodable", "b", "jpg"),
        ("undecodable", "c", "png"),
        ("undecodable", "d", "mask.png"),
    ]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_number_of_workers_changes_nothing(out: Path, num_workers: int) -> None:
    for i in range(4):
        flip(out / f"shard-00000{i}.tar", 700 + i)
    problems = shardio.verify(out, num_workers=num_workers)
    assert problems == shardio.verify(out)
    assert len({problem.where for problem in problems}) == 4


def test_contents_and_headers_across_pieces_are_hashed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are larger and smaller than the pieces in which a tar is read; oracle: the hashes made at indexing."""
    random = np.random.default_rng(0)
    sizes = [0, 1, 511, 512, 513, 5000, 100_000, 0, 7]
    write_tar(tmp_path / "a.tar", [(f"{i}.bin", random.bytes(size)) for i, size in enumerate(sizes)])
    open_table(tmp_path)
    for num_bytes in (300, 512, 1000, 1536, 65536):
        monkeypatch.setattr(
            "shardio.shards.verifying.read_pieces", lambda tar, n=num_bytes: read_pieces(tar, num_bytes=n)
        )
        assert shardio.verify(tmp_path) == []


def test_a_source_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    sources: list[DatasetSource] = [tmp_path / "x", tmp_path / "x.json", tmp_path, []]
    for source in sources:
        with pytest.raises(FileNotFoundError):
            shardio.verify(source)
