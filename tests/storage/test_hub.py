"""At one commit, a repository of the Hugging Face Hub is read like the folder that was uploaded."""

from __future__ import annotations

import json
import os
import pickle
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, HfFileSystem, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

import shardio
from shardio import DataLoader, ImageFolder, ShardDataset
from shardio.errors import LocationError, PackError, StoreError
from shardio.storage import Location, ReplacedError, parse_location
from shardio.storage.client import client
from shardio.storage.hub import HubRepository
from shardio.storage.locations import RemoteOptions
from tests.cli.commands import run
from tests.faults.proxy import FaultProxy, Script
from tests.raising import assert_raises
from tests.servers.fake_hub_program import READER, STRANGER
from tests.servers.stores import FakeHub
from tests.sources import write_images
from tests.storage.conftest import at_server

CONTENT = np.random.default_rng(0).bytes(300_000)
KEYS = ["a.tar", "b/c/d/e.tar", "ü/日本語 😀.tar", "a+b & c?d=e#f%20@1.tar", "'\"$\\*.tar", "x" * 200, "{0..3}"]
TEXTS = ["shardio.json", ".gitattributes", ".cache/z", "b/.hidden", "b.x", *(f"ba/{i}" for i in range(12))]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for key, content in {**dict.fromkeys(KEYS, CONTENT), **{key: key.encode() for key in TEXTS}, "empty": b""}.items():
        put(tmp_path / "files" / key, content)
    return tmp_path / "files"


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def root(fake_hub: FakeHub, files: Path) -> Location:
    name = uuid.uuid4().hex
    fake_hub.commit(name, files)
    return at_server(fake_hub.server, name)


def test_versions_are_the_etags_of_the_hubs_own_library(root: Location, fake_hub: FakeHub) -> None:
    repository, endpoint = f"org/{str(root).split('/')[4]}", fake_hub.server.options["endpoint"]
    for key in [*KEYS, "shardio.json", "empty"]:
        url = hf_hub_url(repository, key, repo_type="dataset", endpoint=endpoint)
        assert (root / key).stat().version == f'"{get_hf_file_metadata(url).etag}"'


def test_a_folder_with_many_folders_is_listed_in_few_requests(fake_hub: FakeHub, tmp_path: Path) -> None:
    keys = sorted(f"{part}/{i:02d}/{j}" for part in ("other", "train") for i in range(60) for j in range(2))
    for key in keys:
        put(tmp_path / "files" / key, key.encode())
    name = uuid.uuid4().hex
    fake_hub.commit(name, tmp_path / "files")
    with FaultProxy(fake_hub.server.host, fake_hub.server.port) as proxy:
        root = at_server(fake_hub.server.behind(proxy.host, proxy.port), name)
        assert [each for i in range(60) for each in (root / f"train/{i:02d}").walk()] == keys[120:]
        assert [(root / key).stat().size for key in keys[:120]] == [len(key) for key in keys[:120]]
        assert proxy.counts().num_requests == 1 + 2 * (16 + 180 // 5), (
            "there are requests for the first 16 folders, then for all folders"
        )


@pytest.mark.parametrize("character", "[]^|")
def test_names_that_cannot_be_requested_are_an_error(fake_hub: FakeHub, tmp_path: Path, character: str) -> None:
    put(tmp_path / "files" / f"a{character}", CONTENT)
    fake_hub.commit(name := uuid.uuid4().hex, tmp_path / "files")
    location = at_server(fake_hub.server, name) / f"a{character}"
    message = r"cannot be requested if its name contains one of \[ \] \^ \|. Rename it"
    assert_raises(LocationError, message, location.read_whole)


# Revisions


@pytest.mark.parametrize("revision", ["feature/new", "refs/pr/3", "ü b"])
def test_a_url_may_name_a_revision_as_in_the_hubs_own_library(fake_hub: FakeHub, tmp_path: Path, revision: str) -> None:
    name = uuid.uuid4().hex
    for content in "main", revision:
        put(tmp_path / "files" / "x" / "a@1", content.encode())
        commit = fake_hub.commit(name, tmp_path / "files", revision=content)
    text = revision if revision.startswith("refs/") else revision.replace("/", "%2F")
    location = at_server(fake_hub.server, f"{name}@{text}/x/a@1")
    library = HfFileSystem(endpoint=fake_hub.server.options["endpoint"], token=False)
    theirs = library.resolve_path(f"{fake_hub.server.url}/{name}@{text}/x/a@1")
    assert (location.key, location.read_whole()) == (asdict(theirs)["path_in_repo"], revision.encode())
    assert parse_location(str(location)).store.prefix == location.store.prefix, "the text is enough to open it"
    assert at_server(fake_hub.server, f"{name}@{commit}/x/a@1").read_whole() == revision.encode()
    assert at_server(fake_hub.server, f"{name}/x/a@1").read_whole() == b"main"


