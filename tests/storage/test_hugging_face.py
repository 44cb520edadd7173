"""Datasets in repositories of the Hugging Face Hub are read like local ones, and only what is not in the cache."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import shardio
from shardio import DataLoader, ImageFolder, ShardDataset
from shardio.cli.main import app
from shardio.errors import PackError
from shardio.storage.remote.client import client
from tests.faults.proxy import FaultProxy
from tests.servers.fake_hub import FakeHub
from tests.servers.fixtures import fake_hub
from tests.sources import write_images
from tests.storage.packing_images import pack_images
from tests.tars import write_tar

__all__ = ["fake_hub"]

Rows = list[tuple[str, int]]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The folder that is uploaded, with a dataset in ``train``."""
    write_images(tmp_path / "images")
    pack_images(tmp_path / "images", tmp_path / "files" / "train")
    return tmp_path / "files"


@pytest.fixture
def proxy(fake_hub: FakeHub) -> Iterator[FaultProxy]:
    """A proxy before the server of large files, which counts what is fetched."""
    with FaultProxy(fake_hub.server.host, fake_hub.storage_port) as proxy:
        fake_hub.redirect_to(proxy.host, proxy.port)
        yield proxy
        fake_hub.redirect_to(fake_hub.server.host, fake_hub.storage_port)


def read(source: str | Path, fake_hub: FakeHub, num_workers: int = 0, cache: Path | None = None) -> Rows:
    """Return the keys and labels of an epoch, in its order."""
    return list(read_rows(source, fake_hub, num_workers, cache))


def read_rows(
    source: str | Path, fake_hub: FakeHub, num_workers: int = 0, cache: Path | None = None
) -> Iterator[tuple[str, int]]:
    options = fake_hub.server.options if str(source).startswith("hf:") else None
    dataset = ShardDataset(source, shuffle=True, fields=("key", "label"), storage_options=options, cache=cache)
    for keys, labels in DataLoader(dataset, batch_size=4, num_workers=num_workers):
        yield from zip(keys, labels.tolist(), strict=True)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("path", ["train", "train/shardio.json"])
def test_a_packed_dataset_is_read_like_the_local_one(
    fake_hub: FakeHub, local: Path, path: str, num_workers: int
) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, local, revision="v1.0")
    expected = read(local / path, fake_hub)
    assert read(f"{fake_hub.server.url}/{name}@v1.0/{path}", fake_hub, num_workers=num_workers) == expected


def test_class_folders_are_read_like_local_ones(fake_hub: FakeHub, tmp_path: Path) -> None:
    write_images(tmp_path / "files" / "train")
    name = uuid.uuid4().hex
    fake_hub.commit(name, tmp_path / "files")
    local = ImageFolder(tmp_path / "files" / "train")
    remote = ImageFolder(f"{fake_hub.server.url}/{name}/train", storage_options=fake_hub.server.options)
    assert remote.classes == local.classes
    assert len(remote) == len(local)
    for i in range(len(local)):
        (found, label), (expected, expected_label) = remote[i], local[i]
        assert np.array_equal(found, expected)
        assert label == expected_label


def test_a_commit_during_an_epoch_does_not_change_it(fake_hub: FakeHub, local: Path, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, local)
    expected = read(local / "train", fake_hub)
    found = read_rows(f"{fake_hub.server.url}/{name}/train", fake_hub)
    rows = [next(found) for _ in range(3)]
    write_images(tmp_path / "other", per_class=9)
    pack_images(tmp_path / "other", tmp_path / "new" / "train")
    fake_hub.commit(name, tmp_path / "new")
    assert rows + list(found) == expected
    client().close()  # Another run.
    assert read(f"{fake_hub.server.url}/{name}/train", fake_hub) == read(tmp_path / "new" / "train", fake_hub)


def test_files_that_a_commit_leaves_unchanged_stay_in_the_cache(
    fake_hub: FakeHub, local: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    name = uuid.uuid4().hex
    fake_hub.commit(name, local)
    url, expected = f"{fake_hub.server.url}/{name}", read(local / "train", fake_hub)
    assert read(f"{url}/train", fake_hub, cache=tmp_path / "cache") == expected
    assert proxy.counts().num_bytes
    proxy.reset()
    (local / "README.md").write_text("new")
    commit = fake_hub.commit(name, local)
    client().close()
    for revision in "", f"@{commit}":
        assert read(f"{url}{revision}/train", fake_hub, cache=tmp_path / "cache") == expected
    assert proxy.counts().num_requests == 0


def test_tars_of_other_tools_are_indexed_in_the_users_cache_folder(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "files").mkdir()
    contents = {f"{i:03d}": np.random.default_rng(i).bytes(1000) for i in range(20)}
    write_tar(tmp_path / "files" / "a-0.tar", [(f"{key}.bin", content) for key, content in contents.items()])
    name = uuid.uuid4().hex
    fake_hub.commit(name, tmp_path / "files")
    for source in f"{name}/a-{{0..0}}.tar", name:
        url = f"{fake_hub.server.url}/{source}"
        assert dict(ShardDataset(url, fields=("key", "bin"), storage_options=fake_hub.server.options)) == contents


def test_nothing_is_packed_into_a_repository(fake_hub: FakeHub, tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    with pytest.raises(PackError, match=r"cannot write to hf://datasets/org/a/: .* Hub are read-only"):
        shardio.pack(tmp_path / "images", f"{fake_hub.server.url}/a")


def test_commands_read_repositories(fake_hub: FakeHub, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    client().close()
