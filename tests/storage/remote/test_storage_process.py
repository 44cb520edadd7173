"""All processes of a run share a storage process. It is restarted if it dies, and ends after the last of them."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from shardio.storage import Location, make_access, parse_location
from shardio.storage.options import RemoteOptions
from shardio.storage.remote.backends import MAX_START_DELAY_S, bound_start_delay
from shardio.storage.remote.client import Client, client
from shardio.storage.remote.messages import Create, ReadWhole, Stat
from shardio.storage.remote.storage_process import MAX_STORES
from tests.servers.fixtures import seaweedfs_server
from tests.servers.server import Server
from tests.servers.web_folder import serve_folder
from tests.storage.conftest import at_server

__all__ = ["seaweedfs_server"]


@pytest.fixture
def root(seaweedfs_server: Server) -> Location:
    return at_server(seaweedfs_server, uuid.uuid4().hex)


def put(location: Location, content: bytes) -> Location:
    with location.write_whole() as file:
        file.write(content)
    return location


def storage_process_id() -> int:
    process = client()._process
    assert process is not None
    return process.pid


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < deadline, "the storage process has not ended"
        time.sleep(0.01)  # Between two looks.


class Contents(Dataset[bytes]):
    """The contents of objects."""

    def __init__(self, locations: list[Location]) -> None:
        self.locations = locations

    def __getitem__(self, index: int) -> bytes:
        return self.locations[index].read_whole()

    def __len__(self) -> int:
        return len(self.locations)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_of_torch_read_what_their_parent_has_read(root: Location, context: str) -> None:
    locations = [put(root / str(i), b"%d" % i) for i in range(8)]
    assert locations[0].read_whole() == b"0"
    folder = client().folder
    loader = DataLoader(
        Contents(locations), batch_size=None, num_workers=2, multiprocessing_context=context, collate_fn=bytes
    )
    assert list(loader) == [b"%d" % i for i in range(8)]
    assert client().folder == folder


def test_a_forked_child_has_its_own_connections(root: Location) -> None:
    location = put(root / "a", b"content")
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write_end, location.read_whole())
        finally:
            os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 100) == location.read_whole() == b"content"
    os.close(read_end)
    os.waitpid(child, 0)


def test_a_pickled_location_leads_to_the_same_storage_process() -> None:
    location = put(parse_location(f"memory://{uuid.uuid4().hex}/a"), b"in the memory of the storage process")
    program = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).read_whole().decode())"
    command = [sys.executable, "-c", program, pickle.dumps(location).hex()]
    assert subprocess.check_output(command, text=True) == "in the memory of the storage process\n"


def test_a_location_that_was_pickled_by_a_process_that_has_ended_is_read(root: Location) -> None:
    location = put(root / "a", b"content")
    program = textwrap.dedent("""
        import pickle, sys
        location = pickle.loads(bytes.fromhex(sys.argv[1]))
        location.read_whole()
        print(pickle.dumps(location).hex())
    """)
    client().close()  # So that the other process starts one of its own.
    command = [sys.executable, "-c", program, pickle.dumps(location).hex()]
    copy: Location = pickle.loads(bytes.fromhex(subprocess.check_output(command, text=True)))
    assert copy.read_whole() == b"content"


def test_a_storage_process_that_was_killed_is_replaced(root: Location) -> None:
    content = os.urandom(3_000_000)
    location = put(root / "a", content)
    file = location.open()
    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(file.read, start, start + 1_000_000) for start in range(0, 2_000_000, 50_000)]
        os.kill(storage_process_id(), signal.SIGKILL)
        assert [each.result() for each in reading] == [
            content[start : start + 1_000_000] for start in range(0, 2_000_000, 50_000)
        ]
    assert location.read_whole() == content


def test_the_folder_of_a_storage_process_that_was_killed_is_removed_at_the_end() -> None:
    put(parse_location(f"memory://{uuid.uuid4().hex}/a"), b"1")
    folder = client().folder
    assert folder is not None
    os.kill(storage_process_id(), signal.SIGKILL)
    client().close()
    assert not folder.exists()


def refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[object]]:
    """Let no storage process start. Return the list of their arguments."""
    found = list[Sequence[object]]()

    def refuse(function: str, arguments: Sequence[object], *, descriptors: Sequence[int]) -> None:
        found.append(arguments)
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("shardio.storage.remote.client.start_process", refuse)
    return found


def test_a_private_cache_outlives_a_storage_process_that_cannot_be_replaced() -> None:
    location = parse_location(f"memory://{uuid.uuid4().hex}/a", make_access())
    put(location, b"1")
    with closing(location.open()) as file:
        assert file.read(0, 1) == b"1"
    folder = client().folder
    assert folder is not None
    cached = sorted((folder / "cache").iterdir())
    assert cached
    os.kill(storage_process_id(), signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch:
        refuse_to_start(patch)
        with pytest.raises(BlockingIOError):
            location.stat()
    assert sorted((folder / "cache").iterdir()) == cached
    assert not location.exists(), "the next one starts, and has an empty memory"
    assert client().folder == folder


def test_a_storage_process_that_cannot_start_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    refuse_to_start(monkeypatch)
    with pytest.raises(BlockingIOError):
        Client().ask(Stat(root="memory://x", options=RemoteOptions(), key="a"))
    assert not list(tmp_path.iterdir())


def test_the_path_of_temporary_folders_may_be_longer_than_that_of_a_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("ü" * 60)  # 120 bytes. A socket's path has at most 107.
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    one, other = Client(), Client()
    try:
        assert one.ask(Create(root="memory://x", options=RemoteOptions(), key="a", content=b"content"))
        assert one.folder is not None
        assert one.folder.parent == long
        assert one.folder.stat().st_mode & 0o777 == 0o700, "other users cannot connect"
        other.adopt(one.folder)
        assert other.ask(ReadWhole(root="memory://x", options=RemoteOptions(), key="a")) == b"content"
    finally:
        other.close()
        one.close()
    assert list(long.iterdir()) == []


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
        deadline = time.monotonic() + 30
        while any(count(what) > most[what] + 4 for what in most):  # Some are being closed.
            assert time.monotonic() < deadline, "they are closed"
            time.sleep(0.01)  # Between two looks.


def test_the_first_requests_of_many_ranks_are_spread() -> None:
    bounds = [bound_start_delay(world_size) for world_size in range(1, 5000)]
    assert bounds == sorted(bounds)
    assert bounds[:15] == [0.0] * 15, "few ranks do not wait"
    assert 0 < bounds[15] <= bounds[-1] == MAX_START_DELAY_S


def test_a_storage_process_knows_how_many_ranks_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1000")
    arguments = refuse_to_start(monkeypatch)
    with pytest.raises(BlockingIOError):
        Client().ask(Stat(root="memory://x", options=RemoteOptions(), key="a"))
    assert arguments[0][-1] == 1000


@pytest.mark.parametrize(("world_size", "num_waits"), [(1000, 1), (8, 0)])
def test_only_the_first_request_to_a_store_waits(world_size: int, num_waits: int) -> None:
    program = textwrap.dedent(f"""
        import socket, time
        from pathlib import Path
        from shardio.storage.remote.backends import bound_start_delay
        from shardio.storage.remote.messages import Stat
        from shardio.storage.options import RemoteOptions
        from shardio.storage.remote.storage_process import StorageProcess
        waits = []
        time.sleep = waits.append
        process = StorageProcess(socket.socket(), Path("unused"), {world_size})
        for _ in range(3):
            store = process._find_store(Stat(root="memory://x", options=RemoteOptions(), key="a"))
            store.make("ask", lambda backend: None)
        assert all(0 < wait <= bound_start_delay({world_size}) for wait in waits)
        print(len(waits))
    """)
    assert int(subprocess.check_output([sys.executable, "-c", program], text=True)) == num_waits


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_it_ends_after_the_process_that_started_it(ending: str) -> None:
    program = textwrap.dedent(f"""
        import os, signal
        from shardio.storage import parse_location
        from shardio.storage.remote.client import client
        location = parse_location("memory://x/a")
        with location.write_whole() as file:
            file.write(b"1")
        print(client().folder, flush=True)
        {ending}
    """)
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    wait_until_gone(Path(done.stdout.strip()))


def test_it_lives_on_for_children_that_use_it() -> None:
    program = textwrap.dedent("""
        import os, sys, time
        from shardio.storage import parse_location
        from shardio.storage.remote.client import client
        location = parse_location("memory://x/a")
        with location.write_whole() as file:
            file.write(b"1")
        if os.fork() == 0:
            sys.stdin.read()  # Until the test has seen that the parent has ended.
            print(location.read_whole().decode(), flush=True)
            os._exit(0)
        print(client().folder, flush=True)
        os._exit(0)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.wait()
        process.stdin.close()
        assert process.stdout.read() == "1\n"
    wait_until_gone(folder)