def test_a_branch_that_moves_does_not_change_a_run(fake_hub: FakeHub, files: Path) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, files)
    root = at_server(fake_hub.server, name)
    with closing((root / "a.tar").open()) as file:
        put(files / "a.tar", CONTENT[::-1])
        put(files / "ba" / "new", b"new")
        (files / "shardio.json").unlink()
        fake_hub.commit(name, files)
        assert file.read(5, 70_000) == CONTENT[5:70_000]
    copy: Location = pickle.loads(pickle.dumps(root))
    assert ((copy / "a.tar").read_whole(), (copy / "shardio.json").read_whole()) == (CONTENT, b"shardio.json")
    assert "new" not in (copy / "ba").list()
    with closing((root / "a.tar").open()) as file:
        client().close()  # A new storage process starts, as in the next run or after the old one is killed.
        assert_raises(ReplacedError, r"a\.tar was replaced while it was in use", file.read, 0, 10)
    assert (root / "a.tar").read_whole() == CONTENT[::-1]
    assert not (root / "shardio.json").exists()
    assert "new" in (root / "ba").list()


# Rights


@pytest.mark.parametrize("kind", ["is_private", "is_gated"])
def test_those_who_have_the_right_read_what_is_not_public(fake_hub: FakeHub, files: Path, kind: str) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, files, **{kind: True})  # type: ignore[arg-type]  # booleans
    assert (at_server(fake_hub.server, name, token=READER) / "a.tar").read_whole() == CONTENT
    for token in False, STRANGER, "hf_wrong":
        location = at_server(fake_hub.server, name, token=token) / "a.tar"
        errors, message = (PermissionError, LocationError), "does not exist, or it is private or gated"
        caught = assert_raises(errors, message, location.read_whole)
        assert "hf_" not in f"{caught} {location!r}"


@pytest.mark.parametrize("from_file", [False, True])
def test_the_token_and_the_endpoint_come_from_the_users_settings(
    fake_hub: FakeHub, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_file: bool
) -> None:
    fake_hub.commit("settings", files, is_private=True)
    (tmp_path / "token").write_text(f"{READER}\n")
    monkeypatch.setenv("HF_ENDPOINT", fake_hub.server.options["endpoint"])
    monkeypatch.setenv(*(("HF_TOKEN_PATH", str(tmp_path / "token")) if from_file else ("HF_TOKEN", READER)))
    client().close()  # The next storage process starts with the new environment variables.
    assert parse_location(f"{fake_hub.server.url}/settings/a.tar").read_whole() == CONTENT
    client().close()


def test_what_does_not_exist_is_an_error_for_everyone(fake_hub: FakeHub, root: Location) -> None:
    with pytest.raises(LocationError, match=r"hf://datasets/org/none: .* 404 .* does not exist, or it is private"):
        at_server(fake_hub.server, "none/a", token=READER).exists()
    with pytest.raises(LocationError, match="@v9: the repository has no such revision"):
        at_server(fake_hub.server, f"{str(root).split('/')[4]}@v9/a").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokem": "hf_secret"}, "unknown options for hf://datasets/org/a: tokem"),
        ({"token": "hf_secret\n"}, "the token of the Hugging Face Hub .* is invalid"),
        ({"endpoint": "hub.example.org"}, "must be a URL such as https://huggingface.co"),
        ({"endpoint": "https://user:hf_secret@hub.example.org"}, "without a query, a user name or a password"),
    ],
)
def test_errors_do_not_show_invalid_options(fake_hub: FakeHub, options: dict[str, str], message: str) -> None:
    caught = assert_raises(LocationError, message, lambda: at_server(fake_hub.server, "a/b", **options).stat())
    assert "hf_secret" not in str(caught)


