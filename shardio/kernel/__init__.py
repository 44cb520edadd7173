"""The kernel: shardio's JPEG decoder and operations on pixels, in C.

The C source is in this folder; decoder.h and edit.h list the files. tools/build_kernel.py compiles the source when
shardio is built, once for each kind of processor (:mod:`targets`).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from shardio.kernel.targets import find_targets

if TYPE_CHECKING:
    from shardio.kernel.functions import Functions, Kernel

__all__ = ["find_functions", "find_kernel", "load_functions", "require_functions", "why_no_kernel"]


def find_functions() -> Functions | None:
    """Return the kernel's functions, or None if there is no kernel for this processor."""
    return load_functions()[0]


@cache
def load_functions() -> tuple[Functions | None, str]:
    """Return the kernel's functions, or None and the reason why there is no kernel."""
    reason = "shardio was built without the kernel for this processor"
    for target in find_targets():
        if target.path.exists():
            from shardio.kernel.functions import Functions

            try:
                return Functions(target.path), ""
            except OSError as error:  # For example, the file system does not allow execution.
                reason = f"the kernel cannot be loaded: {error}"
    return None, reason


@cache
def find_kernel() -> Kernel | None:
    """Return the decoder, or None if there is no kernel for this processor."""
    if (functions := find_functions()) is None:
        return None
    from shardio.kernel.functions import Kernel

    return Kernel(functions)


def why_no_kernel() -> str | None:
    """Return the reason why this process has no kernel, or None if it has one."""
    return load_functions()[1] or None


def require_functions() -> Functions:
    """Return the kernel's functions.

    Raises:
        ImportError: If there is no kernel for this processor.
    """
    if (functions := find_functions()) is None:
        raise ImportError(f"{why_no_kernel()}: install a wheel that has it")
    return functions
