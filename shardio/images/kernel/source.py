"""Hash the source of the compiled functions, and locate the shared objects that a build compiles from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import xxhash

BUILT_FOLDER = Path(__file__).parent / "built"
"""The folder of the shared objects that shardio was built with."""

_COMPILED_IN = ("jpeg/standard.py", "jpeg/tile_table.py", "kernel/compiling.py")
"""The files outside ``compiled/`` that determine the machine code: constants, and the code that calls LLVM."""


@cache
def hash_source() -> str:
    """Return a hash of everything that determines what the functions do, in hexadecimal."""
    images = Path(__file__).parents[1]
    hasher = xxhash.xxh3_64()
    for path in (*sorted(images.glob("kernel/compiled/*.py")), *(images / name for name in _COMPILED_IN)):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def built_path(target: str) -> Path:
    """Return the path of the shared object for a target of :data:`shardio.images.kernel.targets.TARGETS`."""
    return BUILT_FOLDER / f"{target}-{hash_source()}.so"
