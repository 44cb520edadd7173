"""Read millions of random hostile tars and indexes.

Each input has its own seed, so ``--only`` can repeat an input that breaks a law. The laws are those of
``tests/shards/tar_laws.py``: reading raises one of shardio's errors, or gives the samples that tarfile reads. Reading
never crashes, takes at most a few seconds and little memory, and never writes a file outside the campaign's folder.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from tools.campaigns import INTERRUPTED, describe_end, make_progress, show

LIMIT_S = 2
"""The limit on the processor time of each way of reading an input, in seconds per MiB."""

MEMORY = 64 * 2**20
"""The number of bytes of address space that the process may add after the warm-up."""

MEMORY_PER_BYTE = 20
"""The number of bytes of address space, beyond ``MEMORY``, that the process may add for each byte of an input."""

WARM_UP = 200
"""The number of inputs to read before memory is measured, to import modules and fill caches."""

INPUTS_PER_REPORT = 1000

INPUTS_PER_FOLDER = 100
"""One in every ``INPUTS_PER_FOLDER`` inputs is also read from a folder."""

MAX_FAILURES = 20

MEMORY_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""The folder for files: in memory if possible, because writes to a disk would take most of the time."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.rmdir", "os.truncate", "os.chmod"}
"""The audit events of functions that change the file system."""


@dataclass(kw_only=True, slots=True)
class Report:
    """The outcomes of checking some inputs.

    Attributes:
        num_inputs: The number of inputs.
        outcomes: The number of occurrences of each outcome.
        wrong: The law that the last input breaks; None if the input breaks no law.
        seed: The seed of the last input.
    """

    num_inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: str | None = None
    seed: int = 0


class Limits:
    """Limits on the processor time and memory of this process, and a record of changed paths outside a folder."""

    def __init__(self, folder: Path) -> None:
        self.changed: list[str] = []
        self._folder = str(folder)
        self._num_bytes: int | None = None
        sys.addaudithook(self._audit)

    def measure(self) -> None:
        """Measure the memory of this process, and limit it from now on."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self._num_bytes = pages * resource.getpagesize() + MEMORY

    def start(self, num_bytes: int) -> None:
        """Limit the time and the memory until the next call, given the size of an input."""
        # SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S * max(1, num_bytes / 2**20))
        if self._num_bytes is not None:
            _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (self._num_bytes + MEMORY_PER_BYTE * num_bytes, hard_limit))

    def stop(self) -> None:
        """Remove the limits."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard_limit, hard_limit))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not flags & WRITING or not isinstance(path, str | bytes):
                return
        elif event in CHANGES and not isinstance(arguments[0], int):  # A descriptor refers to anonymous memory.
            if arguments[-1] not in (-1, None) and event in ("os.remove", "os.rmdir"):
                return  # shutil.rmtree passes a path relative to an open folder.
            path = arguments[0]
        else:
            return
        is_cache = "/__pycache__/" in os.fsdecode(path)  # The first import of a module writes bytecode.
        if not is_cache and not os.fsdecode(path).startswith((self._folder, "/dev/null")):
            self.changed.append(f"{event} {path!r}")


def run_seeds(seeds: range, reports: Connection, current: Any, folder: Path) -> None:
    """In this process, check the inputs made from seeds, and send reports. Stop if an input breaks a law."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["XDG_CACHE_HOME"] = tempfile.tempdir = str(folder)
    limits = Limits(folder)
    report = Report()
    for i, seed in enumerate(seeds):
        if i == WARM_UP:
            limits.measure()
        current.value = seed
        report.wrong = check_seed(seed, limits, report.outcomes, folder)
        report.num_inputs += 1
        report.seed = seed
        if report.wrong or report.num_inputs == INPUTS_PER_REPORT:
            reports.send(report)
            if report.wrong:
                return
            report = Report()
    reports.send(report)


def check_seed(seed: int, limits: Limits, outcomes: Counter[str], folder: Path) -> str | None:
    """Check the input made from a seed, and count its outcomes. Return the law that the input breaks, or None."""
    from tests.shards.hostile import make_shard
    from tests.shards.tar_laws import Laws

    rng = random.Random(seed)
    laws = Laws(limits.start, limits.stop)
    try:
        shard = make_shard(rng)
        laws.check(shard, rng)
        if seed % INPUTS_PER_FOLDER == 0:
            laws.check_folder(shard, folder)
    except Exception as error:  # An unexpected error breaks a law.
        return f"{type(error).__name__}: {error!s:.1000}"
    finally:
        outcomes.update(laws.outcomes)
    return f"reading changed {limits.changed[0]}" if limits.changed else None


