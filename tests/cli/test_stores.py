"""Commands produce the same output for datasets in object stores as for local datasets."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.cli.options import read_access
from shardio.errors import LocationError
from shardio.shards import MANIFEST_NAME
from shardio.storage import Location, parse_location
from shardio.storage.client import Client, Request, client
from shardio.testing.store import put
from tests.cli.commands import LINE, error_of, run, run_main, train_here, usage_error
from tests.files import read_files, read_objects
from tests.raising import assert_raises
from tests.servers.server import Server, put_all, upload
from tests.servers.stores import SECRET_ACCESS_KEY
from tests.sources import write_images
from tests.tars import write_tar


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("urls") / "in"
    write_images(folder)
    return folder


@pytest.fixture(params=["memory", "mirror"])
def home(request: pytest.FixtureRequest, mirrored: Callable[[Path], Location], tmp_path: Path) -> Location:
    """A folder in an object store, or a folder whose URL contains a local path."""
    if request.param == "mirror":
        return mirrored(tmp_path / "home")
    return parse_location(f"memory://{uuid.uuid4().hex}/some")


@pytest.fixture
def remote(packed: Path, home: Location) -> Location:
    """The packed dataset in an object store, uploaded without shardio pack."""
    return put_all(packed, home / "out")


LOOKS = ["info", "info --json", "ls --fields", "ls --json", "cat class-0/name-001 --field jpg", "order", "dups"]


def assert_looks_the_same(local: Path, remote: Location, tmp_path: Path, *options: str) -> None:
    for command in (*LOOKS, "check --world-size 2"):
        name, *others = command.split()
        by_place = [run(name, local, *others).output, run(name, remote, *others, *options).output]
        assert by_place[0].replace(str(local), str(remote)) == by_place[1]
    assert run("verify", remote, "--deep", *options).stdout.startswith("no problems in 5 shards, 21 samples")
    for page in (tmp_path / "page.html", remote.folder / "page.html"):
        run("view", remote, "-o", page, *options)
    assert (remote.folder / "page.html").read_whole() == (tmp_path / "page.html").read_bytes()
    for number, (place, settings) in enumerate(((local, ()), (remote, options))):
        run("augment", place, "--recipe", "cifar", "-o", tmp_path / f"{number}.png", *settings)
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()
    run("extract", remote, "class-0/name-001", tmp_path / "into", *options)
    assert sorted(read_files(tmp_path / "into" / "class-0")) == ["name-001.cls", "name-001.jpg"]
    run("export-index", remote, "--format", "wids", "--out", tmp_path, *options)
    urls = [shard["url"] for shard in json.loads((tmp_path / "wids.json").read_bytes())["shardlist"]]
    assert urls == [str(remote / f"shard-{number:06d}.tar") for number in range(5)]
    run("export-index", remote, "--format", "dali", "--out", remote.folder / "dali", *options)
    assert read_objects(remote.folder / "dali").keys() == {f"shard-{number:06d}.idx" for number in range(5)}


def assert_is_changed_the_same(local: Path, remote: Location, tmp_path: Path, *options: str) -> None:
    home = remote.folder
    done = run("reshard", remote, home / "a", "--max-shard-samples", 5, *options)
    assert done.stdout.startswith(f"{home / 'a'}: 21 samples in 5 shards")
    assert run("split", remote, home / "b", *options).stdout.splitlines()[1].startswith(f"{home / 'b'}/val: ")
    merged = json.loads(run("merge", home / "c", home / "b/val", home / "b/train", "--json", *options).stdout)
    assert (merged["out"], merged["samples"]) == (str(home / "c"), 21)
    run("reshard", remote, tmp_path / "local", "--max-shard-samples", 5, *options)
    assert read_files(tmp_path / "local").keys() == read_files(local).keys()
    run("split", local, tmp_path / "parts")
    run("append", tmp_path / "parts" / "train", home / "b" / "val", *options)
    keys = sorted(run("ls", local).stdout.splitlines())
    assert sorted(run("ls", tmp_path / "parts" / "train").stdout.splitlines()) == keys
    assert sorted(run("ls", home / "c", *options).stdout.splitlines()) == keys
    (home / "a" / "shard-000001.tar.idx").remove()
    (home / "a" / MANIFEST_NAME).remove()
    assert "2 problems" in run("verify", home / "a", *options, code=1).stdout
    done = run("repair", home / "a", "--classes", remote, *options)
    assert done.stdout.count("which was missing") == 2
    assert f"{home / 'a' / MANIFEST_NAME}: wrote the manifest" in done.stdout
    assert run("verify", home / "a", *options).stdout.startswith("no problems in 5 shards, 21 samples")
    assert {**read_objects(home / "a"), MANIFEST_NAME: b""} == {**read_files(local), MANIFEST_NAME: b""}
    write_tar(tmp_path / "a.tar", [("x/1.txt", b"one"), ("x/2.txt", b"two")])
    tar = home / "tars" / "a.tar"
    put(tar, (tmp_path / "a.tar").read_bytes())
    assert f"index: {tar}.idx\n" in run("index", tar, *options).stdout
    assert (home / "tars").list() == ["a.tar", "a.tar.idx", "shardio-index.json"]
    assert "already current" in run("index", tar, *options).stdout
    assert run("cat", tar, "x/2", *options).stdout == "two"


def test_commands_look_into_and_change_a_dataset_in_a_store(packed: Path, remote: Location, tmp_path: Path) -> None:
    assert_looks_the_same(packed, remote, tmp_path)
    assert_is_changed_the_same(packed, remote, tmp_path)
    assert f"cannot append to {remote}: " in error_of("append", remote, remote.folder / "a")


def test_slashes_at_the_end_of_a_path_or_a_url_change_nothing(packed: Path, remote: Location, tmp_path: Path) -> None:
    for place in (packed, remote):
        by_name = [run("info", f"{place}{end}").stdout for end in ("", "/")]
        assert by_name[0] == by_name[1]
    for home in (tmp_path / "parts", remote.folder / "parts"):
        done = run("split", f"{packed}/", f"{home}/").stdout.splitlines()
        assert [line.partition(": ")[0] for line in done] == [f"{home}/train", f"{home}/val"]


def test_loading_commands_read_class_folders_and_shards_by_url(
    images: Path, packed: Path, remote: Location, mirrored: Callable[[Path], Location], tmp_path: Path
) -> None:
    assert "saturated" in run("doctor", remote, "--seconds", 0.01).stdout
    for source in (remote, mirrored(images)):
        found = run("bench", source, "--image-size", 32, "--num-workers", 0, "--json").stdout
        assert json.loads(found)["num_samples"] == 21
        output = [
            train_here(str(place), "--val", str(place), "--epochs", 1, "--num-workers", 0).stdout
            for place in (source, packed if source is remote else images)
        ]
        assert LINE.findall(output[0])[0][:5] == LINE.findall(output[1])[0][:5]
    for number, place in enumerate((images, mirrored(images))):
        run("augment", place, "--recipe", "cifar", "-o", tmp_path / f"{number}.png")
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()
    run("pack", images, tmp_path / "out", "--classes", mirrored(images))
    run("pack", images, tmp_path / "other", "--classes", remote)


def test_a_dataset_is_packed_into_an_object_store(source: Path, packed: Path, home: Location) -> None:
    url = str(home / "new")
    found = json.loads(run("pack", source, url, "--max-shard-samples", "5", "--json").stdout)
    assert (found["out"], found["samples"]) == (url, 21)
    assert read_objects(home / "new") == read_files(packed)
    done = run("pack", source, f"{url}/parts", "--split", "0.5,0.5", "--workers", "1")
    assert done.stdout.startswith(f"{url}/parts/train: packed ")
    assert "already holds a packed dataset" in run_main("pack", source, url).stderr


def test_indexes_of_read_only_buckets_are_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = parse_location(f"memory://{uuid.uuid4().hex}/tars")
    write_tar(tmp_path / "a.tar", [("x/1.txt", b"one"), ("x/2.txt", b"two")])
    put(home / "a.tar", (tmp_path / "a.tar").read_bytes())
    put(home / "b.tar.gz", gzip.compress((tmp_path / "a.tar").read_bytes()))
    ask = Client.ask

    def ask_or_deny(client: Client, request: Request) -> Any:
        if request.operation == "write":
            raise PermissionError(errno.EACCES, f"cannot write {request.key}: the server answered 403")
        return ask(client, request)

    monkeypatch.setattr(Client, "ask", ask_or_deny)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run("index", home).stdout.count(f"index: {tmp_path / 'cache'}") == 2
    assert home.list() == ["a.tar", "b.tar.gz"]
    assert len(shardio.ShardDataset(str(home / "a.tar"), fields="key")) == 2
    assert run("cat", home / "b.tar.gz", "x/2").stdout == "two"


def test_storage_options_are_names_and_values(packed: Path) -> None:
    options = read_access(["endpoint=http://host:1/a=b", "retries=3", "timeout_s=2.5", "region=007"]).options
    assert (options.retries, options.timeout_s) == (3, 2.5)
    assert dict(options.config) == {"endpoint": "http://host:1/a=b", "region": "007"}
    for option in ("endpoint", "=x", "retries=many", "retries=-1"):
        assert "storage" in usage_error("pack", packed, "memory://x/out", "--storage-option", option)
    assert "ftp://" in error_of("info", "ftp://host/out")
    found = error_of("append", "s3://bucket/out", packed)  # Nothing is requested.
    assert "cannot append to s3://bucket/out: " in found
    assert "--cache" in usage_error("check", packed, "--cache", "s3://bucket/cache")
    assert "--cache-size" in usage_error("bench", packed, "--cache-size", "much")


@pytest.fixture
def server(seaweedfs_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A real S3 server. The storage process does not see the developer's own AWS settings."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client().close()
    yield seaweedfs_server
    client().close()  # A later test starts another storage process, with its own environment.


@pytest.fixture
def served(server: Server, packed: Path) -> Location:
    return upload(packed, f"{server.url}/{uuid.uuid4().hex}/out", server.options)


@pytest.fixture
def options(server: Server) -> list[str]:
    return [f"--storage-option={name}={value}" for name, value in server.options.items()]


@pytest.mark.slow
def test_options_reach_a_server(packed: Path, served: Location, options: list[str], tmp_path: Path) -> None:
    assert_looks_the_same(packed, served, tmp_path, *options)
    assert_is_changed_the_same(packed, served, tmp_path, *options)
    cached = [*options, "--cache", tmp_path / "cache"]
    check = ["--world-size", 2, "--batch-size", 4, "--epochs", 2]
    assert run("check", served, *check, *cached).output == run("check", packed, *check).output
    lines = run("bench", served, "--image-size", 32, "--epochs", 2, "--json", *cached).stdout.splitlines()
    assert [json.loads(line)["num_samples"] for line in lines] == [21, 21]
    assert list((tmp_path / "cache").glob("**/*.copy"))


@pytest.mark.slow
def test_a_run_is_trained_and_resumed(packed: Path, served: Location, options: list[str], tmp_path: Path) -> None:
    cached = [*options, "--num-workers", "1", "--cache", str(tmp_path / "cache"), "--cache-size", "100MB"]
    output = {"local": "", "remote": ""}
    for name, place, settings in (("local", packed, ["--num-workers", "0"]), ("remote", str(served), cached)):
        for num_epochs in (1, 2):
            done = train_here(place, "--epochs", num_epochs, "--batch-size", 4, "--out", tmp_path / name, *settings)
            output[name] += done.stdout
        assert "resuming after step 5 (complete epochs: 1)" in done.stdout
    losses, remote = (
        [figures.group("loss", "val_loss") for figures in LINE.finditer(each)] for each in output.values()
    )
    assert (len(losses), losses) == (2, remote)
    assert list((tmp_path / "cache").glob("**/*.copy"))


@pytest.mark.slow
def test_samples_by_key_come_through_a_cache(packed: Path, served: Location, server: Server, tmp_path: Path) -> None:
    with (
        shardio.open(packed) as expected,
        shardio.open(str(served), storage_options=server.options, cache=tmp_path, cache_size="1GB") as found,
    ):
        assert dict(found) == dict(expected)
    assert list(tmp_path.glob("**/*.copy"))
    assert shardio.verify(str(served), storage_options=server.options) == []
    assert_raises(ValueError, "cache must be a local folder", shardio.open, str(served), cache="s3://bucket/cache")


@pytest.fixture
def profiles(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write AWS configuration files with profiles. Return the other options that commands need to reach the server."""
    pytest.importorskip("boto3")
    wrong = {"access_key_id": "a-wrong-id", "secret_access_key": "a-wrong-secret"}
    texts = ["[profile empty]\n"]
    for profile, credentials in (("right", server.options), ("wrong", wrong)):
        texts += [f"[profile {profile}]\n", *(f"aws_{name} = {credentials[name]}\n" for name in wrong)]
    (tmp_path / "config").write_text("".join(texts))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    client().close()  # The next storage process starts with the new variables.
    return [f"--storage-option={name}={value}" for name, value in server.options.items() if name not in wrong]


@pytest.mark.slow
def test_profiles_give_credentials(
    served: Location, packed: Path, profiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = run("ls", packed).stdout
    assert run("ls", served, *profiles, "--storage-option=profile=right").stdout == keys
    for profile, kind, message in (
        ("wrong", PermissionError, "InvalidAccessKeyId.*Check the credentials"),
        ("empty", LocationError, "the profile 'empty' has no credentials"),
        ("absent", LocationError, r"The config profile \(absent\) could not be found.*AWS_PROFILE"),
    ):
        done = run("ls", served, *profiles, f"--storage-option=profile={profile}", code=1)
        assert type(done.exception) is kind
        assert re.search(message, str(done.exception))
        for secret in ("a-wrong-secret", SECRET_ACCESS_KEY):
            assert secret not in str(done.exception) + done.output
    monkeypatch.setenv("AWS_PROFILE", "right")
    client().close()
    assert run("ls", served, *profiles).stdout == keys
