"""Load the compiled functions that shardio was built with, or else those that were compiled on this machine.

The operating system loads a shared object in 0.2 ms. LLVM loads an object file in 35 ms. Neither way loads numba.
"""

from __future__ import annotations

import ctypes
from functools import partial
from importlib.util import find_spec

from shardio.images.kernel.functions import Function, Functions
from shardio.images.kernel.source import built_path
from shardio.images.kernel.targets import find_targets


def load_functions() -> Functions | None:
    """Load the compiled functions. Return None if there are none for this processor yet."""
    if (built := load_built()) is not None:
        return built
    if not can_compile():
        return None
    from shardio.images.kernel.cache_files import object_name, read_object

    code = read_object()
    return None if code is None else load_object(object_name(), code)


def load_built() -> Functions | None:
    """Load the functions that shardio was built with. Return None if there are none for the current source."""
    for target in find_targets():
        if (path := built_path(target)).exists():
            return Functions(path.name, partial(_find, ctypes.CDLL(str(path))))
    return None


def load_object(name: str, code: bytes) -> Functions:
    """Load the functions from an object file.

    Args:
        name: Identifies the code.
        code: The object file's content.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    # The engine owns the code's memory. Code and data refer to each other by 32-bit distances (x86-64's R_X86_64_PC32;
    # aarch64's ADRP reaches 4 GiB). LLVM's own memory manager maps each section separately. In a process with many
    # libraries, the sections may be too far apart, and LLVM aborts the process. llvmlite's manager maps them together.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()

    def find(function_name: str) -> Function:
        function = ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine.get_function_address(function_name))
        function.owner = engine  # type: ignore[attr-defined]  # The engine is freed with its functions.
        return function

    return Functions(name, find)


def can_compile() -> bool:
    """Return whether numba, which compiles the functions, is installed."""
    return find_spec("numba") is not None and find_spec("llvmlite") is not None


def _find(library: ctypes.CDLL, name: str) -> Function:
    function = library[name]
    function.argtypes, function.restype = [ctypes.c_int64], None
    return function
