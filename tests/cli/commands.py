"""Commands run in the test process, because starting a new process is much slower."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from typer.testing import CliRunner, Result

import shardio
from shardio.cli.main import app, main
from tests.sources import write_images

LINE = re.compile(
    r"epoch (?P<epoch>\d+)  loss (?P<loss>\d+\.\d{3})  accuracy (?P<accuracy>\d+\.\d)%  "
    r"(val loss (?P<val_loss>\d+\.\d{3})  val accuracy (?P<val_accuracy>\d+\.\d)%  )?"
    r"(?P<rate>\d+) images/s  waiting for data (?P<wait>\d+)%"
)
"""The line that ``shardio train`` prints for each epoch."""


ERROR = re.compile(r"error: .+\n(  .+\n)*(hint: .+\n)?")
"""The form of every error message. Continuation lines are indented."""


def run(*arguments: object, code: int | None = 0) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert code is None or done.exit_code == code, (done.output, done.exception)
    return done


def usage_error(*arguments: object) -> str:
    done = run(*arguments, code=2)
    assert done.stdout == ""
    assert ERROR.fullmatch(done.stderr)
    return done.stderr


class Ended(NamedTuple):
    code: object
    stdout: str
    stderr: str


def run_main(*arguments: object) -> Ended:
    """Run the whole program, which prints the error if a command fails."""
    stdout, stderr = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["shardio", *map(str, arguments)])
    with argv, redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
    return Ended(code, stdout.getvalue(), stderr.getvalue())


def error_of(*arguments: object) -> str:
    """Return what the program prints when it fails: an error, and perhaps a hint."""
    done = run_main(*arguments)
    assert (done.code, done.stdout) == (1, "")
    assert ERROR.fullmatch(done.stderr)
    return done.stderr


def pack_with_bad_image(folder: Path) -> Path:
    """Pack images, including a truncated one (class-1/name-003)."""
    write_images(folder / "in")
    broken = folder / "in" / "class-1" / "name-003.jpg"
    broken.write_bytes(broken.read_bytes()[:-100])
    shardio.pack(folder / "in", folder / "out", check=False)
    return folder / "out"


def train_here(source: Path | str, *options: object, code: int | None = 0) -> Result:
    """Train on small images with one CPU thread."""
    settings = "--image-size 32 --device cpu --threads 1 --precision fp32"
    return run("train", source, *settings.split(), *options, code=code)
