"""Plant faults in loaders, and verify that the checker identifies each fault and accepts all correct loaders.

The cases are defined in ``tests/check/``, and the tests run the quick cases. The output is two Markdown tables. The
campaign fails if the checker misses or misnames a fault, or rejects a correct loader.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

import shardio
from tests.check.cases import Case
from tests.check.test_check import PLANTED, UNUSUAL
from tests.sources import write_images


def judge_case(case: Case, packed: Path, *, is_fault: bool) -> tuple[bool, str]:
    """Return whether the verdict on a case is correct, and the case's row in the table."""
    start = time.perf_counter()
    verdict, message = case.judge(packed)
    seconds = time.perf_counter() - start
    is_named = case.says in message
    holds = is_named and (
        verdict != "right" if is_fault else (verdict == "right") == (not case.says) and verdict != "wrong"
    )
    what = f"{verdict}: …{case.says}…" if is_fault and is_named else verdict if holds else f"**{verdict}**: {message!r}"
    return holds, f"| {case.name} | {what} | {seconds:.1f} s |"


def main(
    only: Annotated[str, typer.Option(help="Run only the cases whose names contain this text.")] = "",
    quick: Annotated[bool, typer.Option(help="Skip cases with worker processes or 10^6 samples.")] = False,
) -> None:
    """Run the checker on planted faults and on correct loaders."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    start, num_wrong = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as work:
        write_images(Path(work) / "in", classes=3, per_class=7, width=8, height=8)
        shardio.pack(Path(work) / "in", Path(work) / "out", max_shard_samples=6)
        for title, cases in ("planted fault", PLANTED), ("correct loader", UNUSUAL):
            chosen = [case for case in cases if only in case.name and not (quick and case.is_slow)]
            typer.echo(f"\n| {title} | verdict | time |\n|---|---|---|")
            for case in chosen:
                holds, row = judge_case(case, Path(work) / "out", is_fault=cases is PLANTED)
                num_wrong += not holds
                typer.echo(row)
            typer.echo(f"\n{len(chosen)} cases")
    typer.echo(f"\n{num_wrong} wrong verdicts in {time.perf_counter() - start:.0f} s")
    raise typer.Exit(1 if num_wrong else 0)


if __name__ == "__main__":
    typer.run(main)
