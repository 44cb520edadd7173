"""File descriptors for dataset files, within one budget for the whole process."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache

MAX_DESCRIPTORS = 128
"""The maximum number of descriptors to keep open."""

LEFT_FOR_OTHERS = 4
"""The process's limit is divided by this number: torch's workers, the user and other libraries need the rest."""

LEFT_BY_REQUESTS = 28
"""The descriptors of a storage process that its requests do not use."""

PER_REQUEST = 2
"""The descriptors of a request: its connection, and the copy in a cache that it fills."""


def descriptor_budget() -> int:
    """Return the maximum number of descriptors to keep open under the process's current limit."""
    limit = _find_limit()
    return MAX_DESCRIPTORS if limit is None else max(2, min(MAX_DESCRIPTORS, limit // LEFT_FOR_OTHERS))


def bound_requests(max_requests: int) -> int:
    """Return how many requests a storage process may make at a time under its current limit."""
    limit = _find_limit()
    return max_requests if limit is None else max(1, min(max_requests, (limit - LEFT_BY_REQUESTS) // PER_REQUEST))


def _find_limit() -> int | None:
    """Return the process's current limit; None if there is none."""
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


class Descriptor:
    """An open file descriptor. It closes when the last reference to it is gone, so a running read keeps it open."""

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # A pipe without a writer would block.

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "number"):
            os.close(self.number)


class OpenFiles:
    """The open descriptors by their files' serial numbers, least recently used first.

    There is no lock, because a forked child or a finalizer could find it held. Each dictionary operation is atomic.
    Threads that open files at the same time may exceed the budget by one descriptor each, until the next file is
    opened.
    """

    def __init__(self) -> None:
        self._descriptors: OrderedDict[int, Descriptor] = OrderedDict()
        self.serials = itertools.count()

    def find(self, serial: int) -> Descriptor | None:
        """Return a file's descriptor, or None if it is not open."""
        descriptor = self._descriptors.get(serial)
        if descriptor is not None:
            with suppress(KeyError):  # Another thread has closed it.
                self._descriptors.move_to_end(serial)
        return descriptor

    def open(self, serial: int, path: str) -> Descriptor:
        """Open a file. Close the least recently used files if too many are open."""
        self._shrink(descriptor_budget() - 1)
        try:
            descriptor = Descriptor(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._shrink(0)  # The rest of the process has used up the limit: keep only this one.
            descriptor = Descriptor(path)
        self._descriptors[serial] = descriptor
        return descriptor

    def close(self, serial: int) -> None:
        """Close a file as soon as no thread reads it."""
        self._descriptors.pop(serial, None)

    def _shrink(self, num_kept: int) -> None:
        with suppress(KeyError):  # It may be empty: other threads close files, too.
            while len(self._descriptors) > num_kept:
                self._descriptors.popitem(last=False)


@cache
def open_files() -> OpenFiles:
    """Return this process's open files."""
    return OpenFiles()
