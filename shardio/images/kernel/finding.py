"""Find the kernel, and start to compile it if it is missing. Without numba, there is no kernel and no error."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shardio.forks import hold_during_forks

if TYPE_CHECKING:
    from shardio.images.kernel.background import BackgroundBuild
    from shardio.images.kernel.loading import Kernel

LOOK_AGAIN_S = 1.0
"""The interval at which a decoding process checks whether the kernel has been compiled."""


class _Finder:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kernel: Kernel | None = None
        self._look_at = 0.0
        self._is_registered = False
        self._build: BackgroundBuild | None = None

    def find(self) -> Kernel | None:
        if self._kernel is None and time.monotonic() >= self._look_at and self._lock.acquire(blocking=False):
            try:
                self._hold_back_forks()
                self._look_at = time.monotonic() + LOOK_AGAIN_S
                self._kernel = _load()
                if self._build is not None:
                    self._build.watch()
                if self._kernel is None and not _is_possible():
                    self._look_at = float("inf")
            finally:
                self._lock.release()
        return self._kernel

    def prepare(self) -> None:
        if self.find() is not None or not _is_possible():
            return
        from shardio.images.kernel.background import build_in_background

        if (started := build_in_background()) is not None:
            self._build = started

    def _hold_back_forks(self) -> None:
        """Make forks wait until no thread loads the kernel. In the child, a held lock would never be released."""
        if not self._is_registered:
            hold_during_forks(self._lock)
            self._is_registered = True


_finder = _Finder()


def find_kernel() -> Kernel | None:
    """Return the kernel, or None if it is not compiled yet or cannot be used."""
    return _finder.find()


def why_no_kernel() -> str | None:
    """Return why this process has no kernel, or None if it has one."""
    if find_kernel() is not None:
        return None
    if not _is_possible():
        return "numba is not installed (pip install numba)"
    from shardio.images.kernel.loading import kernel_path, read_kernel, why_untrusted_kernel

    if (refused := read_kernel()) is not None and not refused[1]:
        return f"its pixels differ from those of libjpeg-turbo and OpenCV on this machine: {refused[0]}"
    if (untrusted := why_untrusted_kernel()) is not None:
        return untrusted
    log = kernel_path().with_suffix(".log")
    if log.exists() and log.stat().st_size:
        return f"the last attempt to compile it failed: see {log}"
    return (
        "it is not compiled yet: run python -m shardio.images.kernel, or iterate over a shardio.DataLoader, which "
        "compiles it in the background if it does not use torch's workers"
    )


def prepare_kernel() -> None:
    """Start to compile the kernel in the background if it is missing. One process does it, and its parent logs that."""
    _finder.prepare()


def _is_possible() -> bool:
    return find_spec("numba") is not None and find_spec("llvmlite") is not None


def _load() -> Kernel | None:
    if not _is_possible():
        return None
    from shardio.images.kernel.loading import load_kernel

    return load_kernel()
