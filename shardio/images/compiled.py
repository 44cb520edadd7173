"""Loops that numba compiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from shardio.images.trust import UntrustedError, check_folder

_log = logging.getLogger("shardio")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function by numba; it releases the GIL.

    The code is kept on disk, where there is a place for it that others may not write to: what numba keeps is loaded as
    code. Beside this module anybody who may write can change the source as well, so nothing is asked of that place.
    """
    try:
        dispatcher = njit(cache=True, nogil=True)(function)
        kept_in = getattr(getattr(dispatcher, "stats", None), "cache_path", None)  # NUMBA_DISABLE_JIT: no dispatcher.
        if kept_in is not None and Path(kept_in).parent != Path(function.__code__.co_filename).parent:
            check_folder(Path(kept_in))
    except RuntimeError:  # Neither this package's folder nor the user's cache folder can be written to.
        return njit(nogil=True)(function)
    except UntrustedError as error:
        _log.warning("numba's compiled code is not kept, and each process compiles it: %s (NUMBA_CACHE_DIR)", error)
        return njit(nogil=True)(function)
    return dispatcher
