from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "fuzz_kernel.py"


@pytest.mark.slow
def test_the_kernel_stays_between_guard_pages() -> None:
    done = run_python(SCRIPT, "--guard", "--files", 200, "--start", 77, "--seed", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("200 files of seed 2 from 77 on --guard: no access outside the kernel's memory; ")


FAULTS = {
    "one file alone": ("len(chunk.contents) and 8 in files", "SIGSEGV", "file 8", "8 --files 1"),
    "two files together": ("{8, 9} <= set(files)", "SIGSEGV", "files 8 to 11, together", "8 --files 4"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("condition", "end", "files", "again"), FAULTS.values(), ids=FAULTS)
def test_files_that_end_the_process_are_named(condition: str, end: str, files: str, again: str) -> None:
    code = f"""
import ctypes, multiprocessing
from tools import fuzz_kernel

def make_chunk(seed, files, originals):
    chunk = make_usual_chunk(seed, files, originals)
    if {condition}:
        ctypes.string_at(0)
    return chunk

make_usual_chunk, fuzz_kernel._make_chunk = fuzz_kernel._make_chunk, make_chunk
fork = multiprocessing.get_context("fork")  # A spawned process would not have this fault.
multiprocessing.get_context = lambda _: fork
fuzz_kernel.main(files=20, seed=1, start=0, guard=True, tight=None)
"""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 1
    expected = f"{end}: seed 1, {files}; repeat with --seed 1 --start {again} --guard"
    assert done.stderr.splitlines()[-1] == expected