def run_job(seeds: range, folder: Path) -> Iterator[Report]:
    """Check the inputs made from seeds in another process, which is replaced if a law is broken. Yield its reports."""
    context = multiprocessing.get_context("spawn")
    current = context.RawValue("q", seeds.start)
    while seeds:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=run_seeds, args=(seeds, send, current, folder), daemon=True)
        process.start()
        send.close()
        num_left = len(seeds)
        try:
            while num_left:
                try:
                    report: Report = receive.recv()
                except EOFError:
                    too_long = f"one way of reading the input took more than {LIMIT_S} s of processor time per MiB"
                    wrong, seed = describe_end(process, signal.SIGPROF, too_long), int(current.value)
                    report = Report(num_inputs=seed + 1 - seeds[-num_left], wrong=wrong, seed=seed)
                num_left -= report.num_inputs
                yield report
                if report.wrong:
                    break
        finally:
            process.terminate()
            process.join()
            receive.close()
        seeds = seeds[len(seeds) - num_left :]


def main(
    cases: Annotated[int, typer.Option(min=1, help="Number of inputs.")] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Seed of the inputs.")] = 0,
    save: Annotated[Path, typer.Option(help="Folder for inputs that break a law.")] = Path("fuzz-failures"),
    only: Annotated[int | None, typer.Option(min=0, help="Read only the input of this seed, in this process.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Read only this saved input, in this process.")] = None,
    atheris: Annotated[
        bool, typer.Option(help="Use atheris to find inputs that reach new lines. Its options follow --.")
    ] = False,
    options: Annotated[list[str] | None, typer.Argument(help="Options of atheris, such as -max_total_time=60.")] = None,
) -> None:
    """Read random hostile tars and indexes."""
    if atheris:
        run_atheris(options or [], save)
        return
    if only is not None or replay is not None:
        with tempfile.TemporaryDirectory() as temporary:
            typer.echo(show(_replay(only, replay, Path(temporary))))
        return

    os.environ["MALLOC_ARENA_MAX"] = "1"  # Each of malloc's arenas reserves 64 MiB of address space.
    outcomes, num_read, failures, start = Counter[str](), 0, Counter[str](), time.perf_counter()
    try:
        with (
            tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder,
            make_progress("inputs") as progress,
        ):
            bar = progress.add_task("inputs", total=cases)
            for report in run_job(range(seed << 32, (seed << 32) + cases), Path(folder)):
                num_read += report.num_inputs
                outcomes.update(report.outcomes)
                progress.update(bar, completed=num_read)
                if report.wrong:
                    failures[report.wrong] += 1
                    typer.echo(f"{report.wrong}\n{_save(report.seed, save)}")
                    if failures.total() == MAX_FAILURES:
                        break
    except KeyboardInterrupt:
        typer.echo(f"{show(outcomes)}\ninterrupted: {failures.total()} of {num_read:,} inputs break a law")
        raise typer.Exit(INTERRUPTED) from None
    elapsed_s = time.perf_counter() - start
    typer.echo(show(outcomes))
    typer.echo(
        f"{failures.total()} of {num_read:,} inputs with seed {seed} break a law; "
        f"reading took {elapsed_s:.0f} s ({num_read / elapsed_s:,.0f} inputs/s)"
    )
    if failures:
        raise typer.Exit(1)


def _replay(seed: int | None, path: Path | None, folder: Path) -> Counter[str]:
    """Read one input without limits, so a debugger can show where it hangs."""
    from tests.shards.hostile import HostileShard, make_shard
    from tests.shards.tar_laws import Laws

    rng, laws = random.Random(seed or 0), Laws()
    shard = make_shard(rng) if path is None else HostileShard.load(path.read_bytes())
    laws.check(shard, rng)
    laws.check_folder(shard, folder)
    return laws.outcomes


def _save(seed: int, folder: Path) -> str:
    """Save the input of a seed. Return a message with the command that reads the input again."""
    from tests.shards.hostile import make_shard

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed-{seed}.hostile"
    path.write_bytes(make_shard(random.Random(seed)).dump())
    return f"    saved as {path}; read it again with: python tools/fuzz_tars.py --only {seed}"


def run_atheris(options: list[str], save: Path) -> None:
    """Run atheris, which changes inputs to reach new lines of shardio and tarfile, and then exits the process."""
    try:
        atheris: Any = import_module("atheris")
    except ImportError:
        raise typer.BadParameter("--atheris needs the atheris package: pip install atheris") from None
    with atheris.instrument_imports(include=["shardio.shards", "shardio.values", "tarfile", "gzip"]):
        from tests.shards.hostile import HostileShard, make_shard
        from tests.shards.tar_laws import Laws

        Laws().check(make_shard(random.Random(0)), random.Random(0))

    def check(content: bytes) -> None:
        Laws().check(HostileShard.load(content), random.Random(0))

    save.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for seed in range(300):
            (Path(corpus) / str(seed)).write_bytes(make_shard(random.Random(seed)).dump())
        limits = [f"-artifact_prefix={save}/", "-max_len=65536", f"-timeout={2 * LIMIT_S}", "-rss_limit_mb=512"]
        atheris.Setup([sys.argv[0], *limits, *options, corpus], check)
        with suppress(KeyboardInterrupt):
            atheris.Fuzz()


if __name__ == "__main__":
    typer.run(main)
