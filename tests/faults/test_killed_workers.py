"""Worker processes die at any moment and in any way: the batches do not change, or an error gives the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardio import WorkerError
from shardio.loader import chunk_pool as pool_module, fork_server
from shardio.transforms import Compose
from tests.buffers import PROGRAM, buffer_of, buffers_of, find_buffers, find_fork_servers
from tests.faults.worker_processes import (
    BATCH_SIZE,
    CROP,
    DEADLINE_S,
    Batches,
    Data,
    Expected,
    batches_of,
    collect,
    find_worker_processes,
    install,
    install_gate,
    install_poison,
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


def disturb(loader: Any, act: Callable[[], None]) -> Batches:
    """Receive two epochs, and call ``act`` once in each."""
    batches = Batches()
    with warns_of_deaths():
        for _ in range(2):
            for batch in loader:
                if len(batches) in (1, 8):
                    act()
                batches.append(plain(batch))
    return batches


def have_started() -> bool:
    return all(len(list(Path(f"/proc/{process_id}/task").iterdir())) > 1 for process_id in find_worker_processes())


# Killed


def test_worker_processes_killed_repeatedly(data: Data, expected: Expected) -> None:
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
    iterator = iter(loader)
    wait_until(find_worker_processes, "there is a worker process")
    kill_worker_processes()
    with warns_of_deaths():
        assert list(map(plain, iterator)) == expected["shards"][0]
    for num_killed, epoch in ((1, 1), (2, 0)):
        for process_id in find_worker_processes()[:num_killed]:
            send_signal(process_id, signal.SIGKILL)
        loader.set_epoch(epoch)
        with warns_of_deaths():
            assert batches_of(loader) == expected["shards"][epoch]
        assert loader.stats().num_worker_restarts == num_killed
    for number in range(2):
        loader.set_epoch(0)
        with warns_of_deaths() if number else nullcontext():
            assert [plain(batch) for batch in islice(loader, 2)] == expected["shards"][0][:2]
        kill_worker_processes()
    with warns_of_deaths():
        assert batches_of(loader) == expected["shards"][1]


@pytest.mark.slow
def test_other_processes_and_loaders_are_not_affected(data: Data, expected: Expected) -> None:
    other = iter(make_loader(data, "map", 1))
    wait_until(find_worker_processes, "its worker process has a command line")
    others_processes = find_worker_processes()
    # A process that looks like a fork server, and sleeps until the test ends it.
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


# Fork servers


def kill_first(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Kill the first ``most`` fork servers before they read anything. Return a list to which the process id of each
    fork server is added."""
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


def test_fork_servers_killed_before_a_message(data: Data, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    started = kill_first(monkeypatch, 2)
    with warns_of_deaths() as warned:
        assert batches_of(make_loader(data, "shards", 2)) == expected["shards"][0]
    assert len(started) == 2 + 1
    said = [str(warning.message) for warning in warned]
    assert [text.count("signal: Killed") for text in said] == [1, 1], "both worker processes died for the same reason"


@pytest.mark.slow
def test_a_killed_fork_server_takes_its_worker_processes_with_it(data: Data, expected: Expected) -> None:
    servers = list[int]()

    def kill_server() -> None:
        before, (server,) = find_worker_processes(), find_fork_servers()
        # A fork would copy locks that other threads hold, and these would never be released in the child.
        assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
        servers.append(server)
        send_signal(server, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, before)), "they have ended")

    batches = disturb(make_loader(data, "shards", 2, persistent_workers=True), kill_server)
    assert len(set(servers)) == 2
    assert find_fork_servers().isdisjoint(servers)
    assert batches == [*expected["shards"][0], *expected["shards"][1]]


