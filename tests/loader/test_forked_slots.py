"""A forked child's batch does not change, whatever its parent does next.

The process that forks here is a fresh one, not the one that runs the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from itertools import islice
from pathlib import Path
from typing import Any

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
)
from tests.processes import assert_passes_in_fresh_process, forkserver_context


def hold_in_child_and_parent(packed: str) -> None:
    loader, oracle = make_loader(Path(packed), persistent_workers=True), make_oracle(Path(packed))
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
    held.clear()  # The children alone hold them from now on. Free buffers are scarce in the middle of an epoch.
    used = set.union(*(buffers_of(batches) for batches in (iterator, loader, loader)))
    assert not buffers & used, "the children share their pages"
    assert ask_one() == ask_other() == digest(expected)


def test_batches_in_child_and_parent_do_not_change_while_the_parent_continues(pictures: Path) -> None:
    assert_passes_in_fresh_process(hold_in_child_and_parent, pictures)


def fork_with_a_batch_in_each_epoch(packed: str) -> None:
    loader = make_loader(Path(packed), persistent_workers=True)
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


def test_buffers_that_a_child_held_are_released(pictures: Path) -> None:
    assert_passes_in_fresh_process(fork_with_a_batch_in_each_epoch, pictures)


def fork_while_others_take(packed: str) -> None:
    """Fork repeatedly while another thread iterates."""
    loader, oracle = make_loader(Path(packed), persistent_workers=True), make_oracle(Path(packed))
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
    assert num_with_batch > 0, "otherwise the test shows nothing"
    assert seen == [[digest([batch]) for batch in epoch] for epoch in expected]


def test_a_thread_may_fork_while_another_one_iterates(pictures: Path) -> None:
    assert_passes_in_fresh_process(fork_while_others_take, pictures)


def fork_while_a_batch_is_handed_out(packed: str) -> None:
    taken: list[Any] = []
    # The last one registered runs first: it does what another thread might do after the loader's callback.
    os.register_at_fork(before=lambda: taken.append(next(iterator)))
    loader = make_loader(Path(packed), persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    ask = fork(lambda: digest(taken))
    want, buffer = digest(taken), buffer_of(taken[0][0])
    taken.clear()
    used = set.union(*(buffers_of(batches) for batches in (iterator, loader, loader)))
    assert buffer not in used, "the child has its pages"
    assert ask() == want


def test_a_batch_that_another_thread_receives_during_a_fork_does_not_change(pictures: Path) -> None:
    assert_passes_in_fresh_process(fork_while_a_batch_is_handed_out, pictures)


def count_sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


def count_sockets_in_child(packed: str) -> None:
    before = count_sockets()
    loader = make_loader(Path(packed), persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    assert count_sockets() > before
    assert fork(count_sockets)() == str(before), "otherwise worker processes would outlive their parent"


def test_a_child_holds_no_socket_of_its_parents_worker_processes(pictures: Path) -> None:
    assert_passes_in_fresh_process(count_sockets_in_child, pictures)


def free_in_child(packed: str) -> None:
    loader, oracle = make_loader(Path(packed), persistent_workers=True), make_oracle(Path(packed))
    process_ids: set[int] = set()
    for _ in range(2):
        iterator = iter(loader)
        kept = list(islice(iterator, 4))
        process_ids = process_ids or find_worker_processes()

        def free(kept: list[Any] = kept) -> str:
            nonlocal loader, iterator
            kept.clear()
            del loader, iterator
            return "freed"

        ask = fork(free)
        kept += islice(iterator, 2)
        assert ask() == "freed"
        kept += iterator
        assert_same(kept, list(oracle))
        assert_same(list(loader), list(oracle))
        assert find_worker_processes() == process_ids


def test_what_a_child_frees_does_not_affect_its_parent(pictures: Path) -> None:
    assert_passes_in_fresh_process(free_in_child, pictures)


def answer(batches: Any, may_look: Any, digests: Any) -> None:
    """Take batches out of a queue; send their digest later."""
    held = [batches.get() for _ in range(3)]
    digests.put("held")
    may_look.wait()
    digests.put(digest(held))


def assert_received_batches_stay(packed: str, method: str) -> None:
    context: Any = multiprocessing.get_context("fork") if method == "fork" else forkserver_context()
    loader, oracle = make_loader(Path(packed), persistent_workers=True), make_oracle(Path(packed))
    buffers_of(loader)
    expected = list(oracle) and list(oracle)
    batches, may_look, digests = context.Queue(), context.Event(), context.Queue()
    child = context.Process(target=answer, args=(batches, may_look, digests), daemon=True)
    iterator = iter(loader)
    first = next(iterator)  # Forked with one batch at hand.
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
    oracle.set_epoch(9)
    loader.set_epoch(9)
    assert_same(list(loader), list(oracle))


def test_batches_that_a_forked_process_received_do_not_change(pictures: Path) -> None:
    assert_passes_in_fresh_process(assert_received_batches_stay, pictures, "fork")


def test_batches_that_a_process_of_a_fork_server_received_do_not_change(pictures: Path) -> None:
    """As by one that ``spawn`` starts: it inherits no memory of this process."""
    assert_received_batches_stay(str(pictures), "forkserver")
