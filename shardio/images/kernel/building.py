"""Compile the kernel, once for each machine and version."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import llvmlite.binding as llvm
from filelock import FileLock

from shardio.images.kernel.loading import Kernel, kernel_path, pack_kernel, read_kernel
from shardio.images.trust import FILE_MODE, make_folder
from shardio.whole_writes import write_whole

_log = logging.getLogger("shardio")


def build(path: Path | None = None) -> Path:
    """Compile the kernel for this machine unless it is compiled already, and return its path.

    Several processes may call this at the same time: one compiles, the others wait. If the kernel's pixels differ from
    the libraries', the file records that, and the kernel is not used. All users may read the file, whatever the umask.

    Args:
        path: The kernel's file; by default in the user's cache folder.

    Raises:
        UntrustedError: If other users may write to its folder.
        OSError: If the file cannot be written.
    """
    path = kernel_path() if path is None else path
    make_folder(path.parent)
    with FileLock(path.with_suffix(".lock")):
        build_locked(path)
    return path


def build_locked(path: Path) -> None:
    """Compile the kernel unless it is compiled already. Warn if it cannot be used. The process must hold the lock."""
    kernel = read_kernel(path)
    if kernel is None:
        from shardio.images.kernel.checking import find_difference

        kernel = _compile()
        difference = find_difference(Kernel(*kernel))
        if difference is not None:
            kernel = difference, b""
        with write_whole(path, mode=FILE_MODE) as file:
            file.write(pack_kernel(*kernel))
    name, code = kernel
    if not code:
        _log.warning("%s", describe_difference(name))


def describe_difference(difference: str) -> str:
    """Return the warning for machines on which the kernel's pixels differ."""
    return (
        "shardio does not use its JPEG kernel on this machine, because its pixels differ from those of libjpeg-turbo "
        f"and OpenCV: {difference}. It uses these libraries instead, which is slower. Please report this message."
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
    """Return LLVM code without external references, except to C's memory functions.

    numba declares functions of its own runtime and of Python's that allocate arrays and raise errors. The kernel does
    neither, so they are never called. If one is called nevertheless, the process aborts.
    """
    code = re.sub(
        r"^declare (?!.*@llvm\.)(.*\))(.*)$",
        r"define internal \1 { call void @llvm.trap() unreachable }",
        code,
        flags=re.M,
    )
    code = re.sub(r"^(@\w+) = external global (\w+).*$", r"\1 = internal global \2 0", code, flags=re.M)
    return code + "\ndeclare void @llvm.trap()\n"
