"""Repair restores what the tars prove, drops what is cut off, and keeps everything else as it is."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

import shardio
from shardio.errors import FormatError
from shardio.shards import open_table
from shardio.shards.manifest import UNFINISHED_NAME, Manifest
from shardio.shards.repairing import RepairResult, repair
from shardio.storage import Writer, parse_location
from shardio.storage.local import LocalStore
from tests.files import flip, read_files
from tests.tars import index_of, read_members, write_tar

CLASSES = ["class-0", "class-1", "class-2"]


def run(folder: Path, *, accept_changes: bool = False) -> RepairResult:
    return repair(parse_location(folder), accept_changes=accept_changes)


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return each file's inode and modification time, which change if it is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_an_intact_pack_is_not_written(out: Path) -> None:
    before = state_of(out)
    result = run(out)
    assert (result.actions, result.problems, result.are_classes_lost) == ((), (), False)
    assert state_of(out) == before


@pytest.mark.parametrize("damage", ["missing", "garbage", "truncated", "of another shard", "one bit"])
def test_indexes_are_restored_to_the_byte_and_tars_are_left_alone(out: Path, packed: Path, damage: str) -> None:
    index = index_of(out / "shard-000002.tar")
    content = index.read_bytes()
    index.write_bytes(
        {
            "missing": b"",
            "garbage": b"x" * 1000,
            "truncated": content[:-20],
            "of another shard": index_of(out / "shard-000000.tar").read_bytes(),
            "one bit": content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
        }[damage]
    )
    if damage == "missing":
        index.unlink()
    before = state_of(out)
    result = run(out)
    assert [action.where for action in result.actions] == [str(index)]
    assert not result.problems
    assert read_files(out) == read_files(packed)
    changed = {name for name, state in state_of(out).items() if before.get(name) != state}
    assert changed == {index.name}


def test_a_whole_dataset_is_restored_from_its_tars(out: Path, packed: Path) -> None:
    for path in out.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    result = repair(parse_location(out), classes=CLASSES)
    assert not result.problems
    found, expected = read_files(out), read_files(packed)
    manifests = [json.loads(files.pop("shardio.json")) for files in (found, expected)]
    assert found == expected
    assert manifests[0] == {**manifests[1], "pack": {}}
    assert shardio.verify(out) == []
    assert open_table(out).manifest.classes == tuple(CLASSES)


def test_lost_classes_are_reported(out: Path) -> None:
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
    """Return the keys whose members lie whole in the first bytes of a tar; the oracle is tarfile."""
    with tarfile.open(tar) as opened:
        members = opened.getmembers()
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
    tar.write_bytes(tar.read_bytes()[:700])
    before = state_of(out)
    result = run(out)
    assert [(problem.kind, problem.where) for problem in result.problems] == [("header", str(tar))]
    assert state_of(out) == before


@pytest.mark.parametrize("cut", [0, 700])
def test_a_tar_that_cannot_be_read_is_kept_and_the_others_are_repaired(out: Path, packed: Path, cut: int) -> None:
    """A damaged header in the middle is not a truncated end, even if the end is truncated, too."""
    tar = out / "shard-000001.tar"
    with tarfile.open(tar) as opened:
        flip(tar, opened.getmembers()[3].offset)
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size - cut])
    before = tar.read_bytes(), tar.stat().st_mtime_ns
    index_of(out / "shard-000003.tar").unlink()
    result = run(out)
    assert [problem.where for problem in result.problems] == [str(tar)]
    assert (tar.read_bytes(), tar.stat().st_mtime_ns) == before
    assert {name: content for name, content in read_files(out).items() if name != tar.name} == {
        name: content for name, content in read_files(packed).items() if name != tar.name
    }


@pytest.mark.parametrize(("has_index", "cut"), [(True, 0), (False, 0), (True, 6000)])
def test_a_damaged_content_is_not_taken_for_good(out: Path, has_index: bool, cut: int) -> None:
    """Without an index, only the manifest proves the damage: of the whole tar, not of a truncated one."""
    tar = out / "shard-000001.tar"
    with tarfile.open(tar) as opened:
        member = next(member for member in opened.getmembers() if member.name.endswith(".jpg"))
    flip(tar, member.offset_data + 5)
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size - cut])
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
    assert shardio.verify(out) == []
    assert open_table(out).manifest.num_samples == 17


def test_missing_and_unlisted_tars_stay_as_they_are(out: Path) -> None:
    (out / "shard-000001.tar").unlink()
    write_tar(out / "shard-000009.tar", [("a.jpg", b"")])
    before = state_of(out)
    result = run(out)
    assert [problem.kind for problem in result.problems] == ["unlisted", "missing"]
    assert state_of(out) == before


def test_an_index_without_a_tar_is_a_problem_if_nothing_else_knows_the_tar(out: Path) -> None:
    (out / "shard-000001.tar").unlink()
    (out / "shardio.json").unlink()
    assert [(problem.kind, problem.where) for problem in run(out).problems] == [
        ("missing", str(out / "shard-000001.tar"))
    ]
    assert open_table(out).manifest.num_samples == 16


def test_what_is_no_finished_pack_is_refused(tars: Path, out: Path, tmp_path: Path) -> None:
    (out / UNFINISHED_NAME).write_text("0")
    for folder, message in ((out, "rerun the same pack command"), (tars, "shardio index")):
        before = state_of(folder)
        with pytest.raises(FormatError, match=message):
            run(folder)
        assert state_of(folder) == before
    (tmp_path / "empty").mkdir()
    for folder in tmp_path / "x", tmp_path / "empty":
        with pytest.raises(FileNotFoundError):
            run(folder)


class Killed(BaseException):
    """Ends a repair where SIGKILL might."""


@pytest.mark.parametrize("num_writes", range(5))
@pytest.mark.parametrize("is_written", [False, True])
def test_an_interrupted_repair_can_be_run_again(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int, is_written: bool
) -> None:
    """It is killed before or after any of its writes."""
    tar = out / "shard-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-3000])
    index_of(out / "shard-000003.tar").unlink()
    expected = Path(shutil.copytree(out, tmp_path / "expected"))
    run(expected)
    original, left = LocalStore.write_whole, [num_writes]

    @contextmanager
    def kill(self: LocalStore, key: str) -> Iterator[Writer]:
        if Path(key).parent != out:
            with original(self, key) as file:
                yield file
            return
        left[0] -= 1
        if left[0] < 0 and not is_written:
            raise Killed
        with original(self, key) as file:
            yield file
        if left[0] < 0:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write_whole", kill)
        if num_writes < 4:
            with pytest.raises(Killed):
                run(out)
        else:
            run(out)
    run(out)
    assert read_files(out) == read_files(expected)
    assert shardio.verify(out) == []
