"""The emulation of the Hub serves what huggingface_hub expects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, HfFileSystem, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from tests.servers.fake_hub import FakeHub
from tests.servers.fake_hub_program import READER, STRANGER
from tests.servers.fixtures import fake_hub

__all__ = ["fake_hub"]

pytestmark = pytest.mark.slow

CONTENTS = {"shardio.json": b'{"a": 1}', "train/a b%20+ü.tar": os.urandom(300_000), "empty": b""}
CONTENTS |= {f"train/many/{i}": b"%d" % i for i in range(12)}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, content in CONTENTS.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "files"


def test_the_hubs_own_library_reads_all_files(fake_hub: FakeHub, files: Path, tmp_path: Path) -> None:
    commit = fake_hub.commit("library", files, revision="feature/new")
    endpoint = fake_hub.server.options["endpoint"]
    assert HfApi(endpoint=endpoint).dataset_info("org/library", revision="feature/new").sha == commit
    system = HfFileSystem(endpoint=endpoint, token=False)
    root = "datasets/org/library@feature%2Fnew"
    assert system.find(root) == sorted(f"{root}/{name}" for name in CONTENTS)
    assert system.info(f"{root}/train/many/3")["size"] == 1
    with pytest.raises(FileNotFoundError):
        system.info(f"{root}/train/many/13")
    for name in ["shardio.json", "train/a b%20+ü.tar", "empty", "train/many/11"]:
        assert system.cat(f"{root}/{name}") == CONTENTS[name]
        with system.open(f"{root}/{name}", block_size=1000) as file:
            file.seek(3)
            assert file.read(5) == CONTENTS[name][3:8]
        place: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "endpoint": endpoint}
        path = hf_hub_download("org/library", name, cache_dir=tmp_path / "cache", **place)
        assert Path(path).read_bytes() == CONTENTS[name]
        found = get_hf_file_metadata(hf_hub_url("org/library", name, **place))
        assert (found.size, found.commit_hash) == (len(CONTENTS[name]), commit)


@pytest.mark.parametrize(
    ("name", "token", "error"),
    [
        ("missing", False, RepositoryNotFoundError),
        ("missing", READER, RepositoryNotFoundError),
        ("private", STRANGER, RepositoryNotFoundError),
        ("private", "hf_wrong", HfHubHTTPError),
        ("gated", False, GatedRepoError),
        ("gated", STRANGER, GatedRepoError),
    ],
)
def test_the_hubs_own_library_reports_what_may_not_be_read(
    fake_hub: FakeHub, files: Path, name: str, token: str | bool, error: type[Exception]
) -> None:
    fake_hub.commit("private", files, is_private=True)
    fake_hub.commit("gated", files, is_gated=True)
    endpoint = fake_hub.server.options["endpoint"]
    url = hf_hub_url(f"org/{name}", "shardio.json", repo_type="dataset", endpoint=endpoint)
    with pytest.raises(error):
        get_hf_file_metadata(url, token=token)
    assert get_hf_file_metadata(url.replace(name, "private"), token=READER).size == len(CONTENTS["shardio.json"])
    with pytest.raises(RevisionNotFoundError):
        HfApi(endpoint=endpoint).dataset_info("org/private", revision="none", token=READER)
