from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shardio.errors import FormatError
from shardio.shards import DatasetSource, Manifest, open_table, write_manifest
from shardio.storage import parse_location
from tests.files import count_open_files
from tests.tars import write_tar


def shard_names(source: DatasetSource) -> list[str]:
    table = open_table(source)
    assert [tar.name for tar in table.tars] == [shard.name for shard in table.manifest.shards]
    assert all(location.exists() for location in table.tars + table.indexes)
    return [tar.name for tar in table.tars]


def test_a_packed_directory_and_its_manifest_are_the_same_dataset(packed: Path) -> None:
    assert open_table(packed) == open_table(packed / "shardio.json") == open_table(str(packed))


def test_a_packed_directory_lists_shards_in_manifest_order(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    manifest = open_table(packed).manifest
    backwards = Manifest(shards=manifest.shards[::-1], fields=manifest.fields, classes=manifest.classes)
    write_manifest(parse_location(copy / "shardio.json"), backwards)
    assert shard_names(copy) == sorted((path.name for path in packed.glob("*.tar")), reverse=True)


def test_a_manifest_may_have_another_name(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    (copy / "shardio.json").rename(copy / "train.json")
    assert open_table(copy / "train.json").manifest == open_table(packed).manifest


def test_a_directory_of_tars_is_read_in_sorted_order(tars: Path) -> None:
    assert shard_names(tars) == [f"x-{i:06d}.tar" for i in range(4)]
    assert open_table(tars).manifest.shard_sizes.tolist() == [1, 2, 3, 4]


def test_tars_without_a_manifest_have_their_fields_and_no_classes(tars: Path) -> None:
    write_tar(tars / "y.tar", [("a.jpg", b"1"), ("a.cls", b"0")])
    manifest = open_table(tars).manifest
    assert (manifest.fields, manifest.classes, manifest.pack) == (("cls", "jpg", "txt"), (), {})


def test_tars_and_their_packed_directory_hold_the_same(packed: Path) -> None:
    tars = sorted(packed.glob("*.tar"))
    assert open_table(list(tars)).manifest.shards == open_table(packed).manifest.shards
    assert open_table(list(tars)).manifest.digest == open_table(packed).manifest.digest


def test_a_single_tar_is_a_dataset(tars: Path) -> None:
    assert shard_names(tars / "x-000002.tar") == ["x-000002.tar"]


def test_a_list_keeps_its_order(tars: Path) -> None:
    assert shard_names([tars / "x-000003.tar", str(tars / "x-000000.tar")]) == ["x-000003.tar", "x-000000.tar"]


def test_brace_notation_names_many_tars(tars: Path) -> None:
    assert shard_names(f"{tars}/x-{{000001..000003}}.tar") == [f"x-{i:06d}.tar" for i in (1, 2, 3)]
    assert shard_names([f"{tars}/x-00000{{2,1}}.tar", tars / "x-000000.tar"]) == [
        "x-000002.tar",
        "x-000001.tar",
        "x-000000.tar",
    ]


def test_an_existing_tar_with_a_brace_in_its_path_is_not_a_pattern(tars: Path) -> None:
    folder = tars.parent / "a{b"
    folder.mkdir()
    write_tar(folder / "{x,y}.tar", [("a.txt", b"")])
    assert shard_names(folder / "{x,y}.tar") == ["{x,y}.tar"]
    assert shard_names(folder) == ["{x,y}.tar"]


@pytest.mark.parametrize("name", ["nothing", "nothing.tar", "nothing.json", "x-{000003..000005}.tar"])
def test_a_missing_source_is_not_found(tars: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing|x-000004\.tar, .*x-000005\.tar"):
        open_table(tars / name)


def test_a_directory_without_tars_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds neither shardio\.json nor any \*\.tar: pack the images first"):
        open_table(tmp_path)


def test_an_empty_list_is_not_a_dataset() -> None:
    with pytest.raises(FileNotFoundError):
        open_table([])


@pytest.mark.parametrize("pattern", [["{0}/one", "{0}/two"], ["{0}/{{one,two}}"], ["{0}/x.tar", "{0}/one", "{0}/two"]])
def test_directories_in_a_list_are_refused(tmp_path: Path, pattern: list[str]) -> None:
    write_tar(tmp_path / "x.tar", [("0.txt", b"")])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "x.tar", [("0.txt", b"")])
    with pytest.raises(FileNotFoundError) as caught:
        open_table([name.format(tmp_path) for name in pattern])
    assert str(caught.value) == (
        f"a list may name only tars and patterns of tars, but {tmp_path}/one and {tmp_path}/two are directories: pass "
        "one directory by itself, or list the tars in them"
    )


def test_one_directory_in_a_list_is_refused(tars: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"but {tars} is a directory: pass it by itself")):
        open_table([tars])


def test_a_manifest_without_samples_is_refused(tmp_path: Path) -> None:
    write_manifest(parse_location(tmp_path / "shardio.json"), Manifest(shards=()))
    with pytest.raises(FormatError, match=r"shardio\.json has no samples"):
        open_table(tmp_path)


@pytest.mark.parametrize("members", [[], [("README", b"no sample")], [("__meta__/a.json", b"{}")]])
def test_tars_without_samples_are_refused(tmp_path: Path, members: list[tuple[str, bytes]]) -> None:
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(FormatError, match="no samples"):
        open_table(tmp_path / "a.tar")


def test_one_tar_without_samples_among_others_is_read(tars: Path) -> None:
    write_tar(tars / "w.tar", [("README", b"no sample")])
    assert open_table(tars).manifest.shard_sizes.tolist() == [0, 1, 2, 3, 4]


def test_opening_a_table_leaves_no_file_open(tars: Path) -> None:
    before = count_open_files()
    table = open_table(tars)
    assert len(table.tars) == 4
    assert count_open_files() == before


@pytest.mark.parametrize("lost", [["shardio.json"], ["shardio.json", "shard-000001.tar"]])
def test_a_packed_directory_without_its_manifest_is_unfinished(packed: Path, tmp_path: Path, lost: list[str]) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    for name in lost:
        (copy / name).unlink()
    message = rf"holds shards or indexes that shardio packed \(\d, .* no {' and no '.join(lost)}: a pack or a copy is"
    with pytest.raises(FormatError, match=message):
        open_table(copy)
    assert sorted(path.name for path in copy.iterdir()) == sorted({path.name for path in packed.iterdir()} - {*lost})


def test_a_copy_that_has_only_an_index_is_unfinished(packed: Path, tmp_path: Path) -> None:
    shutil.copy(packed / "shard-000000.tar.idx", tmp_path)
    with pytest.raises(FormatError, match=r"no shardio\.json and no shard-000000\.tar"):
        open_table(tmp_path)


def test_tars_that_shardio_packed_are_read_from_a_list(packed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(packed, tmp_path / "copy")
    (copy / "shardio.json").unlink()
    indexes = {path.name: path.read_bytes() for path in copy.glob("*.idx")}
    assert shard_names(f"{copy}/shard-{{000001..000002}}.tar") == ["shard-000001.tar", "shard-000002.tar"]
    assert {path.name: path.read_bytes() for path in copy.glob("*.idx")} == indexes


@pytest.mark.parametrize("name", ["x", "shard"])
def test_a_directory_of_indexed_foreign_tars_is_read(tars: Path, name: str) -> None:
    for tar in sorted(tars.glob("*.tar")):
        tar.rename(tar.with_name(tar.name.replace("x", name)))
    names = [f"{name}-{i:06d}.tar" for i in range(4)]
    assert shard_names(tars) == names
    assert shard_names(tars) == names


def test_tars_in_upper_case_are_read_and_hidden_ones_are_not(tars: Path) -> None:
    (tars / "x-000003.tar").rename(tars / "x-000003.TAR")
    shutil.copy(tars / "x-000000.tar", tars / ".x-000000.tar")
    (tars / ".x.tar.gz").write_bytes(b"compressed")
    assert shard_names(tars) == [*(f"x-{i:06d}.tar" for i in range(3)), "x-000003.TAR"]


@pytest.mark.parametrize("source", ["", ["x.tar", ""]])
def test_an_empty_name_is_not_the_working_directory(
    tars: Path, monkeypatch: pytest.MonkeyPatch, source: DatasetSource
) -> None:
    monkeypatch.chdir(tars)
    write_tar(tars / "x.tar", [("a.txt", b"")])
    with pytest.raises(ValueError, match=r"the path is empty: pass a file or a directory, or '\.'"):
        open_table(source)
