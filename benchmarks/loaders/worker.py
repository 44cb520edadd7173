"""Run one candidate once, and print the figures as the last line, in JSON.

``python -m benchmarks.loaders.worker CASE CANDIDATE WORK DATA NUM_SAMPLES NUM_WORKERS NUM_EPOCHS``
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from benchmarks.loaders.cases import CASES, Trial
from benchmarks.loaders.job import Crop, Job
from benchmarks.loaders.registry import find


def main(case: str, name: str, work: str, data: str, num_samples: str, num_workers: str, num_epochs: str) -> None:
    """Run the candidate."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # Some cases have more workers than cores.
    crop: Crop = "eval" if case == "eval" else "train"
    job = Job(data=Path(data), num_samples=int(num_samples), num_workers=int(num_workers), crop=crop)
    trial = Trial(candidate=find(name), job=job, work=Path(work), num_epochs=int(num_epochs))
    print("\n" + json.dumps(CASES[case](trial)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
