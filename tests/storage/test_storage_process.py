"""All processes of a run share a storage process, which is replaced if it dies or hangs, and outlives them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis.strategies import lists, sampled_from
from torch.utils.data import DataLoader

from shardio.storage import Location, copies, listing as listing_module, make_access, parse_location
from shardio.storage.client import Client, Request, client, read_process_id
from shardio.storage.listing import list_files, open_listing
from shardio.storage.locations import CacheSettings, RemoteOptions
from shardio.storage.operations import MAX_START_DELAY_S, bound_start_delay
from shardio.storage.storage_process import MAX_REFETCHED, MAX_STORES, StorageProcess, choose_parts
from tests.faults.proxy import FaultProxy, Script
from tests.faults.worker_processes import wait_until
from tests.files import suspended_holder
from tests.raising import assert_raises
from tests.servers.server import Server
from tests.servers.web_folder import serve_folder
from tests.storage.conftest import at_server, in_memory, put, storage_process_id

CONTENT = os.urandom(3_000_000)
STARTS = range(0, 2_000_000, 50_000)
PARTS = [CONTENT[start : start + 1_000_000] for start in STARTS]
WITHIN_S = 120.0  # The time limit for a call.


@pytest.fixture
def root(seaweedfs_server: Server) -> Location:
    return at_server(seaweedfs_server, uuid.uuid4().hex)


def request(operation: str, **arguments: object) -> Request:
    return Request(operation=operation, root="memory://x", options=RemoteOptions(), key="a", arguments=arguments)


def storage_folder() -> Path:
    folder = client().folder
    assert folder is not None
    return folder


def run(program: str, *arguments: str) -> str:
    return subprocess.check_output([sys.executable, "-c", textwrap.dedent(program), *arguments], text=True)


# Sharing


class Locations(list[Location]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index).read_whole()


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_of_torch_read_what_their_parent_has_read(root: Location, context: str) -> None:
    locations = [put(root / str(i), b"%d" % i) for i in range(8)]
    assert locations[0].read_whole() == b"0"
    folder = client().folder
    settings: Any = {"batch_size": None, "num_workers": 2, "multiprocessing_context": context, "collate_fn": bytes}
    loader: DataLoader[bytes] = DataLoader(Locations(locations), **settings)  # type: ignore[arg-type]  # a list of locations
    assert list(loader) == [location.read_whole() for location in locations] == [b"%d" % i for i in range(8)]
    assert client().folder == folder


def test_a_pickled_location_leads_to_the_same_storage_process_or_a_new_one(root: Location) -> None:
    program = """
        import pickle, sys
        location = pickle.loads(bytes.fromhex(sys.argv[1]))
        print(location.read_whole().decode())
        print(pickle.dumps(location).hex())
    """
    location = put(in_memory(), b"in the memory of the storage process")
    assert run(program, pickle.dumps(location).hex()).startswith("in the memory of the storage process\n")
    location = put(root / "a", b"content")
    client().close()  # The other process starts a storage process, which ends before this process reads the location.
    copy: Location = pickle.loads(bytes.fromhex(run(program, pickle.dumps(location).hex()).splitlines()[1]))
    assert copy.read_whole() == b"content"


# Death


def test_a_storage_process_that_was_killed_is_replaced(root: Location) -> None:
    location = put(root / "a", CONTENT)
    file = location.open()
    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(file.read, start, start + 1_000_000) for start in STARTS]
        os.kill(storage_process_id(), signal.SIGKILL)
        assert [each.result() for each in reading] == PARTS
    folder = storage_folder()
    os.kill(storage_process_id(), signal.SIGKILL)
    client().close()
    assert not folder.exists(), "the folder is removed at the end"


def refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[object]]:
    found = list[Sequence[object]]()

    def refuse(function: str, arguments: Sequence[object], *, descriptors: Sequence[int]) -> None:
        found.append(arguments)
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("shardio.storage.client.start_process", refuse)
    return found


def test_a_private_cache_outlives_a_storage_process_that_cannot_be_replaced() -> None:
    location = put(parse_location(f"memory://{uuid.uuid4().hex}/a", make_access()), b"1")
    with closing(location.open()) as file:
        assert file.read(0, 1) == b"1"
    folder = storage_folder()
    cached = sorted((folder / "cache").iterdir())
    assert cached
    os.kill(storage_process_id(), signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch:
        refuse_to_start(patch)
        assert_raises(BlockingIOError, None, location.stat)
    assert sorted((folder / "cache").iterdir()) == cached
    assert not location.exists(), "the next storage process starts with an empty memory"
    assert client().folder == folder


def test_a_storage_process_that_cannot_start_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1000")
    arguments = refuse_to_start(monkeypatch)
    assert_raises(BlockingIOError, None, lambda: Client().ask(request("stat")))
    assert not list(tmp_path.iterdir())
    assert arguments[0][-1] == 1000, "the storage process receives the number of ranks"


def test_the_path_of_temporary_folders_may_exceed_a_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("ü" * 60)  # The name has 120 bytes, but a socket's path has at most 107.
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    one, other = Client(), Client()
    try:
        assert one.ask(request("create", content=b"content"))
        assert one.folder
        assert one.folder.parent == long
        assert one.folder.stat().st_mode & 0o777 == 0o700, "other users cannot connect"
        other.adopt(one.folder)
        assert other.ask(request("read_whole")) == b"content"
    finally:
        other.close()
        one.close()
    assert list(long.iterdir()) == []


@pytest.mark.slow
def test_stores_that_are_not_used_any_more_cost_neither_connections_nor_threads(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3_000_000))

    def read_with(retries: int) -> None:
        access = make_access({"retries": retries}, cache=tmp_path / "cache", cache_size="1GB")
        file = parse_location(f"{url}/a", access).open()
        file.discard(0, file.size)
        file.prefetch([(0, 1_000_000), (2_000_000, 3_000_000)])

    def count(what: str) -> int:
        return len(list(Path(f"/proc/{storage_process_id()}/{what}").iterdir()))

    with serve_folder(tmp_path) as (url, _):
        for retries in range(MAX_STORES):
            read_with(retries)
        most = {what: count(what) for what in ("fd", "task")}
        for retries in range(MAX_STORES, 4 * MAX_STORES):
            read_with(retries)
        wait_until(lambda: all(count(what) <= most[what] + 4 for what in most), "the stores are closed")


# Start with many ranks


def test_the_first_requests_of_many_ranks_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = [bound_start_delay(world_size) for world_size in range(1, 5000)]
    assert bounds == sorted(bounds)
    assert bounds[:15] == [0.0] * 15, "few ranks do not wait"
    assert 0 < bounds[15] <= bounds[-1] == MAX_START_DELAY_S
    for world_size, num_waits in ((1000, 1), (8, 0)):  # Only a rank's first request to a store waits.
        waits = list[float]()
        monkeypatch.setattr("time.sleep", waits.append)
        with socket.socket() as unused:
            process = StorageProcess(unused, Path("unused"), world_size)
            for _ in range(3):
                store = process._find_store("memory://x", RemoteOptions())
                store.make("ask", "a", lambda backend: None)
        assert all(0 < wait <= bound_start_delay(world_size) for wait in waits)
        assert len(waits) == num_waits


# End

WRITE = """
import os, signal, sys
from shardio.storage import parse_location
from shardio.storage.client import client
location = parse_location("memory://x/a")
with location.write_whole() as file:
    file.write(b"1")
