"""Call functions with an object when this process forks, for as long as the object exists."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
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
    order. Unlike there, a function is unregistered when its ``owner`` is destroyed. An error of one function does not
    prevent the other calls; Python reports the errors by ``sys.unraisablehook``. Ctrl-C that arrives before the first
    call prevents all of them, so locks need :func:`hold_during_forks`.

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


def hold_during_forks(lock: threading.RLock) -> None:
    """Hold a lock whenever this process forks. The lock is kept alive until the process ends.

    Python calls the lock's own methods. They run no Python code, so Ctrl-C cannot skip the release. It can end the wait
    for a lock that another thread holds. This process then forks without the lock, and as it is an RLock, the release
    that follows fails and leaves it with its owner.
    """
    if hasattr(os, "register_at_fork"):  # Windows has no forks.
        # As concurrent.futures does. The child gets a released lock, even if another thread of the parent held it.
        renew = lock._at_fork_reinit  # type: ignore[attr-defined]  # typeshed leaves it out
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=renew)


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
    _call_each(iter(watches[::-1] if moment == "before" else watches), moment)


def _call_each(watches: Iterator[_Watch], moment: str) -> None:
    """Make all calls, whatever some of them raise; raise their errors as a chain."""
    try:
        for watch in watches:
            owner, function = watch.owner(), getattr(watch, moment)
            if owner is not None and function is not None:
                function(owner)
    except BaseException:  # Ctrl-C, too: what the other watches hold must be released in any case.
        _call_each(watches, moment)
        raise
