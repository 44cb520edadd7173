"""Interruptions are errors that signal handlers raised, and no others."""

from __future__ import annotations

import signal
from enum import Enum

import pytest

from shardio.interruptions import is_interruption


class Kind(Enum):
    """Its lookup of a value is Python code, as that of the signal module's enums is."""

    CAT = 1


def test_an_error_of_an_enum_is_no_interruption() -> None:
    with pytest.raises(ValueError, match="is not a valid Kind") as caught:
        Kind(2)
    assert not is_interruption(caught.value)


def test_causes_may_go_round_in_a_circle() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_interruption(first)
    first.__cause__ = first
    assert not is_interruption(first)


def test_a_handlers_error_is_one_also_as_a_cause() -> None:
    def handle(number: int, frame: object) -> None:
        raise TimeoutError("too late")

    def decode() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except TimeoutError as error:
            raise ValueError("damaged") from error

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(ValueError, match="damaged") as caught:
            decode()
        assert is_interruption(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
