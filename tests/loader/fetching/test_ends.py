"""Workers for any dataset end with the epoch, the loader or the process. One that dies is an error that says why."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from torch._C import _error_if_any_worker_fails, _remove_worker_pids, _set_worker_pids

from shardio import DataLoader, WorkerError
from shardio.loader import buffers
from shardio.loader.fetch_workers import describe_death
from shardio.process import describe_exit
from tests.files import count_open_files


class Arrays(torch.utils.data.Dataset[Any]):
    """Arrays that are large enough for buffers, one of which ends its worker."""

    def __init__(self, fatal: Any = None) -> None:
        self.fatal = fatal

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if self.fatal is not None and index == 17:
            if isinstance(self.fatal, int):
                os.kill(os.getpid(), self.fatal)
                time.sleep(60)
            os._exit(3)
        return np.full(2000, index)


def find_mappings() -> set[str]:
    """Return the inodes of the anonymous memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:shardio" in line}


DEATHS = pytest.mark.parametrize(
    ("fatal", "message"),
    [
        (signal.SIGKILL, "Killed (SIGKILL). Memory has probably run out: use fewer workers, a smaller prefetch_factor"),
        (signal.SIGBUS, "Bus error (SIGBUS). Shared memory has probably run out: use fewer workers or smaller batches"),
        (signal.SIGSEGV, "Segmentation fault (SIGSEGV). A library crashed in the dataset or collate_fn: use num_worke"),
        (signal.SIGUSR1, "User defined signal 1 (SIGUSR1). Another process may have ended it"),
        (signal.SIGRTMIN + 1, "Real-time signal 1. Another process may have ended it"),
        ("exit", "exited unexpectedly with exit code 3. Standard error may show why. Use num_workers=0 to debug"),
    ],
    ids=str,
)


@pytest.mark.parametrize("fatal", [signal.SIGKILL, "exit"], ids=str)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dead_worker_is_an_error_after_which_the_loader_works_again(fatal: Any, persistent: bool) -> None:
    others = set(multiprocessing.active_children())
    loader = DataLoader(dataset := Arrays(fatal), 4, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    numbers = list[Any]()
    with pytest.raises(WorkerError, match=r"DataLoader worker \(pid\(s\) \d+\) .*(SIGKILL|exit code 3)") as caught:  # noqa: PT012
        for batch in batches:
            numbers.append(batch[:, 0].tolist())  # what was received before counts, too
    assert isinstance(caught.value, RuntimeError), "as torch's is"
    assert numbers == [list(range(first, first + 4)) for first in range(0, 4 * len(numbers), 4)]
    with pytest.raises(RuntimeError, match=r"call loader.load_state_dict\(loader.state_dict\(\)\) first"):
        next(batches)
    dataset.fatal = None
    loader.load_state_dict(loader.state_dict())
    assert [batch[:, 0].tolist() for batch in loader] == [
        list(range(first, first + 4)) for first in range(4 * len(numbers), 40, 4)
    ]
    assert persistent or set(multiprocessing.active_children()) <= others


@DEATHS
def test_the_error_of_a_dead_worker_has_the_words_of_torchs_and_says_cause_and_remedy(fatal: Any, message: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=Arrays(fatal).__getitem__, args=(17,))
    process.start()
    assert process.pid is not None
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:  # noqa: PT012  # SIGCHLD may raise it, too
        _set_worker_pids(0, (process.pid,))
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _error_if_any_worker_fails()
    _remove_worker_pids(0)
    process.join()
    words = str(caught.value).partition(". ")[0]
    assert words in str(describe_death(process))
    assert message in str(describe_death(process))
    assert words in describe_exit(f"DataLoader worker (pid {process.pid})", process.exitcode or 0)


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_loaders_that_are_left_early_leave_nothing(method: Any) -> None:
    """Each is iterated halfway, with batches that are kept, and dropped."""

    def leave_one() -> Any:
        loader = DataLoader(Arrays(), 4, num_workers=1, worker_method=method)
        return list(islice(loader, 5))[-1]

    others = set(multiprocessing.active_children())
    kept = [leave_one() for _ in range(3)]
    gc.collect()
    before = count_open_files(), threading.active_count(), len(find_mappings()) - len(kept)
    for _ in range(8):
        kept = [leave_one() for _ in range(2)]
        assert [int(batch[0, 0]) for batch in kept] == [16, 16]
    del kept
    gc.collect()
    assert (count_open_files(), threading.active_count()) == before[:2]
    assert len(find_mappings()) <= max(before[2], 0)
    assert set(multiprocessing.active_children()) <= others


ORPHANING = """
import sys
import time
from shardio import DataLoader
from tests.loader.fetching.test_ends import Arrays

batches = iter(DataLoader(Arrays(), 4, num_workers=2))
next(batches)
print(*[process.pid for process in batches._workers], flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_workers_end_with_a_training_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", ORPHANING], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        process_ids = list(map(int, run.stdout.readline().split()))
        run.kill()
    assert len(process_ids) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process_id}").exists() for process_id in process_ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{process_id}").exists() for process_id in process_ids)


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield np.zeros(100_000)


def test_buffers_are_fewer_if_memory_is_short_and_an_error_if_two_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "find_available_bytes", lambda: 12 * 4 * 800_000)
    batches = iter(DataLoader(Endless(), 4, num_workers=2, prefetch_factor=10))
    for _ in range(30):
        next(batches)
    assert len(find_mappings()) <= 8
    monkeypatch.setattr(buffers, "find_available_bytes", lambda: 4_000_000)
    batches = iter(DataLoader(Endless(), 4, num_workers=2))
    with pytest.raises(MemoryError, match=r"two batches of 3 MB do not fit into the 4 MB .* use a smaller batch_size"):
        next(batches)
