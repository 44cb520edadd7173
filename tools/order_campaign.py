"""Check the laws of order and state on several hundred thousand random cases.

Each case has its own seed, so a failing case can be rerun alone with ``--only``. The laws are defined in
``tests/order/laws.py`` and ``mixture_laws.py``, and in ``tests/datasets/token_laws.py``. The tests check fewer cases.
"""

from __future__ import annotations

import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from shardio.order import POLICIES, OrderSettings
from tests.datasets.token_laws import check_tokens, draw_tokens
from tests.order.laws import Case, Group, check_laws
from tests.order.mixture_laws import check_mixture, draw_mixture
from tools.campaigns import INTERRUPTED, make_progress

CASES_PER_CHUNK = 50
"""The number of cases that a process checks between two reports. After Ctrl-C, a process still checks these cases,
which takes a fraction of a second.
"""


def draw_case(seed: int) -> Case:
    """Return the case for a seed."""
    rng = random.Random(seed)
    # Most datasets are small, so several edge cases occur together. A few datasets are longer than the part that is
    # evaluated at a time.
    largest = rng.choices((3, 12, 40, 400), weights=(30, 40, 27, 3))[0]
    sizes = [0 if rng.random() < 0.15 else rng.randint(1, largest) for _ in range(rng.randint(1, 12))]
    if not any(sizes):
        sizes[rng.randrange(len(sizes))] = rng.randint(1, largest)
    num_samples = sum(sizes)
    shuffle = rng.random() < 0.75
    strata = rng.choice((1, 2, 4, 8, 32)) if shuffle else 1
    rows = rng.choice((-(-num_samples // strata), rng.randint(1, num_samples), rng.randint(1, 16)))
    groups = [_draw_group(rng, num_samples) for _ in range(rng.randint(0, 2))] + [_draw_group(rng, None)]
    return Case(
        shard_sizes=tuple(sizes),
        settings=OrderSettings(
            shuffle=shuffle,
            seed=rng.choice((0, 1, 2**63 - 1, rng.randrange(2**63))),
            window=rows * strata if shuffle else 1,
            strata=strata,
        ),
        epoch=rng.choice((0, 1, rng.randrange(2**20), 2**40)),
        remainder=rng.choice(list(POLICIES)),
        groups=tuple(groups),
        other_world_size=rng.randint(1, 24),
        probe=rng.randrange(10**6),
    )


def _draw_group(rng: random.Random, num_samples: int | None) -> Group:
    """Return a group that stops at a random point in an epoch, or at the epoch's end if ``num_samples`` is None."""
    world_size, batch_size = rng.randint(1, 9), rng.randint(1, rng.choice((2, 8, 20)))
    num_batches = None if num_samples is None else rng.randint(0, num_samples // (world_size * batch_size) + 1)
    return Group(world_size=world_size, num_workers=rng.randint(1, 4), batch_size=batch_size, num_batches=num_batches)


Laws = Literal["order", "mixtures", "tokens"]

LAWS: dict[Laws, tuple[Callable[[int], Any], Callable[[Any], None]]] = {
    "order": (draw_case, check_laws),
    "mixtures": (draw_mixture, check_mixture),
    "tokens": (draw_tokens, check_tokens),
}
"""The function that returns the case for a seed, and the function that checks the case."""


def check_case(seed: int, laws: Laws = "order") -> str | None:
    """Return the failure of a seed's case, or None."""
    draw, check = LAWS[laws]
    try:
        check(draw(seed))
    except Exception as error:  # A crash is a failure.
        return (
            f"{traceback.format_exc()}{error}\n{draw(seed)}\n"
            f"To rerun only this case: tools/order_campaign.py --laws {laws} --only {seed}"
        )
    return None


def check_chunk(seeds: range, laws: Laws = "order") -> str | None:
    """Return the failure of the first case that fails, or None."""
    return next(filter(None, (check_case(seed, laws) for seed in seeds)), None)


def run_chunks(chunks: Iterator[range], processes: int, laws: Laws) -> Iterator[tuple[int, str | None]]:
    """Check chunks of seeds in parallel. As each chunk finishes, yield its number of cases and its failure."""
    with ProcessPoolExecutor(processes, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        running: dict[Future[str | None], int] = {}
        try:
            while True:
                while len(running) < 2 * processes and (seeds := next(chunks, None)) is not None:
                    running[pool.submit(check_chunk, seeds, laws)] = len(seeds)
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def main(
    cases: Annotated[int, typer.Option(min=1, help="Number of cases.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of the campaign, which selects the cases.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    only: Annotated[int | None, typer.Option(min=0, help="Run only the case with this seed.")] = None,
    laws: Annotated[Laws, typer.Option(help="The laws to check.")] = "order",
) -> None:
    """Check the laws of order and state on random cases."""
    if only is not None:
        wrong = check_case(only, laws)
        typer.echo(wrong or f"the laws hold for {LAWS[laws][0](only)}")
        raise typer.Exit(1 if wrong else 0)

    first = seed << 32
    chunks = iter(
        [
            range(start, min(start + CASES_PER_CHUNK, first + cases))
            for start in range(first, first + cases, CASES_PER_CHUNK)
        ]
    )
    num_checked = 0
    try:
        with make_progress("cases") as progress:
            bar = progress.add_task("cases", total=cases)
            for num_cases, wrong in run_chunks(chunks, processes, laws):
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
    typer.echo(f"the laws hold for all {cases} cases with seed {seed}; the run took {elapsed:.0f} s")


if __name__ == "__main__":
    typer.run(main)
