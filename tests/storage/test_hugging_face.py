"""Datasets in repositories of the Hugging Face Hub are read like local ones, and only what is not in the cache."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import shardio
from shardio import DataLoader, ImageFolder, ShardDataset
from shardio.cli.main import app
from shardio.errors import PackError
from shardio.storage.client import client
from tests.faults.proxy import FaultProxy
from tests.servers.fake_hub import FakeHub
from tests.sources import write_images


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The folder that is uploaded, with class folders in ``images`` and a dataset in ``train``."""
    write_images(tmp_path / "files" / "images")
    shardio.pack(tmp_path / "files" / "images", tmp_path / "files" / "train", max_shard_samples=5)
    return tmp_path / "files"


def read(
    source: str | Path, fake_hub: FakeHub, num_workers: int = 0, cache: Path | None = None
) -> Iterator[tuple[str, int]]:
    options = fake_hub.server.options if str(source).startswith("hf:") else None
    dataset = ShardDataset(source, shuffle=True, fields=("key", "label"), storage_options=options, cache=cache)
    for keys, labels in DataLoader(dataset, batch_size=4, num_workers=num_workers):
        yield from zip(keys, labels.tolist(), strict=True)


def test_a_dataset_and_class_folders_are_read_like_local_ones(fake_hub: FakeHub, local: Path) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, local, revision="v1.0")
    url = f"{fake_hub.server.url}/{name}@v1.0"
    for path, num_workers in (("train", 1), ("train/shardio.json", 0)):
        assert list(read(f"{url}/{path}", fake_hub, num_workers)) == list(read(local / path, fake_hub))
    ours = ImageFolder(f"{url}/images", storage_options=fake_hub.server.options)
    theirs = ImageFolder(local / "images")
    assert (ours.classes, len(ours)) == (theirs.classes, len(theirs))
    for i in range(len(theirs)):
        assert torch.equal(ours[i][0], theirs[i][0])
        assert ours[i][1] == theirs[i][1]


def test_files_that_a_commit_leaves_unchanged_stay_in_the_cache(fake_hub: FakeHub, local: Path, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, local)
    url, expected = f"{fake_hub.server.url}/{name}", list(read(local / "train", fake_hub))
    with FaultProxy(fake_hub.server.host, fake_hub.storage_port) as proxy:  # It counts what is fetched.
        fake_hub.redirect_to(proxy.host, proxy.port)
        assert list(read(f"{url}/train", fake_hub, cache=tmp_path / "cache")) == expected
        assert proxy.counts().num_bytes
        proxy.reset()
        (local / "README.md").write_text("new")
        commit = fake_hub.commit(name, local)
        client().close()
        for revision in "", f"@{commit}":
            assert list(read(f"{url}{revision}/train", fake_hub, cache=tmp_path / "cache")) == expected
        assert proxy.counts().num_requests == 0
        fake_hub.redirect_to(fake_hub.server.host, fake_hub.storage_port)


def test_commands_read_repositories_and_nothing_is_packed_into_one(
    fake_hub: FakeHub, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub.commit("commands", local)
    monkeypatch.setenv("HF_ENDPOINT", fake_hub.server.options["endpoint"])
    client().close()  # So that the storage process sees this variable.
    url = f"{fake_hub.server.url}/commands/train"
    found, expected = (CliRunner().invoke(app, ["info", str(source), "--json"]) for source in (url, local / "train"))
    assert found.exit_code == 0, found.stderr
    rows, expected_rows = json.loads(found.stdout), json.loads(expected.stdout)
    assert rows.keys() == expected_rows.keys()
    assert (rows["samples"], rows["shards"]) == (expected_rows["samples"], expected_rows["shards"])
    done = CliRunner().invoke(app, ["doctor", url, "--seconds", "0.01", "--json"])
    assert done.exit_code == 0, done.stderr
    with pytest.raises(PackError, match=r"cannot write to hf://datasets/org/a/: .* Hub are read-only"):
        shardio.pack(local / "images", f"{fake_hub.server.url}/a")
    client().close()
