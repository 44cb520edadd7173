"""Commands on a dataset behind a real S3 server, whose settings come from their options alone."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import shardio
from shardio.cli.main import app
from shardio.errors import LocationError
from shardio.shards import MANIFEST_NAME
from shardio.storage import Location
from shardio.storage.remote.client import client
from tests.cli.train_command import LINE, train_here
from tests.files import read_files, read_objects
from tests.servers.fixtures import seaweedfs_server
from tests.servers.seaweedfs import SECRET_ACCESS_KEY
from tests.servers.server import Server
from tests.storage.conftest import at_server
from tests.storage.uploading import upload
from tests.tars import write_tar

__all__ = ["seaweedfs_server"]

CREDENTIALS = ("access_key_id", "secret_access_key")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the storage process find no settings, such as the developer's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client().close()
    yield
    client().close()  # A later test starts another storage process, with its own environment.


@pytest.fixture(scope="module")
def remote(seaweedfs_server: Server, packed: Path) -> Location:
    return upload(packed, f"{seaweedfs_server.url}/{uuid.uuid4().hex}/out", seaweedfs_server.options)


@pytest.fixture
def options(seaweedfs_server: Server) -> list[str]:
    """The options of commands that reach the server."""
    return [f"--storage-option={name}={value}" for name, value in seaweedfs_server.options.items()]


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_a_run_is_trained_and_resumed(packed: Path, remote: Location, options: list[str], tmp_path: Path) -> None:
    """It learns what a run of the local dataset learns."""
    cached = [*options, "--num-workers", "1", "--cache", str(tmp_path / "cache"), "--cache-size", "100MB"]
    learned = list[list[tuple[str, str]]]()
    for name, source, settings in (("local", str(packed), ["--num-workers", "0"]), ("remote", str(remote), cached)):
        command = ["--batch-size", "4", "--out", str(tmp_path / name), *settings]
        losses = list[tuple[str, str]]()
        for num_epochs in ("1", "2"):
            done = train_here(Path(source), "--epochs", num_epochs, *command)
            assert done.exit_code == 0, (done.output, done.exception)
            losses += [(figures["loss"], figures["val_loss"]) for figures in LINE.finditer(done.stdout)]
        assert "resuming after step 5 (complete epochs: 1)" in done.stdout
        learned.append(losses)
    assert len(learned[0]) == 2
    assert learned[0] == learned[1]
    assert list((tmp_path / "cache").glob("**/*.copy"))


def test_loaders_are_checked_and_measured(packed: Path, remote: Location, options: list[str], tmp_path: Path) -> None:
    cached = [*options, "--cache", tmp_path / "cache"]
    check = ["--world-size", 2, "--batch-size", 4, "--epochs", 2]
    assert run("check", remote, *check, *cached).output == run("check", packed, *check).output
    lines = run("bench", remote, "--image-size", 32, "--epochs", 2, "--json", *cached).stdout.splitlines()
    assert [json.loads(line)["num_samples"] for line in lines] == [21, 21]
    assert list((tmp_path / "cache").glob("**/*.copy"))


def test_class_folders_are_trained_on(
    images: Path, seaweedfs_server: Server, options: list[str], tmp_path: Path
) -> None:
    home = at_server(seaweedfs_server, f"{uuid.uuid4().hex}/images")
    for path in sorted(images.glob("*/*")):
        with (home / path.relative_to(images).as_posix()).write_whole() as file:
            file.write(path.read_bytes())
    cached = [*options, "--cache", str(tmp_path / "cache")]
    losses = list[list[str]]()
    for source, settings in ((images, []), (Path(str(home)), cached)):
        done = train_here(source, "--epochs", "1", "--num-workers", "0", *settings)
        assert done.exit_code == 0, (done.output, done.exception)
        losses.append([figures["loss"] for figures in LINE.finditer(done.stdout)])
    assert losses[0] == losses[1] != []
    found = run("bench", home, "--image-size", 32, "--num-workers", 0, "--json", *cached)
    assert json.loads(found.stdout)["num_samples"] == 21
    run("augment", home, "--recipe", "cifar", "-o", tmp_path / "a.png", *options)
    run("augment", images, "--recipe", "cifar", "-o", tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    run("pack", images, tmp_path / "out", "--classes", home, "--max-shard-samples", 5, *options)
    assert run("verify", tmp_path / "out").stdout.startswith("no problems in 5 shards, 21 samples")


def test_a_cache_must_be_a_local_folder_of_some_size(packed: Path) -> None:
    assert "--cache" in run("check", packed, "--cache", "s3://bucket/cache", code=2).output
    assert "--cache-size" in run("bench", packed, "--cache-size", "much", code=2).output


def test_datasets_are_looked_at(packed: Path, remote: Location, options: list[str], tmp_path: Path) -> None:
    commands = ["info --json", "ls --fields", "cat class-0/name-001 --field jpg", "order", "dups"]
    for command in commands:
        name, *others = command.split()
        by_place = [run(name, packed, *others).output, run(name, remote, *others, *options).output]
        assert by_place[0].replace(str(packed), str(remote)) == by_place[1]
    assert run("verify", remote, "--deep", *options).stdout.startswith("no problems in 5 shards, 21 samples")
    run("extract", remote, "class-0/name-001", tmp_path / "into", *options)
    assert sorted(read_files(tmp_path / "into" / "class-0")) == ["name-001.cls", "name-001.jpg"]
    run("augment", remote, "--recipe", "cifar", "-o", tmp_path / "sheet.png", *options)
    run("view", remote, "-o", remote.folder / "page.html", *options)
    run("view", remote, "-o", tmp_path / "page.html", *options)
    assert (remote.folder / "page.html").read_whole() == (tmp_path / "page.html").read_bytes()
    run("export-index", remote, "--format", "dali", "--out", remote.folder / "dali", *options)
    assert read_objects(remote.folder / "dali").keys() == {f"shard-{number:06d}.idx" for number in range(5)}


def test_datasets_are_changed(packed: Path, remote: Location, options: list[str], tmp_path: Path) -> None:
    home = remote.folder
    assert run("reshard", remote, home / "a", *options).stdout.startswith(f"{home / 'a'}: 21 samples in 1 shard")
    run("split", remote, home / "b", *options)
    run("merge", home / "c", home / "b" / "val", home / "b" / "train", *options)
    run("reshard", remote, tmp_path / "local", "--max-shard-samples", 5, *options)
    assert read_files(tmp_path / "local").keys() == read_files(packed).keys()
    run("split", packed, tmp_path / "parts")
    run("append", tmp_path / "parts" / "train", home / "b" / "val", *options)
    keys = sorted(run("ls", packed).stdout.splitlines())
    assert sorted(run("ls", tmp_path / "parts" / "train").stdout.splitlines()) == keys
    assert sorted(run("ls", home / "c", *options).stdout.splitlines()) == keys
    (home / "a" / MANIFEST_NAME).remove()
    assert "wrote the manifest" in run("repair", home / "a", "--classes", remote, *options).stdout
    assert run("verify", home / "a", *options).stdout.startswith("no problems in 1 shard, 21 samples")


def test_tars_of_other_tools_are_indexed(remote: Location, options: list[str], tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x/1.txt", b"one"), ("x/2.txt", b"two")])
    tar = remote.folder / "tars" / "a.tar"
    with tar.write_whole() as file:
        file.write((tmp_path / "a.tar").read_bytes())
    assert f"index: {tar}.idx\n" in run("index", tar, *options).stdout
    assert run("cat", tar, "x/2", *options).stdout == "two"


def test_samples_are_read_by_key_through_a_cache_and_verified(
    packed: Path, remote: Location, seaweedfs_server: Server, tmp_path: Path
) -> None:
    with (
        shardio.open(packed) as expected,
        shardio.open(str(remote), storage_options=seaweedfs_server.options, cache=tmp_path, cache_size="1GB") as found,
    ):
        assert dict(found) == dict(expected)
    assert list(tmp_path.glob("**/*.copy"))
    assert shardio.verify(str(remote), storage_options=seaweedfs_server.options) == []
    with pytest.raises(ValueError, match="cache must be a local folder"):
        shardio.open(str(remote), cache="s3://bucket/cache")


@pytest.fixture
def profiles(seaweedfs_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """AWS's configuration files with some profiles. Return the options of commands that reach the server otherwise."""
    pytest.importorskip("boto3")
    right, wrong = seaweedfs_server.options, {"access_key_id": "a-wrong-id", "secret_access_key": "a-wrong-secret"}
    texts = ["[profile empty]\n"]
    for profile, credentials in (("right", right), ("wrong", wrong)):
        texts += [f"[profile {profile}]\n", *(f"aws_{name} = {credentials[name]}\n" for name in CREDENTIALS)]
    (tmp_path / "config").write_text("".join(texts))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return [f"--storage-option={name}={value}" for name, value in right.items() if name not in CREDENTIALS]


def test_credentials_come_from_a_profile(
    remote: Location, packed: Path, profiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = run("ls", packed).stdout
    assert run("ls", remote, *profiles, "--storage-option=profile=right").stdout == keys
    monkeypatch.setenv("AWS_PROFILE", "right")
    client().close()
    assert run("ls", remote, *profiles).stdout == keys


@pytest.mark.parametrize(
    ("profile", "kind", "message"),
    [
        ("wrong", PermissionError, "InvalidAccessKeyId.*Check the credentials"),
        ("empty", LocationError, "the profile 'empty' has no credentials"),
        ("absent", LocationError, r"The config profile \(absent\) could not be found.*AWS_PROFILE"),
    ],
)
def test_a_profile_that_does_not_work_is_an_error_without_secrets(
    remote: Location, profiles: list[str], profile: str, kind: type[Exception], message: str
) -> None:
    done = run("ls", remote, *profiles, f"--storage-option=profile={profile}", code=1)
    assert type(done.exception) is kind
    assert re.search(message, str(done.exception))
    for secret in ("a-wrong-secret", SECRET_ACCESS_KEY):
        assert secret not in str(done.exception) + done.output
