"""Check the laws of order and state on random cases, some hundred thousand of them.

Each case has a seed of its own, so that one that fails can be run alone with ``--only``. The laws are those of
``tests/order/laws.py``, which the tests check on fewer cases.
"""

from __future__ import annotations

import random
import signal
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are no installed package.

from shardio.order import OrderSettings, Remainder
from tests.order.laws import Case, Group, check_laws

CASES_PER_CHUNK = 50
"""Cases that a process checks between two reports: a fraction of a second's work, which Ctrl-C waits for."""

POLICIES: tuple[Remainder, ...] = ("pad", "mask", "keep", "drop")

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    # Mostly small, where the ends meet; now and then longer than the order is evaluated at a time.
    largest = draw.choices((3, 12, 40, 400), weights=(30, 40, 27, 3))[0]
    sizes = [0 if draw.random() < 0.15 else draw.randint(1, largest) for _ in range(draw.randint(1, 12))]
    if not any(sizes):
        sizes[draw.randrange(len(sizes))] = draw.randint(1, largest)
    num_samples = sum(sizes)
    shuffle = draw.random() < 0.75
    groups = [_draw_group(draw, num_samples) for _ in range(draw.randint(0, 2))] + [_draw_group(draw, None)]
    return Case(
        shard_sizes=tuple(sizes),
        settings=OrderSettings(
            shuffle=shuffle,
            seed=draw.choice((0, 1, 2**63 - 1, draw.randrange(2**63))),
            lanes=draw.choice((1, 2, 4, draw.randint(1, 20))) if shuffle else 1,
            window=draw.choice((num_samples, draw.randint(1, num_samples), draw.randint(1, 16))) if shuffle else 1,
        ),
        epoch=draw.choice((0, 1, draw.randrange(2**20), 2**40)),
        remainder=draw.choice(POLICIES),
        groups=tuple(groups),
        other_world_size=draw.randint(1, 24),
        probe=draw.randrange(10**6),
    )


def _draw_group(draw: random.Random, num_samples: int | None) -> Group:
    """Return a group that goes on to the end, or one that stops somewhere in an epoch of so many samples."""
    world_size, batch_size = draw.randint(1, 9), draw.randint(1, draw.choice((2, 8, 20)))
    num_batches = None if num_samples is None else draw.randint(0, num_samples // (world_size * batch_size) + 1)
    return Group(world_size=world_size, num_workers=draw.randint(1, 4), batch_size=batch_size, num_batches=num_batches)


def check_case(seed: int) -> str | None:
    """Return what is wrong with a seed's case, or None."""
    case = draw_case(seed)
    try:
        check_laws(case)
    except Exception as error:  # A crash is a failure of the case like any other.
        where = traceback.format_exc() if not isinstance(error, AssertionError) else ""
        return f"{where}{error}\n{case}\nRun it alone with: tools/order_campaign.py --only {seed}"
    return None


def check_chunk(seeds: range) -> str | None:
    """Return what is wrong with the first case of some seeds that fails, or None."""
    return next(filter(None, map(check_case, seeds)), None)


def run_chunks(chunks: Iterator[range], processes: int) -> Iterator[tuple[int, str | None]]:
    """Check chunks of seeds side by side; yield each one's number of cases and what is wrong, as they finish."""
    with ProcessPoolExecutor(processes, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        running: dict[Future[str | None], int] = {}
        try:
            while True:
                while len(running) < 2 * processes and (seeds := next(chunks, None)) is not None:
                    running[pool.submit(check_chunk, seeds)] = len(seeds)
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def main(
    cases: Annotated[int, typer.Option(min=1, help="How many cases.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the campaign; others have other cases.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="How many processes.")] = 2,
    only: Annotated[int | None, typer.Option(min=0, help="Run the case of this seed alone.")] = None,
) -> None:
    """Check the laws of order and state on random cases."""
    if only is not None:
        wrong = check_case(only)
        typer.echo(wrong or f"the laws hold for {draw_case(only)}")
        raise typer.Exit(1 if wrong else 0)

    first = seed << 32
    chunks = iter(
        [
            range(start, min(start + CASES_PER_CHUNK, first + cases))
            for start in range(first, first + cases, CASES_PER_CHUNK)
        ]
    )
    columns = (TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    num_checked = 0
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("cases", total=cases)
            for num_cases, wrong in run_chunks(chunks, processes):
                if wrong:
                    progress.stop()
                    typer.echo(wrong)
                    raise typer.Exit(1)
                num_checked += num_cases
                progress.update(bar, completed=num_checked)
            elapsed = progress.tasks[0].finished_time or 0.0
    except KeyboardInterrupt:
        typer.echo(f"interrupted: the laws held for {num_checked} of {cases} cases")
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(f"the laws hold for all {cases} cases of seed {seed}, checked in {elapsed:.0f} s")


if __name__ == "__main__":
    typer.run(main)
