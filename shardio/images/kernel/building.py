"""Compiling the kernel, once for each machine and version."""

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
    """Compile the kernel for this machine, unless that is done; return where it is.

    Several processes may do so at once: one compiles, the others wait for it. Where its pixels differ from the
    libraries', the file says so, and the kernel is not used. All users may read the file, whatever the umask.

    Args:
        path: Where it goes; by default into the user's cache folder.

    Raises:
        UntrustedError: If others may write to its folder.
        OSError: If it cannot be written.
    """
    path = kernel_path() if path is None else path
    make_folder(path.parent)
    with FileLock(path.with_suffix(".lock")):
        build_locked(path)
    return path


def build_locked(path: Path) -> None:
    """Compile the kernel unless that is done, in a process that holds the lock; say so if it must not be used."""
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
        _log.warning("%s", say_unused(name))


def say_unused(difference: str) -> str:
    """Return the message for users whose machine draws other pixels with the kernel."""
    return (
        "shardio's JPEG decoder is not used on this machine, since its pixels are not those of libjpeg-turbo and "
        f"OpenCV here: {difference}. They decode, more slowly. Please report this line."
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
