"""The version of the compiled functions: a hash of their source; and where a build of shardio puts them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import xxhash

BUILT_FOLDER = Path(__file__).parent / "built"
"""Holds the shared objects that shardio was built with."""

_COMPILED = (
    *("best_table", "chunk", "codes", "colour", "compiling", "entropy", "entry", "heads", "idct", "memory"),
    *("recoding", "records", "regions", "resizing", "streams", "upsampling", "vectors"),
)
_COMPILED_IN_JPEG = ("standard", "tile_table")
"""The files outside this folder whose names are compiled in as constants."""


@cache
def hash_source() -> str:
    """Return a hash of all that determines what the functions do, in hexadecimal."""
    here = Path(__file__).parent
    hasher = xxhash.xxh3_64()
    for path in (
        *(here / f"{name}.py" for name in _COMPILED),
        *(here.parent / "jpeg" / f"{name}.py" for name in _COMPILED_IN_JPEG),
    ):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def built_path(target: str) -> Path:
    """Return the path of the shared object for a target of :data:`shardio.images.kernel.targets.TARGETS`."""
    return BUILT_FOLDER / f"{target}-{hash_source()}.so"
