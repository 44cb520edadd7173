"""Loading the kernel into a process whose address space is crowded, as CUDA's libraries crowd it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardio.images.kernel.loading import kernel_path

ROOT = Path(__file__).parents[2]

DECODE_AMONG_SMALL_HOLES = """
import ctypes
import numpy as np
import simplejpeg
from shardio.images import CropPlan, decode_all, open_image
from shardio.images.kernel import find_kernel, loading

NOBODY, RESERVED = 0, 0x2 | 0x20 | 0x4000  # PROT_NONE; MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
WIDTH, PAGES_OF_CODE, HOLE = 3 << 30, 1 << 16, 1 << 15
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def reserve(size):
    return libc.mmap(None, size, NOBODY, RESERVED, -1, 0)

content = simplejpeg.encode_jpeg(np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8))
assert len(loading.read_kernel()[1]) > PAGES_OF_CODE  # LLVM is loaded, and has memory of its own.
wide = reserve(WIDTH)
while reserve(PAGES_OF_CODE) > wide:  # Linux takes the highest hole: from here on, code comes below the wide region,
    pass
for number in range(1, 17):  # and what is smaller comes to its upper end.
    libc.munmap(wide + WIDTH - number * (1 << 20), HOLE)
print(find_kernel() is not None)
print((decode_all([open_image(content)], CropPlan.whole(np.array([[64, 48]])))[0]
    == simplejpeg.decode_jpeg(content)).all())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the layout of the address space is Linux's")
def test_it_loads_where_small_holes_lie_more_than_2_gb_from_large_ones() -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(kernel_path().parents[2]), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", DECODE_AMONG_SMALL_HOLES], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr
