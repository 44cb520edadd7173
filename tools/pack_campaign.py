"""Kill ``shardio pack`` at random moments, resume it, and check that the result equals that of an uninterrupted pack.

    python tools/pack_campaign.py --kills 200

Each pack has 1 to 4 workers and random options for storing JPEGs. The pack is interrupted at a random moment, uniformly
distributed over the duration of a whole pack, including the start. The interruption is SIGKILL or SIGINT to the
command, SIGKILL to one of its worker processes, or a disk that fills up after a random number of bytes of one file.
After each interruption, files with final names must equal those of the uninterrupted pack, and no process of the pack
may remain. The same command then resumes the pack until it finishes. The campaign starts more packs until it reaches
the requested number of interruptions.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from shardio.shards import MANIFEST_NAME, UNFINISHED_NAME
from tests.files import read_files
from tests.sources import write_images

ENDS_WITHIN_S = 15.0
"""The time, in seconds, within which the worker processes of a killed pack must end."""

MODES = (("--no-check",), (), ("--jpeg", "tile"), ("--jpeg", "reencode", "--max-side", "40"))


def main(
    kills: Annotated[int, typer.Option(min=1, help="Number of interruptions.")] = 200,
    samples: Annotated[int, typer.Option(min=20, help="Number of images; more images make packs take longer.")] = 1500,
    seed: Annotated[int, typer.Option(help="Seed for the random choices.")] = 0,
) -> None:
    """Interrupt packs, resume them, and exit with code 1 if a pack differs from the uninterrupted pack."""
    with tempfile.TemporaryDirectory(prefix="shardio-pack-") as name:
        campaign = Campaign(Path(name), samples, random.Random(seed))
        while campaign.interruptions.total() < kills:
            campaign.pack_until_finished(kills)
        campaign.report()


class Campaign:
    """A campaign that packs one directory repeatedly.

    Attributes:
        interruptions: The number of interruptions of each kind.
    """

    def __init__(self, root: Path, samples: int, draw: random.Random) -> None:
        self._source, self._out, self._draw = root / "in", root / "out", draw
        write_images(self._source, classes=10, per_class=samples // 10, width=64, height=48)
        (self._source / "class-3" / "broken.jpg").write_bytes(b"no image")
        self._whole, self._seconds = dict[tuple[str, ...], dict[str, bytes]](), dict[tuple[str, ...], float]()
        for mode in MODES:
            started = time.monotonic()
            subprocess.run(self._command(mode, 2), check=True)
            self._seconds[mode] = time.monotonic() - started
            self._whole[mode] = read_files(self._out)
            shutil.rmtree(self._out)
        self.interruptions = Counter[str]()
        self._num_packs = self._num_missed = 0
        self._started = time.monotonic()

    def pack_until_finished(self, kills: int) -> None:
        """Pack, and interrupt the command repeatedly, until it finishes or the number of kills is reached."""
        mode, num_workers = self._draw.choice(MODES), self._draw.randint(1, 4)
        is_finished = False
        while not is_finished and self.interruptions.total() < kills:
            is_finished = self._launch(mode, num_workers)
            self._check_files(mode)
        if not is_finished:
            subprocess.run(self._command(mode, num_workers), check=True)
        assert read_files(self._out) == self._whole[mode], f"{mode} on {num_workers} workers differs"
        self._num_packs += 1
        shutil.rmtree(self._out)

    def report(self) -> None:
        """Print a summary."""
        kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(self.interruptions.items()))
        print(
            f"{self.interruptions.total()} interruptions ({kinds}) of {self._num_packs} packs, "
            f"{self._num_missed} came too late; all bytes equal those of uninterrupted packs; "
            f"the run took {time.monotonic() - self._started:.0f} s"
        )

    def _launch(self, mode: tuple[str, ...], num_workers: int) -> bool:
        """Run the command and interrupt it. Return whether the command finished first."""
        kind = self._draw.choice(list(KINDS))
        limit = self._draw.randint(1, 60_000) if kind == "full disk" else None
        command = self._command(mode, num_workers)
        if limit is not None:
            command = ["bash", "-c", f'ulimit -f {limit // 1024 + 1}; exec "$@"', "bash", *command]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.monotonic() + self._draw.random() * self._seconds[mode]
        while process.poll() is None and (limit is not None or time.monotonic() < deadline):
            time.sleep(0.002)
        workers = list_children(process.pid)
        if process.poll() is None:
            KINDS[kind](process, workers, self._draw)
        _, errors = process.communicate(timeout=120)
        wait_for_end(workers)
        files = read_files(self._out)
        if process.returncode == 0 or (MANIFEST_NAME in files and UNFINISHED_NAME not in files):
            self._num_missed += 1
            return True
        self.interruptions[kind] += 1
        if kind == "full disk":
            assert "rerun the same command to resume" in errors, errors
        return False

    def _check_files(self, mode: tuple[str, ...]) -> None:
        for name, content in read_files(self._out).items():
            if not name.startswith("."):
                assert content == self._whole[mode][name], f"{name} has different bytes"

    def _command(self, mode: tuple[str, ...], num_workers: int) -> list[str]:
        options = ["--max-shard-samples", "25", "--num-workers", str(num_workers), "--quiet", *mode]
        return [sys.executable, "-m", "shardio", "pack", str(self._source), str(self._out), *options]


def kill(process: subprocess.Popen[str], workers: list[int], draw: random.Random) -> None:
    """Kill the command."""
    process.kill()


def interrupt(process: subprocess.Popen[str], workers: list[int], draw: random.Random) -> None:
    """Send SIGINT, as Ctrl-C does."""
    process.send_signal(signal.SIGINT)


def kill_worker(process: subprocess.Popen[str], workers: list[int], draw: random.Random) -> None:
    """Kill a worker process or, if there is none yet, the command."""
    with suppress(ProcessLookupError):
        os.kill(draw.choice(workers or [process.pid]), signal.SIGKILL)


def wait_only(process: subprocess.Popen[str], workers: list[int], draw: random.Random) -> None:
    """Do nothing: the full disk interrupts the command."""


Interrupt = Callable[[subprocess.Popen[str], list[int], random.Random], None]
KINDS: dict[str, Interrupt] = {
    "SIGKILL": kill,
    "SIGINT": interrupt,
    "SIGKILL to a worker": kill_worker,
    "full disk": wait_only,
}


def list_children(pid: int) -> list[int]:
    """Return the child processes of a process, or none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_for_end(pids: list[int]) -> None:
    """Wait until processes have ended, or fail after a timeout."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"worker processes {left} are still running"
        time.sleep(0.01)


if __name__ == "__main__":
    typer.run(main)
