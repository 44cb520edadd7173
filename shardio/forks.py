"""Forks of this process: objects that must act when it forks, each for as long as it lives."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class _Watch:
    """An object, and what to call with it."""

    owner: weakref.ref[Any]
    before: Callable[[Any], object] | None
    after_in_parent: Callable[[Any], object] | None
    after_in_child: Callable[[Any], object] | None


_watches: dict[int, _Watch] = {}
_serials = itertools.count()


def call_at_fork(
    owner: Owner,
    *,
    before: Callable[[Owner], object] | None = None,
    after_in_parent: Callable[[Owner], object] | None = None,
    after_in_child: Callable[[Owner], object] | None = None,
) -> None:
    """Call functions with ``owner`` whenever this process forks. ``owner`` is not kept alive.

    Calls before the fork run in reverse order of registration, calls after it in order, as with
    ``os.register_at_fork``, which never forgets a function.

    Args:
        owner: An object that can be weakly referenced.
        before: Called in the parent before the fork.
        after_in_parent: Called in the parent after the fork.
        after_in_child: Called in the child. Only the thread that forked exists there.
    """
    _register()
    serial = next(_serials)
    reference = weakref.ref(owner, partial(_forget, serial))
    _watches[serial] = _Watch(reference, before, after_in_parent, after_in_child)


def _forget(serial: int, _: object) -> None:
    _watches.pop(serial, None)


@cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):  # Windows has no forks.
        os.register_at_fork(
            before=partial(_call, "before"),
            after_in_parent=partial(_call, "after_in_parent"),
            after_in_child=partial(_call, "after_in_child"),
        )


def _call(moment: str) -> None:
    watches = list(_watches.values())  # A copy made in one step: other threads may register meanwhile.
    for watch in reversed(watches) if moment == "before" else watches:
        owner, function = watch.owner(), getattr(watch, moment)
        if owner is not None and function is not None:
            function(owner)
