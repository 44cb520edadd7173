"""Compiling the kernel, once for each machine and version, into the user's cache folder."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llvmlite.binding as llvm

from shardio.images.kernel.loading import Kernel, kernel_path, pack_kernel, read_kernel

_BUILD = "import sys; sys.path[:] = eval(sys.argv.pop(1)); from shardio.images.kernel.building import _build; _build()"
"""The program of the background process: it finds modules where this one does."""

_log = logging.getLogger("shardio")


def build() -> Path:
    """Compile the kernel for this machine, unless that is done; return where it is.

    Several processes may do so at once: one compiles, the others wait for it. Where its pixels differ from the
    libraries', the file says so, and the kernel is not used.
    """
    path = kernel_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path, wait=True):
        _build()
    return path


def build_in_background() -> bool:
    """Begin to compile the kernel in a process of its own; return whether it was begun: somebody else may do it."""
    path = kernel_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, wait=False) as descriptor:
            if read_kernel() is not None:
                return False
            subprocess.Popen(
                [sys.executable, "-c", _BUILD, repr([str(entry) or str(Path.cwd()) for entry in sys.path])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],  # So there is no moment in which nobody has the lock.
                start_new_session=True,  # Ctrl-C in a short run leaves it to be of use for the next one.
            )
    except OSError:
        return False
    return True


@contextmanager
def _lock(path: Path, *, wait: bool) -> Iterator[int]:
    """Hold the lock on a kernel's file; a process that inherits the descriptor goes on to hold it until it ends.

    Raises:
        OSError: If it cannot be had, or somebody else has it and ``wait`` is False.
    """
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def _build() -> None:
    """Compile the kernel unless that is done, in a process that holds the lock; say so if it must not be used."""
    kernel = read_kernel()
    if kernel is None:
        from shardio.images.kernel.checking import find_difference

        kernel = _compile()
        difference = find_difference(Kernel(*kernel))
        if difference is not None:
            kernel = difference, b""
        _write(kernel_path(), pack_kernel(*kernel))
    name, code = kernel
    if not code:
        _log.warning(
            "shardio's JPEG decoder is not used on this machine, since its pixels are not those of libjpeg-turbo and "
            "OpenCV here: %s. They decode, more slowly. Please report this line.",
            name,
        )


def _compile() -> tuple[str, bytes]:
    """Return the name of the kernel's function, and its machine code as an object file."""
    from shardio.images.kernel.entry import compile_entry

    code, name = compile_entry()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="default",
    )
    return name, machine.emit_object(llvm.parse_assembly(_close(code)))


def _close(code: str) -> str:
    """Return LLVM code that refers to nothing outside of it but C's memory functions.

    What allocates arrays and raises errors, in numba's runtime and Python's, is declared and never called: the kernel
    does neither. Should it ever come to that, the process ends there and then.
    """
    code = re.sub(
        r"^declare (?!.*@llvm\.)(.*\))(.*)$",
        r"define internal \1 { call void @llvm.trap() unreachable }",
        code,
        flags=re.M,
    )
    code = re.sub(r"^(@\w+) = external global (\w+).*$", r"\1 = internal global \2 0", code, flags=re.M)
    return code + "\ndeclare void @llvm.trap()\n"


def _write(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
