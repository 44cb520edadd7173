"""Files of a web server are read by ranges. They cannot be listed."""

from __future__ import annotations

import uuid
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardio import DataLoader, ShardDataset
from shardio.errors import LocationError
from shardio.storage import Location, ReplacedError, parse_location
from tests.servers.fixtures import WebServer, nginx_server
from tests.sources import write_images
from tests.storage.packing_images import pack_images

__all__ = ["nginx_server"]

CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def site(nginx_server: WebServer) -> tuple[Location, Path]:
    """A folder of a web server: its URL and its path."""
    name = uuid.uuid4().hex
    (nginx_server.files / name).mkdir()
    return parse_location(f"{nginx_server.server.url}/{name}"), nginx_server.files / name


def test_a_file_is_read_by_ranges(site: tuple[Location, Path]) -> None:
    root, folder = site
    (folder / "a b%20é.tar").write_bytes(CONTENT)
    location = root / "a b%20é.tar"
    assert location.exists()
    assert location.read_whole() == CONTENT
    with closing(location.open()) as file:
        assert (file.size, file.version) == (len(CONTENT), location.stat().version)
        for start, stop in [(0, 1), (7, 70_000), (0, len(CONTENT)), (len(CONTENT), len(CONTENT))]:
            assert file.read(start, stop) == CONTENT[start:stop]
        with pytest.raises(EOFError, match="ends at byte 300000"):
            file.read(5, 300_001)


def test_what_is_not_there_is_missing(site: tuple[Location, Path]) -> None:
    root, _ = site
    assert not (root / "a").exists()
    with pytest.raises(FileNotFoundError, match="a"):
        (root / "a").read_whole()


def test_a_replaced_file_is_not_read_as_the_old_one(site: tuple[Location, Path]) -> None:
    root, folder = site
    (folder / "a").write_bytes(CONTENT)
    with closing((root / "a").open()) as file:
        (folder / "a").write_bytes(CONTENT[::-1][:1000])
        with pytest.raises(ReplacedError, match="was replaced"):
            file.read(0, 10)


def test_a_folder_cannot_be_listed(site: tuple[Location, Path]) -> None:
    root, folder = site
    (folder / "f").mkdir()
    (folder / "f" / "a").write_bytes(CONTENT)
    assert not (root / "f").is_folder()
    with pytest.raises(LocationError, match=r"cannot list .*: a web server does not list its files. Name a manifest"):
        (root / "f").list()


@pytest.mark.parametrize("name", ["packed", "packed/shardio.json"])
def test_a_packed_dataset_is_read_like_the_local_one(site: tuple[Location, Path], tmp_path: Path, name: str) -> None:
    root, folder = site
    write_images(tmp_path / "images")
    pack_images(tmp_path / "images", folder / "packed")
    found, expected = (
        list(DataLoader(ShardDataset(source, shuffle=True, fields=("key", "label")), batch_size=4))
        for source in (f"{root}/{name}", folder / name)
    )
    assert [(keys, labels.tolist()) for keys, labels in found] == [(keys, labels.tolist()) for keys, labels in expected]
