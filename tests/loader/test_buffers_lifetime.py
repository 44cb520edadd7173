"""Buffers, descriptors and processes end with the last object that needs them, and a forked child has its own."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from shardio import DataLoader, ShardMapDataset
from shardio.loader.buffers import make_memory
from shardio.transforms import RandomResizedCrop
from tests.buffers import (
    NUM_BUFFERS,
    assert_same,
    buffer_of,
    buffers_of,
    digest,
    find_buffers,
    find_worker_processes,
    fork,
    make_loader,
    make_oracle,
    wait_until,
    without_collector,
)
from tests.files import count_open_files
from tests.processes import assert_passes_in_fresh_process, forkserver_context

pytestmark = pytest.mark.usefixtures("no_process_of_other_tests")

NUM_BATCHES = 160
"""The number of batches, which exceeds the number of descriptors that a test below allows its process."""


@pytest.fixture(autouse=True, scope="module")
def _all_is_open(pictures: Path) -> None:
    """Open all descriptors that stay open for later loaders."""
    list(make_loader(pictures))


def test_memory_that_cannot_be_allocated_leaves_no_descriptor() -> None:
    before = count_open_files()
    with pytest.raises(OSError, match="Invalid argument"):
        make_memory(-1)
    assert count_open_files() == before


def await_few_buffers(buffers: set[int], process_ids: Iterable[int]) -> None:
    assert len(find_buffers() - buffers) <= NUM_BUFFERS + 1
    for process_id in process_ids:
        wait_until(lambda process_id=process_id: len(find_buffers(process_id)) <= NUM_BUFFERS + 1)  # type: ignore[misc]  # of a default


@pytest.mark.parametrize("persistent", [False, True])
def test_memory_descriptors_and_worker_processes_end_with_the_loader(pictures: Path, persistent: bool) -> None:
    with without_collector():
        buffers, process_ids, num_files = find_buffers(), find_worker_processes(), count_open_files()
        loader, oracle = make_loader(pictures, persistent_workers=persistent), make_oracle(pictures)
        kept, expected = list(loader), list(oracle)
        for number in (0, 3):
            iterator = iter(loader)
            kept += islice(iterator, number)
            expected += islice(oracle, number)
            assert find_worker_processes() - process_ids
            assert len(find_buffers() - buffers) >= len(kept)
            if not persistent:
                del iterator
                assert find_worker_processes() <= process_ids
                assert find_buffers() - buffers == {buffer_of(images) for images, *_ in kept}
        iterator = None
        del loader, iterator
        assert find_worker_processes() <= process_ids
        assert count_open_files() == num_files
        assert find_buffers() - buffers == {buffer_of(images) for images, *_ in kept}
        assert_same(kept, expected)
        kept.clear()
        assert find_buffers() <= buffers


def test_buffers_of_kept_batches_and_abandoned_iterators_are_released(pictures: Path) -> None:
    with without_collector():
        buffers, process_ids = find_buffers(), find_worker_processes()
        loader = make_loader(pictures, persistent_workers=True)
        for _ in range(2):
            kept = list(loader)
            assert len(find_buffers() - buffers) >= len(kept)
            del kept
            buffers_of(loader)
            assert len(find_buffers() - buffers) <= NUM_BUFFERS + 1
        mine, num_files = find_worker_processes() - process_ids, count_open_files()
        await_few_buffers(buffers, mine)
        for number in range(40):
            loader.set_epoch(number)
            iterator = iter(loader)
            for _ in range(number % 4):
                next(iterator)
            if number % 2:  # An iterator that is not deleted ends when the next one is created.
                del iterator
        assert count_open_files() == num_files
        oracle = make_oracle(pictures)
        for each in (loader, oracle):
            each.set_epoch(3)
        assert_same(list(loader), list(oracle))
        buffers_of(loader)
        assert find_worker_processes() - process_ids == mine
        await_few_buffers(buffers, mine)


def kept_batches_hold_no_descriptors(packed: Path) -> None:
    """Keep more batches than the limit of descriptors for this process and its worker process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(48))
    order = [number % 100 for number in range(NUM_BATCHES)]
    loader = DataLoader(dataset, sampler=order, num_workers=1, persistent_workers=True)
    kept = list(loader)
    (process_id,) = find_worker_processes()
    assert len({buffer_of(images) for images, _ in kept}) == len(kept) == NUM_BATCHES
    num_files = count_open_files()
    assert num_files < 64
    kept += list(loader)
    assert count_open_files() == num_files
    assert find_worker_processes() == {process_id}
    assert len(find_buffers(process_id)) >= len(kept)
    assert len(list(Path(f"/proc/{process_id}/fd").iterdir())) < 64
    oracle = ShardMapDataset(packed, fields="key")
    assert [key for _, (key,) in kept] == [oracle[number] for number in [*order, *order]]


