"""Only errors that a signal handler raised are interruptions."""

from __future__ import annotations

import signal
from enum import Enum

import pytest

from shardio.process import is_interruption


class Kind(Enum):
    """Looks values up in Python code, as the signal module's enums do."""

    CAT = 1


def test_an_error_of_an_enum_is_not_an_interruption() -> None:
    with pytest.raises(ValueError, match="is not a valid Kind") as caught:
        Kind(2)
    assert not is_interruption(caught.value)


def test_causes_may_form_a_cycle() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_interruption(first)
    first.__cause__ = first
    assert not is_interruption(first)


def test_a_handlers_error_is_an_interruption_even_as_a_cause() -> None:
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
