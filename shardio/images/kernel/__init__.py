"""Provide the kernel: shardio's JPEG decoder and image operations, compiled for the processor.

The functions are in :mod:`compiled`. numba compiles them (:mod:`compiling`) when shardio is built, for several
processors (:mod:`targets`), or else on the user's machine (:mod:`building`). A background process on that machine
checks the kernel's pixels once (:mod:`checking`). Decoding processes load the machine code without numba
(:mod:`loading`). :mod:`finding` decides which code, if any, to load.
"""

from shardio.images.kernel.finding import (
    check_kernel,
    compiled_functions,
    find_functions,
    find_kernel,
    prepare_kernel,
    why_no_kernel,
)

__all__ = ["check_kernel", "compiled_functions", "find_functions", "find_kernel", "prepare_kernel", "why_no_kernel"]