def batches_in_child_and_parent_do_not_change_while_the_parent_continues(packed: Path) -> None:
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
    buffers_of(loader)
    expected = list(islice(oracle, 3)) and list(islice(oracle, 3))
    iterator = iter(loader)
    held = list(islice(iterator, 3))
    ask_one = fork(lambda: digest(held))
    for _ in range(2):
        buffers_of(loader)
    assert_same(held, expected)
    ask_other = fork(lambda: digest(held))
    buffers = {buffer_of(images) for images, *_ in held}
    iterator = iter(loader)
    buffers_of(islice(iterator, 3))
    held.clear()  # From now on, only the children hold these batches. In the middle of an epoch, few buffers are free.
    used = set.union(*(buffers_of(batches) for batches in (iterator, loader, loader)))
    assert not buffers & used, "the children share their pages"
    assert ask_one() == ask_other() == digest(expected)


def buffers_that_a_child_held_are_released(packed: Path) -> None:
    loader = make_loader(packed, persistent_workers=True)
    before = find_buffers()
    for epoch in range(4):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        held = list(islice(iterator, 2))
        want = digest(held)
        assert fork(lambda held=held: digest(held))() == want  # type: ignore[misc]  # mypy sees a lambda of an argument
        del held
        buffers_of(iterator)
        assert len(find_buffers() - before) <= NUM_BUFFERS + 2


def a_thread_may_fork_while_another_one_iterates(packed: Path) -> None:
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
    expected = [list(oracle) for _ in range(2)]
    held: list[Any] = []
    seen: list[Any] = []

    def iterate() -> None:
        for _ in range(2):
            epoch = []
            for batch in loader:
                held[:] = [batch]
                epoch.append(digest([batch]))
            seen.append(epoch)

    thread = threading.Thread(target=iterate)
    thread.start()
    asked = []
    num_with_batch = 0
    while thread.is_alive():
        batches = list(held)
        num_with_batch += bool(batches)
        want = digest(batches)
        asked.append((want, fork(lambda batches=batches: digest(batches))))  # type: ignore[misc]  # of an argument
        del batches
        if len(asked) > 3:
            want, ask = asked.pop(0)
            assert ask() == want
    thread.join()
    assert all(ask() == want for want, ask in asked)
    assert num_with_batch > 0, "otherwise, the test shows nothing"
    assert seen == [[digest([batch]) for batch in epoch] for epoch in expected]


