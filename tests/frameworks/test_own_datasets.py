"""Two ranks of torchrun deliver each sample of people's own datasets once, also resumed, also with Accelerate."""

from __future__ import annotations

from pathlib import Path

from tests.frameworks.launch import check_epochs
from tests.torchrun import run_by_torchrun

EPOCHS = {"distributed": 2, "shares": 2, "accelerate": 2, "accelerate-stateful": 3}


def test_two_ranks(tmp_path: Path) -> None:
    done = run_by_torchrun("tests.frameworks.with_own_datasets:be_rank", tmp_path, num_ranks=2)
    assert done.returncode == 0, done.stderr
    for name, num_epochs in EPOCHS.items():
        check_epochs(tmp_path / name, [f"number {number}" for number in range(24)], num_epochs=num_epochs)
