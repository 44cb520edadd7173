"""Guard pages detect any access beyond an array."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools.guard_pages import PAGE, GuardedMemory


def test_an_array_works_as_any_other() -> None:
    for num_bytes, at_end in itertools.product((1, 16, PAGE, PAGE + 8), (False, True)):
        memory = GuardedMemory()
        array = memory.place(num_bytes, at_end=at_end)
        array[...] = 7
        assert (array == 7).all()
        content = np.arange(num_bytes // 8 * 8, dtype=np.uint8).view(np.int64)
        np.testing.assert_array_equal(memory.place(content.shape, np.int64, at_end=at_end, content=content), content)
        assert memory.place(3 * PAGE, at_end=at_end).nbytes == 3 * PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placed", "access"),
    [
        ("at_end=True", "ctypes.string_at(first + 100, 1)"),
        ("at_end=False", "ctypes.string_at(first - 1, 1)"),
        ("at_end=True", "ctypes.memset(first + 100, 0, 1)"),
        ("at_end=False", "ctypes.memset(first - 1, 0, 1)"),
        ("at_end=True, content=5", "ctypes.memset(first, 0, 1)"),  # It is read-only.
    ],
)
def test_an_access_beyond_it_ends_the_process(placed: str, access: str) -> None:
    code = f"""
import ctypes
from tools.guard_pages import GuardedMemory
m = GuardedMemory()
m.place(3 * {PAGE}, at_end=True)
first = m.place(100, {placed}).ctypes.data
print(len(ctypes.string_at(first, 100)), flush=True)
{access}
print("beyond")
"""
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "100\n")
