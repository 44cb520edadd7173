"""A forked child starts worker processes of its own, and its parent keeps its own.

The process that forks here is a fresh one, not the one that runs the tests.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardio import DataLoader, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.processes import assert_passes_in_fresh_process
from tests.slots import (
    assert_same,
    digest,
    find_hosts,
    fork,
    make_loader,
    make_oracle,
    wait_until,
)


def iterate_in_child(packed: str) -> None:
    loader, oracle = make_loader(Path(packed), num_workers=3, persistent_workers=True), make_oracle(Path(packed))
    expected = [list(oracle) for _ in range(3)]
    iterator = iter(loader)
    kept = list(islice(iterator, 3))
    hosts = find_hosts()
    assert len(hosts) > 1

    def iterate() -> str:
        assert not find_hosts()
        for epoch in (2, 1, 2):
            loader.set_epoch(epoch)
            assert digest(loader) == digest(expected[epoch])
        own = find_hosts()
        assert len(own) == len(hosts)
        assert not own & hosts
        assert digest(kept) == digest(expected[0][:3])
        return " ".join(map(str, own))

    ask = fork(iterate)
    kept += islice(iterator, 3)
    own = ask().split()
    assert_same([*kept, *iterator], expected[0])
    assert_same(list(loader), expected[1])
    assert find_hosts() == hosts
    wait_until(lambda: not any(Path("/proc", host, "exe").exists() for host in own))


def test_a_child_iterates_with_hosts_of_its_own(pictures: Path) -> None:
    assert_passes_in_fresh_process(iterate_in_child, pictures)


def use_iterator_in_child(packed: str) -> None:
    dataset = ShardMapDataset(packed, fields=("image", "label", "key"), transform=RandomResizedCrop(48))
    for loader in (
        make_loader(Path(packed), persistent_workers=True),
        make_loader(Path(packed)),
        DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2),
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
    assert digest([*kept, *iterator]) == ask(), "without hosts each goes on by itself"


def test_an_iterator_stays_with_the_process_that_began_it(pictures: Path) -> None:
    assert_passes_in_fresh_process(use_iterator_in_child, pictures)


def end_children(packed: str) -> None:
    loader, oracle = make_loader(Path(packed), persistent_workers=True), make_oracle(Path(packed))
    hosts: set[int] = set()
    for end in (os._exit, sys.exit):
        iterator = iter(loader)
        kept = list(islice(iterator, 3))
        hosts = hosts or find_hosts()
        child = os.fork()
        if child == 0:
            end(0)
        assert os.waitpid(child, 0)[1] == 0
        assert_same([*kept, *iterator], list(oracle))
        assert find_hosts() == hosts


def test_hosts_stay_when_a_child_ends(pictures: Path) -> None:
    assert_passes_in_fresh_process(end_children, pictures)
