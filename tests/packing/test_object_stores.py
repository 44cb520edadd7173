"""Datasets written to object stores have the same bytes as local ones, and never look finished too early."""

from __future__ import annotations

import itertools
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.errors import FormatError, LocationError, PackError, StoreError
from shardio.packing import PackOptions, PackResult, make_parts, pack_parts
from shardio.packing.folders import RECORD_PREFIX, choose_folder
from shardio.process import WorkProgress
from shardio.shards import MANIFEST_NAME, UNFINISHED_NAME, open_table
from shardio.storage import Location, StorageOptions, make_direct_access, parse_location
from shardio.storage.client import Client, Request
from shardio.storage.operations import PART
from shardio.testing.store import put
from tests.faults.proxy import FaultProxy, Script
from tests.files import files_of_at_most, read_files, read_objects, read_parts
from tests.mirror_store import MirrorStore
from tests.packing.packs import Interrupt, assert_refused, pack, write_all
from tests.processes import forkserver_context
from tests.raising import assert_raises
from tests.servers.server import Server
from tests.sources import write_images

Files = dict[str, bytes]

THREE: dict[str, Any] = {"max_shard_samples": 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine images in three classes. One image cannot be decoded."""
    root = tmp_path_factory.mktemp("remote") / "in"
    write_images(root, classes=3, per_class=3, width=8, height=8)
    (root / "class-1" / "name-001.jpg").write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def expected(source: Path) -> Files:
    """The files of a local pack."""
    shardio.pack(source, source.parent / "out", **THREE)
    return read_files(source.parent / "out")


@pytest.fixture
def out() -> Location:
    """A new folder in an object store."""
    return parse_location(f"memory://{uuid.uuid4().hex}/a/train")


@contextmanager
def noting_changes(note: Callable[[str, str], object]) -> Iterator[None]:
    """Whenever this process is about to change an object, call a function with the kind of change and the name."""
    ask = Client.ask

    def note_and_ask(client: Client, request: Request) -> Any:
        if request.operation in ("write", "create", "remove"):
            note(request.operation, request.key.rpartition("/")[2])
        return ask(client, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "ask", note_and_ask)
        yield


@pytest.fixture
def changes() -> Iterator[list[tuple[str, str]]]:
    """The kind of each change that this process makes, and the name of the changed object, in order."""
    found = list[tuple[str, str]]()
    with noting_changes(lambda kind, name: found.append((kind, name))):
        yield found


def pack_again(source: Path, out: Location, progress: WorkProgress | None = None) -> PackResult:
    return pack(source, Path(str(out)), progress, max_shard_size=1 << 28, **THREE)


@pytest.fixture
def interrupted(source: Path, out: Location) -> Location:
    """A pack that stopped in the third of its three shards. Each shard has three samples."""
    assert_raises(KeyboardInterrupt, None, pack_again, source, out, Interrupt(7))
    return out


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_bytes_are_those_of_a_local_pack(source: Path, expected: Files, out: Location, num_workers: int) -> None:
    manifest = shardio.pack(source, str(out), **THREE, num_workers=num_workers)
    assert read_objects(out) == expected
    assert "rejected.jsonl" in expected
    assert (open_table(str(out)).manifest, len(shardio.ShardDataset(str(out)))) == (manifest, 8)


def test_parts_equal_those_of_a_local_pack(source: Path, tmp_path: Path, out: Location) -> None:
    parts = make_parts([0.5, 0.5], ["train", "val"])
    settings = PackOptions(max_shard_size=1 << 28, **THREE, num_workers=1)
    for where in (tmp_path / "out", Path(str(out))):
        pack_parts(source, where, parts, settings)
    found = {name.removesuffix("/"): read_objects(out / name.removesuffix("/")) for name in out.list()}
    assert found == read_parts(tmp_path / "out")


def test_the_manifest_is_written_last(source: Path, out: Location, changes: list[tuple[str, str]]) -> None:
    shardio.pack(source, str(out), **THREE, num_workers=1)
    manifest = changes.index(("write", MANIFEST_NAME))
    assert (changes[0], {kind for kind, _ in changes[1:manifest]}) == (("create", UNFINISHED_NAME), {"write"})
    assert changes[manifest + 1] == ("remove", UNFINISHED_NAME)
    assert {kind for kind, _ in changes[manifest + 1 :]} == {"remove"}
    for number in range(3):
        tar = f"shard-{number:06d}.tar"
        written = [name for kind, name in changes if kind == "write" and tar in name]
        assert written == [tar, f"{tar}.idx", f"{RECORD_PREFIX}{tar}.json"]


def test_an_interrupted_pack_is_resumed(
    source: Path, expected: Files, interrupted: Location, changes: list[tuple[str, str]]
) -> None:
    out = interrupted
    assert_raises(FormatError, "holds an unfinished pack", open_table, str(out))
    message = "unfinished pack of different images or with different settings"
    assert_raises(PackError, message, shardio.pack, source, str(out), max_shard_samples=4)
    changes.clear()
    result = pack_again(source, out)
    assert [name for _, name in changes if name.endswith(".tar")] == ["shard-000002.tar"]
    assert (result.num_kept, result.damaged_shards) == (sum(e.num_samples for e in result.manifest.shards[:2]), [])
    assert read_objects(out) == expected


@pytest.mark.parametrize("name", ["shard-000001.tar", "shard-000001.tar.idx"])
def test_a_shard_that_was_replaced_is_packed_again(
    source: Path, expected: Files, interrupted: Location, name: str
) -> None:
    out = interrupted
    put(out / name, (out / name).read_whole())
    (out / "shard-000000.tar.idx").remove()
    first, second = pack_again(source, out).damaged_shards
    assert (str(first.path), str(second.path)) == (str(out / "shard-000000.tar"), str(out / "shard-000001.tar"))
    assert "does not exist" in first.what
    assert "was replaced" in second.what
    assert read_objects(out) == expected


@pytest.mark.parametrize("content", [b"", b"{}", b'{"entry": 1}', b"\x00"])
def test_a_damaged_record_is_not_used(source: Path, expected: Files, interrupted: Location, content: bytes) -> None:
    put(interrupted / f"{RECORD_PREFIX}shard-000001.tar.json", content)
    result = pack_again(source, interrupted)
    assert (result.num_kept, read_objects(interrupted)) == (result.manifest.shards[0].num_samples, expected)


@pytest.mark.parametrize("name", ["shard-000000.tar", "shard-000002.tar", "other.tar"])
def test_a_tar_that_is_not_part_of_the_pack_is_refused(source: Path, interrupted: Location, name: str) -> None:
    write_all(interrupted.folder / "foreign", samples())
    precious = (interrupted.folder / "foreign" / "shard-000000.tar").read_whole()
    put(interrupted / name, precious)
    message = f"{name} is not a shard of the unfinished pack in .*Move it elsewhere"
    assert_refused(message, source, str(interrupted), **THREE, num_workers=1)
    assert (interrupted / name).read_whole() == precious


def test_a_pack_without_shards_and_a_refused_one_leave_all_as_it_is(source: Path, out: Location) -> None:
    assert_refused("is not an image", source, str(out), strict=True)
    assert out.list() == []
    for name, message in (("thesis.tex", "is not empty"), (MANIFEST_NAME, "already holds a packed dataset")):
        put(out / name, b"precious")
        before = read_objects(out)
        assert_refused(message, source, str(out))
        assert read_objects(out) == before


def test_of_two_writers_that_begin_at_the_same_time_one_is_refused(out: Location) -> None:
    choose_folder(out).mark(b"one")
    assert_raises(PackError, "another program has just started writing", choose_folder(out).mark, b"other")
    assert (out / UNFINISHED_NAME).read_whole() == b"one"


def test_a_full_disk_is_that_of_the_temporary_file(source: Path, expected: Files, out: Location) -> None:
    out.list()  # Listing starts the storage process, to which the limit does not apply.
    message = r"packing into memory:.* failed: .*: '/.*/shardio-.*'\. Finished and kept 0"
    with files_of_at_most(3000):
        assert_refused(message, source, str(out), **THREE, num_workers=1)
    shardio.pack(source, str(out), **THREE, num_workers=1)
    assert read_objects(out) == expected


def test_two_runs_of_one_pack_write_one_dataset(source: Path, expected: Files, out: Location) -> None:
    class Running(WorkProgress):
        num_packed = 0

        def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
            self.num_packed += num_done
            if self.num_packed == 5:
                shardio.pack(source, str(out), **THREE, num_workers=1)

    pack_again(source, out, Running())
    assert read_objects(out) == expected


def test_read_only_stores_and_urls_that_name_no_store_are_refused(
    source: Path, mirrored: Callable[[Path], Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MirrorStore, "can_write", lambda store, key: False)
    for url, root in (
        ("http://127.0.0.1:9/out", "http://127.0.0.1:9/"),
        ("hf://datasets/user/name/out", "hf://datasets/user/name/"),
        (str(mirrored(source.parent / "out")), "mirror://"),
    ):
        message = f"cannot write to {url}: {root} is read-only for shardio. Choose a directory or an object store"
        assert_refused(message, source, url)
        assert_raises(PackError, message, write_all, url, [])
    assert_raises(LocationError, "ftp:// is not supported", shardio.pack, source, "ftp://host/out")
    assert_refused(r"the source s3://bucket/in is a URL(.|\n)*aws s3 sync", "s3://bucket/in")
    assert_raises(PackError, r"cannot append to s3://bucket/out", shardio.append, "s3://bucket/out", source)


def samples(num: int = 10) -> Iterator[dict[str, Any]]:
    return ({"__key__": f"d/{i}", "txt": "text" * i, "json": {"i": i}} for i in range(num))


FOUR: dict[str, Any] = {"max_shard_samples": 4}


def test_writers_iterables_and_rewritten_datasets_have_the_same_bytes(tmp_path: Path, out: Location) -> None:
    for home in (tmp_path, out):
        write_all(home / "in", samples(), **FOUR)
        shardio.pack(samples(), str(home / "iterable"), **FOUR)
        shardio.reshard(str(home / "in"), str(home / "small"), max_shard_samples=3, shuffle_seed=1)
        shardio.split(str(home / "small"), str(home / "parts"), by=[0.5, 0.5], names=["x", "y"])
        shardio.merge(str(home / "merged"), [str(home / "parts" / "y"), str(home / "parts" / "x")])
        for worker in range(2):
            write_all(home / "workers", [{"__key__": f"{worker}", "txt": ""}], worker=worker, num_workers=2)
        shardio.finalize(str(home / "workers"))
    for name in ("in", "iterable", "small", "parts/x", "parts/y", "merged", "workers"):
        assert read_objects(out / name) == read_files(tmp_path / name)
    assert shardio.verify(str(out / "in")) == []
    here = str(out / "in")
    assert_raises(PackError, "holds tars of a source", shardio.reshard, here, here, overwrite=True)
    shardio.append(tmp_path / "parts" / "x", [str(out / "parts" / "y")])
    with shardio.open(tmp_path / "parts" / "x") as appended:
        assert sorted(appended) == sorted(sample["__key__"] for sample in samples())


def test_a_dataset_is_replaced_with_overwrite(tmp_path: Path, out: Location, changes: list[tuple[str, str]]) -> None:
    write_all(out, samples(20), **FOUR)
    assert_raises(PackError, r"is not empty .*pass --overwrite", write_all, out, samples())
    changes.clear()

    def samples_of_an_unfinished_dataset() -> Iterator[dict[str, Any]]:
        assert out.list() == [UNFINISHED_NAME]
        assert next(name for kind, name in changes if kind == "remove") == MANIFEST_NAME
        assert_raises(FormatError, "unfinished", open_table, str(out))
        yield from samples()

    write_all(out, samples_of_an_unfinished_dataset(), **FOUR, overwrite=True)
    write_all(tmp_path / "out", samples(), **FOUR)
    assert read_objects(out) == read_files(tmp_path / "out")


@pytest.mark.parametrize("writes", [True, False])
def test_a_writer_that_another_one_replaces_makes_no_dataset_and_keeps_its_mark(out: Location, writes: bool) -> None:
    first, second = shardio.ShardWriter(str(out)), shardio.ShardWriter(str(out), overwrite=True)
    first.__enter__()
    assert_raises(PackError, "holds an unfinished dataset", shardio.ShardWriter(str(out)).__enter__)
    second.__enter__()
    if writes:
        first.write({"__key__": "a", "txt": "first"})
        second.write({"__key__": "a", "txt": "second"})
    message = "another program has started writing" if writes else "no samples were written"
    assert_raises(PackError, message, first.__exit__, None, None, None)
    assert MANIFEST_NAME not in out.list()
    if not writes:
        second.write({"__key__": "a", "txt": "second"})
    second.__exit__(None, None, None)
    with shardio.open(str(out)) as dataset:
        assert [(key, sample["txt"]) for key, sample in dataset.items()] == [("a", b"second")]


NUM_CHANGES = 16
"""The number of changes in a pack into three shards: writing the mark, three tars with indexes and records, the list of
rejected samples and the manifest, and removing the mark and three records."""


def pack_and_die(source: Path, out: Location, n: int) -> None:
    """Pack, and kill this process immediately before its n-th change.

    ``out`` includes the address of the storage process, whose memory holds the objects.
    """
    numbers = itertools.count(1)

    def die(kind: str, name: str) -> None:
        if next(numbers) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    with noting_changes(die):
        shardio.pack(source, str(out), **THREE, num_workers=1)


def exit_code_of_pack(source: Path, out: Location, n: int) -> int | None:
    out.list()  # Listing starts the storage process.
    process = forkserver_context().Process(target=pack_and_die, args=(source, out, n))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, NUM_CHANGES + 2))
def test_a_pack_killed_at_any_change_resumes(source: Path, expected: Files, out: Location, n: int) -> None:
    assert exit_code_of_pack(source, out, n) == (-signal.SIGKILL if n <= NUM_CHANGES else 0)
    found = read_objects(out)
    assert {name: content for name, content in found.items() if not name.startswith(".")}.items() <= expected.items()
    if MANIFEST_NAME in found:
        assert open_table(str(out)).manifest.num_samples == 8
        assert found.keys() >= expected.keys()
    elif found:
        assert_raises(FormatError, "unfinished", open_table, str(out))
    else:
        assert_raises(FileNotFoundError, "no such", open_table, str(out))
    if found:
        message = r"unfinished pack of different images|already holds a packed dataset"
        assert_raises(PackError, message, shardio.pack, source, str(out), max_shard_samples=4)
    if not found or UNFINISHED_NAME in found:
        shardio.pack(source, str(out), **THREE)
        assert read_objects(out) == expected


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files, the first of which is larger than one part of an upload."""
    folder = tmp_path_factory.mktemp("servers") / "in"
    folder.mkdir()
    for number, num_bytes in enumerate([PART + 1, 1000, 1000, 1000]):
        (folder / f"{number}.bin").write_bytes(np.random.default_rng(number).bytes(num_bytes))
    return folder


@pytest.mark.slow
def test_a_server_has_the_bytes_of_a_local_pack(seaweedfs_server: Server, files: Path, tmp_path: Path) -> None:
    url, options = f"{seaweedfs_server.url}/{uuid.uuid4().hex}", seaweedfs_server.options
    for where, storage_options in ((str(tmp_path / "out"), None), (url, options)):
        shardio.pack(files, where, fields=["bin"], max_shard_samples=2, num_workers=2, storage_options=storage_options)
    assert read_objects(parse_location(url, make_direct_access(options))) == read_files(tmp_path / "out")
    write_all(url, [{"__key__": "a", "txt": "text"}], overwrite=True, storage_options=options)
    assert len(shardio.ShardDataset(url, fields="key", storage_options=options)) == 1
    wrong = {**options, "secret_access_key": "wrong"}
    message = r"cannot list s3://.*: the server answered 403 .*Check the credentials"
    assert_raises(PermissionError, message, shardio.pack, files, f"{seaweedfs_server.url}/x", storage_options=wrong)
    message = r"cannot list s3://missing/x: .*NoSuchBucket"
    assert_raises(StoreError, message, shardio.pack, files, "s3://missing/x", storage_options=options)


FAULTS = dict.fromkeys(("status_500", "status_503", "reset_before", "reset_in_body", "truncated", "corrupt"), 0.06)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_faults_of_the_network_change_nothing(seaweedfs_server: Server, files: Path, tmp_path: Path, seed: int) -> None:
    """If the response is lost after the server has written the mark, the pack must recognize its own mark."""
    one_each: dict[str, Any] = {"fields": ["bin"], "max_shard_samples": 1, "num_workers": 1}
    shardio.pack(files, tmp_path / "out", **one_each)
    script = Script(seed=seed, faults=FAULTS, methods=("GET", "HEAD", "PUT", "POST", "DELETE"))
    url, reached = f"{seaweedfs_server.url}/{uuid.uuid4().hex}", seaweedfs_server.options
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port, script) as proxy:
        options: StorageOptions = {**reached, "endpoint": f"http://127.0.0.1:{proxy.port}", "timeout_s": 3}
        shardio.pack(files, url, storage_options=options, **one_each)
        assert proxy.counts().num_faults
    assert read_objects(parse_location(url, make_direct_access(reached))) == read_files(tmp_path / "out")
