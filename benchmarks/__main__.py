"""The loader benchmark: ``python -m benchmarks PHOTOS``."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from benchmarks.loaders.cases import CASES
from benchmarks.loaders.data import copy_images
from benchmarks.loaders.files import list_files
from benchmarks.loaders.registry import CANDIDATES, Candidate, find
from benchmarks.loaders.report import describe_machine, draw_chart, write_json
from benchmarks.loaders.rounds import Settings, run_case, tell
from benchmarks.loaders.tables import make_tables

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False)


@app.command()
def main(
    images: Annotated[Path | None, typer.Argument(help="Class folders of JPEGs. Required without --list.")] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"Run only this case: {', '.join(CASES)}. Repeatable.")] = None,
    candidate: Annotated[list[str] | None, typer.Option(help="Run only this candidate. Repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each candidate.")] = 5,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples; images are repeated to reach it.")] = 5000,
    small_samples: Annotated[int, typer.Option(min=1, help="Number of 1 KiB samples.")] = 200_000,
    workers: Annotated[int, typer.Option(min=1, help="Workers (or threads) of each candidate.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Timed epochs, after a warm-up epoch.")] = 1,
    work: Annotated[Path | None, typer.Option(help="Directory to keep the data in (default: temporary).")] = None,
    results: Annotated[Path, typer.Option(help="Directory for the results.")] = HERE / "results",
    name: Annotated[str, typer.Option(help="Name of the results, used in their file name.")] = "loaders",
    chart: Annotated[Path | None, typer.Option(help="Save a chart of the training case to this file.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the candidates and exit.")] = False,
) -> None:
    """Compare image loaders: candidates take turns, each in its own process."""
    if show:
        _show_candidates()
        return
    if images is None or not images.is_dir():
        raise typer.BadParameter("IMAGES must be a directory of class folders with JPEGs")
    cases = case or list(CASES)
    if unknown := set(cases) - set(CASES):
        raise typer.BadParameter(f"unknown case {unknown.pop()!r}: use one of {', '.join(CASES)}")
    chosen = [find(given) for given in candidate] if candidate else CANDIDATES
    # The candidates run in other processes, which must find this package.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    signal.signal(signal.SIGTERM, _exit)
    with tempfile.TemporaryDirectory(prefix="shardio-benchmarks-") as temporary:
        settings = Settings(
            work=work or Path(temporary),
            num_samples=samples,
            num_small=small_samples,
            num_workers=workers,
            num_epochs=epochs,
            num_rounds=rounds,
        )
        settings.work.mkdir(parents=True, exist_ok=True)
        _run(images, cases, chosen, settings, results / f"{datetime.date.today()}-{name}.json", chart)


def _run(
    images: Path, cases: Sequence[str], chosen: Sequence[Candidate], settings: Settings, path: Path, chart: Path | None
) -> None:
    machine = describe_machine()
    tell(f"copying {settings.num_samples} images to {settings.work}")
    copy_images(images, settings.work, settings.num_samples)
    files = [file for file, _ in list_files(settings.work / "folder")]
    data = {"images": len(files), "bytes": sum(Path(file).stat().st_size for file in files)}
    found = {}
    for case in cases:
        able = [candidate for candidate in chosen if case in candidate.cases]
        if not able:
            continue
        found[case] = run_case(case, able, settings)
        print(make_tables(case, found[case]), flush=True)
        # The results are written after each case, so an interrupted run keeps them.
        write_json(path, found, settings, machine, data)
        if case == "train" and chart is not None:
            draw_chart(chart, found[case], machine)
    print(f"All results are in {path}.")
    failed = [result for results in found.values() for result in results if result.problem not in ("", "not installed")]
    for result in failed:
        print(f"\n{result.candidate.name}: {result.problem}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _exit(number: int, _: FrameType | None) -> None:
    """Exit with an exception, so temporary data and processes are cleaned up."""
    raise SystemExit(128 + number)


def _show_candidates() -> None:
    for candidate in CANDIDATES:
        state = "" if candidate.is_installed else f"; not installed: {', '.join(candidate.modules)}"
        print(f"{candidate.name:22} {candidate.title} ({', '.join(sorted(candidate.cases))}){state}")


if __name__ == "__main__":
    app()
