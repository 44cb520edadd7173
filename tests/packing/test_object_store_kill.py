"""A pack into an object store that is killed before any of its changes: nothing half-written passes for a dataset."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import FormatError, PackError
from shardio.shards import MANIFEST_NAME, UNFINISHED_NAME, open_table
from shardio.storage import Location, parse_location
from shardio.storage.client import Client, Request
from tests.files import read_files, read_objects
from tests.processes import forkserver_context
from tests.sources import write_images

pytestmark = pytest.mark.slow


NUM_CHANGES = 16
"""Changes in a pack into three shards: the mark; a tar, its index and its record for each shard; the list of rejected
samples, which is removed; the manifest; the removal of the mark and of three records."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kill") / "in"
    write_images(root, classes=3, per_class=3, width=8, height=8)
    return root


@pytest.fixture(scope="module")
def uninterrupted(source: Path) -> dict[str, bytes]:
    shardio.pack(source, source.parent / "uninterrupted", max_shard_samples=3)
    return read_files(source.parent / "uninterrupted")


def pack_and_die(source: Path, out: Location, n: int) -> None:
    """Pack, and kill this process right before its n-th change.

    The location has brought the address of the storage process, whose memory holds the objects.
    """
    ask, num_changes = Client.ask, 0

    def ask_or_die(client: Client, request: Request) -> Any:
        nonlocal num_changes
        if request.operation in ("write", "create", "remove"):
            num_changes += 1
            if num_changes == n:
                os.kill(os.getpid(), signal.SIGKILL)
        return ask(client, request)

    Client.ask = ask_or_die  # type: ignore[method-assign, assignment]  # In a process of its own.
    shardio.pack(source, str(out), max_shard_samples=3, num_workers=1)


def exit_code_of_pack(source: Path, out: Location, n: int) -> int | None:
    out.list()  # The storage process runs.
    process = forkserver_context().Process(target=pack_and_die, args=(source, out, n))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("n", range(1, NUM_CHANGES + 1))
def test_a_pack_killed_before_any_change_can_be_resumed(source: Path, uninterrupted: dict[str, bytes], n: int) -> None:
    out = parse_location(f"memory://{uuid.uuid4().hex}/out")
    assert exit_code_of_pack(source, out, n) == -signal.SIGKILL
    found = read_objects(out)
    assert {
        name: content for name, content in found.items() if not name.startswith(".")
    }.items() <= uninterrupted.items()
    if MANIFEST_NAME in found:
        assert open_table(str(out)).manifest.num_samples == 9
        assert found.keys() >= uninterrupted.keys()
    else:
        with pytest.raises(FormatError if found else FileNotFoundError, match="unfinished" if found else "no such"):
            open_table(str(out))
    if found:
        with pytest.raises(PackError, match=r"unfinished pack of different images|already holds a packed dataset"):
            shardio.pack(source, str(out), max_shard_samples=4)
    if not found or UNFINISHED_NAME in found:
        shardio.pack(source, str(out), max_shard_samples=3)
        assert read_objects(out) == uninterrupted


def test_the_test_above_covers_every_change(source: Path) -> None:
    out = parse_location(f"memory://{uuid.uuid4().hex}/out")
    assert exit_code_of_pack(source, out, NUM_CHANGES + 1) == 0
