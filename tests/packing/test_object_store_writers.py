"""ShardWriter, merge, split and reshard write to object stores what they write locally."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import FormatError, PackError
from shardio.shards import MANIFEST_NAME, UNFINISHED_NAME, open_table
from shardio.storage import Location, parse_location
from shardio.storage.remote.client import Client
from shardio.storage.remote.messages import Remove, Request
from tests.files import read_files, read_objects, read_parts


@pytest.fixture
def out() -> Location:
    """A new folder in an object store."""
    return parse_location(f"memory://{uuid.uuid4().hex}/a/train")


def samples(num: int = 10) -> Iterator[dict[str, Any]]:
    return ({"__key__": f"d/{i}", "txt": "text" * i, "json": {"i": i}} for i in range(num))


def write(out: Path | Location, num: int = 10, **options: Any) -> None:
    with shardio.ShardWriter(str(out), max_shard_samples=4, **options) as writer:
        for sample in samples(num):
            writer.write(sample)


def test_a_writer_writes_the_same_bytes(tmp_path: Path, out: Location) -> None:
    for where in (tmp_path / "out", out):
        write(where)
    assert read_objects(out) == read_files(tmp_path / "out")
    assert shardio.verify(str(out)) == []


def test_an_iterable_is_packed_to_the_same_bytes(tmp_path: Path, out: Location) -> None:
    for where in (str(tmp_path / "out"), str(out)):
        shardio.pack(samples(), where, max_shard_samples=4)
    assert read_objects(out) == read_files(tmp_path / "out")


def test_an_interrupted_iterable_starts_again(out: Location) -> None:
    def fail() -> Iterator[dict[str, Any]]:
        yield from samples()
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        shardio.pack(fail(), str(out), max_shard_samples=4)
    assert UNFINISHED_NAME in out.list()
    assert shardio.pack(samples(5), str(out), max_shard_samples=4).num_samples == 5
    assert len(out.list()) == 5


def test_several_workers_write_the_same_bytes(tmp_path: Path, out: Location) -> None:
    for where in (tmp_path / "out", out):
        for worker in range(2):
            with shardio.ShardWriter(str(where), worker=worker, num_workers=2) as writer:
                writer.write({"__key__": f"{worker}", "txt": ""})
        shardio.finalize(str(where))
    assert read_objects(out) == read_files(tmp_path / "out")


def test_a_part_is_written_again_and_a_missing_one_is_named(out: Location) -> None:
    for overwrite in (False, True):
        with shardio.ShardWriter(str(out), worker=1, num_workers=2, overwrite=overwrite) as writer:
            writer.write({"__key__": "a", "txt": ""})
    with (
        pytest.raises(PackError, match="already holds files of worker 1"),
        shardio.ShardWriter(str(out), worker=1, num_workers=2),
    ):
        pass
    with pytest.raises(PackError, match=r"1 of the 2 workers of .* have not ended \(0\)"):
        shardio.finalize(str(out))
    with pytest.raises(PackError, match="does not exist"):
        shardio.finalize(str(out / "nothing"))


def test_an_existing_dataset_is_replaced_only_with_overwrite(
    tmp_path: Path, out: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(out, num=20)
    with pytest.raises(PackError, match=r"is not empty .*pass --overwrite"):
        write(out)
    removed, ask = list[str](), Client.ask

    def ask_and_record(client: Client, request: Request) -> Any:
        if isinstance(request, Remove):
            removed.append(request.key)
        return ask(client, request)

    monkeypatch.setattr(Client, "ask", ask_and_record)
    with shardio.ShardWriter(str(out), max_shard_samples=4, overwrite=True) as writer:
        assert out.list() == [UNFINISHED_NAME]
        assert removed[0] == (out / MANIFEST_NAME).key
        with pytest.raises(FormatError, match="unfinished"):
            open_table(str(out))
        for sample in samples():
            writer.write(sample)
    write(tmp_path / "out")
    assert read_objects(out) == read_files(tmp_path / "out")


def test_a_writer_whose_shards_another_one_replaces_makes_no_dataset(out: Location) -> None:
    first, second = shardio.ShardWriter(str(out)), shardio.ShardWriter(str(out), overwrite=True)
    first.__enter__()
    with pytest.raises(PackError, match="holds an unfinished dataset"):
        shardio.ShardWriter(str(out)).__enter__()
    second.__enter__()
    first.write({"__key__": "a", "txt": "first"})
    second.write({"__key__": "a", "txt": "second"})
    with pytest.raises(PackError, match="another program has begun to write"):
        first.__exit__(None, None, None)
    assert MANIFEST_NAME not in out.list()
    second.__exit__(None, None, None)
    with shardio.open(str(out)) as dataset:
        assert dataset["a"]["txt"] == b"second"


def test_a_writer_that_fails_keeps_the_mark_of_another_one(out: Location) -> None:
    first, second = shardio.ShardWriter(str(out)), shardio.ShardWriter(str(out), overwrite=True)
    first.__enter__()
    second.__enter__()
    with pytest.raises(PackError, match="no samples were written"):
        first.__exit__(None, None, None)
    second.write({"__key__": "a", "txt": "second"})
    second.__exit__(None, None, None)
    with shardio.open(str(out)) as dataset:
        assert list(dataset) == ["a"]


def test_a_writer_that_fails_leaves_no_dataset(out: Location) -> None:
    def fail(num: int) -> None:
        with shardio.ShardWriter(str(out), max_shard_samples=4) as writer:
            for sample in samples(num):
                writer.write(sample)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail(3)
    assert out.list() == []
    with pytest.raises(KeyboardInterrupt):
        fail(5)
    assert out.list() == [UNFINISHED_NAME, "shard-000000.tar", "shard-000000.tar.idx"]
    with pytest.raises(FormatError, match="unfinished"):
        open_table(str(out))


def test_datasets_are_rewritten_from_and_to_an_object_store(tmp_path: Path, out: Location) -> None:
    for home in (tmp_path, out):
        write(home / "in")
        shardio.reshard(str(home / "in"), str(home / "small"), max_shard_samples=3, shuffle_seed=1)
        shardio.split(str(home / "small"), str(home / "parts"), by=[0.5, 0.5], names=["x", "y"])
        shardio.merge(str(home / "merged"), [str(home / "parts" / "y"), str(home / "parts" / "x")])
    for name in ("small", "merged"):
        assert read_objects(out / name) == read_files(tmp_path / name)
    parts = {name: read_objects(out / "parts" / name) for name in ("x", "y")}
    assert parts == read_parts(tmp_path / "parts")
    with pytest.raises(PackError, match="holds tars that would be read"):
        shardio.reshard(str(out / "in"), str(out / "in"), overwrite=True)
    shardio.append(tmp_path / "parts" / "x", [str(out / "parts" / "y")])
    with shardio.open(tmp_path / "parts" / "x") as appended:
        assert sorted(appended) == sorted(sample["__key__"] for sample in samples())
