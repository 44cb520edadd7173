"""The kernel: shardio's own JPEG code, above all its decoder, compiled for the processor.

The functions are in :mod:`compiled`. numba compiles them (:mod:`compiling`) when shardio is built, for several
processors (:mod:`targets`), or else on the user's machine (:mod:`building`). There its pixels are checked once
(:mod:`checking`), in the background. Processes that decode load the machine code without numba (:mod:`loading`), and
:mod:`finding` decides which code that is, if any.
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
