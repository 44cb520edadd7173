"""Functions compiled by numba, with their machine code cached on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from shardio.images.trust import UntrustedError, check_folder

_log = logging.getLogger("shardio")


def cached_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with numba, cache its machine code on disk, and release the GIL while it runs.

    numba loads cached files as code, so they are kept only in a folder that no other user may write to. The folder next
    to the module needs no check: users who may write there may also change the source. numba compiles a function again
    when its own file changes. It does not notice changes to imported constants, so these must be final, like those of
    the JPEG standard.
    """
    try:
        dispatcher = njit(cache=True, nogil=True)(function)
        cache_folder = getattr(getattr(dispatcher, "stats", None), "cache_path", None)  # None with NUMBA_DISABLE_JIT.
        if cache_folder is not None and Path(cache_folder).parent != Path(function.__code__.co_filename).parent:
            check_folder(Path(cache_folder))
    except RuntimeError:  # Neither this package's folder nor the user's cache folder is writable.
        return njit(nogil=True)(function)
    except UntrustedError as error:
        _log.warning(
            "numba's machine code is not cached, so each process compiles it: %s. Set NUMBA_CACHE_DIR to a folder that "
            "only you can write to",
            error,
        )
        return njit(nogil=True)(function)
    return dispatcher
