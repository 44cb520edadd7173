"""A background process finds the modules of the process that starts it and keeps nothing else of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardio
from shardio.process import start_process

ROOT = Path(shardio.__file__).parents[1]

PROGRAM = """
import json, os, sys

def report():
    inherited = [number for number in map(int, sys.argv[2:]) if is_open(number)]
    print(json.dumps([sys.argv[1], os.getcwd(), os.environ["COLOUR"], sys.stdin.read(), inherited, os.getsid(0)]))

def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
"""


def test_it_gets_what_it_is_given_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "reports.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "modules"])
    passed, kept = os.pipe()
    try:
        process = start_process(
            "reports:report",
            ["a b", passed, kept],
            environment={"COLOUR": "blue"},
            descriptors=[passed],
            cwd="/",
            stdout=subprocess.PIPE,
        )
        output, _ = process.communicate(timeout=60)
    finally:
        os.close(passed)
        os.close(kept)
    assert process.returncode == 0
    assert output.decode() == f'["a b", "/", "blue", "", [{passed}], {process.pid}]\n'


GONE = """
import os, subprocess, sys
from shardio.process import start_process
os.mkdir(sys.argv[1])
os.chdir(sys.argv[1])
os.rmdir(sys.argv[1])
sys.path.insert(0, "")
sys.exit(start_process("shardio.process:count_processors", cwd="/").wait())
"""


def test_it_starts_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", GONE, tmp_path / "gone"], env=environment, timeout=60, check=True)
