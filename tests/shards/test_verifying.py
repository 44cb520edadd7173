"""Verification finds and locates every problem. Repair restores what the tars contain, and keeps all other files."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, example, given, settings, strategies as st

import shardio
from shardio.errors import FormatError
from shardio.shards import DatasetSource, Problem, open_table
from shardio.shards.manifest import UNFINISHED_NAME, Manifest
from shardio.shards.repairing import RepairResult, repair
from shardio.shards.shard import write_index
from shardio.shards.tar import StoredField, StoredSample
from shardio.storage import Writer, parse_location, read_pieces
from shardio.storage.local import LocalStore
from tests.files import flip, read_files
from tests.raising import assert_raises
from tests.sources import encode
from tests.tars import index_of, open_file, read_members, read_metadata, write_tar


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
    long, unicode = "d/" * 80 + "a.txt", "ключ/ü.txt"
    members = [("README", b"1"), (long, b"2"), ("._x.txt", b"3"), (unicode, b"4"), ("b.TXT", b"5" * 700)]
    for name, tar_format in (("pax", tarfile.PAX_FORMAT), ("gnu", tarfile.GNU_FORMAT)):
        named = [(f"{name}/{key}", content) for key, content in members]
        write_tar(tmp_path / f"{name}.tar", named, tar_format=tar_format)
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


TAR = "shard-000001.tar"
DAMAGES: list[tuple[dict[str, bytes | None], list[str]]] = [
    ({TAR: None}, [f"missing {TAR}"]),
    ({f"{TAR}.idx": None}, [f"missing {TAR}"]),
    ({f"{TAR}.idx": b"{"}, [f"index {TAR}.idx"]),
    ({f"{TAR}.idx": b"+"}, [f"index {TAR}.idx"]),
    ({"shardio.json": None}, ["manifest shardio.json"]),
    ({"shardio.json": b"{"}, ["manifest shardio.json"]),
    ({UNFINISHED_NAME: b"0"}, ["unfinished out"]),
    ({"other.tar": b"1", ".hidden.tar": b"1", "x.tgz": b""}, ["unlisted other.tar", "unlisted out"]),
]
"""Files in a packed directory that are removed, written, or lengthened by one byte, and the resulting problems."""


@pytest.mark.parametrize(("files", "expected"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_problem_with_one_file_does_not_hide_those_of_others(
    out: Path, files: dict[str, bytes | None], expected: list[str]
) -> None:
    for name, content in files.items():
        if content is None:
            (out / name).unlink()
        else:
            (out / name).write_bytes((out / name).read_bytes() + b"x" if content == b"+" else content)
    for others in ([], ["digest shard-000003.tar"]):
        found = [f"{problem.kind} {Path(problem.where).name}" for problem in shardio.verify(out)]
        assert sorted(each for each in found if "digest" in each or "000003" not in each) == sorted(expected + others)
        flip(out / "shard-000003.tar", 600)


@pytest.mark.parametrize(("kind", "offset"), [("content", 7), ("header", -512)])
def test_each_damaged_content_or_header_is_named_by_key_and_offset(out: Path, kind: str, offset: int) -> None:
    tar = out / "shard-000001.tar"
    members = [member for member in contents_of(tar) if member.name.endswith(".jpg")]
    damaged = [members[0], members[2], members[-1]]
    for member in damaged:
        flip(tar, member.offset_data + offset)
    found = [problem for problem in shardio.verify(out) if problem.kind == kind]
    assert [(problem.key, problem.field, problem.offset) for problem in found] == [
        (member.name.removesuffix(".jpg"), "jpg", member.offset_data) for member in damaged
    ]


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
    os.truncate(tar, members[-2].offset_data + 1)
    problems = shardio.verify(out)
    assert {"stale", "digest", "content"} <= set(kinds(problems))
    lost = [problem.offset for problem in problems if problem.kind == "content"]
    assert lost == [member.offset_data for member in members[-2:] if member.size > 1 or member is members[-1]]


def test_members_that_the_index_lacks_are_named(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    write_tar(tar, [(f"{key}.txt", key.encode()) for key in "abcd"])
    digest = open_table(tar).manifest.shards[0].digest
    members = {member.name[0]: member for member in contents_of(tar)}
    with open_file(tar) as file:
        samples = [StoredSample(key, {"txt": StoredField(members[key].offset_data, 1, 0)}) for key in "bc"]
        write_index(parse_location(index_of(tar)), file, samples, digest, file.version)
    problems = shardio.verify(tar)
    assert kinds(problems) == ["unindexed", "content", "content", "unindexed"]
    assert "a.txt" in problems[0].message
    assert problems[-1].offset == members["d"].offset_data


def test_an_index_with_impossible_offsets_is_reported(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    write_tar(tar, [(f"{i}.txt", b"1" * 600) for i in range(7)])
    open_table(tar)
    fields = [(512, 600), (800, 600), (2**50, 5), (-7, 3), (100, 3), (2**62, 2**62), (2**63 - 1, 1)]
    tensors = safetensors.numpy.load_file(index_of(tar))
    tensors["offset"], tensors["size"] = np.array([*zip(*fields, strict=True)])[:, None]
    safetensors.numpy.save_file(tensors, index_of(tar), {"shardio": json.dumps(read_metadata(tar))})
    problems = shardio.verify(tar)
    named = {problem.key for problem in problems if problem.kind in ("index", "content")}
    assert named == {*"12456", None}  # A size without an offset belongs to no key.


def test_a_manifest_that_differs_is_reported(out: Path) -> None:
    manifest = out / "shardio.json"
    values = json.loads(manifest.read_bytes())
    values["shards"][1] |= {"num_samples": 4, "digest": "0"}
    values["shards"] += [values["shards"][0]]
    manifest.write_text(json.dumps({**values, "fields": ["jpg"]}))
    problems = shardio.verify(out)
    assert kinds(problems) == ["manifest"] * 8
    assert "it lacks the fields cls, which shard-000000.tar.idx has" in [problem.message for problem in problems]
    assert "shard-000000.tar 2 times" in problems[0].message


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(is_tar=st.booleans(), place=st.floats(0, 1, exclude_max=True), mask=st.sampled_from([1, 128]))
@example(is_tar=False, place=0.9, mask=128)  # The key is no longer ASCII, and a plain header may encode it differently.
def test_every_changed_bit_is_found(packed: Path, tmp_path: Path, is_tar: bool, place: float, mask: int) -> None:
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
    found = [(problem.kind, problem.key, problem.field) for problem in shardio.verify(tar, deep=True)]
    assert found == [("undecodable", *each) for each in (("b", "jpg"), ("c", "png"), ("d", "mask.png"))]


def test_the_number_of_workers_changes_nothing(out: Path) -> None:
    for i in range(4):
        flip(out / f"shard-00000{i}.tar", 700 + i)
    problems = shardio.verify(out)
    assert problems == shardio.verify(out, num_workers=1) == shardio.verify(out, num_workers=3)
    assert len({problem.where for problem in problems}) == 4


def test_contents_and_headers_across_pieces_are_hashed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert_raises(FileNotFoundError, None, shardio.verify, source)


def run(folder: Path, **options: Any) -> RepairResult:
    return repair(parse_location(folder), **options)


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return each file's inode and modification time, which change if the file is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_an_intact_pack_is_not_written(out: Path) -> None:
    before = state_of(out)
    result = run(out)
    assert (result.actions, result.problems, result.are_classes_lost, state_of(out)) == ((), (), False, before)


@pytest.mark.parametrize("damage", ["missing", "garbage", "truncated", "of another shard", "one bit"])
def test_indexes_are_restored_to_the_byte_and_tars_are_left_alone(out: Path, packed: Path, damage: str) -> None:
    index = index_of(out / "shard-000002.tar")
    content = index.read_bytes()
    if damage == "missing":
        index.unlink()
    elif damage == "one bit":
        flip(index, len(content) - 3)
    else:
        other = index_of(out / "shard-000000.tar").read_bytes()
        index.write_bytes({"garbage": b"x" * 1000, "truncated": content[:-20], "of another shard": other}[damage])
    before = state_of(out)
    result = run(out)
    assert ([action.where for action in result.actions], result.problems) == ([str(index)], ())
    assert read_files(out) == read_files(packed)
    assert {name for name, state in state_of(out).items() if before.get(name) != state} == {index.name}


def test_a_whole_dataset_is_restored_from_its_tars(out: Path, packed: Path) -> None:
    for path in out.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    classes = ("class-0", "class-1", "class-2")
    result = run(out, classes=classes)
    assert not result.problems
    found, expected = read_files(out), read_files(packed)
    manifests = [json.loads(files.pop("shardio.json")) for files in (found, expected)]
    assert (found, manifests[0], shardio.verify(out)) == (expected, {**manifests[1], "pack": {}}, [])
    assert open_table(out).manifest.classes == classes
    (out / "shardio.json").write_text("{")
    assert run(out).are_classes_lost
    assert open_table(out).manifest.classes == ()
    assert not run(out).actions


@pytest.mark.parametrize("change", [{"digest": "0" * 32}, {"num_samples": 1}, {"num_bytes": 5}])
def test_a_manifest_with_wrong_values_is_restored(out: Path, packed: Path, change: dict[str, object]) -> None:
    values = json.loads((out / "shardio.json").read_bytes())
    values["shards"][1] |= change
    values["fields"] = ["cls"]
    (out / "shardio.json").write_text(json.dumps(values))
    assert [action.where for action in run(out).actions] == [str(out / "shardio.json")]
    assert read_files(out) == read_files(packed)


def complete_samples(tar: Path, size: int) -> list[str]:
    """Return the keys whose members are complete in the first bytes of a tar, according to tarfile."""
    members = contents_of(tar)
    lost = {member.name.partition(".")[0] for member in members if member.offset_data + member.size > size}
    return [key for key in dict.fromkeys(member.name.partition(".")[0] for member in members) if key not in lost]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0.3, 1, exclude_max=True), has_index=st.booleans(), at_block=st.booleans())
@example(place=0.999, has_index=True, at_block=True)
@example(place=0.999, has_index=False, at_block=False)
def test_complete_samples_are_kept(packed: Path, tmp_path: Path, place: float, has_index: bool, at_block: bool) -> None:
    out = tmp_path / "copy"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(packed, out)
    tar = out / "shard-000001.tar"
    size = int(place * tar.stat().st_size)
    size -= size % 512 if at_block else 0
    expected = complete_samples(tar, size)
    original = read_members(tar)
    whole = tar.read_bytes()
    if not has_index:
        index_of(tar).unlink()
    tar.write_bytes(whole[:size])
    result = run(out)
    assert not result.problems
    assert isinstance(result.manifest, Manifest)
    assert result.manifest.pack["max_shard_samples"] == 5
    keys = [key for key, _ in read_members(tar)]
    assert keys == [name for name, _ in original if name.partition(".")[0] in expected]
    assert shardio.verify(out) == []
    if len(keys) < len(original):
        assert "num_tiled" not in result.manifest.pack
        dropped = next(action.dropped for action in result.actions if action.where == str(tar))
        lost = set(dict.fromkeys(name.partition(".")[0] for name, _ in original)) - set(expected)
        assert set(dropped) == lost if has_index else set(dropped) <= lost
    else:
        assert tar.read_bytes() in (whole, whole[:size])  # Only the end mark was cut off.
    assert not run(out).actions


def test_a_tar_without_a_complete_sample_is_kept(out: Path) -> None:
    tar = out / "shard-000001.tar"
    os.truncate(tar, 700)
    before = state_of(out)
    assert [(problem.kind, problem.where) for problem in run(out).problems] == [("header", str(tar))]
    assert state_of(out) == before


@pytest.mark.parametrize("cut", [0, 700])
def test_a_tar_that_cannot_be_read_is_kept_and_the_others_are_repaired(out: Path, packed: Path, cut: int) -> None:
    tar = out / "shard-000001.tar"
    flip(tar, contents_of(tar)[3].offset)
    os.truncate(tar, tar.stat().st_size - cut)
    before = state_of(out)[tar.name], tar.read_bytes()
    index_of(out / "shard-000003.tar").unlink()
    result = run(out)
    assert [problem.where for problem in result.problems] == [str(tar)]
    assert (state_of(out)[tar.name], tar.read_bytes()) == before
    assert read_files(out) == {**read_files(packed), tar.name: before[1]}


@pytest.mark.parametrize(("has_index", "cut"), [(True, 0), (False, 0), (True, 6000)])
def test_a_damaged_content_is_not_taken_for_good(out: Path, has_index: bool, cut: int) -> None:
    tar = out / "shard-000001.tar"
    member = next(member for member in contents_of(tar) if member.name.endswith(".jpg"))
    flip(tar, member.offset_data + 5)
    os.truncate(tar, tar.stat().st_size - cut)
    if not has_index:
        index_of(tar).unlink()
    before = state_of(out)
    result = run(out)
    assert {problem.where for problem in result.problems} == {str(tar)}
    if has_index:
        assert result.problems[0].key == member.name.removesuffix(".jpg")
    assert state_of(out) == before
    assert not run(out, accept_changes=True).problems
    assert shardio.verify(out) == []


def test_a_tar_that_was_replaced_by_another_gets_a_new_index(out: Path) -> None:
    write_tar(out / "shard-000001.tar", [("class-0/new.jpg", b"1"), ("class-0/new.cls", b"0")])
    assert not run(out).problems
    assert (shardio.verify(out), open_table(out).manifest.num_samples) == ([], 17)


def test_missing_and_unlisted_tars_stay_as_they_are(out: Path) -> None:
    (out / "shard-000001.tar").unlink()
    write_tar(out / "shard-000009.tar", [("a.jpg", b"")])
    before = state_of(out)
    assert (kinds(list(run(out).problems)), state_of(out)) == (["unlisted", "missing"], before)
    (out / "shard-000009.tar").unlink()
    (out / "shardio.json").unlink()  # Now only the index refers to the tar.
    (problem,) = run(out).problems
    assert (problem.kind, problem.where) == ("missing", str(out / "shard-000001.tar"))
    assert open_table(out).manifest.num_samples == 16


def test_what_is_no_finished_pack_is_refused(tars: Path, out: Path, tmp_path: Path) -> None:
    (out / UNFINISHED_NAME).write_text("0")
    for folder, message in ((out, "rerun the same pack command"), (tars, "shardio index")):
        before = state_of(folder)
        assert_raises(FormatError, message, run, folder)
        assert state_of(folder) == before
    (tmp_path / "empty").mkdir()
    for folder in tmp_path / "x", tmp_path / "empty":
        assert_raises(FileNotFoundError, None, run, folder)


class Killed(BaseException):
    """An exception that ends a repair at a moment when SIGKILL might end it."""


@pytest.mark.parametrize("num_writes", range(5))
@pytest.mark.parametrize("is_written", [False, True])
def test_an_interrupted_repair_resumes(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int, is_written: bool
) -> None:
    tar = out / "shard-000001.tar"
    os.truncate(tar, tar.stat().st_size - 3000)
    index_of(out / "shard-000003.tar").unlink()
    expected = Path(shutil.copytree(out, tmp_path / "expected"))
    run(expected)
    original, left = LocalStore.write_whole, [num_writes]

    @contextmanager
    def kill(self: LocalStore, key: str) -> Iterator[Writer]:
        left[0] -= Path(key).parent == out
        if left[0] < 0 and not is_written:
            raise Killed
        with original(self, key) as file:
            yield file
        if left[0] < 0:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write_whole", kill)
        with pytest.raises(Killed) if num_writes < 4 else nullcontext():
            run(out)
    run(out)
    assert read_files(out) == read_files(expected)
    assert shardio.verify(out) == []
