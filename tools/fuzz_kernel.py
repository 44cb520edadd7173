"""Let the JPEG kernel read damaged files, and see that it touches no memory but its own.

There are two ways, each of which sees what the other does not. The kernel is compiled anew with every index checked,
which takes half a minute; with ``--tight 2048`` for pictures of so few pixels, so that these files fill its arrays.
Or, with ``--guard``, it is run as users run it, where nothing but the pages around its memory, which nobody may touch,
keeps it inside.

A process of its own reads the files. Whatever ends it, the file is named that did. Whether the pixels are right is
seen by ``fuzz_images.py``.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are no installed package.

from tests.images.fuzz_laws import draw_file
from tests.images.mutations import Collection, collect
from tests.images.watched_kernel import Chunk, StrayAccessError, compile_checked, load_guarded

CHUNK = 4
"""Files that are drawn by one call of the kernel, in rows of one size. Of many, few would lie beside the pages."""

LIMIT_S = 60
"""Seconds that a chunk may take; then the process is ended."""

PROBLEM = 1
"""The process's exit code if the kernel was seen to touch what is not its own."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process is to do, and how far it is.

    Attributes:
        guard: Whether it is the kernel as users run it.
        tight: Else, for how many pixels it is made, if not for as many as usual.
        seed: Of the campaign.
        files: The numbers of the files.
        at_once: How many of them are drawn by one call.
        begun: The first one of the last call.
        num_drawn: How many were drawn.
    """

    guard: bool
    tight: int | None
    seed: int
    files: range
    at_once: int = CHUNK
    begun: Any = field(default_factory=lambda: RawValue(c_int64, -1))
    num_drawn: Any = field(default_factory=lambda: RawValue(c_int64, 0))

    @property
    def options(self) -> str:
        """How the kernel is watched, as the command line has it."""
        return " --guard" if self.guard else f" --tight {self.tight}" if self.tight else ""

    def calls(self) -> Iterator[range]:
        """Yield the numbers of files that are drawn at once: never those of two chunks, or their rows would differ."""
        start = self.files.start
        while start < self.files.stop:
            stop = min(start + self.at_once, (start // CHUNK + 1) * CHUNK, self.files.stop)
            yield range(start, stop)
            start = stop


def run(job: Job) -> None:
    """Do a job in this process, and end it where something is wrong."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collection = collect()
    if job.guard:
        from shardio.images.kernel.building import build
        from shardio.images.kernel.loading import unpack_kernel

        kernel = unpack_kernel(build().read_bytes())
        assert kernel is not None, "it is just compiled"
        draw = load_guarded(*kernel)
    else:
        draw = compile_checked(job.tight)
    draw(Chunk([], [], (1, 1), at_end=True))  # It compiles what is not yet compiled, whatever time that takes.
    for numbers in job.calls():
        job.begun.value = numbers.start
        signal.alarm(LIMIT_S)  # Its default action ends the process, also while the kernel runs.
        try:
            is_done = draw(_draw_chunk(job.seed, numbers, collection))
        except StrayAccessError as error:
            print(error, file=sys.stderr)
            sys.exit(PROBLEM)
        job.num_drawn.value += int(is_done.sum())
    signal.alarm(0)


def _draw_chunk(seed: int, numbers: range, collection: Collection) -> Chunk:
    number = numbers.start // CHUNK
    made = [draw_file((seed << 32) + number, collection) for number in numbers]
    contents, plans = [content for content, _, _ in made], [_draw_plan(content, draw) for content, _, draw in made]
    height, width = random.Random((seed << 32) + number).choices(range(1, 80), k=2)
    return Chunk(contents, plans, (height, width), at_end=number % 2 == 0)


def _draw_plan(content: bytes, draw: random.Random) -> tuple[int, ...]:
    """Return a plan for a part of a file, mostly one that lies in the picture."""
    frame = content.find(b"\xff\xc0\0") + 5
    sides = [int.from_bytes(content[at : at + 2], "big") for at in (frame, frame + 2)]
    if draw.random() < 0.15:
        corner, box = [draw.randint(-1, 60) for _ in sides], [draw.randint(1, 90) for _ in sides]
    else:
        corner = [draw.randrange(max(side, 1)) for side in sides]
        box = [draw.randint(1, max(1, min(side - first, 90))) for side, first in zip(sides, corner, strict=True)]
    longest = 17_000 if draw.random() < 0.05 else 120  # It refuses what gets larger than 16,384.
    after = box if draw.random() < 0.3 else [draw.randint(1, longest) for _ in sides]
    window = [0, 0] if draw.random() < 0.5 else [draw.randint(-30, side) for side in after]
    return (*corner, *box, *after, *window, draw.randrange(2))


def watch(job: Job, progress: Progress) -> str:
    """Have a process of its own do a job; return by what it ended, nothing if all is well."""
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
    files: Annotated[int, typer.Option(min=1, help="How many files.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the campaign; others damage otherwise.")] = 0,
    start: Annotated[int, typer.Option(min=0, help="The number of the first file.")] = 0,
    guard: Annotated[bool, typer.Option("--guard", help="As users run it, between pages nobody may touch.")] = False,
    tight: Annotated[int | None, typer.Option(min=1024, help="Checked, with arrays for so few pixels.")] = None,
) -> None:
    """Draw a random window of each of many damaged files."""
    if guard and tight:
        raise typer.BadParameter("--tight is for a kernel that is compiled anew, which --guard's is not")
    began = time.monotonic()
    job = Job(guard=guard, tight=tight, seed=seed, files=range(start, start + files))
    with Progress(console=Console(stderr=True)) as progress:
        if end := watch(job, progress):
            sys.exit(_name_file(job, end, progress))
    elapsed_s = time.monotonic() - began
    print(
        f"{files:,} files of seed {seed} from {start} on{job.options}: nothing touched but its own; "
        f"{job.num_drawn.value:,} were drawn, in {elapsed_s:.0f} s ({files / elapsed_s:,.0f} files/s)"
    )


def _name_file(job: Job, end: str, progress: Progress) -> str:
    """Return what is to be said of a job that ended so: the file that does it alone, or those that do it together."""
    numbers = next((call for call in job.calls() if call.start == job.begun.value), None)
    if numbers is None:
        return f"{end}, before the first file"
    alone = replace(job, files=numbers, at_once=1, begun=RawValue(c_int64, -1), num_drawn=RawValue(c_int64, 0))
    end_alone = watch(alone, progress)
    first, count = (alone.begun.value, 1) if end_alone else (numbers.start, len(numbers))
    return (
        f"{end_alone or end}: seed {job.seed}, "
        + (f"file {first}" if end_alone else f"files {first} to {first + count - 1}, together")
        + f"; again by --seed {job.seed} --start {first} --files {count}{job.options}"
    )


if __name__ == "__main__":
    typer.run(main)