def test_without_the_hubs_library_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LocationError, match=r"pip install 'shardio-loader\[hf\]'"):
        HubRepository("hf://datasets/org/a", RemoteOptions())


# Faults


Proxies = tuple[FaultProxy, FaultProxy]


@pytest.fixture
def proxies(fake_hub: FakeHub) -> Iterator[Proxies]:
    with (
        FaultProxy(fake_hub.server.host, fake_hub.server.port) as before_hub,
        FaultProxy(fake_hub.server.host, fake_hub.storage_port) as before_storage,
    ):
        fake_hub.redirect_to(before_storage.host, before_storage.port)
        yield before_hub, before_storage
        fake_hub.redirect_to(fake_hub.server.host, fake_hub.storage_port)


@pytest.mark.slow
def test_faults_do_not_change_what_is_read(fake_hub: FakeHub, files: Path, proxies: Proxies) -> None:
    content = os.urandom(2_000_000)
    put(files / "large.tar", content)
    before_hub, before_storage = proxies
    name = uuid.uuid4().hex
    fake_hub.commit(name, files)
    faults = dict.fromkeys(["status_429", "status_503", "reset_before", "stall_before"], 0.05)
    before_hub.set(Script(faults=faults, max_faults=5))
    in_body = dict.fromkeys(["reset_in_body", "truncated", "wrong_range"], 0.05)
    before_storage.set(Script(faults=faults | in_body, max_faults=8))
    root = at_server(fake_hub.server.behind(before_hub.host, before_hub.port), name, timeout_s=0.3, retries=100)
    assert list(root.walk()) == sorted([*(key for key in TEXTS if "/." not in f"/{key}"), *KEYS, "empty", "large.tar"])
    with closing((root / "large.tar").open()) as file:
        for start in range(0, len(content), 100_000):
            assert file.read(start, start + 100_000) == content[start : start + 100_000]
    assert (root / "large.tar").read_whole() == content
    assert before_hub.counts().num_faults
    assert before_storage.counts().num_faults


def test_a_failing_hub_raises_and_damage_is_repaired(fake_hub: FakeHub, files: Path, proxies: Proxies) -> None:
    fake_hub.commit("failing", files)
    server = fake_hub.server.behind(proxies[0].host, proxies[0].port)
    for kind in ("status_503", "reset_before"):
        proxies[0].set(Script(faults={kind: 1.0}))
        with pytest.raises(StoreError, match=r"cannot read hf://datasets/org/failing/a after 2 attempts in \d+ s: "):
            at_server(server, "failing/a", retries=1, token=READER).stat()
    proxies[1].set(Script(faults={"corrupt": 1.0}, max_faults=2))
    assert at_server(fake_hub.server, "failing/a.tar").read_whole() == CONTENT
    assert proxies[1].counts().num_faults == {"corrupt": 2}


# The emulation of the Hub, as huggingface_hub uses it


@pytest.mark.slow
def test_the_hubs_own_library_reads_all_files(fake_hub: FakeHub, files: Path, tmp_path: Path) -> None:
    contents = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
    commit = fake_hub.commit("library", files, revision="feature/new")
    endpoint = fake_hub.server.options["endpoint"]
    assert HfApi(endpoint=endpoint).dataset_info("org/library", revision="feature/new").sha == commit
    system = HfFileSystem(endpoint=endpoint, token=False)
    root = "datasets/org/library@feature%2Fnew"
    assert system.find(root) == sorted(f"{root}/{name}" for name in contents)
    assert system.info(f"{root}/ba/3")["size"] == len("ba/3")
    assert_raises(FileNotFoundError, None, system.info, f"{root}/ba/13")
    place: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "endpoint": endpoint}
    for name in ["shardio.json", "ü/日本語 😀.tar", "empty", "ba/11"]:
        with system.open(f"{root}/{name}", block_size=1000) as file:
            file.seek(3)
            assert file.read(5) == contents[name][3:8]
        path = hf_hub_download("org/library", name, cache_dir=tmp_path / "cache", **place)
        assert Path(path).read_bytes() == contents[name]
        found = get_hf_file_metadata(hf_hub_url("org/library", name, **place))
        assert (found.size, found.commit_hash) == (len(contents[name]), commit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "token", "error"),
    [
        ("missing", READER, RepositoryNotFoundError),
        ("private", STRANGER, RepositoryNotFoundError),
        ("private", "hf_wrong", HfHubHTTPError),
        ("gated", False, GatedRepoError),
        ("gated", STRANGER, GatedRepoError),
    ],
)
def test_the_hubs_library_reports_missing_rights(
    fake_hub: FakeHub, files: Path, name: str, token: str | bool, error: type[Exception]
) -> None:
    fake_hub.commit("private", files, is_private=True)
    fake_hub.commit("gated", files, is_gated=True)
    endpoint = fake_hub.server.options["endpoint"]
    url = hf_hub_url(f"org/{name}", "shardio.json", repo_type="dataset", endpoint=endpoint)
    assert_raises(error, None, get_hf_file_metadata, url, token=token)
    assert get_hf_file_metadata(url.replace(name, "private"), token=READER).size == len("shardio.json")
    with pytest.raises(RevisionNotFoundError):
        HfApi(endpoint=endpoint).dataset_info("org/private", revision="none", token=READER)


