"""Class folders and shards in an object store are read like local ones, and each byte is fetched once."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardWriter
from shardio.datasets import unwrap
from shardio.errors import FormatError, SampleError, StoreError
from shardio.storage import Location
from tests.faults.proxy import KINDS, FaultProxy, Script
from tests.raising import assert_raises
from tests.servers.server import Server
from tests.sources import encode, write_images
from tests.storage.conftest import at_server, options_of, put, put_all

NUM_IMAGES = 3 * 20


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_images(root, per_class=NUM_IMAGES // 3)
    (root / "class-0" / "ü b").mkdir()
    (root / "class-0" / "name-000.jpg").rename(root / "class-0" / "ü b" / "a+b%20.jpg")
    (root / "class-0" / "notes.txt").write_text("not an image")
    (root / "class-0" / ".hidden.jpg").write_bytes(b"")
    (root / "README.md").write_text("not in a class")
    return root


@pytest.fixture(scope="module")
def bucket(seaweedfs_server: Server, local: Path) -> Location:
    return put_all(local, at_server(seaweedfs_server, uuid.uuid4().hex))


@pytest.fixture
def remote(bucket: Location, behind: Server, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    there = at_server(behind, bucket.key)
    return str(there), {"storage_options": options_of(there), "cache": tmp_path / "cache"}


def read_gets(proxy: FaultProxy) -> Counter[str]:
    return Counter(each.path for each in proxy.requests() if each.method in ("GET", "HEAD") and ".jpg" in each.path)


def test_samples_labels_and_identity_are_those_of_the_local_folder(remote: Any, local: Path, proxy: FaultProxy) -> None:
    url, options = remote
    ours, theirs = ImageFolder(url, **options), ImageFolder(local)
    assert (ours.root, ours.classes, ours.digest) == (url, theirs.classes, theirs.digest)
    assert [(path.removeprefix(url), label) for path, label in ours.samples] == [
        (path.removeprefix(str(local)), label) for path, label in theirs.samples
    ]
    assert not read_gets(proxy)  # The listing suffices.
    copy = pickle.loads(pickle.dumps(ours))
    assert torch.equal(copy[3][0], theirs[3][0])
    with pytest.raises(FileNotFoundError, match=f"{url}/class-0/ü b has no class folders"):
        ImageFolder(f"{url}/class-0/ü b", **options)


LOADERS: dict[str, Any] = {
    "order": lambda data: DataLoader(data, batch_size=7, num_workers=2, sampler=EpochSampler(data, batch_size=7)),
    "sampler": lambda data: DataLoader(data, 7, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "subset": lambda data: DataLoader(Subset(data, range(0, len(data), 2)), batch_size=7),
    "concat": lambda data: DataLoader(ConcatDataset([data, data]), batch_size=7, num_workers=1),
    "torch": lambda data: torch.utils.data.DataLoader(data, batch_size=7, num_workers=1),
}


@pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS.keys())
def test_batches_are_local_and_images_requested_once(
    remote: Any, local: Path, proxy: FaultProxy, make_loader: Any
) -> None:
    url, options = remote
    ours, theirs = make_loader(ImageFolder(url, **options)), make_loader(ImageFolder(local))
    for numbers_of_requests in ({1}, set()):  # The second epoch comes from the cache.
        for (images, labels), (expected, their_labels) in zip(ours, theirs, strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(labels, their_labels)
        assert set(read_gets(proxy).values()) == numbers_of_requests
        proxy.reset()


def test_what_is_planned_is_in_the_cache_afterwards(remote: Any) -> None:
    url, options = remote
    data = ImageFolder(url, **options)
    reader: Any = data.reader
    parts = unwrap(ConcatDataset([Subset(data, range(10, 20)), data]))
    for samples, indices, expected in [
        (data.remote_samples(), [3, 1, 3], [3, 1]),
        (parts.dataset.remote_samples(), [0, 9, 10 + 25], [10, 19, 25]),
    ]:
        keys = [reader.find_key(data.samples[index][0]) for index in expected]
        assert [reader.files.read_present(key) for key in keys] == [None] * len(keys)
        for fetch in samples.plan(np.array(indices)):
            fetch()
        assert None not in [reader.files.read_present(key) for key in keys]


def test_a_second_run_reads_the_cache_and_the_kept_listing(remote: Any, proxy: FaultProxy, tmp_path: Path) -> None:
    url, options = remote
    listing = tmp_path / "kept" / "listing.json"

    def read_all() -> int:
        """Return the number of requests for images."""
        proxy.reset()
        data = ImageFolder(url, **options, listing=listing)
        assert sum(len(labels) for _, labels in DataLoader(data, batch_size=20)) == NUM_IMAGES
        return read_gets(proxy).total()

    assert read_all() == NUM_IMAGES
    read_all()
    assert not proxy.requests()
    assert [path.name for path in listing.parent.iterdir()] == ["listing.json"]
    for path in (tmp_path / "cache").glob("*.copy"):  # A power failure may leave a damaged copy.
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    assert 1 <= read_all() < NUM_IMAGES
    with pytest.raises(FormatError, match=rf"{listing} is the listing of {url}, not of {url}/class-0"):
        ImageFolder(f"{url}/class-0", **options, listing=listing)
    listing.write_bytes(listing.read_bytes()[:-1])
    with pytest.raises(FormatError, match=rf"{listing} is not a listing: .*Delete it"):
        ImageFolder(url, **options, listing=listing)


LISTING = """
import json, sys, shardio
url, options, listing = json.loads(sys.argv[1])
print(shardio.ImageFolder(url, **options, listing=listing).digest)
"""


@pytest.mark.slow
def test_processes_that_start_together_list_the_folder_once(remote: Any, proxy: FaultProxy, tmp_path: Path) -> None:
    url, options = remote
    ImageFolder(url, **options)
    num_lists = sum("list-type" in each.path for each in proxy.requests())
    proxy.reset()
    proxy.set(Script(latency_s=0.3))
    options["cache"] = str(options["cache"])
    command = [sys.executable, "-c", LISTING, json.dumps([url, options, str(tmp_path / "listing")])]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {process.communicate()[0] for process in processes}
    assert ([process.returncode for process in processes], len(digests)) == ([0, 0, 0], 1)
    assert sum("list-type" in each.path for each in proxy.requests()) == num_lists


@pytest.fixture
def changing(behind: Server, tmp_path: Path) -> tuple[Location, str, dict[str, Any]]:
    write_images(tmp_path / "images", per_class=2)
    folder = put_all(tmp_path / "images", at_server(behind, uuid.uuid4().hex))
    return folder, str(folder), {"storage_options": options_of(folder)}


def test_images_that_changed_since_they_were_listed_are_named(changing: Any, tmp_path: Path) -> None:
    folder, url, options = changing
    data = ImageFolder(url, **options, listing=tmp_path / "listing")
    keys = [path.removeprefix(f"{url}/") for path, _ in data.samples]
    put(folder / keys[1], encode(200))
    (folder / keys[2]).remove()
    for index, cause in [(1, "was replaced while it was in use"), (2, "does not exist")]:
        message = rf"the image {url}/{keys[index]} cannot be read: .*{cause}.*listing"
        raised = assert_raises(SampleError, message, data.__getitems__, [0, index, 3])
        assert (raised.row, raised.key, raised.where) == (1, f"{url}/{keys[index]}", url)
    loader = DataLoader(data, batch_size=6, on_error="skip", quarantine=tmp_path / "list.jsonl")
    with pytest.warns(RuntimeWarning, match="unreadable samples skipped: 2"):
        assert [len(labels) for _, labels in loader] == [4]


def test_images_that_are_not_listed_are_read_all_the_same(changing: Any, proxy: FaultProxy) -> None:
    folder, url, options = changing
    options["storage_options"] |= {"retries": 1}
    data = ImageFolder(url, **options)
    content = encode(7, suffix="png")
    put(folder / "other.png", content)
    data.samples = [*data.samples, (f"{url}/other.png", 1)]
    assert np.array_equal(data[-1][0].permute(1, 2, 0), np.asarray(Image.open(io.BytesIO(content))))
    proxy.set(Script(faults={"status_503": 1.0}))  # HTTP errors do not mean that the image is damaged.
    assert_raises(StoreError, "after 2 attempts", lambda: data[0])


@pytest.mark.slow
def test_no_fault_changes_an_image(remote: Any, local: Path, proxy: FaultProxy) -> None:
    url, options = remote
    options["storage_options"] |= {"timeout_s": 0.5, "retries": 999}
    theirs = ImageFolder(local)
    expected = [theirs[index][0] for index in range(NUM_IMAGES)]
    data = ImageFolder(url, **options)
    rate = 0.4 / len(KINDS)
    # Requests for whole images are unconditional, so a server cannot answer that the object has changed.
    proxy.set(Script(seed=3, faults=dict.fromkeys([each for each in KINDS if each != "changed_object"], rate)))
    found = [image for images, _ in DataLoader(data, batch_size=8, num_workers=2) for image in images]
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    assert sum(proxy.counts().num_faults.values()) > 5


# Shards: a rank fetches only its share of an epoch, once and in few requests

NUM_SAMPLES, NUM_SHARDS = 600, 12


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, content = tmp_path_factory.mktemp("read-ahead") / "data", np.random.default_rng(0)
    with ShardWriter(folder, max_shard_samples=NUM_SAMPLES // NUM_SHARDS) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:04d}", "bin": content.bytes(int(content.integers(20_000, 40_000)))})
    return folder


@pytest.fixture(scope="module")
def stored(seaweedfs_server: Server, shards: Path) -> Location:
    return put_all(shards, at_server(seaweedfs_server, uuid.uuid4().hex))


@pytest.fixture
def remote_shards(stored: Location, behind: Server, proxy: FaultProxy) -> Location:
    proxy.set(Script(latency_s=0.01))
    return at_server(behind, stored.key)


@pytest.mark.parametrize(
    ("loader_type", "world_size", "shuffle"),
    [
        (DataLoader, 1, True),
        pytest.param(DataLoader, 3, False, marks=pytest.mark.slow),
        (torch.utils.data.DataLoader, 2, True),
        (torch.utils.data.DataLoader, 1, False),
    ],
)
def test_a_rank_fetches_its_share_once(
    remote_shards: Location, shards: Path, proxy: FaultProxy, shuffle: bool, world_size: int, loader_type: type
) -> None:
    settings: dict[str, Any] = {"window": 300, "strata": 4} if shuffle else {}
    settings |= {"rank": 0, "world_size": world_size, "remainder": "keep", "batch_size": 20, "fields": ("key", "bin")}
    datasets = [
        ShardDataset(str(remote_shards), shuffle=shuffle, **settings, storage_options=options_of(remote_shards)),
        ShardDataset(shards, shuffle=shuffle, **settings),
    ]
    proxy.reset()
    loader, theirs = (loader_type(each, batch_size=20, num_workers=2) for each in datasets)
    expected = list(map(list, theirs))
    assert list(map(list, loader)) == expected
    num_bytes = sum(len(content) for _, contents in expected for content in contents)
    gets = [each for each in proxy.requests() if each.method == "GET" and each.path.endswith(".tar")]
    assert sum(each.num_bytes for each in gets) <= 1.05 * num_bytes
    if world_size == 1:  # Reading the samples one by one would need at least 600 requests.
        assert len(gets) < 300
        proxy.reset()
        assert len(list(loader)) == len(expected)
        assert not [each for each in proxy.requests() if each.range is not None], "the next epoch fetches nothing"


def test_parts_of_a_large_index_are_fetched(
    seaweedfs_server: Server, behind: Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    with ShardWriter(tmp_path) as writer:
        for number in range(24_000):
            writer.write({"__key__": f"{number:05d}", "txt": b"%d" % number, "cls": b"1"})
    remote = at_server(behind, put_all(tmp_path, at_server(seaweedfs_server, uuid.uuid4().hex)).key)
    num_index_bytes = (tmp_path / "shard-000000.tar.idx").stat().st_size
    settings: dict[str, Any] = {"shuffle": True, "fields": ("key", "txt"), "world_size": 8, "batch_size": 64}
    dataset = ShardDataset(str(remote), rank=3, **settings, storage_options=options_of(remote))
    proxy.reset()
    assert [int(key) == int(text) for key, text in dataset] == [True] * 3000
    gets = [each for each in proxy.requests() if each.method == "GET" and each.path.endswith(".idx")]
    assert len(gets) < 100
    assert sum(each.num_bytes for each in gets) < num_index_bytes / 4


def test_damaged_parts_of_indexes_are_fetched_again(
    remote_shards: Location, shards: Path, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.storage.remote.MAX_WHOLE", 0)
    monkeypatch.setattr("shardio.shards.shard_index.MAX_KEPT", 0)
    settings: dict[str, Any] = {"shuffle": True, "fields": ("key", "bin"), "batch_size": 8}
    expected = list(ShardDataset(shards, **settings))
    for number in range(5):
        options: dict[str, Any] = {"storage_options": options_of(remote_shards), "cache": tmp_path / str(number)}
        remote = ShardDataset(str(remote_shards), **settings, **options)
        proxy.set(Script(faults={"corrupt": 0.1}, max_faults=4))
        assert list(remote) == expected
        assert proxy.counts().num_faults["corrupt"]
