"""Compile the functions on this machine if shardio was built without them, and check their pixels."""

from __future__ import annotations

import logging
from pathlib import Path

from shardio.files import FILE_MODE, WorkLock, make_folder, write_whole
from shardio.images.kernel.cache_files import check_name, object_name, pack, read_check, read_object, user_folder
from shardio.images.kernel.finding import adopt
from shardio.images.kernel.functions import Functions
from shardio.images.kernel.loading import can_compile, load_built, load_object
from shardio.images.kernel.source import hash_source

PATIENCE_S = 180.0
"""The maximum wait for another process to compile the functions, in seconds: several times the usual duration."""

_log = logging.getLogger("shardio")


def build(folder: Path | None = None) -> None:
    """Compile the functions unless they exist for this processor, and check them unless they have been checked.

    If several processes call this at the same time, one works and the others wait. If the functions' pixels differ from
    the libraries', a file records the difference, and the kernel is not used. All users may read the files, regardless
    of the umask.

    Args:
        folder: The folder to write to; by default, the user's cache folder.

    Raises:
        ImportError: If there are no functions for this processor, and numba is not installed.
        UntrustedError: If other users may write to the folder.
        OSError: If the folder cannot be written to.
    """
    folder = user_folder() if folder is None else folder
    make_folder(folder)
    with WorkLock(folder / f"{hash_source()}.lock", PATIENCE_S, FILE_MODE).held():
        build_locked(folder)


def build_locked(folder: Path) -> None:
    """Compile and check the functions as :func:`build` does. The caller must hold the lock."""
    functions, new_code = load_built(), None
    if functions is None:
        if not can_compile():
            raise ImportError("numba is not installed")
        code = read_object(folder)
        if code is None:
            code = new_code = _compile()
        functions = load_object(object_name(), code)
    adopt(functions)
    difference = read_check(functions.name, folder)
    if difference is None:
        from shardio.images.kernel.checking import find_difference

        difference = find_difference(functions) or ""
        if new_code is not None:  # Written after the check, so functions that crash are not published.
            _write(folder / object_name(), new_code)
        _write(folder / check_name(functions.name), difference.encode())
    if difference:
        warn_of_difference(difference)


def compile_here() -> Functions:
    """Compile the functions for this process only.

    Raises:
        ImportError: If numba is not installed.
    """
    return load_object(object_name(), _compile())


def warn_of_difference(difference: str) -> None:
    """Warn that the kernel is not used on this machine, because its pixels differ."""
    _log.warning(
        "shardio does not use its JPEG kernel on this machine, because its pixels differ from those of libjpeg-turbo "
        "or Pillow: %s. It uses these libraries instead, which is slower. Please report this message.",
        difference,
    )


def _compile() -> bytes:
    """Compile the functions for this processor; return their object file."""
    from shardio.images.kernel.compiling import compile_functions, emit_for_this_processor

    return emit_for_this_processor(compile_functions())


def _write(path: Path, content: bytes) -> None:
    with write_whole(path, mode=FILE_MODE) as file:
        file.write(pack(content))