"""


LIVE_ON = """
if os.fork() == 0:
    sys.stdin.read()  # Until the test has seen that the parent has ended.
    print(location.read_whole().decode(), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("ending", "said"), [("pass", ""), ("os.kill(os.getpid(), signal.SIGKILL)", ""), (LIVE_ON, "1\n")]
)
def test_it_ends_after_the_process_that_started_it_and_its_children(ending: str, said: str) -> None:
    command = [sys.executable, "-c", f"{WRITE}\nprint(client().folder, flush=True)\n{ending}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.wait()
        process.stdin.close()
        assert process.stdout.read() == said
    wait_until(lambda: not folder.exists(), "it ends")


# Suspension


def send_content(location: Location, end: Connection) -> None:
    end.recv()
    end.send(location.read_whole())


def test_a_storage_process_that_is_suspended_is_replaced(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.storage.client.SILENCE_S", 0.2)
    monkeypatch.setattr("shardio.storage.client.GREETING_S", 1.0)
    location = put(root / "a", CONTENT)
    file = location.open()
    client().close()
    file.read(0, 1)
    process_id, folder = storage_process_id(), storage_folder()
    context = multiprocessing.get_context("fork")
    end, other = context.Pipe()
    child = context.Process(target=send_content, args=(location, other), daemon=True)
    child.start()
    with ThreadPoolExecutor(4) as pool:
        # Some responses are being sent, and some requests are waiting.
        reading = [pool.submit(file.read, start, start + 1_000_000) for start in STARTS]
        reading[0].result(WITHIN_S)
        os.kill(process_id, signal.SIGSTOP)  # The storage process is then killed, because it does not answer.
        end.send("go")
        assert [each.result(WITHIN_S) for each in reading] == PARTS
        assert end.poll(WITHIN_S)
        assert end.recv() == CONTENT
    child.join()
    assert client().folder == folder, "a cache in the folder is kept"
    assert read_process_id(folder) != process_id
    assert location.read_whole() == CONTENT


@pytest.mark.slow
def test_a_slow_answer_is_awaited(
    root: Location, behind: Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage process with a slow request still answers new connections, so it is not killed."""
    monkeypatch.setattr("shardio.storage.client.SILENCE_S", 0.2)
    location = put(root / "a", CONTENT)
    proxy.set(Script(latency_s=2.0))
    process_id = storage_process_id()
    assert (at_server(behind, location.key).read_whole(), storage_process_id()) == (CONTENT, process_id)


def test_locks_of_a_suspended_process_stop_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(copies, "PATIENCE_S", 0.2)
    monkeypatch.setattr(listing_module, "PATIENCE_S", 0.2)
    old = tmp_path / f"old{copies.COPY_SUFFIX}"
    old.write_bytes(bytes(1_000_000))
    with suspended_holder(tmp_path / copies.LOCK_NAME):
        copies.Budget(CacheSettings(max_bytes=500_000), tmp_path).reserve(100_000, "")
    assert not old.exists()
    folder, listing = in_memory("images"), tmp_path / "listing.json"
    put(folder / "cat/1.jpg", b"1")

    def list_late(folder: Location) -> listing_module.Listing:
        monkeypatch.setattr(listing_module, "list_files", list_files)
        open_listing(folder, listing)  # Simulate another process that saves its listing first.
        put(folder / "cat/2.jpg", b"2")
        return list_files(folder)

    monkeypatch.setattr(listing_module, "list_files", list_late)
    with suspended_holder(tmp_path / ".listing.json.lock"):
        for _ in range(2):
            assert list(open_listing(folder, listing).keys) == ["images/cat/1.jpg"]


@given(lists(sampled_from(["present", "missing", "in flight"]), max_size=16))
@example(["in flight", "present", "in flight"])
def test_ranges_in_flight_are_not_fetched_and_only_small_present_ranges_are_fetched_again(states: list[str]) -> None:
    size = MAX_REFETCHED // 2

    def ranges(*kinds: str) -> list[tuple[int, int]]:
        places = [place for place, state in enumerate(states) if state in kinds]
        firsts = [place for place in places if place - 1 not in places]
        lasts = [place for place in places if place + 1 not in places]
        return [(size * first, size * (last + 1)) for first, last in zip(firsts, lasts, strict=True)]

    parts = choose_parts(ranges("missing", "in flight"), ranges("in flight"))
    fetched = [place for start, stop in parts for place in range(start // size, stop // size)]
    assert fetched == sorted(set(fetched))
    assert {place for place, state in enumerate(states) if state == "missing"} <= set(fetched)
    assert not any(states[place] == "in flight" for place in fetched)
    assert all(states[start // size] == states[stop // size - 1] == "missing" for start, stop in parts)
    again = {place for place in fetched if states[place] == "present"}
    assert all(len(again & set(range(place, place + 3))) < 3 for place in again)