def a_batch_that_another_thread_receives_during_a_fork_does_not_change(packed: Path) -> None:
    taken: list[Any] = []
    # The loader registers its callback later, so the loader's callback runs first. The test's callback then receives a
    # batch, as another thread might.
    os.register_at_fork(before=lambda: taken.append(next(iterator)))
    loader = make_loader(packed, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    ask = fork(lambda: digest(taken))
    want, buffer = digest(taken), buffer_of(taken[0][0])
    taken.clear()
    used = set.union(*(buffers_of(batches) for batches in (iterator, loader, loader)))
    assert buffer not in used, "the child has its pages"
    assert ask() == want


def count_sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


def what_a_child_holds_and_frees_does_not_affect_its_parent(packed: Path) -> None:
    num_sockets = count_sockets()
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
    process_ids: set[int] = set()
    for _ in range(2):
        iterator = iter(loader)
        kept = list(islice(iterator, 4))
        process_ids = process_ids or find_worker_processes()
        assert count_sockets() > num_sockets

        def free(kept: list[Any] = kept) -> int:
            nonlocal loader, iterator
            kept.clear()
            del loader, iterator
            return count_sockets()

        ask = fork(free)
        kept += islice(iterator, 2)
        assert ask() == str(num_sockets), "otherwise, worker processes would outlive their parent"
        kept += iterator
        assert_same(kept, list(oracle))
        assert_same(list(loader), list(oracle))
        assert find_worker_processes() == process_ids


def answer(batches: Any, may_look: Any, digests: Any) -> None:
    held = [batches.get() for _ in range(3)]
    digests.put("held")
    may_look.wait()
    digests.put(digest(held))


def assert_received_batches_do_not_change(packed: Path, method: str = "fork") -> None:
    context: Any = multiprocessing.get_context("fork") if method == "fork" else forkserver_context()
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
    buffers_of(loader)
    expected = list(oracle) and list(oracle)
    batches, may_look, digests = context.Queue(), context.Event(), context.Queue()
    child = context.Process(target=answer, args=(batches, may_look, digests), daemon=True)
    iterator = iter(loader)
    first = next(iterator)  # The child is forked while this batch exists.
    child.start()
    batches.put(first)
    for _ in range(2):
        batches.put(next(iterator))
    rest = list(iterator)
    for _ in range(2):
        buffers_of(loader)
    assert digests.get() == "held"
    assert_same([first, *rest], [expected[0], *expected[3:]])
    del first
    for _ in range(2):
        buffers_of(loader)
    may_look.set()
    assert digests.get() == digest(expected[:3])
    child.join()
    assert child.exitcode == 0
    for each in (oracle, loader):
        each.set_epoch(9)
    assert_same(list(loader), list(oracle))


@pytest.mark.slow
def test_batches_that_a_process_of_a_fork_server_received_do_not_change(pictures: Path) -> None:
    assert_received_batches_do_not_change(pictures, "forkserver")


def a_child_iterates_with_its_own_worker_processes(packed: Path) -> None:
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
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


def a_child_does_not_use_worker_processes_that_the_parent_started_ahead(packed: Path) -> None:
    loader, expected = make_loader(packed), list(make_oracle(packed))
    loader.start_workers()
    ask = fork(lambda: digest(loader))
    assert ask() == digest(expected)
    assert_same(list(loader), expected)


def an_iterator_works_only_in_the_process_that_created_it(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields=("image", "label", "key"), transform=RandomResizedCrop(48))
    others: list[dict[str, Any]] = [
        {},
        {"persistent_workers": True},
        {"persistent_workers": True, "worker_method": "thread"},
    ]
    any_order = [DataLoader(each, 8, num_workers=1, **options) for each in (dataset, range(100)) for options in others]
    for loader in (make_loader(packed, persistent_workers=True), *any_order):
        iterator = iter(loader)
        kept = list(islice(iterator, 3))

        def use(loader: DataLoader = loader, iterator: Any = iterator) -> int:
            with pytest.raises(RuntimeError, match="belongs to the parent of this forked process: call iter"):
                next(iterator)
            return len(list(loader))

        assert fork(use)() == "13", "the child has its own workers"
        assert len([*kept, *iterator]) == 13
    iterator = iter(make_oracle(packed))
    kept = list(islice(iterator, 3))
    ask = fork(lambda: digest([*kept, *iterator]))
    assert digest([*kept, *iterator]) == ask(), "without worker processes, parent and child continue independently"


def worker_processes_survive_the_end_of_a_child(packed: Path) -> None:
    loader, oracle = make_loader(packed, persistent_workers=True), make_oracle(packed)
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


def workers_that_call_the_dataset_are_forked_without_a_warning_beside_a_loader(packed: Path) -> None:
    # Since Python 3.12, forking a process that has threads causes a warning, because the child may wait forever for
    # locks.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    dataset = ShardMapDataset(packed, transform=RandomResizedCrop(32))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    for _ in loader:
        dataset[0]  # The kernel decodes this sample in this process.
        assert threading.enumerate() == [threading.main_thread()]
    iterator = iter(loader)
    next(iterator)
    theirs = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert len(list(theirs)) == len(list(iterator)) + 1


@pytest.mark.parametrize(
    "law",
    [
        batches_in_child_and_parent_do_not_change_while_the_parent_continues,
        an_iterator_works_only_in_the_process_that_created_it,
        *(
            pytest.param(law, marks=pytest.mark.slow)
            for law in (
                kept_batches_hold_no_descriptors,
                buffers_that_a_child_held_are_released,
                a_thread_may_fork_while_another_one_iterates,
                a_batch_that_another_thread_receives_during_a_fork_does_not_change,
                what_a_child_holds_and_frees_does_not_affect_its_parent,
                assert_received_batches_do_not_change,
                a_child_iterates_with_its_own_worker_processes,
                a_child_does_not_use_worker_processes_that_the_parent_started_ahead,
                worker_processes_survive_the_end_of_a_child,
                workers_that_call_the_dataset_are_forked_without_a_warning_beside_a_loader,
            )
        ),
    ],
)
def test_in_a_fresh_process(law: Callable[[Path], None], pictures: Path) -> None:
    assert_passes_in_fresh_process(law, pictures)
