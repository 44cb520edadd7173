"""Verify that the doctor names the causes of slow loaders, and finds nothing wrong with healthy ones.

The loaders are defined in ``tests/diagnosis/patients.py``. Run the campaign on a machine that does nothing else: some
causes, such as too many workers, show up only there. The output is a Markdown table. The campaign fails if a cause is
not named, or if the doctor advises changes to a healthy loader.
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
from tests.diagnosis import patients


def main(
    only: Annotated[str, typer.Option(help="Examine only the loaders whose names contain this text.")] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds that each measurement takes.")] = 1.0,
) -> None:
    """Examine all loaders."""
    warnings.simplefilter("ignore")
    num_wrong = 0
    print("| loader | planted cause | place in the advice | training waits | seconds |")
    print("|---|---|---|---|---|")
    for make in (make for make in (*patients.SLOW, *patients.HEALTHY) if only in make.__name__):
        with tempfile.TemporaryDirectory() as folder:
            loader, step, cause = make(Path(folder))
            began = time.perf_counter()
            diagnosis = shardio.doctor(loader, step, seconds=seconds)
            elapsed_s = time.perf_counter() - began
        causes = [advice.cause for advice in diagnosis.advice]
        places = [place for place, found in enumerate(causes, 1) if cause and cause in found]
        is_right = bool(places) if cause else diagnosis.keeps_up and not causes
        num_wrong += not is_right
        place = f"{places[0]} of {len(causes)}" if places else "none" if is_right else f"**wrong**: {causes}"
        waiting = "" if diagnosis.both is None else f"{diagnosis.both.waiting:.0%}"
        print(f"| {make.__name__} | {cause or 'none'} | {place} | {waiting} | {elapsed_s:.0f} |", flush=True)
    if num_wrong:
        raise SystemExit(f"{num_wrong} verdicts are wrong")


if __name__ == "__main__":
    typer.run(main)
