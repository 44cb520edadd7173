"""All storage backends pass the conformance suite. A dataset is read from any store, and by nothing but its store."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from shardio.errors import FormatError
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, open_table, write_manifest, write_shard
from shardio.storage import Location, RemoteAccess, make_access, parse_location
from shardio.testing.store import Fill, MakeRoot, StoreTests
from tests.memory_store import MemoryStore
from tests.servers.fake_hub import FakeHub
from tests.servers.server import Server
from tests.storage.conftest import at_server, in_memory, put
from tests.tars import write_tar


class TestLocal(StoreTests):
    @pytest.fixture
    def make_root(self) -> MakeRoot:
        return parse_location


class TestObjectStore(StoreTests):
    @pytest.fixture
    def make_root(self) -> MakeRoot:
        return lambda folder: in_memory(folder.name)


class TestCachedStore(StoreTests):
    max_examples = 8

    @pytest.fixture
    def make_root(self) -> MakeRoot:
        return lambda folder: in_memory(folder.name, make_access(cache=folder / "cache", cache_size="100MB"))


class TestMemoryOfTests(StoreTests):
    @pytest.fixture
    def make_root(self) -> MakeRoot:
        store = MemoryStore()
        return lambda folder: store.at(f"{uuid.uuid4().hex}/{folder.name}")


class TestHub(StoreTests):
    keys = tuple(key.replace("[]", "") for key in StoreTests.keys)  # The Hub refuses these characters.
    is_read_only = True

    @pytest.fixture
    def fill(self, fake_hub: FakeHub, tmp_path: Path) -> Fill:
        def fill(contents: Mapping[str, bytes]) -> Location:
            for key, content in contents.items():
                put(parse_location(tmp_path / "files" / key), content)
            name = uuid.uuid4().hex
            fake_hub.commit(name, tmp_path / "files")
            return at_server(fake_hub.server, name)

        return fill


@pytest.mark.slow
class TestServers(StoreTests):
    keys = tuple(key.replace("\\", "") for key in StoreTests.keys)  # SeaweedFS and Azurite store it as a slash.
    max_examples = 1

    @pytest.fixture(params=["seaweedfs_server", "fake_gcs_server", "azurite_server"])
    def make_root(self, request: pytest.FixtureRequest) -> MakeRoot:
        server: Server = request.getfixturevalue(request.param)
        return lambda folder: at_server(server, f"{uuid.uuid4().hex}/{folder.name}")


SAMPLES = [Sample(key=f"ü/{i}", fields={"cls": b"%d" % i, "jpg": bytes([i]) * 1000 * i}, origin="") for i in range(40)]
EXPECTED = [(sample.key, dict(sample.fields)) for sample in SAMPLES]


@pytest.fixture(params=["local", "memory", "cached"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, RemoteAccess]:
    """A folder's name and the access to it."""
    access = make_access(cache=tmp_path / "cache") if request.param == "cached" else RemoteAccess()
    return str(tmp_path / "root" if request.param == "local" else in_memory("root")), access


def read_all(source: str | list[str | Path], access: RemoteAccess) -> list[tuple[str, dict[str, bytes]]]:
    table = open_table(source, access)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["cls", "jpg"])
    return [(sample.key, dict(sample.fields)) for sample in samples]


def test_a_packed_dataset_is_read_from_any_store(place: tuple[str, RemoteAccess]) -> None:
    name, access = place
    root = parse_location(name, access)
    shards = [write_shard(root / f"shard-{i:06d}.tar", SAMPLES[i * 20 : i * 20 + 20])[0] for i in range(2)]
    write_manifest(root / MANIFEST_NAME, Manifest(shards=tuple(shards), fields=("cls", "jpg")))
    for source in (name, f"{name}/{MANIFEST_NAME}", f"{name}/shard-{{000000..000001}}.tar"):
        assert read_all(source, access) == EXPECTED
    (root / MANIFEST_NAME).remove()
    with pytest.raises(FormatError, match=r"root holds shards .*\(2, .* but no shardio\.json"):
        open_table(name, access)


@pytest.mark.filterwarnings("ignore:the members of some samples")
@pytest.mark.parametrize("is_adjacent", [True, False])
def test_tars_of_other_tools_are_indexed_in_any_store(
    place: tuple[str, RemoteAccess], tmp_path: Path, is_adjacent: bool
) -> None:
    name, access = place
    root = parse_location(name, access)
    members = [(f"{key}.{field}", content) for key, fields in EXPECTED for field, content in fields.items()]
    write_tar(tmp_path / "x", members if is_adjacent else members[1::2] + members[::2])
    for _ in range(2):  # The second time, the index is there.
        put(root / "a.tar", (tmp_path / "x").read_bytes())
        assert read_all(name, access) == read_all([f"{name}/a.tar"], access) == EXPECTED
    assert root.list() == ["a.tar", "a.tar.idx"]
    with pytest.raises(FormatError, match=r"a\.tar is named twice"):
        open_table([f"{name}/a.tar", f"{name}/a.tar"], access)
