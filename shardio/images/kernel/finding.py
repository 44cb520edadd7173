"""Find the compiled functions. If they do not exist or are unchecked, compile or check them in the background.

Without compiled functions and without numba, there is no kernel and no error.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from shardio.files import UntrustedError
from shardio.images.kernel.loading import can_compile, load_functions
from shardio.process import hold_during_forks

if TYPE_CHECKING:
    from shardio.images.kernel.background import BackgroundBuild
    from shardio.images.kernel.functions import Functions, Kernel

LOOK_AGAIN_S = 0.1
"""The interval, in seconds, at which a decoding process looks for functions that have been compiled and checked."""


class _Finder:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._functions: Functions | None = None
        self._kernel: Kernel | None = None
        self._look_at = 0.0
        self._difference: str | None = None  # Found in this process. Usually, a file contains it.
        self._is_registered = False
        self._build: BackgroundBuild | None = None

    def find(self) -> Kernel | None:
        if self._kernel is None and time.monotonic() >= self._look_at and self._lock.acquire(blocking=False):
            try:
                self._hold_back_forks()
                self._look_at = time.monotonic() + LOOK_AGAIN_S
                self._kernel = self._load_kernel()
                if self._build is not None:
                    self._build.watch()
                if self._kernel is None and self._functions is None and not can_compile():
                    self._look_at = float("inf")
            finally:
                self._lock.release()
        return self._kernel

    def functions(self) -> Functions | None:
        with self._lock:
            self._hold_back_forks()
            if self._functions is None:
                self._functions = load_functions()
            return self._functions

    def prepare(self) -> None:
        functions = self.functions()
        if self.find() is not None or (functions is None and not can_compile()):
            return
        if self.difference() is not None:  # Another process has checked them, or their pixels differ.
            return
        from shardio.images.kernel import background

        if functions is not None and not background.can_keep_outcome():
            self._check_here(functions)
        elif (started := background.build_in_background(functions)) is not None:
            self._build = started

    def check(self) -> None:
        functions = self.functions()
        if functions is None or self.find() is not None or self.difference() is not None:
            return
        from shardio.images.kernel.building import build

        try:
            build()
        except (UntrustedError, OSError):  # The outcome cannot be stored.
            self._check_here(functions)

    def adopt(self, functions: Functions) -> None:
        with self._lock:
            self._functions, self._look_at = functions, 0.0

    def difference(self) -> str | None:
        """Return the outcome of the check: how the pixels differ, "" if they do not, None if they were not checked."""
        from shardio.images.kernel.cache_files import read_check

        functions = self.functions()
        return self._difference or (None if functions is None else read_check(functions.name))

    def _check_here(self, functions: Functions) -> None:
        """Check the functions' pixels in this process, because the outcome cannot be stored."""
        from shardio.images.kernel.building import warn_of_difference
        from shardio.images.kernel.checking import find_difference
        from shardio.images.kernel.functions import Kernel

        with self._lock:
            self._hold_back_forks()
            self._look_at = float("inf")
            self._difference = find_difference(functions)
            if self._difference is None:
                self._kernel = Kernel(functions)
            else:
                warn_of_difference(self._difference)

    def _load_kernel(self) -> Kernel | None:
        functions = self.functions()
        if functions is None:
            return None
        from shardio.images.kernel.cache_files import read_check
        from shardio.images.kernel.functions import Kernel

        return Kernel(functions) if read_check(functions.name) == "" else None

    def _hold_back_forks(self) -> None:
        """Make forks wait until no thread holds the lock, which would never be released in the child."""
        if not self._is_registered:
            hold_during_forks(self._lock)
            self._is_registered = True


_finder = _Finder()


def find_kernel() -> Kernel | None:
    """Return the kernel; None if it is not yet compiled or checked, or cannot be used."""
    return _finder.find()


def find_functions() -> Functions | None:
    """Return the compiled functions, or None if they are not compiled yet."""
    return _finder.functions()


def compiled_functions() -> Functions:
    """Return the compiled functions, after compiling them if necessary, which takes half a minute.

    Raises:
        ImportError: If shardio was built without them for this processor, and numba is not installed.
    """
    if (functions := _finder.functions()) is not None:
        return functions
    from shardio.images.kernel.building import build, compile_here

    try:
        build()
    except (UntrustedError, OSError):  # The functions cannot be stored, so each process compiles its own.
        adopt(compile_here())
    functions = _finder.functions()
    assert functions is not None, "the functions have just been compiled"
    return functions


def adopt(functions: Functions) -> None:
    """Make this process use functions that it has just compiled."""
    _finder.adopt(functions)


def why_no_kernel() -> str | None:
    """Return the reason why this process has no kernel, or None if it has one."""
    if find_kernel() is not None:
        return None
    functions = _finder.functions()
    if functions is None and not can_compile():
        return "shardio was built without it for this processor, and numba is not installed (pip install numba)"
    from shardio.images.kernel.cache_files import check_name, log_path, object_name, why_untrusted_file

    if difference := _finder.difference():
        return f"its pixels differ from those of libjpeg-turbo or Pillow on this machine: {difference}"
    untrusted = why_untrusted_file(object_name() if functions is None else check_name(functions.name))
    if untrusted is not None:
        return untrusted
    if log_path().exists() and log_path().stat().st_size:
        return f"the last attempt to compile or check it failed: see {log_path()}"
    what = "compiled" if functions is None else "checked"
    return (
        f"it is not {what} on this machine yet: run python -m shardio.images.kernel, or iterate over a "
        "shardio.DataLoader, which does it in the background if it does not use torch's workers"
    )


def check_kernel() -> None:
    """Check the kernel that shardio was built with, unless it has been checked.

    This takes 0.1 s, and compiles nothing.
    """
    _finder.check()


def prepare_kernel() -> None:
    """Start compiling or checking the kernel in the background, if necessary and not yet started by another process."""
    _finder.prepare()
