"""Packs into an object store: the same bytes as a local pack, and nothing that looks finished before it is."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import FormatError, LocationError, PackError
from shardio.packing import PackSettings, RunOptions, make_parts, pack_parts, pack_source
from shardio.packing.folders import RECORD_PREFIX, choose_folder
from shardio.progress import WorkProgress
from shardio.shards import MANIFEST_NAME, UNFINISHED_NAME, open_table
from shardio.storage import Location, parse_location
from shardio.storage.remote.client import Client
from shardio.storage.remote.messages import Create, Remove, Request, Write
from tests.files import files_of_at_most, read_files, read_objects, read_parts
from tests.sources import write_images

SETTINGS = PackSettings(max_shard_size=1 << 28, max_shard_samples=3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine images in three classes, one of which cannot be decoded."""
    root = tmp_path_factory.mktemp("remote") / "in"
    write_images(root, classes=3, per_class=3, width=8, height=8)
    (root / "class-1" / "name-001.jpg").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, bytes]:
    """The files of a local pack."""
    shardio.pack(source, source.parent / "out", max_shard_samples=3)
    return read_files(source.parent / "out")


@pytest.fixture
def out() -> Location:
    """A new folder in an object store."""
    return parse_location(f"memory://{uuid.uuid4().hex}/a/train")


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[type[Request], str]]:
    """The kinds and the names of all objects that this process changes, in order."""
    found = list[tuple[type[Request], str]]()
    ask = Client.ask

    def ask_and_record(client: Client, request: Request) -> Any:
        if isinstance(request, Write | Create | Remove):
            found.append((type(request), request.key.rpartition("/")[2]))
        return ask(client, request)

    monkeypatch.setattr(Client, "ask", ask_and_record)
    return found


class Interrupting(WorkProgress):
    """Interrupts a pack after some samples, as Ctrl-C does."""

    def __init__(self, num_samples: int) -> None:
        self._num_left = num_samples

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        self._num_left -= num_done
        if self._num_left < 0:
            raise KeyboardInterrupt


def interrupt(source: Path, out: Location, num_samples: int = 7) -> None:
    """Pack into three shards of three samples, and stop after some samples."""
    run = RunOptions(num_workers=1)
    with pytest.raises(KeyboardInterrupt):
        pack_source(source, Path(str(out)), SETTINGS, run=run, progress=Interrupting(num_samples))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_bytes_equal_those_of_a_local_pack(
    source: Path, expected: dict[str, bytes], out: Location, num_workers: int
) -> None:
    manifest = shardio.pack(source, str(out), max_shard_samples=3, num_workers=num_workers)
    assert read_objects(out) == expected
    assert "rejected.jsonl" in expected
    assert open_table(str(out)).manifest == manifest
    assert len(shardio.ShardDataset(str(out))) == 8


def test_parts_equal_those_of_a_local_pack(source: Path, tmp_path: Path, out: Location) -> None:
    parts = make_parts([0.5, 0.5], ["train", "val"])
    for where in (tmp_path / "out", Path(str(out))):
        pack_parts(source, where, parts, SETTINGS, run=RunOptions(num_workers=1))
    found = {name.removesuffix("/"): read_objects(out / name.removesuffix("/")) for name in out.list()}
    assert found == read_parts(tmp_path / "out")


def test_the_manifest_is_written_last(source: Path, out: Location, changes: list[tuple[type[Request], str]]) -> None:
    shardio.pack(source, str(out), max_shard_samples=3, num_workers=1)
    manifest = changes.index((Write, MANIFEST_NAME))
    assert changes[0] == (Create, UNFINISHED_NAME)
    assert {kind for kind, _ in changes[1:manifest]} == {Write}
    assert changes[manifest + 1] == (Remove, UNFINISHED_NAME)
    assert {kind for kind, _ in changes[manifest + 1 :]} == {Remove}
    for number in range(3):
        tar = f"shard-{number:06d}.tar"
        written = [name for kind, name in changes if kind is Write and tar in name]
        assert written == [tar, f"{tar}.idx", f"{RECORD_PREFIX}{tar}.json"]


def test_an_interrupted_pack_is_resumed_and_keeps_finished_shards(
    source: Path, expected: dict[str, bytes], out: Location, changes: list[tuple[type[Request], str]]
) -> None:
    interrupt(source, out)
    with pytest.raises(FormatError, match="holds an unfinished pack"):
        open_table(str(out))
    with pytest.raises(PackError, match="unfinished pack of different images or with different settings"):
        shardio.pack(source, str(out), max_shard_samples=4)
    changes.clear()
    result = pack_source(source, Path(str(out)), SETTINGS, run=RunOptions(num_workers=1))
    assert [name for _, name in changes if name.endswith(".tar")] == ["shard-000002.tar"]
    assert (result.num_kept, result.damaged_shards) == (sum(e.num_samples for e in result.manifest.shards[:2]), [])
    assert read_objects(out) == expected


def test_a_shard_that_was_replaced_is_packed_again(source: Path, expected: dict[str, bytes], out: Location) -> None:
    interrupt(source, out)
    content = (out / "shard-000001.tar").read_whole()
    with (out / "shard-000001.tar").write_whole() as file:
        file.write(content)
    (out / "shard-000000.tar.idx").remove()
    result = pack_source(source, Path(str(out)), SETTINGS, run=RunOptions(num_workers=1))
    assert [str(problem.path) for problem in result.damaged_shards] == [
        str(out / "shard-000000.tar"),
        str(out / "shard-000001.tar"),
    ]
    assert "was replaced" in result.damaged_shards[1].what
    assert "does not exist" in result.damaged_shards[0].what
    assert read_objects(out) == expected


