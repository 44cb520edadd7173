"""How threads are divided over hosts, and how those talk."""

from hypothesis import given
from hypothesis import strategies as st

from shardio.loader.processes.pool import MAX_SINGLE_THREAD_PROCESSES, THREADS_PER_PROCESS, divide_threads
from shardio.loader.processes.wire import make_pair, receive, send


@given(st.integers(1, 300), st.integers(1, 300))
def test_all_threads_have_a_host_and_no_host_is_without_or_much_fuller(num_threads: int, num_processors: int) -> None:
    hosts = divide_threads(num_threads, num_processors)
    assert sum(hosts) == num_threads
    assert min(hosts) >= 1
    assert max(hosts) - min(hosts) <= 1
    assert len(hosts) <= num_processors


@given(st.integers(1, 300))
def test_with_processors_enough_few_threads_are_alone_and_many_in_pairs(num_threads: int) -> None:
    hosts = divide_threads(num_threads, num_threads)
    assert max(hosts) <= (1 if num_threads <= MAX_SINGLE_THREAD_PROCESSES else THREADS_PER_PROCESS)
    assert len(hosts) <= max(MAX_SINGLE_THREAD_PROCESSES, -(-num_threads // THREADS_PER_PROCESS))


def test_what_an_end_said_before_it_closed_is_heard() -> None:
    """Also if it had not read all that it was told: the system says so first, and the words come after that."""
    ours, theirs = make_pair()
    with ours:
        with theirs:
            send(ours, "not read")
            send(theirs, "last words")
        assert receive(ours) == ("last words", [])
        assert receive(ours) is None
