"""Damage hundreds of thousands of small image files at random, then read and tile them.

Each file has its own seed, so ``--only`` can repeat a file that breaks a law. The laws are those of
``tests/images/fuzz_laws.py``: reading raises a meaningful error or gives the right pixels. Reading never crashes, and
takes at most a few seconds and little memory.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from tests.images.fuzz_laws import check_file, make_damaged_file
from tests.images.mutations import write_originals
from tools.campaigns import INTERRUPTED, describe_end, make_progress, show

LIMIT_S = 5
"""The time limit for a file, in seconds. A file that exceeds this limit ends the process."""

MEMORY = 512 * 2**20
"""The number of bytes of address space that the process may add after the warm-up."""

WARM_UP = 300
"""The number of files to read before memory is measured, to import modules and fill caches."""

FILES_PER_REPORT = 500


@dataclass(kw_only=True, slots=True)
class Job:
    """A process, its reports, and the path of a copy of the file that it reads."""

    process: multiprocessing.process.BaseProcess
    reports: Connection
    note: Path
    is_done: bool = False


@dataclass(kw_only=True, slots=True)
class Report:
    """The results for some files.

    Attributes:
        num_files: The number of files.
        outcomes: The number of occurrences of each outcome.
        wrong: The law that the last file breaks; None if the file breaks no law.
        is_last: Whether this is the last report.
    """

    num_files: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: str | None = None
    is_last: bool = False


def check_seed(seed: int, note: BinaryIO) -> list[str]:
    """Make a file from a seed, write it to ``note``, check the file, and return the outcomes."""
    content, made_of, rng = make_damaged_file(seed, ORIGINALS)
    note.seek(0)
    note.truncate()
    note.write(content)
    signal.alarm(LIMIT_S)  # SIGALRM ends the process, even if it hangs outside Python.
    try:
        return check_file(content, made_of, rng)
    finally:
        signal.alarm(0)


ORIGINALS = write_originals()


def run_seeds(seeds: range, reports: Connection, path: Path) -> None:
    """Check the seeds' files in this process, and send reports. Stop at the first file that breaks a law."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with path.open("wb", buffering=0) as note:
        _report_seeds(seeds, reports, note)


def _report_seeds(seeds: range, reports: Connection, note: BinaryIO) -> None:
    report = Report()
    for i, seed in enumerate(seeds):
        if i == WARM_UP:
            _limit_memory()
        try:
            report.outcomes.update(check_seed(seed, note))
        except Exception as error:  # An unexpected error breaks a law.
            report.wrong = f"{type(error).__name__}: {error} (seed {seed})"
        report.num_files += 1
        if report.wrong or report.num_files == FILES_PER_REPORT:
            reports.send(report)
            if report.wrong:
                return
            report = Report()
    report.is_last = True
    reports.send(report)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard_limit))


def run_jobs(seeds: range, num_jobs: int, folder: Path) -> Iterator[tuple[Report, Path]]:
    """Check the seeds' files in new processes. Yield reports and the paths of their files, until a law is broken."""
    context = multiprocessing.get_context("spawn")
    jobs = []
    for i in range(num_jobs):
        receive, send = context.Pipe(duplex=False)
        note = folder / f"job-{i}"
        process = context.Process(target=run_seeds, args=(seeds[i::num_jobs], send, note))
        process.start()
        send.close()
        jobs.append(Job(process=process, reports=receive, note=note))
    try:
        while running := {job.reports: job for job in jobs if not job.is_done}:
            for reports in wait(list(running)):
                job = next(job for job in jobs if job.reports is reports)
                try:
                    report: Report = job.reports.recv()
                except EOFError:
                    report = Report(
                        wrong=describe_end(job.process, signal.SIGALRM, f"the file took longer than {LIMIT_S} s")
                    )
                job.is_done = report.is_last
                yield report, job.note
                if report.wrong:
                    return
    finally:
        for job in jobs:
            job.process.terminate()
            job.process.join()


def main(
    files: Annotated[int, typer.Option(min=1, help="Number of files.")] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of the damage.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    save: Annotated[Path, typer.Option(help="Folder for a file that breaks a law.")] = Path("fuzz-failures"),
    only: Annotated[int | None, typer.Option(min=0, help="Read only this seed's file, in this process.")] = None,
) -> None:
    """Damage small image files at random, then read and tile them."""
    if only is not None:
        save.mkdir(parents=True, exist_ok=True)
        with (save / f"seed-{only}").open("wb", buffering=0) as copy:
            typer.echo("\n".join(check_seed(only, copy)))
        return

    seeds = range(seed << 32, (seed << 32) + files)
    outcomes = Counter[str]()
    num_read, start = 0, time.perf_counter()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            make_progress("files") as progress,
        ):
            bar = progress.add_task("files", total=files)
            for report, note in run_jobs(seeds, min(jobs, files), Path(folder)):
                num_read += report.num_files
                outcomes.update(report.outcomes)
                progress.update(bar, completed=num_read)
                if report.wrong:
                    progress.stop()
                    typer.echo(f"{show(outcomes)}\n{report.wrong}\nThe file: {_save(note, save)}")
                    raise typer.Exit(1)
    except KeyboardInterrupt:
        typer.echo(f"{show(outcomes)}\ninterrupted: the laws held for {num_read:,} of {files:,} files")
        raise typer.Exit(INTERRUPTED) from None
    elapsed_s = time.perf_counter() - start
    typer.echo(show(outcomes))
    typer.echo(
        f"the laws hold for all {files:,} files with seed {seed}, "
        f"read in {elapsed_s:.0f} s by {jobs} jobs ({files / elapsed_s:,.0f} files/s)"
    )


def _save(note: Path, folder: Path) -> Path:
    """Save, under a unique name, a file that breaks a law."""
    folder.mkdir(parents=True, exist_ok=True)
    content = note.read_bytes() if note.exists() else b""
    kept = folder / f"{int(time.time())}-{os.getpid()}.image"
    with suppress(FileNotFoundError):
        kept.write_bytes(content)
    return kept


if __name__ == "__main__":
    typer.run(main)
