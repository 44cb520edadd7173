from __future__ import annotations

import resource
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.processes import forkserver_context, run_python
from tests.shards.hostile_shards import HostileShard

# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
fuzz_tars = import_module("tools.fuzz_tars")

SCRIPT = Path(__file__).parents[2] / "tools" / "fuzz_tars.py"


@pytest.mark.slow
def test_a_campaign_says_how_many_inputs_break_a_law(tmp_path: Path) -> None:
    done = run_python(SCRIPT, "--cases", 60, "--seed", 3, "--save", tmp_path / "kept", cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stdout
    assert "0 of 60 inputs of seed 3 break a law" in done.stdout
    assert "index: done" in done.stdout
    assert not (tmp_path / "kept").exists()


def _break(seeds: range, reports: Any, current: Any, folder: Path) -> None:
    """Break a law at 3, die at 5, and hang at 7."""
    for seed in seeds:
        current.value = seed
        if seed == 5:
            signal.raise_signal(signal.SIGKILL)
        if seed == 7:
            signal.setitimer(signal.ITIMER_PROF, 0.01)
            while True:
                pass
        reports.send(fuzz_tars.Report(num_inputs=1, wrong="other samples" if seed == 3 else None, seed=seed))
        if seed == 3:
            return


def test_a_campaign_goes_on_after_a_broken_law_a_crash_and_a_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = forkserver_context()
    monkeypatch.setattr(fuzz_tars.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(fuzz_tars, "run_seeds", _break)
    reports = list(fuzz_tars.run_job(range(10), tmp_path))
    assert sum(report.num_inputs for report in reports) == 10
    assert {report.seed: report.wrong for report in reports if report.wrong} == {
        3: "other samples",
        5: "the process ended by SIGKILL",
        7: "one way of reading it took longer than 2 s of processor time per MiB",
    }


def test_a_saved_input_can_be_read_again(tmp_path: Path) -> None:
    how = fuzz_tars._save(37, tmp_path)
    assert "--only 37" in how
    (saved,) = tmp_path.iterdir()
    assert HostileShard.load(saved.read_bytes()).num_bytes
    assert fuzz_tars._replay(None, saved, tmp_path).total() > 0
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
