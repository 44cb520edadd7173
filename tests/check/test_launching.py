"""Ranks end together: the first failure, Ctrl-C and SIGTERM end all ranks and their children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardio.check.ranks import RankCommand, run_ranks
from shardio.errors import ShardioError

# A rank that writes the process id of its child. Both sleep until the launcher ends them. A stubborn rank survives
# SIGTERM, and then writes its own process id.
WAITS = """
import os, signal, subprocess, sys, time
def write(number, name):
    with open(name + ".tmp", "w") as file:
        file.write(str(number))
    os.rename(name + ".tmp", name)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: write(os.getpid(), sys.argv[1] + "-told"))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # Until it is ended.
write(child.pid, sys.argv[1])
time.sleep(600)  # Longer than any test: only a signal ends it.
"""


POLLS = """
import sys, os, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)  # Another rank writes the file.
"""
"""The beginning of the code of a rank that waits for a file."""


def rank(directory: Path, number: int, code: str, *arguments: object) -> RankCommand:
    return RankCommand(
        command=[sys.executable, "-c", code, *map(str, arguments)],
        environment={"RANK": str(number)},
        path=directory / str(number),
    )


def is_running(process_id: int) -> bool:
    status = Path(f"/proc/{process_id}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_file(path: Path) -> int:
    while not path.exists():
        time.sleep(0.01)  # Not a wait for a fixed time: the file ends the loop.
    return int(path.read_text())


@pytest.mark.slow
def test_the_first_failure_ends_the_others_and_their_children(tmp_path: Path) -> None:
    """The second rank fails when the first one has a child."""
    fails = POLLS + "sys.exit('no data today')"
    marker = tmp_path / "child"
    with pytest.raises(ShardioError) as caught:
        run_ranks([rank(tmp_path, 0, WAITS, marker), rank(tmp_path, 1, fails, marker)], "script.py:make")
    assert str(caught.value) == "rank 1 of script.py:make failed:\nno data today"
    assert not is_running(await_file(marker))


def test_the_rank_that_failed_first_is_named_and_not_the_one_that_ended_first(tmp_path: Path) -> None:
    cause = """
import sys, time
open(sys.argv[1], "w").write(str(time.time_ns()))
time.sleep(600)  # It failed, but has not ended when the other rank does.
"""
    effect = POLLS + "sys.exit('peer is gone')"
    failed = tmp_path / "0.failed"
    with pytest.raises(ShardioError, match="rank 0 of it failed:\nit wrote nothing"):
        run_ranks([rank(tmp_path, 0, cause, failed), rank(tmp_path, 1, effect, failed)], "it")


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    writes = "import os, signal, sys\nsys.stderr.write('x' * 300_000); sys.stderr.flush()\n"
    kills = f"{writes}os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(ShardioError, match=r"rank 0 of it was terminated by signal 9 \(Killed\):\n… x+$") as caught:
        run_ranks([rank(tmp_path, 0, kills)], "it")
    assert len(str(caught.value)) < 10_000


LAUNCHES = """
import sys
from pathlib import Path
from tests.check.test_launching import WAITS, rank
from shardio.check import ranks
work, ranks.GRACE_S = Path(sys.argv[1]), float(sys.argv[2])
ranks.run_ranks([rank(work, number, WAITS, work / str(number), *sys.argv[3:]) for number in range(2)], "it")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "kind", "grace_s", "is_sent_again"),
    [
        (signal.SIGINT, -signal.SIGINT, "obedient", 600, False),
        (signal.SIGTERM, 143, "stubborn", 0, False),
        (signal.SIGTERM, 143, "stubborn", 600, True),
    ],
)
def test_signals_end_all_ranks_and_their_children(
    number: signal.Signals, code: int, kind: str, grace_s: float, is_sent_again: bool, tmp_path: Path
) -> None:
    """Ranks that stay are killed when their grace ends, or at once after a second signal."""
    root = Path(__file__).parents[2]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHES, str(tmp_path), str(grace_s), kind],
        cwd=root,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    processes = [await_file(tmp_path / str(rank)) for rank in range(2)]
    launcher.send_signal(number)
    if is_sent_again:
        processes += [await_file(tmp_path / f"{rank}-told") for rank in range(2)]
        launcher.send_signal(number)
    launcher.communicate(timeout=300)
    assert launcher.returncode == code
    assert not any(map(is_running, processes))