# Datasets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that is uploaded, with class folders in ``images`` and a dataset in ``train``."""
    write_images(tmp_path / "files" / "images")
    shardio.pack(tmp_path / "files" / "images", tmp_path / "files" / "train", max_shard_samples=5)
    return tmp_path / "files"


def read(source: str | Path, fake_hub: FakeHub, num_workers: int = 0, cache: Path | None = None) -> list[Any]:
    options = fake_hub.server.options if str(source).startswith("hf:") else None
    dataset = ShardDataset(source, shuffle=True, fields=("key", "label"), storage_options=options, cache=cache)
    return [(keys, labels.tolist()) for keys, labels in DataLoader(dataset, batch_size=4, num_workers=num_workers)]


def test_a_dataset_and_class_folders_are_read_like_local_ones(fake_hub: FakeHub, folder: Path) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, folder, revision="v1.0")
    url = f"{fake_hub.server.url}/{name}@v1.0"
    for path, num_workers in (("train", 1), ("train/shardio.json", 0)):
        assert read(f"{url}/{path}", fake_hub, num_workers) == read(folder / path, fake_hub)
    ours, theirs = ImageFolder(f"{url}/images", storage_options=fake_hub.server.options), ImageFolder(folder / "images")
    assert (ours.classes, len(ours)) == (theirs.classes, len(theirs))
    for i in range(len(theirs)):
        assert torch.equal(ours[i][0], theirs[i][0])
        assert ours[i][1] == theirs[i][1]


def test_files_that_a_commit_leaves_unchanged_stay_in_the_cache(
    fake_hub: FakeHub, folder: Path, tmp_path: Path, proxies: Proxies
) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, folder)
    url, expected = f"{fake_hub.server.url}/{name}", read(folder / "train", fake_hub)
    _, proxy = proxies  # The proxy counts the bytes that are fetched.
    # Fetch all fields: otherwise, reading ahead later may also fetch the bytes between two labels.
    list(ShardDataset(f"{url}/train", storage_options=fake_hub.server.options, cache=tmp_path / "cache"))
    assert proxy.counts().num_bytes
    proxy.reset()
    (folder / "README.md").write_text("new")
    commit = fake_hub.commit(name, folder)
    client().close()
    for revision in "", f"@{commit}":
        assert read(f"{url}{revision}/train", fake_hub, cache=tmp_path / "cache") == expected
    assert proxy.counts().num_requests == 0


def test_commands_read_repositories_only(fake_hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.commit("commands", folder)
    monkeypatch.setenv("HF_ENDPOINT", fake_hub.server.options["endpoint"])
    client().close()  # The next storage process starts with the new environment variable.
    url = f"{fake_hub.server.url}/commands/train"
    rows, expected_rows = (json.loads(run("info", source, "--json").stdout) for source in (url, folder / "train"))
    assert rows.keys() == expected_rows.keys()
    assert (rows["samples"], rows["shards"]) == (expected_rows["samples"], expected_rows["shards"])
    run("doctor", url, "--seconds", "0.01", "--json")
    with pytest.raises(PackError, match=r"cannot write to (hf://datasets/org/a/): \1 is read-only for shardio"):
        shardio.pack(folder / "images", f"{fake_hub.server.url}/a")
    client().close()
