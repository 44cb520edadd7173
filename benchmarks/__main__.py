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
from shardio.images.kernel.building import build

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False)


@app.command()
def main(
    images: Annotated[Path | None, typer.Argument(help="Class folders of JPEGs. Needed unless --list.")] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; may be repeated.")] = None,
    candidate: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is run.")] = 5,
    samples: Annotated[int, typer.Option(min=1, help="To how many the images are repeated.")] = 5000,
    small_samples: Annotated[int, typer.Option(min=1, help="How many samples of 1 KiB.")] = 200_000,
    workers: Annotated[int, typer.Option(min=1, help="Workers, or threads, of each.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs that are timed, after one that is not.")] = 1,
    work: Annotated[Path | None, typer.Option(help="Where data are made, and stay. Temporary by default.")] = None,
    results: Annotated[Path, typer.Option(help="Where the figures are written.")] = HERE / "results",
    name: Annotated[str, typer.Option(help="What the figures are of, in their file's name.")] = "loaders",
    chart: Annotated[Path | None, typer.Option(help="Where to draw the training case.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Say who can be compared, and stop.")] = False,
) -> None:
    """Measure image loaders side by side, each in a process of its own, and in turns."""
    if show:
        _show_candidates()
        return
    if images is None or not images.is_dir():
        raise typer.BadParameter("a directory of class folders with JPEGs is needed")
    cases = case or list(CASES)
    if unknown := set(cases) - set(CASES):
        raise typer.BadParameter(f"there is no case {unknown.pop()!r}; there are {', '.join(CASES)}")
    chosen = [find(given) for given in candidate] if candidate else CANDIDATES
    # Candidates' processes import this package too.
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
    tell("compiling shardio's JPEG kernel, unless that is done")
    build()
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
        write_json(path, found, settings, machine, data)  # After each case, so that a run cut short is kept.
        if case == "train" and chart is not None:
            draw_chart(chart, found[case], machine)
    print(f"All figures are in {path}.")
    failed = [result for results in found.values() for result in results if result.problem not in ("", "not installed")]
    for result in failed:
        print(f"\n{result.candidate.name}: {result.problem}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _exit(number: int, _: FrameType | None) -> None:
    """End by an exception, so that temporary data are removed and nobody is left running."""
    raise SystemExit(128 + number)


def _show_candidates() -> None:
    for candidate in CANDIDATES:
        state = "" if candidate.is_installed else f"; not installed: {', '.join(candidate.modules)}"
        print(f"{candidate.name:22} {candidate.title} ({', '.join(sorted(candidate.cases))}){state}")


if __name__ == "__main__":
    app()
