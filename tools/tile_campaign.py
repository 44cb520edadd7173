"""Tile every JPEG of the full corpus and of a folder, and check that tiling is lossless.

The laws are those of ``tests/images/tiling_laws.py``, which the tests check on the small corpus. ``--crops`` compares
random crops of each file, both untouched and tiled, with a full decode. ``--jpegtran`` compares each tiled file with
the output of jpegtran, libjpeg's own lossless transcoder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

from shardio.images.tiling import tile_jpeg
from tests.images.crop_laws import assert_parts, random_boxes
from tests.images.pictures import read_by_pillow
from tests.images.tiling_laws import TILED, check_corpus_file, check_file, read_by_simplejpeg, take_apart
from tools.campaigns import INTERRUPTED
from tools.full_corpus import full_corpus

SUFFIXES = {".jpg", ".jpeg"}

UNUSABLE = 2
"""The exit code if the campaign cannot run with the given options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A file to tile.

    Attributes:
        name: The file's name in messages.
        content: The file's content.
        check: A function that checks the laws and returns the outcome, as ``check_file`` does.
    """

    name: str
    content: bytes
    check: Callable[[], str]


@dataclass(kw_only=True, slots=True)
class Comparison:
    """A comparison of tiled files with the output of jpegtran.

    Attributes:
        outcomes: The number of files by outcome: ``same scan``, byte for byte; ``other scan, same pixels``; ``not
            read``. jpegtran's scan may differ because jpegtran empties the padding blocks outside the image and
            renumbers Huffman tables.
        num_bytes: The total size of jpegtran's files.
        num_tiled_bytes: The total size of the tiled files.
        num_table_bytes: The total size of the tile tables in the tiled files, which jpegtran's files do not have.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_tiled_bytes: int = 0
    num_table_bytes: int = 0

    def add(self, subject: Subject) -> None:
        """Compare the tiled file with the file that jpegtran writes.

        Raises:
            AssertionError: If their pixels differ.
        """
        tiled = tile_jpeg(subject.content)
        parts = take_apart(tiled)
        interval = int.from_bytes(parts.all_of(0xDD)[0][4:], "big")
        command = ["jpegtran", "-copy", "all", "-optimize", "-restart", f"{interval}B"]
        done = subprocess.run(command, input=subject.content, capture_output=True, check=False)
        if done.returncode or not done.stdout:
            self.outcomes["not read"] += 1
            return
        if take_apart(done.stdout).scan == parts.scan:
            self.outcomes["same scan"] += 1
        elif np.array_equal(read_by_pillow(done.stdout), read_by_pillow(tiled)):
            self.outcomes["other scan, same pixels"] += 1
        else:
            raise AssertionError(f"{subject.name}: the pixels of jpegtran's file differ from those of the tiled file")
        self.num_bytes += len(done.stdout)
        self.num_tiled_bytes += len(tiled)
        self.num_table_bytes += sum(map(len, parts.tile_table))

    def summary(self) -> str:
        """Return the comparison in one line."""
        ratio = self.num_tiled_bytes / max(self.num_bytes, 1)
        bare_ratio = (self.num_tiled_bytes - self.num_table_bytes) / max(self.num_bytes, 1)
        return (
            f"jpegtran: {format_counts(self.outcomes)}; tiled files are {100 * ratio:.2f} % of the size of jpegtran's "
            f"files ({self.num_bytes:,} bytes), or {100 * bare_ratio:.2f} % without their tile tables"
        )


def subjects_of_corpus(limit: int | None) -> Iterator[Subject]:
    """Yield the files of the full corpus, up to a limit."""
    for file in islice(full_corpus(), limit):
        yield Subject(name=file.name, content=file.content, check=partial(check_corpus_file, file))


def subjects_in(folder: Path) -> Iterator[Subject]:
    """Yield the JPEG files in a folder and its subfolders, sorted by path."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES:
            content = path.read_bytes()
            yield Subject(name=str(path), content=content, check=partial(check_file, str(path), content))


def check_crops(subject: Subject, num_crops: int) -> None:
    """If simplejpeg can read the file, compare crops of it, both untouched and tiled, with full decodes.

    Raises:
        AssertionError: If a crop's pixels differ from those of the full decode.
    """
    tiled = tile_jpeg(subject.content)
    try:
        expected = read_by_simplejpeg(subject.content)
    except ValueError:
        return
    height, width = expected.shape[:2]
    boxes = random_boxes(height, width, num_crops, np.random.default_rng([num_crops, len(subject.content)]))
    assert_parts(subject.content, expected, boxes, name=f"{subject.name}, untouched")
    assert_parts(tiled, expected, boxes, name=f"{subject.name}, tiled")


def check(subject: Subject, comparison: Comparison | None, num_crops: int = 0) -> tuple[str | None, str]:
    """Return the law that a subject breaks, or None, and the outcome."""
    try:
        outcome = subject.check()
        if outcome == TILED and num_crops:
            check_crops(subject, num_crops)
        if outcome == TILED and comparison is not None:
            comparison.add(subject)
    except Exception as error:  # A crash counts as a broken law.
        where = "" if isinstance(error, AssertionError) else f"{subject.name}: {traceback.format_exc()}"
        return where or str(error), "broken"
    return None, outcome


def format_counts(counts: Counter[str]) -> str:
    """Return counts as text, the largest first."""
    return ", ".join(f"{num_files:,} {outcome}" for outcome, num_files in counts.most_common())


def main(
    photos: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with more JPEGs to tile.")
    ] = None,
    corpus: Annotated[bool, typer.Option(help="Tile the corpus.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of corpus files (default: all).")] = None,
    jpegtran: Annotated[bool, typer.Option("--jpegtran", help="Compare with the program jpegtran.")] = False,
    crops: Annotated[int, typer.Option(min=0, help="Number of random crops of each file.")] = 0,
    broken: Annotated[Path, typer.Option(help="Where to write a file that breaks a law.")] = Path("broken.jpg"),
) -> None:
    """Check the laws of tiling on JPEG files of every kind."""
    if jpegtran and shutil.which("jpegtran") is None:
        typer.echo("the program jpegtran is not installed: install libjpeg-turbo-progs, or omit --jpegtran")
        raise typer.Exit(UNUSABLE)
    comparison = Comparison() if jpegtran else None
    outcomes = Counter[str]()
    columns = (SpinnerColumn(), TextColumn("files"), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.perf_counter()
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("files", total=None)
            for subject in chain(subjects_of_corpus(limit) if corpus else (), subjects_in(photos) if photos else ()):
                wrong, outcome = check(subject, comparison, crops)
                if wrong is not None:
                    progress.stop()
                    broken.write_bytes(subject.content)
                    typer.echo(f"{wrong}\nThe file was saved to {broken}.")
                    raise typer.Exit(1)
                outcomes[outcome] += 1
                progress.update(bar, completed=outcomes.total())
    except KeyboardInterrupt:
        typer.echo(f"interrupted: the laws held for {outcomes.total():,} files")
        raise typer.Exit(INTERRUPTED) from None
    if not outcomes:
        typer.echo("there are no files to tile")
        raise typer.Exit(UNUSABLE)
    if comparison is not None:
        typer.echo(comparison.summary())
    elapsed_s = time.perf_counter() - started
    typer.echo(f"the laws hold for all {outcomes.total():,} files in {elapsed_s:.0f} s: {format_counts(outcomes)}")


if __name__ == "__main__":
    typer.run(main)
