"""Kill ``shardio train`` at random moments, resume it, and check that the losses equal those of an uninterrupted run.

    python tools/train_campaign.py --kills 50              one process
    python tools/train_campaign.py --kills 20 --ranks 2    two ranks under torchrun, one of which is killed

SIGKILL ends each launch at a random moment, uniformly distributed over the duration of a whole run, including the
start. The same command then resumes the run until it finishes. The campaign checks that the weights, and the losses and
learning rates of every step, are bit-identical to those of an uninterrupted run. The campaign starts more runs until it
reaches the requested number of kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

import shardio
from shardio.train import load_checkpoint
from shardio.train.callbacks import LOG, read_log
from tests.sources import write_images
from tests.train.runs import read_figures

ROOT = Path(__file__).resolve().parents[1]

MODEL = '''
from torch import nn

def make(num_classes):
    """Return a network that uses random numbers and keeps statistics of its batches."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(256, num_classes),
    )
'''


def main(
    kills: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 50,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    samples: Annotated[int, typer.Option(min=30, help="Samples in the dataset; more samples make runs longer.")] = 1500,
    seed: Annotated[int, typer.Option(help="Seed for the random times at which runs are killed.")] = 0,
) -> None:
    """Kill training runs, resume them, and exit with code 1 if a run differs from the uninterrupted run."""
    with tempfile.TemporaryDirectory(prefix="shardio-train-") as name:
        campaign = Campaign(Path(name), ranks, samples, random.Random(seed))
        campaign.run(kills)
    phases = ", ".join(f"{num_kills} {phase}" for phase, num_kills in campaign.phases.most_common())
    typer.echo(f"{kills} kills with seed {seed} ({phases}), {campaign.num_runs} runs: all equal the uninterrupted run")


class Campaign:
    """A campaign that kills training runs in a directory and resumes them.

    Attributes:
        phases: The number of kills in each phase of a run.
        num_runs: The number of runs that finished and were compared.
    """

    def __init__(self, directory: Path, ranks: int, samples: int, moments: random.Random) -> None:
        self.directory, self.ranks, self.moments = directory, ranks, moments
        self.phases: Counter[str] = Counter()
        self.num_runs = 0
        write_images(directory / "images", per_class=samples // 3)
        shardio.pack(directory / "images", directory / "packed", max_shard_samples=100)
        (directory / "model.py").write_text(MODEL)

    def run(self, num_kills: int) -> None:
        """Kill runs ``num_kills`` times in total, and finish the last run."""
        start = time.monotonic()
        self._finish(self._start("whole"))
        whole_s = time.monotonic() - start
        while self.num_runs == 0 or self.phases.total() < num_kills:
            name = f"run-{self.num_runs}"
            while self.phases.total() < num_kills and self._kill(name, self.moments.uniform(0, whole_s)):
                pass
            self._finish(self._start(name))
            self._compare(name)
            self.num_runs += 1

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        options = (
            "--epochs 4 --batch-size 8 --accumulate 2 --image-size 24 --num-workers 1 --device cpu --precision fp32"
        )
        often = "--deterministic --log-every 1 --checkpoint-every 7 --seed 5"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command = [sys.executable, *(launcher if self.ranks > 1 else []), "-m", "shardio", "train", "packed"]
        return subprocess.Popen(
            [*command, *options.split(), *often.split(), "--model", "model.py:make", "--out", name],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        _, stderr = process.communicate()
        if process.returncode:
            raise SystemExit(f"a run failed without being killed: {stderr.decode()}")

    def _kill(self, name: str, after_s: float) -> bool:
        """Start or resume a run, and kill it after some time. Return whether the run was killed before it finished."""
        run = self.directory / name
        before, num_lines = _find_partial(run), len(list(read_log(run / LOG)))
        process = self._start(name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=after_s)
        pids = _find_ranks(process.pid) if self.ranks > 1 else [process.pid]
        if process.poll() is not None or not pids:
            self._finish(process)
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.moments.choice(pids), signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            return False
        lines = list(read_log(run / LOG))
        if _find_partial(run) > before:
            self.phases["while writing a file"] += 1
        elif len(lines) <= num_lines:
            self.phases["while starting"] += 1
        else:
            self.phases["after an epoch" if lines[-1]["kind"] == "epoch" else "within an epoch"] += 1
        return True

    def _compare(self, name: str) -> None:
        one, other = self.directory / name, self.directory / "whole"
        if read_figures(one) != read_figures(other):
            lines = zip(read_figures(one), read_figures(other), strict=False)
            differing = next((pair for pair in lines if pair[0] != pair[1]), "one is longer")
            raise SystemExit(f"{name} differs from the uninterrupted run: {differing}")
        weights, expected = (load_checkpoint(path / "last.pt")["model"] for path in (one, other))
        if not all(torch.equal(weights[key], expected[key]) for key in expected):
            raise SystemExit(f"the weights of {name} differ from those of the uninterrupted run")


def _find_ranks(parent: int) -> list[int]:
    """Return the IDs of the processes that a launcher started (its children; see proc(5))."""
    found: list[int] = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in children.read_text().split()]
    return found


def _find_partial(run: Path) -> set[Path]:
    """Return the incomplete files that a kill left behind."""
    return set(run.glob(".*.partial"))


if __name__ == "__main__":
    typer.run(main)
