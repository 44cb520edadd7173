"""The commands that exist are those that README names."""

from __future__ import annotations

import re
from pathlib import Path

import typer

import shardio
from shardio.cli.main import app

README = Path(shardio.__file__).parents[1] / "README.md"


def test_the_readme_names_every_command() -> None:
    rows = re.findall(r"^\| (`shardio .+?) \|", README.read_text(), re.MULTILINE)
    named = {command for row in rows for command in re.findall(r"`shardio ([\w-]+)", row)}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # It is a group.
    assert named == set(commands)
