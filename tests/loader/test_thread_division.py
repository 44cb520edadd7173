"""The division of threads over worker processes, and their messages."""

from hypothesis import given, strategies as st

from shardio.loader.processes.pool import divide_threads
from shardio.loader.processes.wire import make_pair, receive, send


@given(st.integers(1, 300), st.integers(1, 300))
def test_threads_are_divided_evenly_over_worker_processes(num_threads: int, num_processors: int) -> None:
    threads = divide_threads(num_threads, num_processors)
    assert sum(threads) == num_threads
    assert min(threads) >= 1
    assert max(threads) - min(threads) <= 1
    assert len(threads) <= num_processors


@given(st.integers(1, 300), st.integers(0, 300))
def test_with_enough_processors_each_thread_has_a_process(num_threads: int, num_spare: int) -> None:
    assert divide_threads(num_threads, num_threads + num_spare) == [1] * num_threads


def test_messages_that_an_end_sent_before_it_closed_are_received() -> None:
    """Even if it closed before it read everything: the system reports that first, then delivers the messages."""
    ours, theirs = make_pair()
    with ours:
        with theirs:
            send(ours, "not read")
            send(theirs, "last words")
        assert receive(ours) == ("last words", [])
        assert receive(ours) is None
