"""Worker processes die at any moment and in any way: the batches do not change, or an error says why."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardio import WorkerError
from shardio.loader.processes import fork_server, pool as pool_module
from tests.buffers import PROGRAM, find_fork_servers
from tests.faults.worker_processes import (
    KINDS,
    Batches,
    Data,
    Expected,
    batches_of,
    find_worker_processes,
    install_slowness,
    is_alive,
    make_loader,
    plain,
    run_during,
    send_signal,
    wait_until,
    warns_of_deaths,
)

pytestmark = pytest.mark.usefixtures("no_worker_process_is_left")


def kill_worker_processes(number: signal.Signals = signal.SIGKILL) -> None:
    for process_id in find_worker_processes():
        send_signal(process_id, number)


def have_started() -> bool:
    """Return whether all worker processes have threads that decode."""
    return all(len(list(Path(f"/proc/{process_id}/task").iterdir())) > 1 for process_id in find_worker_processes())


def test_worker_processes_killed_at_any_moment(data: Data, expected: Expected, modules: Path) -> None:
    """``tools/loader_campaign.py`` does this with all kinds of datasets, thousands of times."""
    install_slowness(modules, 0.05)  # An epoch takes longer than until the first kill.
    draw, killed = random.Random(0), list[int]()

    def kill_two() -> None:
        for _ in range(2):
            time.sleep(draw.uniform(0.0, 0.15))  # The moment is what is random here.
            for process_id in draw.sample(process_ids := find_worker_processes(), min(len(process_ids), 1)):
                killed.append(process_id)
                send_signal(process_id, signal.SIGKILL)

    loader = make_loader(data, "folder", 3, persistent_workers=True)
    with warns_of_deaths():  # Of one at least: on a busy machine, a kill may come after the last batch of an epoch.
        for epoch in expected["folder"]:
            iterator = iter(loader)  # Its worker processes are there now.
            with run_during(kill_two):
                assert batches_of(iterator) == epoch
    assert len(killed) >= 2


@pytest.mark.parametrize(("num_workers", "number"), [(1, 5), (3, 0)])
def test_all_worker_processes_killed_at_once(
    data: Data, expected: Expected, modules: Path, num_workers: int, number: int
) -> None:
    install_slowness(modules, 0.01)
    batches = Batches()
    with warns_of_deaths() if number < 5 else nullcontext():  # The last batch is there already.
        for batch in make_loader(data, "shards", num_workers):
            if len(batches) == number:
                kill_worker_processes()
            batches.append(plain(batch))
    assert batches == expected["shards"][0]


def test_worker_processes_killed_repeatedly(data: Data, expected: Expected) -> None:
    """But not three times over the same batch."""
    loader, batches = make_loader(data, "map", 1, persistent_workers=True), Batches()
    num_deaths = list[int]()
    with warns_of_deaths() as warned:
        for _ in range(2):
            for batch in loader:
                if len(batches) % 3 == 0:
                    kill_worker_processes()
                batches.append(plain(batch))
            num_deaths.append(loader.stats().num_worker_restarts)
            assert loader.stats().num_images_by_decoder["kernel"] == loader.stats().num_samples == 96
    assert sum(str(warning.message).count("signal: Killed (SIGKILL)") for warning in warned) == sum(num_deaths) > 0
    assert batches == [*expected["map"][0], *expected["map"][1]]


def test_worker_processes_killed_between_epochs(data: Data, expected: Expected) -> None:
    loader = make_loader(data, "shards", 2, persistent_workers=True)
    assert batches_of(loader) == expected["shards"][0]
    for num_killed, epoch in ((1, 1), (2, 0)):
        for process_id in find_worker_processes()[:num_killed]:
            send_signal(process_id, signal.SIGKILL)
        loader.set_epoch(epoch)
        with warns_of_deaths():
            assert batches_of(loader) == expected["shards"][epoch]
        assert loader.stats().num_worker_restarts == num_killed


def test_worker_processes_killed_after_a_break(data: Data, expected: Expected) -> None:
    """What an abandoned epoch had begun does not get into the next one."""
    loader = make_loader(data, "map", 1, persistent_workers=True)
    for number in range(2):
        loader.set_epoch(0)
        with warns_of_deaths() if number else nullcontext():
            assert [plain(batch) for batch in islice(loader, 2)] == expected["map"][0][:2]
        kill_worker_processes()
    with warns_of_deaths():
        assert batches_of(loader) == expected["map"][1]


def test_restarted_worker_processes_find_relative_paths(
    data: Data, expected: Expected, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(data.shards.parent)
    here = Data(images=Path(data.images.name), shards=Path(data.shards.name))
    iterators = [iter(make_loader(here, kind, 1)) for kind in KINDS]
    batches = [[plain(next(iterator))] for iterator in iterators]
    monkeypatch.chdir(tmp_path)
    kill_worker_processes()
    for kind, begun, iterator in zip(KINDS, batches, iterators, strict=True):
        with warns_of_deaths():
            assert [*begun, *map(plain, iterator)] == expected[kind][0]


def kill_first(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Kill the first fork servers, up to ``most``, before they read anything; return the ids of all started."""
    start, started = fork_server._start_process, list[int]()

    def start_and_kill(*arguments: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments)
        started.append(process.pid)
        if len(started) <= most:
            process.kill()
            process.wait()
        return process

    monkeypatch.setattr(fork_server, "_start_process", start_and_kill)
    return started


