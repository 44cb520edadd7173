"""People's code kills its process, blocks, leaks, prints, starts threads: batches stay equal, or an error says why."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardio.loader.processes import pool as pool_module, worker_process
from shardio.transforms import Compose
from tests.faults.worker_processes import CROP, DEADLINE_S, Batches, Data, batches_of, make_loader, warns_of_deaths

pytestmark = pytest.mark.usefixtures("no_worker_process_is_left")


def once(marker: Path, act: Callable[[], None]) -> Callable[[Any], Any]:
    """Return a transform that acts in the first process that calls it, and returns the image."""

    def transform(image: Any) -> Any:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return image
        act()
        return image

    return transform


def batches_without(data: Data) -> Batches:
    """Return the batches of a transform that does nothing in place of the user's."""
    return batches_of(make_loader(data, "shards", transform=Compose([CROP, lambda image: image])))


DEATHS: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit code 3": lambda: os._exit(3),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


@pytest.mark.parametrize("name", DEATHS)
def test_code_that_ends_its_process_loses_no_batch(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(pool_module, "PATIENCE_S", 1.0)
    transform = Compose([CROP, once(tmp_path / "marker", DEATHS[name])])
    loader = make_loader(data, "shards", 2, transform=transform)
    with warns_of_deaths() as warned:
        assert batches_of(loader) == batches_without(data)
    assert loader.stats().num_worker_restarts == 1
    if name != "SIGSTOP":  # It is killed after it did not answer.
        assert name in str(warned[0].message)
        assert "MB of memory before its last chunks" in str(warned[0].message)


def test_code_that_exits_python_is_an_error(data: Data) -> None:
    def leave(image: Any) -> None:
        raise SystemExit(4)

    with pytest.raises(SystemExit):
        batches_of(make_loader(data, "shards", 1, transform=leave))


def test_code_that_blocks_meets_the_timeout(data: Data, tmp_path: Path) -> None:
    block = once(tmp_path / "marker", lambda: time.sleep(10 * DEADLINE_S))
    loader = make_loader(data, "shards", 1, transform=Compose([CROP, block]), timeout=2)
    with pytest.raises(RuntimeError, match=r"no batch arrived within timeout=2\.?0? s"):
        batches_of(loader)
    loader.set_epoch(0)
    assert batches_of(loader) == batches_without(data)


def test_code_that_starts_threads_and_prints(data: Data, capfd: pytest.CaptureFixture[str]) -> None:
    def start_thread(image: Any) -> Any:
        threading.Thread(target=threading.Event().wait).start()  # It never ends.
        print("printed by the transform")  # noqa: T201  # as people do
        return image

    assert batches_of(make_loader(data, "shards", 2, transform=Compose([CROP, start_thread]))) == batches_without(data)
    assert "printed by the transform" in capfd.readouterr().out


def test_memory_that_code_keeps_is_reported(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GROWTH_BYTES", 1 << 20)
    kept = list[bytes]()

    def leak(image: Any) -> Any:
        kept.append(os.urandom(4 << 20))
        return image

    loader = make_loader(data, "shards", 1, transform=Compose([CROP, leak]))
    with pytest.warns(RuntimeWarning, match=r"a worker process uses \d+ MB of memory, \d+ MB more than at its start"):
        batches_of(loader)
    (num_bytes,) = loader.stats().worker_bytes
    assert num_bytes > 100 << 20
    sound = make_loader(data, "shards", 1)
    batches_of(sound)
    assert 0 < sound.stats().worker_bytes[0] < num_bytes - (80 << 20)


def test_a_warning_comes_once_for_each_doubling() -> None:
    watch = pool_module.MemoryWatch(warns=True)
    first, limit = 50 << 20, (100 << 20) + pool_module.GROWTH_BYTES
    for num_bytes in (first, 2 * first, limit):
        watch.record(1, num_bytes)
    with pytest.warns(RuntimeWarning, match=r"uses 1\.2 GB of memory, 1\.1 GB more than at its start"):
        watch.record(1, limit + 1)
    watch.record(1, 2 * limit + 2)
    watch.record(2, 3 * limit)  # Another process, which began with that much.
    with pytest.warns(RuntimeWarning, match="uses 2.4 GB"):
        watch.record(1, 2 * limit + 3)
    assert watch.forget(1) == " (it used 2.4 GB of memory before its last chunks)"
    assert watch.bytes_by_worker == {2: 3 * limit}


def test_memory_is_that_of_the_process() -> None:
    before = worker_process.read_private_bytes()
    # Not from malloc, which may have kept as much.
    block = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"\1" * len(block))
    assert worker_process.read_private_bytes() - before >= 0.9 * len(block)
    block.close()
