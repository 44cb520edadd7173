from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "fuzz_kernel.py"


def test_the_kernel_stays_between_guard_pages() -> None:
    done = run_python(SCRIPT, "--guard", "--files", 1000, "--start", 77, "--seed", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1,000 files of seed 2 from 77 on --guard: nothing touched but its own; ")


FAULTS = {
    "one file reads what nobody may": (
        "len(chunk.contents) and 300 in numbers",
        "SIGSEGV",
        "file 300",
        "300 --files 1",
    ),
    "two files do it together": (
        "{300, 301} <= set(numbers)",
        "SIGSEGV",
        "files 300 to 303, together",
        "300 --files 4",
    ),
}


@pytest.mark.parametrize(("condition", "end", "files", "again"), FAULTS.values(), ids=FAULTS)
def test_files_that_end_the_process_are_named(condition: str, end: str, files: str, again: str) -> None:
    code = f"""
import ctypes, multiprocessing
from tools import fuzz_kernel

def draw_chunk(seed, numbers, collection):
    chunk = draw_chunk_as_usual(seed, numbers, collection)
    if {condition}:
        ctypes.string_at(0)
    return chunk

draw_chunk_as_usual, fuzz_kernel._draw_chunk = fuzz_kernel._draw_chunk, draw_chunk
fork = multiprocessing.get_context("fork")  # Another process would not have this fault.
multiprocessing.get_context = lambda _: fork
fuzz_kernel.main(files=400, seed=1, start=0, guard=True, tight=None)
"""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 1
    expected = f"{end}: seed 1, {files}; again by --seed 1 --start {again} --guard"
    assert done.stderr.splitlines()[-1] == expected
