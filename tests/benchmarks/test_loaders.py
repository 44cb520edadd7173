"""The loader benchmark reports its progress, and leaves no files or processes behind."""

from __future__ import annotations

import os
import re
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loaders import rounds
from benchmarks.loaders.registry import CANDIDATES, PIXELS_CHANGED, PIXELS_KEPT, PIXELS_SMALL, SMALL, find
from benchmarks.loaders.rounds import Settings, run_case
from tests.faults.worker_processes import wait_until
from tests.processes import run_python, start_python

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="it measures with Linux's /proc")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def make_command(images: Path, temporary: Path, num_rounds: int) -> list[str]:
    command = f"-m benchmarks {images} --case train --workers 1 --samples 21 --candidate shardio-folder"
    return [*command.split(), "--results", str(temporary.parent), "--rounds", str(num_rounds)]


@pytest.mark.slow
def test_each_turn_is_told_with_case_round_and_candidate(images: Path, temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = run_python(*make_command(images, temporary, 1), cwd=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "shardio, ImageFolder" in done.stdout
    assert re.findall(".*round.*", done.stderr) == ["train: round 1 of 1, turn 1 of 1: shardio-folder"]
    assert list(temporary.iterdir()) == []


def test_each_round_rotates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(rounds, "_prepare", lambda case, result, settings: tmp_path)
    monkeypatch.setattr(rounds, "_run_once", lambda case, result, data, settings: result.rounds.append({}))
    settings = Settings(work=tmp_path, num_samples=1, num_small=1, num_workers=1, num_epochs=1, num_rounds=3)
    run_case("train", [find(name) for name in ("shardio-folder", "bare")], settings)
    turns = ["shardio-folder", "bare"], ["bare", "shardio-folder"], ["shardio-folder", "bare"]
    assert capsys.readouterr().err.splitlines() == [
        f"train: round {number} of 3, turn {turn} of 2: {name}"
        for number, names in enumerate(turns, 1)
        for turn, name in enumerate(names, 1)
    ]


@pytest.mark.slow
def test_temporary_data_are_removed_when_it_is_ended(images: Path, temporary: Path, tmp_path: Path) -> None:
    errors, environment = tmp_path / "errors", {**os.environ, "TMPDIR": str(temporary)}
    command = make_command(images, temporary, 100_000)
    process = start_python(*command, cwd=ROOT, environment=environment, output=tmp_path / "output", errors=errors)
    wait_until(lambda: errors.exists() and "round 1 of" in errors.read_text(), "the first round has begun")
    assert list(temporary.iterdir()) != []
    process.terminate()
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []


def test_candidates_are_compared_with_those_that_store_the_same() -> None:
    found = dict[str, set[str]]()
    for candidate in CANDIDATES:
        found.setdefault(candidate.stored, set()).add(candidate.name)
    assert found.keys() == {PIXELS_KEPT, PIXELS_CHANGED, PIXELS_SMALL, SMALL}
    assert found[PIXELS_CHANGED] == {"shardio-400", "ffcv", "nodes-400"}
    assert found[PIXELS_SMALL] == {"shardio-256", "shardio-ppm", "ffcv-256", "nodes-256", "turboloader-256"}
    loaders = product(("shardio", "webdataset", "mosaic"), ("sequential", "shuffled"))
    assert found[SMALL] == {f"{loader}-{order}" for loader, order in loaders}
