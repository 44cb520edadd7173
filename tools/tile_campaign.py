"""Tile every JPEG of the zoo, and photographs, and check that nothing is lost.

The laws are those of ``tests/images/laws_of_tiling.py``, which the tests check on a small zoo. With ``--crops`` random
crops of each file, as it is and tiled, are held against full decodes at 1/1, 1/2, 1/4 and 1/8. With ``--jpegtran`` each
tiled file is compared with what libjpeg's own lossless transcoder, the program jpegtran, makes of the original.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are no installed package.

from shardio.images import open_image
from shardio.images.jpeg.regions import MIN_SCALED_SIDE
from shardio.images.tiling import tile_jpeg
from tests.images.crop_laws import SCALES, assert_parts, full_decode, random_boxes, scaled_size
from tests.images.laws_of_tiling import TILED, check_animal, check_file, take_apart
from tests.images.pictures import read_by_pillow
from tests.images.zoo import full_zoo

SUFFIXES = {".jpg", ".jpeg"}

UNUSABLE = 2
"""The exit code where the campaign cannot be run as asked."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A file to tile.

    Attributes:
        name: What to call it.
        content: The file.
        check: Checks the laws and returns what came of it, as ``check_file`` does.
    """

    name: str
    content: bytes
    check: Callable[[], str]


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What jpegtran makes of the files that were tiled.

    Attributes:
        outcomes: How often it wrote the ``same scan``, byte by byte, or an ``other scan, same pixels`` (it empties the
            blocks outside of the picture, which fill up the last MCUs, and numbers Huffman tables anew), and how often
            the file was ``not read``.
        num_bytes: The size of its files.
        num_tiled_bytes: The size of the same files, tiled.
        num_table_bytes: The part of these that is the tile tables, which jpegtran's do not have.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    num_tiled_bytes: int = 0
    num_table_bytes: int = 0

    def add(self, subject: Subject) -> None:
        """Compare the tiled file with jpegtran's.

        Raises:
            AssertionError: If they do not show the same picture.
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
            raise AssertionError(f"{subject.name}: jpegtran's file has other pixels than the tiled one")
        self.num_bytes += len(done.stdout)
        self.num_tiled_bytes += len(tiled)
        self.num_table_bytes += sum(map(len, parts.tile_table))

    def summary(self) -> str:
        """Return all of it in a line."""
        ratio = self.num_tiled_bytes / max(self.num_bytes, 1)
        bare_ratio = (self.num_tiled_bytes - self.num_table_bytes) / max(self.num_bytes, 1)
        return (
            f"jpegtran: {format_counts(self.outcomes)}; tiled files have {100 * ratio:.2f} % of the size of its files, "
            f"{100 * bare_ratio:.2f} % without their tile tables ({self.num_bytes:,} bytes)"
        )


def subjects_of_zoo(limit: int | None) -> Iterator[Subject]:
    """Yield the animals of the zoo, or the first of them."""
    for animal in islice(full_zoo(), limit):
        yield Subject(name=animal.name, content=animal.content, check=partial(check_animal, animal))


def subjects_in(folder: Path) -> Iterator[Subject]:
    """Yield the JPEG files in a folder and below it, in the order of their names."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES:
            content = path.read_bytes()
            yield Subject(name=str(path), content=content, check=partial(check_file, str(path), content))


def check_crops(subject: Subject, number: int) -> None:
    """Hold crops of a file, as it is and tiled, against full decodes, if simplejpeg reads it.

    Raises:
        AssertionError: If one has other pixels.
    """
    tiled = tile_jpeg(subject.content)
    random = np.random.default_rng([number, len(subject.content)])
    size = open_image(subject.content).size
    for scale in SCALES:
        # libjpeg knows a scale by the size that it leads to, which several do for the smallest pictures.
        if scale > 1 and max(size) < MIN_SCALED_SIDE:
            continue
        try:
            expected = full_decode(subject.content, size, scale)
        except ValueError:
            return
        boxes = random_boxes(*scaled_size(size, scale), number, random)
        assert_parts(subject.content, expected, boxes, scale=scale, name=f"{subject.name}, untouched")
        assert_parts(tiled, expected, boxes, scale=scale, name=f"{subject.name}, tiled")


def check(subject: Subject, comparison: Comparison | None, num_crops: int = 0) -> tuple[str | None, str]:
    """Return what is wrong with a subject, or None, and what came of it."""
    try:
        outcome = subject.check()
        if outcome == TILED and num_crops:
            check_crops(subject, num_crops)
        if outcome == TILED and comparison is not None:
            comparison.add(subject)
    except Exception as error:  # A crash is a broken law like any other.
        where = "" if isinstance(error, AssertionError) else f"{subject.name}: {traceback.format_exc()}"
        return where or str(error), "broken"
    return None, outcome


def format_counts(counts: Counter[str]) -> str:
    """Return counts in words, the largest first."""
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common())


def main(
    photos: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="JPEGs to tile as well.")] = None,
    zoo: Annotated[bool, typer.Option(help="Whether to tile the zoo.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="How many animals of the zoo; all, if not given.")] = None,
    jpegtran: Annotated[bool, typer.Option("--jpegtran", help="Compare with the program jpegtran.")] = False,
    crops: Annotated[int, typer.Option(min=0, help="Random crops of each file at each scale.")] = 0,
    broken: Annotated[Path, typer.Option(help="Where to write a file that breaks a law.")] = Path("broken.jpg"),
) -> None:
    """Check the laws of tiling on JPEG files of every kind."""
    if jpegtran and shutil.which("jpegtran") is None:
        typer.echo("there is no program jpegtran: install libjpeg-turbo-progs, or leave out --jpegtran")
        raise typer.Exit(UNUSABLE)
    comparison = Comparison() if jpegtran else None
    outcomes = Counter[str]()
    columns = (SpinnerColumn(), TextColumn("files"), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.perf_counter()
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("files", total=None)
            for subject in chain(subjects_of_zoo(limit) if zoo else (), subjects_in(photos) if photos else ()):
                wrong, outcome = check(subject, comparison, crops)
                if wrong is not None:
                    progress.stop()
                    broken.write_bytes(subject.content)
                    typer.echo(f"{wrong}\nThe file is {broken}.")
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
