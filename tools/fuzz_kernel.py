"""Make the JPEG kernel read damaged files, and check that it accesses no memory but its own.

There are two ways to check this, and each detects errors that the other misses. By default, the kernel is compiled with
a check of every index, which takes half a minute. ``--tight 2048`` compiles it for so few pixels that these files fill
its arrays. With ``--guard``, the kernel runs as users run it, with inaccessible pages around its memory.

A separate process reads the files. If it ends early, the tool names the file that ended it. ``fuzz_images.py`` checks
the pixels.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Iterator
from ctypes import c_int64
from dataclasses import dataclass, field, replace
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are not installed.

from tests.images.fuzz_laws import make_damaged_file
from tests.images.mutations import Originals, write_originals
from tools.guarded_kernel import Chunk, ForeignAccessError, compile_checked, load_guarded

CHUNK = 4
"""The number of files that one call of the kernel renders, in rows of equal size. With more files, a smaller share of
them would lie next to the inaccessible pages.
"""

LIMIT_S = 60
"""The time limit for a chunk, in seconds. A chunk that exceeds it ends the process."""

PROBLEM = 1
"""The process's exit code if the kernel accessed memory other than its own."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The task of a process, and its progress.

    Attributes:
        guard: Whether to run the kernel as users run it.
        tight: The number of pixels for which to compile the kernel, without ``guard``; None for the usual number.
        seed: The campaign's seed.
        files: The indices of the files.
        num_at_once: The number of files per call.
        begun: The first file of the last call.
        num_rendered: The number of rendered files.
    """

    guard: bool
    tight: int | None
    seed: int
    files: range
    num_at_once: int = CHUNK
    begun: Any = field(default_factory=lambda: RawValue(c_int64, -1))
    num_rendered: Any = field(default_factory=lambda: RawValue(c_int64, 0))

    @property
    def options(self) -> str:
        """The command-line options that choose the kernel."""
        return " --guard" if self.guard else f" --tight {self.tight}" if self.tight else ""

    def calls(self) -> Iterator[range]:
        """Yield the files of each call. Files of two chunks never share a call, because their rows differ in size."""
        start = self.files.start
        while start < self.files.stop:
            stop = min(start + self.num_at_once, (start // CHUNK + 1) * CHUNK, self.files.stop)
            yield range(start, stop)
            start = stop


def run(job: Job) -> None:
    """Run a job in this process. End the process at the first error."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    originals = write_originals()
    render = load_guarded() if job.guard else compile_checked(job.tight)
    render(Chunk([], [], [], (1, 1), at_end=True))  # Compile everything before the time limit applies.
    for files in job.calls():
        job.begun.value = files.start
        signal.alarm(LIMIT_S)  # SIGALRM ends the process, even while the kernel runs.
        try:
            is_done = render(_make_chunk(job.seed, files, originals))
        except ForeignAccessError as error:
            print(error, file=sys.stderr)
            sys.exit(PROBLEM)
        job.num_rendered.value += int(is_done.sum())
    signal.alarm(0)


def _make_chunk(seed: int, files: range, originals: Originals) -> Chunk:
    chunk = files.start // CHUNK
    made = [make_damaged_file((seed << 32) + file, originals) for file in files]
    rng = random.Random((seed << 32) + chunk)
    (height, width), num_crops = rng.choices(range(1, 80), k=2), rng.choice((1, 1, 3))
    plans = [_make_plan(content, rng_of_file) for content, _, rng_of_file in made for _ in range(num_crops)]
    turns = [rng.choice((0, rng.randrange(8))) for _ in made]
    return Chunk([content for content, _, _ in made], plans, turns, (height, width), at_end=chunk % 2 == 0)


def _make_plan(content: bytes, rng: random.Random) -> tuple[int, ...]:
    """Return a plan for a part that usually lies within the image."""
    frame = content.find(b"\xff\xc0\0") + 5
    sides = [int.from_bytes(content[at : at + 2], "big") for at in (frame, frame + 2)]
    if rng.random() < 0.15:
        corner, box = [rng.randint(-1, 60) for _ in sides], [rng.randint(1, 90) for _ in sides]
    else:
        corner = [rng.randrange(max(side, 1)) for side in sides]
        box = [rng.randint(1, max(1, min(side - first, 90))) for side, first in zip(sides, corner, strict=True)]
    longest = 17_000 if rng.random() < 0.05 else 120  # The kernel refuses more than 16,384.
    after = box if rng.random() < 0.3 else [rng.randint(1, longest) for _ in sides]
    window = [0, 0] if rng.random() < 0.5 else [rng.randint(-30, side) for side in after]
    return (*corner, *box, *after, *window, rng.randrange(2), rng.randrange(3))


def watch(job: Job, progress: Progress) -> str:
    """Run a job in a separate process. Return the error that ended it, or an empty string if it finished."""
    process = multiprocessing.get_context("spawn").Process(target=run, args=(job,))
    process.start()
    task = progress.add_task("files", total=len(job.files))
    try:
        while process.is_alive():
            process.join(0.5)
            progress.update(task, completed=max(0, job.begun.value - job.files.start))
    finally:
        process.kill()
        process.join()
    code = process.exitcode or 0
    if code == -signal.SIGALRM:
        return f"a chunk took longer than {LIMIT_S} s"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}" if code else ""


def main(
    files: Annotated[int, typer.Option(min=1, help="Number of files.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of the damage.")] = 0,
    start: Annotated[int, typer.Option(min=0, help="Index of the first file.")] = 0,
    guard: Annotated[bool, typer.Option("--guard", help="Run the usual kernel between inaccessible pages.")] = False,
    tight: Annotated[int | None, typer.Option(min=1024, help="Compile the kernel for only this many pixels.")] = None,
) -> None:
    """Render a random window of each of many damaged files."""
    if guard and tight:
        raise typer.BadParameter("--tight compiles a kernel, and --guard uses the compiled one: leave out one of them")
    began = time.monotonic()
    job = Job(guard=guard, tight=tight, seed=seed, files=range(start, start + files))
    with Progress(console=Console(stderr=True)) as progress:
        if end := watch(job, progress):
            sys.exit(_name_file(job, end, progress))
    elapsed_s = time.monotonic() - began
    print(
        f"{files:,} files of seed {seed} from {start} on{job.options}: no access outside the kernel's memory; "
        f"{job.num_rendered.value:,} were rendered, in {elapsed_s:.0f} s ({files / elapsed_s:,.0f} files/s)"
    )


def _name_file(job: Job, end: str, progress: Progress) -> str:
    """Return the message for a job that ended early, which names the file or files that ended it."""
    files = next((call for call in job.calls() if call.start == job.begun.value), None)
    if files is None:
        return f"{end}, before the first file"
    alone = replace(job, files=files, num_at_once=1, begun=RawValue(c_int64, -1), num_rendered=RawValue(c_int64, 0))
    end_alone = watch(alone, progress)
    first, count = (alone.begun.value, 1) if end_alone else (files.start, len(files))
    return (
        f"{end_alone or end}: seed {job.seed}, "
        + (f"file {first}" if end_alone else f"files {first} to {first + count - 1}, together")
        + f"; repeat with --seed {job.seed} --start {first} --files {count}{job.options}"
    )


if __name__ == "__main__":
    typer.run(main)
