"""``shardio train`` in the tests' own process, and the line that it prints for each epoch."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner, Result

from shardio.cli.main import app

LINE = re.compile(
    r"epoch (?P<epoch>\d+)  loss (?P<loss>\d+\.\d{3})  accuracy (?P<accuracy>\d+\.\d)%  "
    r"(val loss (?P<val_loss>\d+\.\d{3})  val accuracy (?P<val_accuracy>\d+\.\d)%  )?"
    r"(?P<rate>\d+) images/s  waiting for data (?P<wait>\d+)%"
)


def train_here(source: Path, *options: str) -> Result:
    """Run the command in this process, which is much faster than to start another one."""
    command = [
        "train",
        str(source),
        "--image-size",
        "32",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--precision",
        "fp32",
        *options,
    ]
    return CliRunner().invoke(app, command)
