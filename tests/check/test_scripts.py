"""``shardio check script.py:function`` judges a script's loaders on all ranks, and all ranks end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardio import IdentityError
from shardio.check.ranks import RankCommand, run_ranks
from shardio.errors import ShardioError
from tests.check.conftest import RunCheck
from tests.processes import run_python
from tests.raising import assert_raises

SCRIPT = """
import sys
import threading
import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler

def unsplit():
    return DataLoader(list(range(60)), batch_size=8, shuffle=True, num_workers=1)

def split():
    sys.stderr.write("x" * 200_000)  # More than a pipe holds.
    sys.stderr.flush()
    threading.Thread(target=threading.Event().wait).start()  # It never ends.
    torch.distributed.init_process_group("gloo")
    dataset = [{"id": i, "half": i // 2} for i in range(60)]
    return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=1)

class Augmented:
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.rand(3) + index

class Twice(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()

def twice():
    return Twice(Augmented(), batch_size=8)

def augmented():
    return DataLoader(Augmented(), batch_size=8)

def nothing():
    pass
"""


WITHOUT_TORCH = """
import os
import threading

def failing():
    if os.environ["RANK"] == "1":
        raise RuntimeError("no data on this rank")
    threading.Event().wait()  # As ranks wait for each other.
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loaders.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_real_ranks_are_judged_though_they_write_much_and_leave_threads_behind(script: Path) -> None:
    done = run_python(
        "-m", "shardio", "check", f"{script}:split", "--world-size", 2, "--epochs", 2, "--expected", 60, "--key", "id"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 1: right: 60 samples: 60 delivered once" in done.stdout
    assert "rank 1 worker 0: 30 samples" in done.stdout


def test_a_failure_ends_real_ranks_that_wait_for_it_and_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "without_torch.py"
    script.write_text(WITHOUT_TORCH)
    done = run_python("-m", "shardio", "check", f"{script}:failing", "--world-size", 2)
    assert done.returncode == 1
    assert re.match(r"error: rank 1 of .*:failing failed:\n", done.stderr)
    assert "RuntimeError: no data on this rank" in done.stderr


TWICE = "WRONG: 60 samples: 120 delivered once, 0 more than once, 0 never, 60 unexpected"
UNSPLIT = "ranks 0 and 1 delivered the same 60 samples: the loader has no DistributedSampler"
AGAIN = "sample 0 differs when it is read again. To identify samples, pass key="
NOTHING = "nothing must return a loader or another iterable of batches, got None"


@pytest.mark.parametrize(
    ("name", "world_size", "error", "message"),
    [
        ("unsplit", 2, SystemExit, UNSPLIT),
        ("twice", 1, SystemExit, TWICE),
        ("augmented", 1, IdentityError, AGAIN),
        ("nothing", 1, IdentityError, NOTHING),
        ("missing", 1, ValueError, "has no function 'missing'"),
    ],
)
def test_a_scripts_loader_that_is_wrong_or_cannot_be_judged(
    script: Path, run_check: RunCheck, name: str, world_size: int, error: type[BaseException], message: str
) -> None:
    done = run_check(f"{script}:{name}", "--world-size", world_size, "--expected", 60)
    assert (done.exit_code, type(done.exception)) == (1, error)
    assert message in f"{done.output}{done.exception}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:make"], "does not exist"),
        (["{packed}", "--key", "label"], "only a script's batches need --key"),
        (["--merge", "rank-00000.cov", "--key", "label"], "only a script's batches need --key"),
        (["{packed}", "--expected", 5], "applies only to a script"),  # The dataset itself has the expected keys.
    ],
)
def test_wrong_usage_is_refused(packed: Path, run_check: RunCheck, arguments: list[Any], message: str) -> None:
    done = run_check(*(packed if argument == "{packed}" else argument for argument in arguments))
    assert done.exit_code == 2
    assert message in done.output


