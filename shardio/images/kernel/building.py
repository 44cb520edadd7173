"""Compiling the kernel, once for each machine and version, into the user's cache folder."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import llvmlite.binding as llvm
from filelock import FileLock, Timeout

from shardio.images.kernel.loading import Kernel, kernel_path, pack_kernel, read_kernel

_BUILD = (
    "import sys; sys.path[:] = eval(sys.argv.pop(1)); from shardio.images.kernel import building as b; b.build_alone()"
)
"""The program of the background process: it finds modules where this one does."""

_log = logging.getLogger("shardio")


def build() -> Path:
    """Compile the kernel for this machine, unless that is done; return where it is.

    Several processes may do so at once: one compiles, the others wait for it. Where its pixels differ from the
    libraries', the file says so, and the kernel is not used.
    """
    path = kernel_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        _build()
    return path


def build_alone() -> None:
    """Compile the kernel and say so, unless that is done, or somebody else does it."""
    with suppress(Timeout), FileLock(kernel_path().with_suffix(".lock"), timeout=0):
        if read_kernel() is None:
            _log.warning(
                "shardio compiles its JPEG decoder for this machine, in the background: once, for about half a minute "
                "of one core. Until then libjpeg-turbo decodes. (`python -m shardio.images.kernel` does it beforehand.)"
            )
            _build()


def build_in_background() -> None:
    """Have a process of its own build the kernel, unless somebody does or did it, or nothing can be written there."""
    path = kernel_path()
    if read_kernel() is not None:  # One that must not be used.
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        FileLock(path.with_suffix(".lock"), timeout=0).acquire().lock.release()
    except (OSError, Timeout):
        return
    subprocess.Popen(
        [sys.executable, "-c", _BUILD, repr([str(entry) or str(Path.cwd()) for entry in sys.path])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a short run leaves it to be of use for the next one.
    )


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
