from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "train_campaign.py"


def test_runs_killed_at_random_moments_give_the_losses_of_an_uninterrupted_run() -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "2", "--seed", "1", "--samples", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 kills of seed 1 (")
    assert done.stdout.endswith("all equal the uninterrupted one\n")