SHARDIO = """
import shardio

def make(map_style=False, drop_last=False, num_workers=0, key="key", **options):
    loading = dict(batch_size=4, num_workers=num_workers, drop_last=drop_last)
    if not map_style:
        dataset = shardio.ShardDataset({packed!r}, fields=key, shuffle=True, **options)
        return shardio.DataLoader(dataset, **loading)
    dataset = shardio.ShardMapDataset({packed!r}, fields=key)
    return shardio.DataLoader(dataset, sampler=shardio.EpochSampler(dataset, **options), **loading)

def chosen():
    return make({options})
"""

PADDED = "20 delivered once, 1 more than once (1 repeat, 1 required by the remainder policy), 0 never"
LEFT_OUT = "5 left out by the remainder policy, or delivered before the run resumed"
DROPPED = f"16 delivered once, 0 more than once, 5 never ({LEFT_OUT})"
ALL = "21 delivered once, 0 more than once, 0 never"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param("num_workers=1", PADDED, marks=pytest.mark.slow),
        ("map_style=True, key=('label', 'key')", PADDED),
        ("remainder='keep'", ALL),
        ("remainder='mask'", ALL),
        ("remainder='mask', map_style=True, key=('label', 'key')", ALL),
        ("remainder='drop', key=('label', 'key')", DROPPED),
        ("drop_last=True, map_style=True", DROPPED),
    ],
)
def test_a_loader_of_shardio_is_judged_by_its_own_remainder(
    packed: Path, tmp_path: Path, run_check: RunCheck, options: str, words: str
) -> None:
    more = ("--expected", packed, "--key", 1) if "label" in options else ()
    (tmp_path / "script.py").write_text(SHARDIO.format(packed=str(packed), options=options))
    done = run_check(f"{tmp_path / 'script.py'}:chosen", "--world-size", 2, *more)
    assert done.exit_code == 0, done.output
    assert f"epoch 0: right: 21 samples: {words}, 0 unexpected" in done.output


# This rank writes the process id of its child; the two then sleep until the launcher ends them. A stubborn rank
# responds to SIGTERM only by writing its own process id.
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
"""The first lines of a rank's script, which wait for a file."""


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
        time.sleep(0.01)  # Another process creates the file.
    return int(path.read_text())


@pytest.mark.slow
def test_the_first_failure_ends_the_others_and_their_children(tmp_path: Path) -> None:
    fails, marker = POLLS + "sys.exit('no data today')", tmp_path / "child"
    ranks = [rank(tmp_path, 0, WAITS, marker), rank(tmp_path, 1, fails, marker)]
    error = assert_raises(ShardioError, None, run_ranks, ranks, "script.py:make")
    assert str(error) == "rank 1 of script.py:make failed:\nno data today"
    assert not is_running(await_file(marker))


def test_the_rank_that_failed_first_is_named_and_not_the_one_that_ended_first(tmp_path: Path) -> None:
    cause = """
import os, sys, time
open(sys.argv[1] + "~", "w").write(str(time.time_ns()))
os.rename(sys.argv[1] + "~", sys.argv[1])
time.sleep(600)  # It failed, but has not ended when the other rank does.
"""
    effect, failed = POLLS + "sys.exit('peer is gone')", tmp_path / "0.failed"
    ranks = [rank(tmp_path, 0, cause, failed), rank(tmp_path, 1, effect, failed)]
    assert_raises(ShardioError, "rank 0 of it failed:\nit wrote nothing", run_ranks, ranks, "it")


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    writes = "import os, signal, sys\nsys.stderr.write('x' * 300_000); sys.stderr.flush()\n"
    kills = f"{writes}os.kill(os.getpid(), signal.SIGKILL)"
    message = r"rank 0 of it was terminated by signal 9 \(Killed\):\n… x+$"
    assert len(str(assert_raises(ShardioError, message, run_ranks, [rank(tmp_path, 0, kills)], "it"))) < 10_000


LAUNCHES = """
import sys
from pathlib import Path
from tests.check.test_scripts import WAITS, rank
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
