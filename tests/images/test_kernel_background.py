"""The background process that compiles the kernel keeps none of its parent's files open; its failure is reported."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardio.images.kernel.source import hash_source
from tests.images.kernel_machines import ROOT, WITHOUT_BUILT

pytest.importorskip("numba")  # Without it, nothing is compiled in the background.

WAIT = """
import os
from pathlib import Path
(Path(os.environ["XDG_CACHE_HOME"]) / "pid").write_text(str(os.getpid()))
os.mkfifo(os.environ["XDG_CACHE_HOME"] + "/done")
Path(os.environ["XDG_CACHE_HOME"], "started").touch()
open(os.environ["XDG_CACHE_HOME"] + "/done").close()  # Wait until another process opens it for writing.
"""

START = (
    WITHOUT_BUILT
    + """
import os, time
import shardio.process
from shardio.images.kernel import finding
shardio.process._write_program = lambda function: {program!r}
finding.LOOK_AGAIN_S = 0
finding.prepare_kernel()
while not os.path.exists(os.environ["XDG_CACHE_HOME"] + "/started"):
    time.sleep(0.01)
print("the last line")
"""
)


def run(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc lists the open files of a process")
def test_a_script_that_starts_it_does_not_keep_readers_of_its_output_waiting(tmp_path: Path) -> None:
    log = tmp_path / "shardio" / "kernels" / f"{hash_source()}.log"
    try:
        done = run(START.format(program=WAIT), tmp_path)  # It returns when no process has the script's pipes open.
        assert (done.returncode, done.stdout) == (0, "the last line\n")
        assert "is compiling its JPEG kernel" in done.stderr
        assert str(log) in done.stderr
        compiler = int((tmp_path / "pid").read_text())
        opened = {str(entry.readlink()) for entry in Path(f"/proc/{compiler}/fd").iterdir()}  # It is alive.
        assert {str(Path(f"/proc/{compiler}/fd/{descriptor}").readlink()) for descriptor in (1, 2)} == {str(log)}
        assert not {name for name in opened if name.startswith("pipe:")}
        with log.with_suffix(".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        (tmp_path / "done").open("w").close()
    with log.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # The lock is free when the process has ended.


def test_its_failure_is_logged_once_and_its_output_is_kept(tmp_path: Path) -> None:
    code = START.format(program="import os; open(os.environ['XDG_CACHE_HOME'] + '/started', 'w'); 1 / 0") + (
        "finding._finder._build._process.wait()\n"
        "for _ in range(3):\n"
        "    assert finding.find_kernel() is None\n"
        "print(finding.why_no_kernel())\n"
    )
    done = run(code, tmp_path)
    (log,) = tmp_path.glob("shardio/kernels/*.log")
    assert "ZeroDivisionError" in log.read_text()
    _, warning = done.stderr.splitlines()
    assert "could not compile or check its JPEG kernel, and uses libjpeg-turbo instead" in warning
    assert "the background process ended with exit status 1" in warning
    assert f"its output is in {log}" in warning
    assert f"the last attempt to compile or check it failed: see {log}" in done.stdout