@pytest.mark.parametrize("content", [b"", b"{}", b'{"entry": 1}', b"\x00"])
def test_a_damaged_record_makes_its_shard_again(
    source: Path, expected: dict[str, bytes], out: Location, content: bytes
) -> None:
    interrupt(source, out)
    with (out / f"{RECORD_PREFIX}shard-000001.tar.json").write_whole() as file:
        file.write(content)
    result = pack_source(source, Path(str(out)), SETTINGS, run=RunOptions(num_workers=1))
    assert result.num_kept == result.manifest.shards[0].num_samples
    assert read_objects(out) == expected


@pytest.mark.parametrize("name", ["shard-000000.tar", "shard-000002.tar", "other.tar"])
def test_a_tar_that_is_not_part_of_the_pack_is_refused(source: Path, out: Location, name: str) -> None:
    interrupt(source, out)
    with shardio.ShardWriter(str(out.folder / "foreign")) as writer:
        writer.write({"__key__": "x", "txt": "precious"})
    precious = (out.folder / "foreign" / "shard-000000.tar").read_whole()
    with (out / name).write_whole() as file:
        file.write(precious)
    with pytest.raises(PackError, match=f"{name} is not a shard of the unfinished pack in .*Move it away"):
        shardio.pack(source, str(out), max_shard_samples=3, num_workers=1)
    assert (out / name).read_whole() == precious


def test_a_pack_that_fails_before_its_first_shard_leaves_nothing(tmp_path: Path, out: Location) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1)
    (tmp_path / "in" / "class-0" / "name-000.jpg").write_bytes(b"no image")
    with pytest.raises(PackError, match="is not an image"):
        shardio.pack(tmp_path / "in", str(out), strict=True)
    assert out.list() == []


def put_dataset(out: Location) -> None:
    with shardio.ShardWriter(str(out)) as writer:
        writer.write({"__key__": "x", "txt": ""})


def put_file(out: Location) -> None:
    with (out / "thesis.tex").write_whole() as file:
        file.write(b"precious")


@pytest.mark.parametrize(
    ("put", "message"), [(put_dataset, "already holds a packed dataset"), (put_file, "is not empty")]
)
def test_a_destination_that_is_not_empty_is_refused(
    source: Path, out: Location, put: Callable[[Location], None], message: str
) -> None:
    put(out)
    before = read_objects(out)
    with pytest.raises(PackError, match=message):
        shardio.pack(source, str(out))
    assert read_objects(out) == before


def test_of_two_writers_that_begin_at_the_same_time_one_is_refused(out: Location) -> None:
    """Both have found the folder empty."""
    choose_folder(out).mark(b"one")
    with pytest.raises(PackError, match="another program has just begun to write"):
        choose_folder(out).mark(b"other")
    assert (out / UNFINISHED_NAME).read_whole() == b"one"


def test_a_full_disk_is_that_of_the_temporary_file(source: Path, expected: dict[str, bytes], out: Location) -> None:
    out.list()  # The storage process, which has no such limit, runs.
    with (
        files_of_at_most(3000),
        pytest.raises(PackError, match=r"packing into memory:.* failed: .*: '/.*/shardio-.*'\. 0 of 3 shards"),
    ):
        shardio.pack(source, str(out), max_shard_samples=3, num_workers=1)
    shardio.pack(source, str(out), max_shard_samples=3, num_workers=1)
    assert read_objects(out) == expected


class Running(WorkProgress):
    """Runs another pack after some samples."""

    def __init__(self, source: Path, out: Location) -> None:
        self._source, self._out = source, out
        self._num_packed = 0

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        self._num_packed += num_done
        if self._num_packed == 5:
            shardio.pack(self._source, str(self._out), max_shard_samples=3, num_workers=1)


def test_two_runs_of_one_pack_write_one_dataset(source: Path, expected: dict[str, bytes], out: Location) -> None:
    """One begins and ends while the other one runs. No lock can exclude it, and the bytes are the same."""
    run = RunOptions(num_workers=1)
    pack_source(source, Path(str(out)), SETTINGS, run=run, progress=Running(source, out))
    assert read_objects(out) == expected


def test_a_read_only_server_and_urls_that_name_no_store_are_refused(source: Path) -> None:
    with pytest.raises(PackError, match="are read-only for shardio"):
        shardio.pack(source, "http://127.0.0.1:9/out")
    with pytest.raises(PackError, match="are read-only for shardio"):
        shardio.ShardWriter("http://127.0.0.1:9/out").__enter__()
    with pytest.raises(LocationError, match="ftp:// is not supported"):
        shardio.pack(source, "ftp://host/out")
    with pytest.raises(PackError, match=r"the source s3://bucket/in is a URL(.|\n)*aws s3 sync"):
        shardio.pack("s3://bucket/in", source.parent / "elsewhere")
    with pytest.raises(PackError, match=r"cannot append to s3://bucket/out"):
        shardio.append("s3://bucket/out", source)
