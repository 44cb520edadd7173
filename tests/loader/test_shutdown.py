"""Python's shutdown waits for the batches of other threads, and for nothing else."""

from __future__ import annotations

import threading
import time

import pytest

from shardio.loader import failures


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> failures._Gate:
    """A gate that waits for an hour."""
    monkeypatch.setattr(failures, "PATIENCE_S", 3600.0)
    return failures._Gate()


def test_it_waits_until_other_threads_are_outside(gate: failures._Gate) -> None:
    events, is_inside = list[str](), threading.Event()

    def make() -> None:
        gate.enter()
        gate.enter()  # A batch that is made of another loader's batches.
        gate.leave()
        is_inside.set()
        while not gate._is_closed:  # close() tells nobody that it has begun to wait.
            time.sleep(0.001)
        events.append("left")
        gate.leave()

    thread = threading.Thread(target=make)
    thread.start()
    is_inside.wait()
    gate.close()
    events.append("closed")
    thread.join()
    assert events == ["left", "closed"]


def test_it_does_not_wait_for_its_own_thread(gate: failures._Gate) -> None:
    gate.enter()  # Ctrl-C came before leave().
    gate.close()
    with pytest.raises(RuntimeError, match="Python is shutting down"):
        gate.enter()