def test_fork_servers_killed_before_their_first_message(
    data: Data, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = kill_first(monkeypatch, 2)
    with warns_of_deaths() as warned:
        assert batches_of(make_loader(data, "shards", 2)) == expected["shards"][0]
    assert len(started) == 2 + 1
    said = [str(warning.message) for warning in warned]
    assert [text.count("signal: Killed") for text in said] == [1, 1], "both worker processes died of one cause"


@pytest.mark.parametrize("num_workers", [1, 3])
def test_fork_servers_that_always_die_at_once_are_an_error(
    data: Data, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    started = kill_first(monkeypatch, 50)
    with warns_of_deaths(), pytest.raises(WorkerError, match=r"fork server \d+ is killed by signal: Killed"):
        next(iter(make_loader(data, "shards", num_workers)))
    assert len(started) <= 4


def test_a_fork_server_has_one_thread(data: Data) -> None:
    """A fork copies the locks of other threads, which nobody in the child would release."""
    iterator = iter(make_loader(data, "shards", 2))
    next(iterator)
    (server,) = find_fork_servers()
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1


def await_end_of(process_ids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, process_ids)), "the processes have ended")


def test_a_killed_fork_server_takes_its_worker_processes_with_it(data: Data, expected: Expected) -> None:
    """They and the fork server are replaced."""
    loader, batches, servers = make_loader(data, "shards", 2, persistent_workers=True), Batches(), list[int]()
    with warns_of_deaths():
        for _ in range(2):
            for batch in loader:
                if len(batches) in (1, 8):
                    before, (server,) = find_worker_processes(), find_fork_servers()
                    servers.append(server)
                    send_signal(server, signal.SIGKILL)
                    await_end_of(before)
                batches.append(plain(batch))
    assert len(set(servers)) == 2
    assert find_fork_servers().isdisjoint(servers)
    assert batches == [*expected["shards"][0], *expected["shards"][1]]


def test_a_stopped_fork_server_is_replaced(data: Data, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PATIENCE_S", 0.3)
    monkeypatch.setattr(fork_server, "EXIT_S", 0.3)
    loader = make_loader(data, "shards", 2)
    iterator = iter(loader)
    batches = [plain(next(iterator))]
    (server,) = find_fork_servers()
    wait_until(have_started, "all worker processes have started")
    send_signal(server, signal.SIGSTOP)
    kill_worker_processes()
    with warns_of_deaths():
        batches += map(plain, iterator)
    assert batches == expected["shards"][0]
    assert server not in find_fork_servers()


def test_worker_processes_killed_while_they_start(data: Data, expected: Expected) -> None:
    """They do not take long to start: this is before the first batch is requested."""
    iterator = iter(make_loader(data, "shards", 2))
    wait_until(find_worker_processes, "there is a worker process")
    kill_worker_processes()
    with warns_of_deaths():
        assert list(map(plain, iterator)) == expected["shards"][0]


def test_stopped_worker_processes_are_killed(data: Data, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PATIENCE_S", 0.3)
    loader, batches = make_loader(data, "shards", 1, persistent_workers=True), Batches()
    with warns_of_deaths():
        for _ in range(2):
            for batch in loader:
                if len(batches) in (1, 8):
                    wait_until(have_started, "all worker processes have started")
                    kill_worker_processes(signal.SIGSTOP)
                batches.append(plain(batch))
    assert batches == [*expected["shards"][0], *expected["shards"][1]]


def test_briefly_stopped_worker_processes_continue(data: Data, expected: Expected) -> None:
    iterator = iter(make_loader(data, "shards", 1))
    batches = [plain(next(iterator))]
    process_ids = find_worker_processes()
    kill_worker_processes(signal.SIGSTOP)

    def go_on() -> None:
        time.sleep(0.3)  # They are silent for less than the allowed time.
        for process_id in process_ids:
            send_signal(process_id, signal.SIGCONT)

    with run_during(go_on):
        batches.append(plain(next(iterator)))
    assert find_worker_processes() == process_ids
    assert [*batches, *map(plain, iterator)] == expected["shards"][0]


def exit_at_once(modules: Path) -> None:
    (modules / "sitecustomize.py").write_text("import os; os._exit(3)")


def fail_to_import(modules: Path) -> None:
    (modules / "simplejpeg.py").write_text("raise ImportError('there is no libjpeg')")


@pytest.mark.parametrize(("break_startup", "num_workers"), [(exit_at_once, 3), (fail_to_import, 1)])
def test_worker_processes_that_cannot_start_are_an_error(
    data: Data, modules: Path, break_startup: Callable[[Path], None], num_workers: int
) -> None:
    break_startup(modules)
    with warns_of_deaths(), pytest.raises(WorkerError, match=r"exited unexpectedly with exit code [13]"):
        next(iter(make_loader(data, "shards", num_workers)))


def test_other_processes_and_loaders_are_not_affected(data: Data, expected: Expected) -> None:
    """Whatever their names are: a loader knows the worker processes that it started."""
    other = iter(make_loader(data, "map", 1))
    wait_until(find_worker_processes, "its worker process has a command line")
    others_processes = find_worker_processes()
    # It does nothing for as long as the test may take, which ends it.
    namesake = [sys.executable, "-c", "import time; time.sleep(600)", PROGRAM.decode()]
    with subprocess.Popen(namesake) as process:
        iterator = iter(make_loader(data, "shards", 1))
        batches = [plain(next(iterator))]
        for process_id in set(find_worker_processes()) - set(others_processes):
            send_signal(process_id, signal.SIGKILL)
        with warns_of_deaths():
            assert [*batches, *map(plain, iterator)] == expected["shards"][0]
        assert find_worker_processes() == others_processes
        assert process.poll() is None
        process.kill()
    assert [plain(batch) for batch in other] == expected["map"][0]
