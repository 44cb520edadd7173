"""Commands on datasets in object stores: they print what they print for local datasets."""

from __future__ import annotations

import errno
import gzip
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import shardio
from shardio.cli.main import app
from shardio.cli.options import read_access
from shardio.errors import LocationError
from shardio.shards import MANIFEST_NAME
from shardio.storage import Location, parse_location
from shardio.storage.remote.client import Client
from shardio.storage.remote.messages import Request, Write
from tests.files import read_files, read_objects
from tests.sources import write_images
from tests.tars import write_tar


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed dataset in a local directory."""
    folder = tmp_path_factory.mktemp("urls")
    write_images(folder / "in")
    shardio.pack(folder / "in", folder / "out", max_shard_samples=5)
    return folder / "out"


@pytest.fixture(scope="module")
def remote(local: Path) -> Location:
    """The same dataset in an object store, uploaded by other means."""
    folder = parse_location(f"memory://{uuid.uuid4().hex}/some/out")
    for name, content in read_files(local).items():
        put(folder / name, content)
    return folder


def put(location: Location, content: bytes) -> None:
    with location.write_whole() as file:
        file.write(content)


COMMANDS = [
    "info",
    "info --json",
    "ls --fields",
    "ls --json",
    "cat class-0/name-001 --field jpg",
    "order",
    "check --world-size 2",
    "dups",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_the_same(local: Path, remote: Location, command: str) -> None:
    name, *options = command.split()
    by_place = [run(name, place, *options).output.replace(str(place), "PLACE") for place in (local, remote)]
    assert by_place[0] == by_place[1]


def test_a_dataset_is_packed_into_an_object_store(local: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/out"
    found = json.loads(run("pack", local.parent / "in", url, "--max-shard-samples", "5", "--json").stdout)
    assert (found["out"], found["samples"]) == (url, 21)
    assert read_objects(parse_location(url)) == read_files(local)
    done = run("pack", local.parent / "in", f"{url}/parts", "--split", "0.5,0.5", "--workers", "1")
    assert done.stdout.startswith(f"{url}/parts/train: packed ")
    assert "already holds a packed dataset" in str(run("pack", local.parent / "in", url, code=1).exception)


def test_changed_datasets_are_named_by_their_urls(remote: Location) -> None:
    home = f"memory://{uuid.uuid4().hex}"
    assert run("reshard", remote, f"{home}/a").stdout.startswith(f"{home}/a: 21 samples in 1 shard")
    assert run("split", remote, f"{home}/b").stdout.splitlines()[1].startswith(f"{home}/b/val: ")
    found = json.loads(run("merge", f"{home}/c", f"{home}/b/val", f"{home}/b/train", "--json").stdout)
    assert (found["out"], found["samples"]) == (f"{home}/c", 21)
    assert "cannot append to memory:" in str(run("append", f"{home}/c", f"{home}/a", code=1).exception)


def test_a_dataset_is_verified_and_repaired(local: Path) -> None:
    out = parse_location(f"memory://{uuid.uuid4().hex}/out")
    shardio.pack(local.parent / "in", str(out), max_shard_samples=5)
    assert run("verify", out, "--deep").stdout.startswith("no problems in 5 shards, 21 samples")
    (out / "shard-000001.tar.idx").remove()
    (out / MANIFEST_NAME).remove()
    assert "2 problems" in run("verify", out, code=1).stdout
    done = run("repair", out, "--classes", local)
    assert done.stdout.count("which was missing") == 2
    assert f"{out / MANIFEST_NAME}: wrote the manifest" in done.stdout
    run("verify", out)
    assert {name: content for name, content in read_objects(out).items() if name != MANIFEST_NAME} == {
        name: content for name, content in read_files(local).items() if name != MANIFEST_NAME
    }


def test_tars_are_indexed_next_to_them(tmp_path: Path) -> None:
    folder = parse_location(f"memory://{uuid.uuid4().hex}/tars")
    write_tar(tmp_path / "a.tar", [("x/1.txt", b"one"), ("x/2.txt", b"two")])
    put(folder / "a.tar", (tmp_path / "a.tar").read_bytes())
    assert f"index: {folder / 'a.tar.idx'}\n" in run("index", folder).stdout
    assert folder.list() == ["a.tar", "a.tar.idx"]
    assert "already current" in run("index", folder / "a.tar").stdout
    assert run("cat", folder / "a.tar", "x/2").stdout == "two"


def test_indexes_of_tars_in_a_bucket_that_is_read_only_are_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = parse_location(f"memory://{uuid.uuid4().hex}/tars")
    write_tar(tmp_path / "a.tar", [("x/1.txt", b"one"), ("x/2.txt", b"two")])
    put(folder / "a.tar", (tmp_path / "a.tar").read_bytes())
    put(folder / "b.tar.gz", gzip.compress((tmp_path / "a.tar").read_bytes()))
    ask = Client.ask

    def ask_or_deny(client: Client, request: Request) -> Any:
        if isinstance(request, Write):
            raise PermissionError(errno.EACCES, f"cannot write {request.key}: the server answered 403")
        return ask(client, request)

    monkeypatch.setattr(Client, "ask", ask_or_deny)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run("index", folder).stdout.count(f"index: {tmp_path / 'cache'}") == 2
    assert folder.list() == ["a.tar", "b.tar.gz"]
    assert len(shardio.ShardDataset(str(folder / "a.tar"), fields="key")) == 2
    assert run("cat", folder / "b.tar.gz", "x/2").stdout == "two"


def test_indexes_of_other_tools_name_the_shards(remote: Location, local: Path, tmp_path: Path) -> None:
    run("export-index", remote, "--format", "wids", "--out", tmp_path)
    urls = [shard["url"] for shard in json.loads((tmp_path / "wids.json").read_bytes())["shardlist"]]
    assert urls == [str(remote / f"shard-{number:06d}.tar") for number in range(5)]
    run("export-index", local, "--format", "dali", "--out", remote.folder / "dali")
    assert read_objects(remote.folder / "dali").keys() == {f"shard-{number:06d}.idx" for number in range(5)}


def test_images_are_shown_and_extracted(remote: Location, tmp_path: Path) -> None:
    run("view", remote, "-o", tmp_path / "page.html")
    run("view", remote, "-o", remote.folder / "page.html")
    assert (remote.folder / "page.html").read_whole() == (tmp_path / "page.html").read_bytes()
    run("augment", remote, "--recipe", "cifar", "-o", tmp_path / "sheet.png")
    run("extract", remote, "class-0/name-001", tmp_path / "into")
    assert sorted(read_files(tmp_path / "into" / "class-0")) == ["name-001.cls", "name-001.jpg"]


def test_a_url_that_names_no_store_is_an_error_without_a_traceback() -> None:
    assert isinstance(run("info", "ftp://host/out", code=1).exception, LocationError)


def test_storage_options_are_names_and_values() -> None:
    options = read_access(["endpoint=http://host:1/a=b", "retries=3", "timeout_s=2.5", "region=007"]).options
    assert (options.retries, options.timeout_s) == (3, 2.5)
    assert dict(options.config) == {"endpoint": "http://host:1/a=b", "region": "007"}


@pytest.mark.parametrize("option", ["endpoint", "=x", "retries=many", "retries=-1"])
def test_wrong_storage_options_are_usage_errors(tmp_path: Path, option: str) -> None:
    output = run("pack", tmp_path, "memory://x/out", "--storage-option", option, code=2).output
    assert "storage" in output
