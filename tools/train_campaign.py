"""Kill ``shardio train`` at random moments and resume it: the losses must equal those of an uninterrupted run.

    python tools/train_campaign.py --kills 50              one process
    python tools/train_campaign.py --kills 20 --ranks 2    two ranks by torchrun, of which one is killed

Each launch gets ``kill -9`` at a moment drawn evenly from the time that a whole run takes, its start included, and the
same command goes on, until the run is through. Then the losses and rates of every step and the weights are compared,
bit by bit, and another run is begun, until there were as many kills as asked for.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are no installed package.

import shardio
from shardio.train import load_checkpoint
from shardio.train.logs import LOG, read_log
from tests.sources import write_images
from tests.train.runs import read_figures

ROOT = Path(__file__).resolve().parents[1]

MODEL = '''
from torch import nn

def make(num_classes):
    """A network that draws random numbers, and keeps statistics of its batches."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(256, num_classes),
    )
'''


def main(
    kills: Annotated[int, typer.Option(min=1, help="How many.")] = 50,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that train together.")] = 1,
    samples: Annotated[int, typer.Option(min=30, help="Of the dataset: more make longer runs.")] = 1500,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
) -> None:
    """Exit with 1 if a run differs from the undisturbed one."""
    with tempfile.TemporaryDirectory(prefix="shardio-train-") as name:
        campaign = Campaign(Path(name), ranks, samples, random.Random(seed))
        campaign.run(kills)
    where = ", ".join(f"{number} {place}" for place, number in campaign.places.most_common())
    typer.echo(f"{kills} kills of seed {seed} ({where}), {campaign.num_runs} runs: all equal the undisturbed one")


class Campaign:
    """Runs that are killed, in a directory.

    Attributes:
        places: Where kills found the run.
        num_runs: Runs that came to their end, and were compared.
    """

    def __init__(self, directory: Path, ranks: int, samples: int, moments: random.Random) -> None:
        self.directory, self.ranks, self.moments = directory, ranks, moments
        self.places: Counter[str] = Counter()
        self.num_runs = 0
        write_images(directory / "images", per_class=samples // 3)
        shardio.pack(directory / "images", directory / "packed", max_shard_samples=100)
        (directory / "model.py").write_text(MODEL)

    def run(self, kills: int) -> None:
        """Kill so often, and finish the last run."""
        start = time.monotonic()
        self._finish(self._start("whole"))
        whole_s = time.monotonic() - start
        while self.num_runs == 0 or sum(self.places.values()) < kills:
            name = f"run-{self.num_runs}"
            while sum(self.places.values()) < kills and self._kill(name, self.moments.uniform(0, whole_s)):
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
            raise SystemExit(f"a run failed by itself: {stderr.decode()}")

    def _kill(self, name: str, after_s: float) -> bool:
        """Start a run, or go on with it; kill it after some time. Return whether it was still there."""
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
            self.places["while a file was written"] += 1
        elif len(lines) <= num_lines:
            self.places["while it started"] += 1
        else:
            self.places["behind an epoch" if lines[-1]["kind"] == "epoch" else "within an epoch"] += 1
        return True

    def _compare(self, name: str) -> None:
        one, other = self.directory / name, self.directory / "whole"
        if read_figures(one) != read_figures(other):
            lines = zip(read_figures(one), read_figures(other), strict=False)
            differing = next((pair for pair in lines if pair[0] != pair[1]), "one is longer")
            raise SystemExit(f"{name} differs from the undisturbed run: {differing}")
        weights, expected = (load_checkpoint(path / "last.pt")["model"] for path in (one, other))
        if not all(torch.equal(weights[key], expected[key]) for key in expected):
            raise SystemExit(f"the weights of {name} differ from those of the undisturbed run")


def _find_ranks(parent: int) -> list[int]:
    """Return the processes that a launcher started (proc(5): its children)."""
    found: list[int] = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in children.read_text().split()]
    return found


def _find_partial(run: Path) -> set[Path]:
    """Return what a kill left half-written."""
    return set(run.glob(".*.partial"))


if __name__ == "__main__":
    typer.run(main)
