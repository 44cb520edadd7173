"""The loader benchmark says what it does, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loaders.registry import CANDIDATES, PIXELS_CHANGED, PIXELS_KEPT, SMALL

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="it measures by Linux's /proc")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where temporary data go."""
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def start(images: Path, temporary: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks", str(images), "--case", "train", "--workers", "1", *options]
    command += ["--candidate", "shardio-folder", "--candidate", "bare", "--results", str(temporary.parent)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_each_turn_is_told_with_case_round_and_candidate(images: Path, temporary: Path) -> None:
    with start(images, temporary, "--samples", "21", "--rounds", "2") as process:
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "shardio, ImageFolder" in output
    assert [line for line in errors.splitlines() if "round" in line] == [
        "train: round 1 of 2, turn 1 of 2: shardio-folder",
        "train: round 1 of 2, turn 2 of 2: bare",
        "train: round 2 of 2, turn 1 of 2: bare",
        "train: round 2 of 2, turn 2 of 2: shardio-folder",
    ]
    assert list(temporary.iterdir()) == []


def test_temporary_data_are_removed_when_it_is_ended(images: Path, temporary: Path) -> None:
    with start(images, temporary, "--samples", "21", "--rounds", "100000") as process:
        assert process.stderr is not None
        while "round 1 of" not in process.stderr.readline():
            assert process.poll() is None
        assert list(temporary.iterdir()) != []
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []


def test_candidates_are_compared_with_those_that_store_the_same() -> None:
    stored = {candidate.name: candidate.stored for candidate in CANDIDATES}
    assert {name for name, what in stored.items() if what == PIXELS_CHANGED} == {"shardio-400", "ffcv", "nodes-400"}
    assert {name for name, what in stored.items() if what == SMALL} == {
        f"{loader}-{order}" for loader in ("shardio", "webdataset", "mosaic") for order in ("sequential", "shuffled")
    }
    assert set(stored.values()) == {PIXELS_KEPT, PIXELS_CHANGED, SMALL}
