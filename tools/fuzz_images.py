"""Damage small image files by chance and read and tile them, some hundred thousand of them.

Each file has a seed of its own, so that one that breaks a law can be made and read again with ``--only``. The laws
are those of ``tests/images/fuzz_laws.py``: an error that says something, or the right pixels; never a crash, never
more than some seconds or some memory.
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
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are no installed package.

from tests.images.fuzz_laws import check_file, draw_file
from tests.images.mutations import collect

LIMIT_S = 5
"""Seconds that one file may take; then its process is ended."""

MEMORY = 512 * 2**20
"""Bytes of address space that reading may take beyond what the process has when it starts."""

WARM_UP = 300
"""Files that are read before the memory is measured: compiled loops and caches come once."""

FILES_PER_REPORT = 500

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


@dataclass(kw_only=True, slots=True)
class Job:
    """A process, and where it reports and notes what it is about to read."""

    process: multiprocessing.process.BaseProcess
    reports: Connection
    note: Path
    is_done: bool = False


@dataclass(kw_only=True, slots=True)
class Report:
    """What came of some files.

    Attributes:
        num_files: How many.
        outcomes: How often each thing came of reading or tiling one.
        wrong: What is wrong with the last one, if something is.
        is_last: Whether there are no more.
    """

    num_files: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: str | None = None
    is_last: bool = False


def check_seed(seed: int, note: BinaryIO) -> list[str]:
    """Read the file of a seed, of which a copy lies in ``note`` whatever happens; return what came of it."""
    content, made_of, draw = draw_file(seed, COLLECTION)
    note.seek(0)
    note.truncate()
    note.write(content)
    signal.alarm(LIMIT_S)  # Its default action ends the process, also where it hangs outside of Python.
    try:
        return check_file(content, made_of, draw)
    finally:
        signal.alarm(0)


COLLECTION = collect()


def run_seeds(seeds: range, reports: Connection, path: Path) -> None:
    """Check the files of seeds in this process and report; stop at one that breaks a law."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with path.open("wb", buffering=0) as note:
        _report_seeds(seeds, reports, note)


def _report_seeds(seeds: range, reports: Connection, note: BinaryIO) -> None:
    report = Report()
    for number, seed in enumerate(seeds):
        if number == WARM_UP:
            _limit_memory()
        try:
            report.outcomes.update(check_seed(seed, note))
        except Exception as error:  # Whatever is raised but not expected breaks a law.
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
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))


def run_jobs(seeds: range, num_jobs: int, folder: Path) -> Iterator[tuple[Report, Path]]:
    """Check seeds in processes; yield their reports and where each one's last file lies, the first wrong one last."""
    context = multiprocessing.get_context("spawn")
    jobs = []
    for number in range(num_jobs):
        receive, send = context.Pipe(duplex=False)
        note = folder / f"job-{number}"
        process = context.Process(target=run_seeds, args=(seeds[number::num_jobs], send, note))
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
                    report = Report(wrong=_describe_end(job.process))
                job.is_done = report.is_last
                yield report, job.note
                if report.wrong:
                    return
    finally:
        for job in jobs:
            job.process.terminate()
            job.process.join()


def _describe_end(process: multiprocessing.process.BaseProcess) -> str:
    process.join()
    code = process.exitcode or 0
    if code == -signal.SIGALRM:
        return f"the file took longer than {LIMIT_S} s"
    return f"the process ended by {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def show(outcomes: Counter[str]) -> str:
    """Return a table of what came how often."""
    return "\n".join(f"{number:>12,}  {outcome}" for outcome, number in sorted(outcomes.items()))


def main(
    files: Annotated[int, typer.Option(min=1, help="How many files.")] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the campaign; others damage otherwise.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="How many processes.")] = 2,
    save: Annotated[Path, typer.Option(help="Folder for a file that breaks a law.")] = Path("fuzz-failures"),
    only: Annotated[int | None, typer.Option(min=0, help="Read the file of this seed alone, in this process.")] = None,
) -> None:
    """Damage small image files by chance, and read and tile them."""
    if only is not None:
        save.mkdir(parents=True, exist_ok=True)
        with (save / f"seed-{only}").open("wb", buffering=0) as copy:
            typer.echo("\n".join(check_seed(only, copy)))
        return

    columns = (TextColumn("files"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    seeds = range(seed << 32, (seed << 32) + files)
    outcomes = Counter[str]()
    num_read, start = 0, time.perf_counter()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Progress(*columns, console=Console(stderr=True)) as progress,
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
        f"the laws hold for all {files:,} files of seed {seed}, "
        f"read in {elapsed_s:.0f} s by {jobs} jobs ({files / elapsed_s:,.0f} files/s)"
    )


def _save(note: Path, folder: Path) -> Path:
    """Keep a file that breaks a law, under a name that no other has."""
    folder.mkdir(parents=True, exist_ok=True)
    content = note.read_bytes() if note.exists() else b""
    kept = folder / f"{int(time.time())}-{os.getpid()}.image"
    with suppress(FileNotFoundError):
        kept.write_bytes(content)
    return kept


if __name__ == "__main__":
    typer.run(main)
