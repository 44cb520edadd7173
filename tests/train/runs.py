"""What tests of training runs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TIMES = ("train_s", "data_wait_s", "images_per_s", "step_s", "data_wait_share", "memory_allocated", "memory_reserved")


def read_figures(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log without what depends on the machine's mood."""
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
