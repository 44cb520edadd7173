"""Compare shardio's DataLoader with torch's on random datasets, samplers and arguments, and look for leaks.

``compare`` runs random programs with both loaders: types, dtypes, strides and contents of all batches must be equal.
``resume`` stops random programs and resumes them: the remaining batches must equal those of an uninterrupted run.
``leaks`` creates loaders, iterates over half of each one and drops it.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
import time
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import hypothesis
import typer
from hypothesis import HealthCheck, given, strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from shardio import DataLoader
from tests.buffers import find_buffers
from tests.files import find_open_files
from tests.loader.programs import programs
from tests.loader.test_any_dataset import (
    test_random_programs_see_torchs_batches as compared,
    test_threads_deliver_the_same_samples as compared_in_threads,
)
from tests.loader.test_any_dataset_states import test_a_resumed_program_sees_the_rest as resumed
from tests.loader.test_any_dataset_workers import Arrays

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Cases = Annotated[int, typer.Option(min=1, help="Number of random programs.")]
Seed = Annotated[int, typer.Option(help="Seed of the programs.")]


@app.command()
def compare(
    cases: Cases = 2000,
    seed: Seed = 0,
    threads: Annotated[bool, typer.Option(help="Use threads as shardio's workers.")] = False,
) -> None:
    """Run programs with torch's loader and with shardio's."""
    if threads:
        _run("compared with torch's loader", compared_in_threads, cases, seed, programs())
    else:
        _run("compared with torch's loader", compared, cases, seed, programs(), st.none() | st.integers(0, 12))


@app.command()
def resume(cases: Cases = 2000, seed: Seed = 0) -> None:
    """Stop programs after some batches, and resume them in new loaders."""
    _run("resumed", resumed, cases, seed, programs(), st.integers(0, 12), st.booleans())


def _run(what: str, test: Any, cases: int, seed: int, *strategies: st.SearchStrategy[Any]) -> None:
    started, num_run = time.perf_counter(), 0
    check: Callable[..., None] = test.hypothesis.inner_test

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    @given(st.tuples(*strategies))
    def run(drawn: tuple[Any, ...]) -> None:
        nonlocal num_run
        num_run += 1
        check(*drawn)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ignore warnings about the number of workers and the cost of resuming.
        run()
    took_s = time.perf_counter() - started
    typer.echo(f"{num_run} programs from seed {seed} were {what} in {took_s:.0f} s, with no differences")


@app.command()
def leaks(loaders: Annotated[int, typer.Option(min=1, help="Number of loaders.")] = 1000) -> None:
    """Create loaders, drop each one after half an epoch, and check that they leave nothing behind."""
    started = time.perf_counter()
    warnings.simplefilter("ignore")  # Ignore warnings about the number of workers.
    _leave(0)
    gc.collect()
    before = _count_resources()
    for number in range(loaders):
        _leave(number)
    gc.collect()
    after = _count_resources()
    if after != before:
        typer.echo(f"after {loaders} loaders: {after}, expected {before}")
        raise typer.Exit(1)
    took_s = time.perf_counter() - started
    typer.echo(f"in {took_s:.0f} s, {loaders} loaders, each dropped after half an epoch, left nothing behind: {after}")


def _leave(number: int) -> None:
    options: dict[str, Any] = {"persistent_workers": number % 2 == 0, "pin_memory": False}
    options["worker_method"] = "thread" if number % 5 == 4 else "multiprocessing"
    loader = DataLoader(Arrays(), 4, num_workers=1 + number % 3, **options)
    kept = list(islice(iterator := iter(loader), len(loader) // 2))
    assert [int(batch[0, 0]) for batch in kept] == list(range(0, 20, 4))
    del loader, iterator


def _count_resources() -> dict[str, int]:
    return {
        "processes": len(multiprocessing.active_children()),
        "threads": threading.active_count(),
        "descriptors": len(find_open_files()),
        "buffers": len(find_buffers()),
    }


if __name__ == "__main__":
    app()
