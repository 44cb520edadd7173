"""LLVM loads the functions into a crowded address space, such as CUDA's libraries leave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.images.kernel_machines import WITHOUT_BUILT, object_path, run

DECODE_AMONG_SMALL_HOLES = (
    WITHOUT_BUILT
    + """
import ctypes
import numpy as np
import simplejpeg
from shardio.images import CropPlan, render_chunk, open_image
from pathlib import Path
import sys
from shardio.images.kernel import building, find_kernel

NO_ACCESS, RESERVED = 0, 0x2 | 0x20 | 0x4000  # PROT_NONE; MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
WIDTH, PAGES_OF_CODE, HOLE = 3 << 30, 1 << 16, 1 << 15
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def reserve(size):
    return libc.mmap(None, size, NO_ACCESS, RESERVED, -1, 0)

content = simplejpeg.encode_jpeg(np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8))
code = Path(sys.argv[1]).read_bytes()
assert len(code) > PAGES_OF_CODE
building._compile = lambda: code
wide = reserve(WIDTH)
while reserve(PAGES_OF_CODE) > wide:  # Linux uses the highest hole: from here on, code goes below the wide region,
    pass
for i in range(1, 17):  # and smaller sections go to its upper end.
    libc.munmap(wide + WIDTH - i * (1 << 20), HOLE)
building.build()
print(find_kernel() is not None)
print((render_chunk([open_image(content)], CropPlan.whole(np.array([[64, 48]]))).images[0]
    == simplejpeg.decode_jpeg(content)).all())
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="the test relies on how Linux lays out the address space")
def test_it_loads_where_small_holes_are_more_than_2_gb_away_from_large_ones(tmp_path: Path) -> None:
    assert run(DECODE_AMONG_SMALL_HOLES, tmp_path, object_path())[0] == "True\nTrue\n"
