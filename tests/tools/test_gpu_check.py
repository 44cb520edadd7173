"""The check for machines with a GPU runs its stages within their time limits, even if some fail or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import gpu_facts
from tools.gpu_check import BUDGET_S, CUDA_TESTS, RESULTS, ROOT, Stage, install_missing, main, run_stages

HANGS = """
import signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
Path(sys.argv[1], "half.json").write_text('{"cut')
time.sleep(600)
"""


def make_stage(name: str, code: str, share: float = 60.0, **options: Any) -> Stage:
    return Stage(name=name, what="", command=[sys.executable, "-c", code, RESULTS], share=share, **options)


def run(stages: list[Stage], out: Path, budget_s: float = BUDGET_S) -> dict[str, Any]:
    run_stages(stages, out, budget_s)
    found = json.loads((out / "stages.json").read_text())["stages"]
    return {one["name"]: one for one in found}


@pytest.mark.slow
def test_a_stage_that_hangs_and_one_that_fails_do_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.gpu_check.END_S", 0.2)
    write = "import sys; from pathlib import Path; Path(sys.argv[1], 'one.json').write_text('[1, 2]'); print('done')"
    fails = make_stage("fails", "print(*range(20), sep='\\n'); raise LookupError('planted')")
    lacks = make_stage("lacks", "", program="no-such-program")
    found = run([make_stage("hangs", HANGS, share=1), fails, lacks, make_stage("works", write)], tmp_path)
    assert {name: one["status"] for name, one in found.items()} == {
        "hangs": "timed out after 2 s",
        "fails": "failed with exit code 1",
        "lacks": "left out: no-such-program is not installed",
        "works": "passed",
    }
    assert found["works"]["results"] == {"one.json": [1, 2]}
    assert found["hangs"]["results"]["half.json"].startswith("not JSON")
    assert found["fails"]["tail"][-1] == "LookupError: planted"
    child = int(found["hangs"]["tail"][0].split()[1])
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists(), "all processes of the stage have ended"
    assert (tmp_path / "works/one.json").read_text() == "[1, 2]"
    printed = capsys.readouterr().out
    assert printed.index("child") < printed.index("===== fails"), "output is printed immediately"
    assert printed.count("    LookupError: planted") == 1
    page = (tmp_path / "summary.md").read_text()
    assert "| fails | failed with exit code 1 |" in page
    assert "LookupError: planted" in page


@pytest.mark.slow
def test_limits_follow_the_shares_and_the_rest_of_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.gpu_check.END_S", 0.1)
    stages = [make_stage(name, "import time; time.sleep(60)", share) for name, share in (("first", 2), ("second", 1))]
    found = run(stages, tmp_path / "shared", budget_s=4.9)
    assert found["first"]["status"] == "timed out after 3 s"
    assert (found["second"]["status"][:9], found["second"]["limit_s"] < 1.7) == ("timed out", True)
    found = run([make_stage("first", "", 20), make_stage("second", "", 1)], tmp_path / "early", budget_s=60)
    assert found["second"]["limit_s"] > 20, "the limit includes time that the first stage did not use"
    found = run(stages, tmp_path / "late", budget_s=1.9)
    assert found["second"]["status"] == "not started: the budget was used up"


def test_a_second_call_adds_its_stages(tmp_path: Path) -> None:
    run([make_stage("one", "raise SystemExit(2)"), make_stage("other", "print(1)")], tmp_path)
    found = run([make_stage("one", "print(2)")], tmp_path)
    assert [(name, one["status"]) for name, one in found.items()] == [("other", "passed"), ("one", "passed")]
    assert (tmp_path / "log.txt").read_text().count("=====") == 3


@pytest.mark.slow
def test_only_missing_packages_are_installed_and_only_once(tmp_path: Path) -> None:
    wheels, packages = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    for name, module in (("planted_package", "planted_module"), ("pytest", "never_installed")):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{module}.py", "value = 7")
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    assert install_missing(wheels, packages) == ["planted_package"]
    assert install_missing(wheels, packages) == []
    assert sorted(path.name for path in packages.glob("*.py")) == ["planted_module.py"]


def test_the_command_runs_the_stages_that_are_asked_for(tmp_path: Path) -> None:
    command = ["bash", "tools/gpu_check.sh", "--device", "cpu", "--stage", "sanitizer", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (stage,) = json.loads((tmp_path / "out/stages.json").read_text())["stages"]
    assert stage["status"] == "left out: compute-sanitizer is not installed"
    if not torch.cuda.is_available():  # Otherwise, the check would run the benchmark.
        done = subprocess.run(command[:2], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        assert "is a build without CUDA: install a build" in done.stderr or "finds no GPU" in done.stderr
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.cuda" in path.read_text()]
    found = {str(path.relative_to(ROOT)) for path in marked if path != Path(__file__)}
    assert found == set(CUDA_TESTS), "all tests that need CUDA are run"


@pytest.mark.slow
def test_facts_that_need_no_gpu_are_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> Any:
        raise LookupError("planted")

    monkeypatch.setitem(gpu_facts.FACTS, "overhead", fail)
    names = ["overhead", "registration", "stalls", "machine"]
    arguments = ["--device", "cpu", "--results", str(tmp_path), *(part for name in names for part in ("--only", name))]
    assert gpu_facts.main(arguments) == 1
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["registration"] == "needs CUDA"
    assert facts["overhead"] == "failed: LookupError: planted"
    starving = facts["stalls"]["starving"]
    assert 0.5 < starving["data_stall_s"] / starving["elapsed_s"] <= 1


@pytest.mark.parametrize("budget", ["25", "five minutes", "-3m"])
def test_a_budget_needs_a_unit(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--budget={budget}"])
    assert "must be minutes or seconds, such as 25m or 90s" in capsys.readouterr().err
