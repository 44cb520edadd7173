"""A forked child starts its own worker processes, and its parent keeps its own.

The process that forks here is a fresh one, not the one that runs the tests.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from shardio import DataLoader, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.buffers import (
    assert_same,
    digest,
    find_worker_processes,
    fork,
    make_loader,
    make_oracle,
    wait_until,
)
from tests.processes import assert_passes_in_fresh_process


def iterate_in_child(packed: str) -> None:
    loader, oracle = make_loader(Path(packed), persistent_workers=True), make_oracle(Path(packed))
    expected = [list(oracle) for _ in range(3)]
    iterator = iter(loader)
    kept = list(islice(iterator, 3))
    process_ids = find_worker_processes()
    assert process_ids

    def iterate() -> str:
        assert not find_worker_processes()
        for epoch in (2, 1, 2):
            loader.set_epoch(epoch)
            assert digest(loader) == digest(expected[epoch])
        own = find_worker_processes()
        assert len(own) == len(process_ids)
        assert not own & process_ids
        assert digest(kept) == digest(expected[0][:3])
        return " ".join(map(str, own))

    ask = fork(iterate)
    kept += islice(iterator, 3)
    own = ask().split()
    assert_same([*kept, *iterator], expected[0])
    assert_same(list(loader), expected[1])
    assert find_worker_processes() == process_ids
    wait_until(lambda: not any(Path("/proc", process_id, "exe").exists() for process_id in own))


def test_a_child_iterates_with_its_own_worker_processes(pictures: Path) -> None:
    assert_passes_in_fresh_process(iterate_in_child, pictures)


def fork_after_start_workers(packed: str) -> None:
    loader, expected = make_loader(Path(packed)), list(make_oracle(Path(packed)))
    loader.start_workers()
    ask = fork(lambda: digest(loader))
    assert ask() == digest(expected)
    assert_same(list(loader), expected)


def test_a_child_does_not_use_worker_processes_that_the_parent_started_ahead(pictures: Path) -> None:
    assert_passes_in_fresh_process(fork_after_start_workers, pictures)


def use_iterator_in_child(packed: str) -> None:
    dataset = ShardMapDataset(packed, fields=("image", "label", "key"), transform=RandomResizedCrop(48))
    for loader in (
        make_loader(Path(packed), persistent_workers=True),
        DataLoader(dataset, batch_size=8, shuffle=True, num_workers=1),
    ):
        iterator = iter(loader)
        kept = list(islice(iterator, 3))

        def use(iterator: Any = iterator) -> str:
            with pytest.raises(RuntimeError, match="belongs to the parent of this forked process"):
                next(iterator)
            return "refused"

        assert fork(use)() == "refused"
        assert len([*kept, *iterator]) == 13
    iterator = iter(make_oracle(Path(packed)))
    kept = list(islice(iterator, 3))
    ask = fork(lambda: digest([*kept, *iterator]))
    assert digest([*kept, *iterator]) == ask(), "without worker processes, parent and child continue independently"


def test_an_iterator_works_only_in_the_process_that_created_it(pictures: Path) -> None:
    assert_passes_in_fresh_process(use_iterator_in_child, pictures)


def end_children(packed: str) -> None:
    loader, oracle = make_loader(Path(packed), persistent_workers=True), make_oracle(Path(packed))
    process_ids: set[int] = set()
    for end in (os._exit, sys.exit):
        iterator = iter(loader)
        kept = list(islice(iterator, 3))
        process_ids = process_ids or find_worker_processes()
        child = os.fork()
        if child == 0:
            end(0)
        assert os.waitpid(child, 0)[1] == 0
        assert_same([*kept, *iterator], list(oracle))
        assert find_worker_processes() == process_ids


def test_worker_processes_survive_the_end_of_a_child(pictures: Path) -> None:
    assert_passes_in_fresh_process(end_children, pictures)


def fork_beside_a_loader(packed: str) -> None:
    # Since Python 3.12, a fork of a process with threads gives a warning, because the child may wait for them forever.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    dataset = ShardMapDataset(Path(packed), transform=RandomResizedCrop(32))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    for _ in loader:
        dataset[0]  # Decoded in this process, by the kernel.
        assert threading.enumerate() == [threading.main_thread()]
    iterator = iter(loader)
    next(iterator)
    theirs = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert len(list(theirs)) == len(list(iterator)) + 1


def test_torchs_workers_are_forked_without_a_warning_beside_a_loader(packed: Path) -> None:
    assert_passes_in_fresh_process(fork_beside_a_loader, str(packed))
