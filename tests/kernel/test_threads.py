from __future__ import annotations

import os
import subprocess
import sys

import pytest

DECODE = """
import os
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from shardio.images import CropPlan
from shardio.images.rendering import as_records
from shardio.kernel import find_kernel
from shardio.process import count_processors
from tests.images.jpeg_files import by_pillow
from tests.images.pictures import make_picture

kernel, content, plan = find_kernel(), by_pillow(make_picture(99, 77)), as_records(CropPlan.whole(np.array([[99, 77]])))

def decode(_=None):
    rows = np.zeros((1, 99, 77, 3), np.uint8)
    assert kernel.decode([content], plan, np.arange(1), rows).all()
    return rows.tobytes()

expected = decode()
with ThreadPoolExecutor(16) as threads:
    assert set(threads.map(decode, range(200))) == {expected}
num_turns = 0
while kernel._processors.acquire(blocking=False):  # As if threads decoded while this one forks.
    num_turns += 1
assert len(kernel._free) <= num_turns == count_processors()
if (child := os.fork()) == 0:
    os._exit(7 if decode() == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_more_threads_than_processors_take_turns_and_forks_do_not_wait_for_them() -> None:
    done = subprocess.run([sys.executable, "-c", DECODE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("7\n", "")
