"""What users may set for remote storage: how patient it is, and how the backend is reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardio.values import check_integer, check_seconds

StorageOptions = Mapping[str, str | int | float | bool]
"""``storage_options`` as users pass it: see :class:`RemoteOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """The settings of a remote store. They can be compared, hashed and pickled.

    Attributes:
        retries: How often a failed request is repeated.
        timeout_s: The longest time in seconds without any progress, after which a request counts as failed.
        deadline_s: The time in seconds after which a request that keeps failing is not repeated any more.
        max_requests: The maximum number of requests that a run's storage process makes at a time to one store.
        config: The other options, sorted by name: those of the backend, such as ``endpoint`` or ``region``. They may
            contain credentials, so they are not shown.
    """

    retries: int = 20
    timeout_s: float = 10.0
    deadline_s: float = 300.0
    max_requests: int = 64
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def make_options(storage_options: StorageOptions | None) -> RemoteOptions:
    """Check a user's ``storage_options``.

    Raises:
        TypeError: If it is not a mapping, or a value has the wrong type.
        ValueError: If a value is out of range.
    """
    if storage_options is None:
        return RemoteOptions()
    if not isinstance(storage_options, Mapping):
        raise TypeError(f"storage_options must be a dict, got {type(storage_options).__name__}")
    checked: dict[str, Any] = {}
    for name, value in storage_options.items():
        if name in _CHECKS:
            checked[name] = _CHECKS[name](f"storage_options[{name!r}]", value)
    config = {name.lower(): _write_value(name, value) for name, value in storage_options.items() if name not in _CHECKS}
    return RemoteOptions(config=tuple(sorted(config.items())), **checked)


def _check_count(name: str, value: Any, *, at_least: int = 1) -> int:
    return check_integer(name, value, at_least=at_least, below=1000)


def _write_value(name: str, value: object) -> str:
    """Return the value of a backend's option as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    # The value is not shown, because it may be a credential.
    raise TypeError(f"storage_options[{name!r}] must be a string, a number or a boolean, got {type(value).__name__}")


_CHECKS: dict[str, Callable[[str, Any], int | float]] = {
    "retries": partial(_check_count, at_least=0),
    "max_requests": _check_count,
    "timeout_s": check_seconds,
    "deadline_s": check_seconds,
}
"""The options that shardio handles itself, with the functions that check them."""
