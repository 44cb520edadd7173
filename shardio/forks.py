"""Call functions with an object when this process forks, for as long as the object exists."""

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
    """An object, and the functions to call with it at a fork."""

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
    """Register functions to call with ``owner`` whenever this process forks. ``owner`` is not kept alive.

    As with ``os.register_at_fork``, calls before a fork run in reverse order of registration, and calls after it in
    order. Unlike there, a function is unregistered when its ``owner`` is destroyed.

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
    watches = list(_watches.values())  # An atomic copy: other threads may register functions meanwhile.
    for watch in reversed(watches) if moment == "before" else watches:
        owner, function = watch.owner(), getattr(watch, moment)
        if owner is not None and function is not None:
            function(owner)