@pytest.mark.slow
def test_a_stopped_fork_server_is_replaced(data: Data, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PATIENCE_S", 0.3)
    monkeypatch.setattr(fork_server, "EXIT_S", 0.3)
    iterator = iter(make_loader(data, "shards", 2))
    batches = [plain(next(iterator))]
    (server,) = find_fork_servers()
    wait_until(have_started, "all worker processes have started")
    send_signal(server, signal.SIGSTOP)
    kill_worker_processes()
    with warns_of_deaths():
        batches += map(plain, iterator)
    assert batches == expected["shards"][0]
    assert server not in find_fork_servers()


# Stopped


def test_stopped_worker_processes_are_killed(data: Data, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PATIENCE_S", 0.3)

    def stop() -> None:
        wait_until(have_started, "all worker processes have started")
        kill_worker_processes(signal.SIGSTOP)

    batches = disturb(make_loader(data, "shards", 1, persistent_workers=True), stop)
    assert batches == [*expected["shards"][0], *expected["shards"][1]]


@pytest.mark.slow
def test_briefly_stopped_worker_processes_continue(data: Data, expected: Expected) -> None:
    iterator = iter(make_loader(data, "shards", 1))
    batches = [plain(next(iterator))]
    process_ids = find_worker_processes()
    kill_worker_processes(signal.SIGSTOP)

    def go_on() -> None:
        time.sleep(0.3)  # The pause is shorter than the timeout.
        for process_id in process_ids:
            send_signal(process_id, signal.SIGCONT)

    with run_during(go_on):
        batches.append(plain(next(iterator)))
    assert find_worker_processes() == process_ids
    assert [*batches, *map(plain, iterator)] == expected["shards"][0]


# Worker processes that cannot start or that a sample kills


def exit_at_once(modules: Path) -> None:
    (modules / "sitecustomize.py").write_text("import os; os._exit(3)")


def fail_to_import(modules: Path) -> None:
    (modules / "simplejpeg.py").write_text("raise ImportError('there is no libjpeg')")


@pytest.mark.parametrize(
    ("break_startup", "num_workers"), [(exit_at_once, 3), pytest.param(fail_to_import, 1, marks=pytest.mark.slow)]
)
def test_worker_processes_that_cannot_start_are_an_error(
    data: Data, modules: Path, break_startup: Callable[[Path], None], num_workers: int
) -> None:
    break_startup(modules)
    with warns_of_deaths(), pytest.raises(WorkerError, match=r"exited unexpectedly with exit code [13]"):
        next(iter(make_loader(data, "shards", num_workers)))


def sample_of(batches: Batches, number: int) -> str:
    key = batches[number][2][3]
    assert isinstance(key, str)
    return key


def test_two_deaths_over_one_batch(
    data: Data, expected: Expected, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: [num_threads])
    install_poison(modules, sample_of(expected["shards"][0], 1), 2, others_s=0.1)
    loader = make_loader(data, "shards", 6, persistent_workers=True)
    with warns_of_deaths():
        assert batches_of(loader) == expected["shards"][0]
    assert len(list(modules.glob("death-*"))) == loader.stats().num_worker_restarts == 2
    assert batches_of(loader) == expected["shards"][1]


@pytest.mark.parametrize(
    ("num_processes", "num_workers", "number", "others_s"),
    [(1, 1, 4, 0.0), *(pytest.param(*each, 0.1, marks=pytest.mark.slow) for each in ((1, 6, 0), (2, 6, 3)))],
)
def test_a_sample_that_always_kills_its_worker_process_is_named_and_no_other_batch_is_blamed(
    data: Data,
    expected: Expected,
    modules: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_processes: int,
    num_workers: int,
    number: int,
    others_s: float,
) -> None:
    counts = [num_workers // num_processes] * num_processes
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: counts)
    key, others = sample_of(expected["shards"][0], number), expected["shards"][0][number][2]
    install_poison(modules, key, 100, others_s=others_s)
    loader, batches = make_loader(data, "shards", num_workers, persistent_workers=True), Batches()
    said = r"3 worker processes died while processing the same samples.* signal: Aborted"
    with warns_of_deaths(), pytest.raises(WorkerError, match=said) as error_info:
        collect(loader, batches)
    assert batches == expected["shards"][0][:number]
    assert loader.state_dict()["position"] == number * BATCH_SIZE
    named = str(error_info.value).rpartition(": ")[2].split(", ")
    assert key in named
    assert set(named) <= set(others)
    # The first death is not counted if several samples may have caused it.
    assert len(list(modules.glob("death-*"))) in ((3, 4) if others_s else (3,))


# User code that kills its process, blocks, leaks, prints, or starts threads


def once(marker: Path, act: Callable[[], None]) -> Callable[[Any], Any]:
    def transform(image: Any) -> Any:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return image
        act()
        return image

    return transform


def batches_without(data: Data) -> Batches:
    return batches_of(make_loader(data, "shards", transform=Compose([CROP, lambda image: image])))


DEATHS: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit code 3": lambda: os._exit(3),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


@pytest.mark.parametrize(
    "name", ["SIGKILL", *(pytest.param(n, marks=pytest.mark.slow) for n in ("exit code 3", "SIGSTOP"))]
)
def test_code_that_ends_a_process_is_survived(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(pool_module, "PATIENCE_S", 1.0)
    transform = Compose([CROP, once(tmp_path / "marker", DEATHS[name])])
    loader = make_loader(data, "shards", 2, transform=transform)
    with warns_of_deaths() as warned:
        assert batches_of(loader) == batches_without(data)
    assert loader.stats().num_worker_restarts == 1
    if name != "SIGSTOP":  # A stopped process is killed because it does not answer.
        assert name in str(warned[0].message)
        assert "MiB of memory before its last chunks" in str(warned[0].message)


def test_code_that_exits_python_is_an_error(data: Data) -> None:
    def leave(image: Any) -> None:
        raise SystemExit(4)

    with pytest.raises(SystemExit):
        batches_of(make_loader(data, "shards", 1, transform=leave))


@pytest.mark.slow
def test_code_that_blocks_meets_the_timeout(data: Data, tmp_path: Path) -> None:
    block = once(tmp_path / "marker", lambda: time.sleep(10 * DEADLINE_S))
    loader = make_loader(data, "shards", 1, transform=Compose([CROP, block]), timeout=2)
    with pytest.raises(RuntimeError, match=r"no batch arrived within timeout=2\.?0? s: increase it"):
        batches_of(loader)
    loader.set_epoch(0)
    assert batches_of(loader) == batches_without(data)


def test_code_that_starts_threads_and_prints(data: Data, capfd: pytest.CaptureFixture[str]) -> None:
    def start_thread(image: Any) -> Any:
        threading.Thread(target=threading.Event().wait).start()  # It never ends.
        print("printed by the transform")  # noqa: T201  # as users do
        return image

    assert batches_of(make_loader(data, "shards", 2, transform=Compose([CROP, start_thread]))) == batches_without(data)
    assert "printed by the transform" in capfd.readouterr().out


@pytest.mark.slow
def test_memory_that_code_keeps_is_reported(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GROWTH_BYTES", 1 << 20)
    kept = list[bytes]()

    def leak(image: Any) -> Any:
        kept.append(os.urandom(4 << 20))
        return image

    loader = make_loader(data, "shards", 1, transform=Compose([CROP, leak]))
    with pytest.warns(RuntimeWarning, match=r"uses [\d.]+ MiB of memory, [\d.]+ MiB more than when it started"):
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
    with pytest.warns(RuntimeWarning, match=r"uses 1\.098 GiB of memory, 1\.049 GiB more than when it started"):
        watch.record(1, limit + 1)
    watch.record(1, 2 * limit + 2)
    watch.record(2, 3 * limit)  # Worker 2 has used this much memory from the start.
    with pytest.warns(RuntimeWarning, match="uses 2.195 GiB"):
        watch.record(1, 2 * limit + 3)
    assert watch.forget(1) == " (it used 2.195 GiB of memory before its last chunks)"
    assert watch.bytes_by_worker == {2: 3 * limit}


MADE_BEFORE = 1  # One 1-sample chunk is made before the first batch, to determine the layout.


@pytest.fixture
def _one_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: [num_threads])


@pytest.mark.slow
@pytest.mark.usefixtures("_one_worker_process")
def test_all_threads_make_parts_of_the_same_batch_at_a_time(data: Data, modules: Path) -> None:
    meet = f"""
    try:
        if next(numbers) >= {MADE_BEFORE}:
            meeting.wait()
    except threading.BrokenBarrierError:
        open({str(modules / "missed")!r}, "w").close()
"""
    install(modules, meet, f"meeting = threading.Barrier(4, timeout={DEADLINE_S / 4})")
    loader = make_loader(data, "shards", 4, batch_size=32, prefetch_factor=1)
    assert batches_of(loader) == batches_of(make_loader(data, batch_size=32))
    assert not (modules / "missed").exists()


@pytest.mark.usefixtures("_one_worker_process")
def test_another_batch_is_begun_before_the_user_gets_one(data: Data, modules: Path) -> None:
    gate = install_gate(modules)
    iterator = iter(make_loader(data, "shards", 2, prefetch_factor=1))
    batch = next(iterator)
    wait_until(lambda: gate.count("begun") == MADE_BEFORE + 2 * 2, "the next batch is begun")
    assert len(batch) == 3


@pytest.mark.usefixtures("_one_worker_process")
def test_pending_chunks_of_an_abandoned_epoch_are_not_made(data: Data, modules: Path) -> None:
    held = MADE_BEFORE + 1
    gate = install_gate(modules, held=range(held, held + 1))
    loader = make_loader(data, "map", 1, prefetch_factor=5, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    wait_until(lambda: gate.count("begun") == held + 1, "the worker process is at work on the second batch")
    (process_id,) = find_worker_processes()
    del iterator
    wait_until(lambda: len(find_buffers(process_id)) <= 2, "the worker process has dropped the other batches' buffers")
    gate.open()
    assert len(batches_of(loader)) == 6
    assert gate.count("begun") == held + 1 + 6


@pytest.mark.usefixtures("_one_worker_process")
def test_a_buffer_that_is_still_being_filled_is_not_reused(data: Data, modules: Path) -> None:
    held = MADE_BEFORE + 2
    gate = install_gate(modules, held=range(held, held + 1))
    loader, oracle = make_loader(data, "shards", 2, persistent_workers=True), make_loader(data)
    iterator = iter(loader)
    assert plain(next(iterator)) == plain(next(iter(oracle)))
    wait_until(lambda: gate.count("begun") > held, "a thread is at work on the second batch")
    del iterator
    kept = list(loader)
    assert buffer_of(kept[0][0]) is not None, "otherwise, the test shows nothing"
    gate.open()
    wait_until(lambda: gate.is_made(held), "that thread has finished its chunk")
    assert [plain(batch) for batch in kept] == batches_of(oracle)


FAILURE = """
import itertools, os
from shardio.loader.chunk_worker import WorkerProcess

report, numbers = WorkerProcess._report, itertools.count()

def report_or_die(self, outcome):
    if next(numbers) == 2 and not os.path.exists({0}):  # After the third chunk of the first worker process.
        open({0}, "x").close()
        raise SystemExit
    report(self, outcome)

WorkerProcess._report = report_or_die
"""


@pytest.mark.slow
@pytest.mark.usefixtures("_one_worker_process")
def test_a_thread_that_dies_ends_its_worker_process(data: Data, modules: Path) -> None:
    (modules / "sitecustomize.py").write_text(FAILURE.format(repr(str(modules / "failed"))))
    with warns_of_deaths():
        assert batches_of(make_loader(data, "shards", 1)) == batches_of(make_loader(data))
    assert (modules / "failed").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("_one_worker_process")
def test_after_a_death_only_buffers_that_the_new_worker_process_knows_are_used(data: Data, modules: Path) -> None:
    held = MADE_BEFORE + 12 + 1
    gate = install_gate(modules, held=range(held, held + 1))
    loader = make_loader(data, "shards", 2, batch_size=8, prefetch_factor=3, persistent_workers=True)
    buffers_of(loader)  # After this epoch, the pool has free buffers.

    def kill_worker_process() -> None:
        wait_until(lambda: gate.count("made") >= held + 2, "there are batches after the pending one")
        for process_id in find_worker_processes():
            send_signal(process_id, signal.SIGKILL)
        gate.open()

    iterator: Iterator[list[object]] = iter(loader)
    with warns_of_deaths(), run_during(kill_worker_process):
        kept = list(islice(iterator, 4))
    kept.clear()
    for batches in (iterator, loader, loader):
        assert None not in buffers_of(batches)
