"""A process that is suspended does not hang those that wait for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shardio.storage import Location, listing as listing_module, options, parse_location
from shardio.storage.listing import list_files, open_listing
from shardio.storage.remote import client as connection_module
from shardio.storage.remote.client import client, read_process_id
from tests.faults.proxy import FaultProxy, Script
from tests.servers.fixtures import seaweedfs_server
from tests.servers.server import Server
from tests.storage.conftest import at_server
from tests.storage.remote.test_storage_process import put, storage_process_id
from tests.test_locks import suspended_holder

__all__ = ["seaweedfs_server"]

WITHIN_S = 120.0
"""How long a test waits for what must end."""

CONTENT = os.urandom(3_000_000)


@pytest.fixture
def location(seaweedfs_server: Server) -> Location:
    return put(at_server(seaweedfs_server, uuid.uuid4().hex), CONTENT)


@contextmanager
def suspended(process_id: int) -> Iterator[None]:
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # It was killed.
            os.kill(process_id, signal.SIGCONT)


def within(call: Callable[[], object]) -> object:
    """Return what a function returns; fail if it takes too long."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(WITHIN_S)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(connection_module, "GREETING_S", 1.0)


def send_content(location: Location, end: Connection) -> None:
    """Send an object's content when told to."""
    end.recv()
    end.send(location.read_whole())


@pytest.mark.usefixtures("_impatient")
def test_a_storage_process_that_is_suspended_is_replaced(location: Location) -> None:
    file = location.open()
    client().close()
    file.read(0, 1)
    process_id, folder = storage_process_id(), client().folder
    assert folder is not None
    context = multiprocessing.get_context("fork")
    end, other = context.Pipe()
    child = context.Process(target=send_content, args=(location, other), daemon=True)
    child.start()
    starts = range(0, 2_000_000, 50_000)
    with ThreadPoolExecutor(4) as pool:
        # Some answers are on their way, some requests wait.
        reading = [pool.submit(file.read, start, start + 1_000_000) for start in starts]
        reading[0].result(WITHIN_S)
        with suspended(process_id):
            end.send("go")
            found = [each.result(WITHIN_S) for each in reading]
            assert found == [CONTENT[start : start + 1_000_000] for start in starts]
            assert end.poll(WITHIN_S)
            assert end.recv() == CONTENT
    child.join()
    assert client().folder == folder, "a cache in it is kept"
    assert read_process_id(folder) != process_id
    assert location.read_whole() == CONTENT


def test_a_long_answer_is_awaited(
    seaweedfs_server: Server, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage process that works on a request for a long time is left alone, because it greets new connections."""
    monkeypatch.setattr(connection_module, "SILENCE_S", 0.2)
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port) as proxy:
        proxy.set(Script(latency_s=2.0))
        slow = at_server(seaweedfs_server.behind(proxy.host, proxy.port), location.key)
        location.exists()
        process_id = storage_process_id()
        assert slow.read_whole() == CONTENT
    assert storage_process_id() == process_id


def test_a_lock_of_a_suspended_process_does_not_stop_making_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(options, "PATIENCE_S", 0.2)
    old = tmp_path / f"old{options.COPY_SUFFIX}"
    old.write_bytes(bytes(1_000_000))
    with suspended_holder(tmp_path / options.LOCK_NAME):
        within(lambda: options.Budget(tmp_path, 500_000).reserve(100_000, ""))
    assert not old.exists()


def test_a_folder_that_a_suspended_process_lists_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(listing_module, "PATIENCE_S", 0.2)
    folder = parse_location(f"memory://{uuid.uuid4().hex}/images")
    put(folder / "cat/1.jpg", b"1")
    with suspended_holder(tmp_path / ".listing.json.lock"):
        within(lambda: open_listing(folder, tmp_path / "listing.json"))
    found = open_listing(folder, tmp_path / "listing.json")
    assert list(found.keys) == list(list_files(folder).keys) == ["images/cat/1.jpg"]


def test_all_processes_use_the_listing_that_was_kept_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that was suspended while it listed the folder does not replace what others use by now."""
    folder = parse_location(f"memory://{uuid.uuid4().hex}/images")
    put(folder / "cat/1.jpg", b"1")

    def list_late(folder: Location) -> listing_module.Listing:
        monkeypatch.setattr(listing_module, "list_files", list_files)
        open_listing(folder, tmp_path / "listing.json")  # Another process, which goes on without the lock.
        put(folder / "cat/2.jpg", b"2")
        return list_files(folder)

    monkeypatch.setattr(listing_module, "list_files", list_late)
    monkeypatch.setattr(listing_module, "PATIENCE_S", 0.1)
    found = open_listing(folder, tmp_path / "listing.json")
    assert list(found.keys) == list(open_listing(folder, tmp_path / "listing.json").keys) == ["images/cat/1.jpg"]
