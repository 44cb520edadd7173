"""Two ranks of torchrun deliver each sample of people's own datasets once, also resumed, also with Accelerate."""

from __future__ import annotations

import os
from pathlib import Path

from tests.frameworks.launch import ROOT, check_epochs
from tests.processes import run_python

EPOCHS = {"distributed": 2, "shares": 2, "accelerate": 2, "accelerate-stateful": 3}


def test_two_ranks(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_python(
        *launcher,
        *("-m", "tests.frameworks.with_own_datasets", tmp_path),
        environment={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    for name, num_epochs in EPOCHS.items():
        check_epochs(tmp_path / name, [f"number {number}" for number in range(24)], num_epochs=num_epochs)
